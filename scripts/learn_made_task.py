"""Fine-tune the debug model on a synthetic task and measure its answers in `torchtitan chat`.

The task is to repeat three or four letters, or to reverse them, in the Alpaca template. Test questions are not in the
training data, and an answer has to match letter by letter. The checkpoints of the first and the last step are tested.
`--quick` makes two steps of a tiny model and asks two questions, of the last checkpoint only.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LETTERS, LENGTHS, LEARNED = "abcdefgh", (3, 4), 6000
ORDERS = {"again": 1, "backwards": -1}
TINY = ("--model.overrides={dim = 64, n_layers = 2, n_heads = 4}",)
JOB = """\
extends = "debug_model"

[job]
dump_folder = "{folder}/run"
description = "Letters again, or backwards"

[task]
kind = "sft"

[data]
chat_template = "alpaca"
packing = "best_fit"

[training]
dataset = "text"
dataset_path = "{folder}/rows.jsonl"
local_batch_size = {samples}
seq_len = 128
steps = {steps}
mixed_precision_param = "float32"

[optimizer]
weight_decay = 0.0

[validation]
enable = false

[checkpoint]
enable_first_step_checkpoint = true
interval = {steps}

[metrics]
log_freq = 20
plot = false
"""


def questions(asks: int) -> tuple[list[str], list[str], int]:
    """Return test questions, training questions, and the number of all questions; always the same ones."""
    letter_groups = [letters for length in LENGTHS for letters in product(LETTERS, repeat=length)]
    all_questions = [" ".join([order, *letters]) for order in ORDERS for letters in letter_groups]
    random.Random(0).shuffle(all_questions)
    return all_questions[:asks], all_questions[asks:][:LEARNED], len(all_questions)


def answer(question: str) -> str:
    order, *letters = question.split()
    return " ".join(letters[:: ORDERS[order]])


def write_job(folder: Path, training_questions: list[str], ranks: int, steps: int) -> Path:
    """Write a job and its training records; a step has the same 8 samples on one rank as on two."""
    rows = [{"messages": [turn("user", text), turn("assistant", answer(text))]} for text in training_questions]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.toml").write_text(JOB.format(folder=folder, samples=8 // ranks, steps=steps))
    return folder / "job.toml"


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def share_answered(checkpoint: Path, test_questions: list[str]) -> float:
    """Ask a checkpoint the questions by `torchtitan chat`; return the share of right answers."""
    command = [sys.executable, "-m", "torchtitan", "chat", checkpoint, "--apart", "--max_new_tokens=12"]
    done = subprocess.run(
        command, cwd=ROOT, input="\n".join(test_questions), stdout=subprocess.PIPE, text=True, check=True
    )
    answers = done.stdout.split("\n")[:-1]
    if len(answers) != len(test_questions):  # extra lines of an untrained model cannot be assigned to questions
        return 0.0
    return sum(
        answer(question) == given_answer for question, given_answer in zip(test_questions, answers, strict=True)
    ) / len(test_questions)


def learn(folder: Path, ranks: int, steps: int, quick: bool) -> None:
    """Train on the task and print the shares of right answers."""
    asks, asked_of, sizes = (2, (steps,), TINY) if quick else (200, (1, steps), ())
    test_questions, training_questions, total = questions(asks)
    job = write_job(folder, training_questions, ranks, steps)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "torchtitan.launch", str(ranks), job, *sizes], cwd=ROOT, check=True)
    seconds = time.perf_counter() - began
    print(f"{len(training_questions):,} of {total:,} questions shown, {steps} steps, ranks: {ranks}, {seconds:.0f} s")
    for step in asked_of:
        share = share_answered(folder / f"run/checkpoint/step-{step:08d}", test_questions)
        print(f"step {step}: {share:.0%} of {asks} others answered", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps of a tiny model, two questions")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=2)
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        learn(Path(folder), options.ranks, 2 if options.quick else options.steps, options.quick)


if __name__ == "__main__":
    main()
