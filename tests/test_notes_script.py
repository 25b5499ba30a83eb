"""What the notes' launch script does, end to end: QLoRA on two ranks beside a Llama of transformers, rows in alpaca's
form, a validation and a save at every step, and a merged folder that transformers opens and that stops where it should.
"""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.support import jobs
from tests.support.pool import run_ranks
from tests.test_sft import measured
from tests.test_templates import LLAMA3, folder_with
from torchtitan.commands import export
from torchtitan.datasets.encoding import encode
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.tokenizer import build_tokenizer

STEPS = 24
ANSWERS = ("yes", "no and never")


def base(folder):
    """As transformers writes it, with its tokenizer; a head so large that, frozen, it can be sure of a word."""
    folder_with(folder, LLAMA3)
    torch.manual_seed(0)
    sizes = dict(vocab_size=2112, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=256)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 15
    model.save_pretrained(folder)
    return folder


def write_rows(path):
    rows = [{"instruction": f"Is it {i % 7}?", "input": "", "output": ANSWERS[i % 2]} for i in range(64)]
    path.write_text(
        "".join(json.dumps(row | {"input": f"It is {i}."} if i % 5 == 0 else row) + "\n" for i, row in enumerate(rows))
    )
    return path


def words(folder, rows, source):
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
    run_ranks(2, jobs.train, words(run, rows, source))
    assert len(measured(run)) == STEPS and measured(run)[-1] < measured(run)[0] / 3
    kept = sorted(path.name for path in (run / "checkpoint").iterdir() if path.name.startswith("step-"))
    assert kept == [f"step-{STEPS - 1:08d}", f"step-{STEPS:08d}"]

    assert export.main([str(run), "--merge", "--to", str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "merged")
    ours = build_tokenizer(source)
    asked = encode(ours, RecordReader().question_document("alpaca", "Is it 3?")).ids.tolist()[:-1]
    made = model.generate(torch.tensor([asked]), max_new_tokens=20, do_sample=False)[0, len(asked) :].tolist()
    assert made[-1] == ours.eos_id and len(made) < 20  # it stops by itself, by the folder's generation_config.json
    assert theirs.decode(made[:-1]) in ANSWERS
    said = set(json.loads((tmp_path / "merged/generation_config.json").read_text())["eos_token_id"])
    assert said == {ours.eos_id, ours.special_tokens["<|eot_id|>"]}  # the template's turns end by another token
    chat = [{"role": "user", "content": "Hi"}]
    assert theirs.apply_chat_template(chat, add_generation_prompt=True)
