"""The launch script of the notes, end to end: QLoRA on two ranks with a Llama of transformers and alpaca records, a
validation and a save at every step, and a merged folder that transformers opens and that stops generating by itself.
"""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import jobs
from tests.support.notes_rows import ANSWERS, base, write_rows
from tests.support.pool import run_ranks
from tests.support.sft_jobs import validation_losses
from torchtitan.commands import export
from torchtitan.datasets.encoding import encode
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.tokenizer import build_tokenizer

STEPS = 24


def job_options(folder, rows, source):
    settings = dict(task__kind="sft", model__flavor="from_hf", model__hf_folder=source, model__overrides="{}")
    settings |= dict(model__tokenizer_path=source, training__seq_len=192, training__local_batch_size=1)
    settings |= dict(training__global_batch_size=8, training__steps=STEPS, validation__enable=True, validation__freq=1)
    settings |= dict(validation__split=0.1, validation__samples=0, validation__local_batch_size=1)
    settings |= dict(adapter__kind="qlora", adapter__rank=32, adapter__alpha=64.0, adapter__target='["all-linear"]')
    settings |= dict(adapter__save="alone", checkpoint__initial_load_path=source, checkpoint__initial_load_in_hf=True)
    settings |= dict(checkpoint__enable=True, checkpoint__interval=1, checkpoint__keep_latest_k=2)
    settings |= dict(parallelism__fsdp_reshard_after_forward="never", activation_checkpoint__mode="full")
    return jobs.arguments(folder, rows, **settings)


def test_the_script_end_to_end(tmp_path, capsys):
    source, rows, run = base(tmp_path / "base"), write_rows(tmp_path / "rows.jsonl"), tmp_path / "run"
    run_ranks(2, jobs.train, job_options(run, rows, source))
    assert len(validation_losses(run)) == STEPS and validation_losses(run)[-1] < validation_losses(run)[0] / 3
    checkpoints = sorted(path.name for path in (run / "checkpoint").iterdir() if path.name.startswith("step-"))
    assert checkpoints == [f"step-{STEPS - 1:08d}", f"step-{STEPS:08d}"]

    assert export.main([str(run), "--merge", "--to", str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    ours = build_tokenizer(source)
    prompt = encode(ours, RecordReader().question_document("alpaca", "Is it 3?")).ids.tolist()[:-1]
    new_tokens = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    assert (
        new_tokens[-1] == ours.eos_id and len(new_tokens) < 20
    )  # it stops by itself, by the folder's generation_config.json
    assert hf_tokenizer.decode(new_tokens[:-1]) in ANSWERS
    eos_ids = set(json.loads((tmp_path / "merged/generation_config.json").read_text())["eos_token_id"])
    assert eos_ids == {ours.eos_id, ours.special_tokens["<|eot_id|>"]}  # the template's turns end by another token
    chat = [{"role": "user", "content": "Hi"}]
    assert hf_tokenizer.apply_chat_template(chat, add_generation_prompt=True)
