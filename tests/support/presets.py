"""The inputs that fine-tuning presets need from a user: a model folder and records, both tiny."""

import json
from pathlib import Path

from tests.support.chat_templates import LLAMA3, folder_with
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config import manager
from torchtitan.core.random_draws import initialize
from torchtitan.job import ResolvedJob
from torchtitan.models.spec import MODELS

SEQ_LEN, RECORDS = 96, 20
SIZES = "{dim=64, n_layers=2, n_heads=4, n_kv_heads=4, vocab_size=2112, multiple_of=64, max_seq_len=96}"


def write_model(folder: Path) -> Path:
    """Write a Hugging Face folder of a Llama with initial weights and its tokenizer."""
    folder_with(folder, LLAMA3)
    options = ["--model.name=llama3", f"--model.overrides={SIZES}", f"--model.tokenizer_path={folder}"]
    model = ModelBuilder(ResolvedJob(manager.load(options))).meta_model().to_empty(device="cpu")
    initialize(model, 0, model.init_rule)
    MODELS["llama3"].hf.save_hf(folder, model.state_dict(), model.args)
    return folder


def write_records(folder: Path) -> dict[str, Path]:
    """Write records for each kind of task, longer than half of SEQ_LEN so that no two share a sample."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [{"prompt": f"Count on from {i}."} for i in range(RECORDS)]
    answers = [" ".join(str(i + j) for j in range(20)) for i in range(RECORDS)]
    rows = {"sft": [row | {"completion": answer} for row, answer in zip(prompts, answers, strict=True)]}
    rows["pairs"] = [
        row | {"chosen": answer, "rejected": answer[::-1]} for row, answer in zip(prompts, answers, strict=True)
    ]
    paths = {kind: folder / f"{kind}.jsonl" for kind in rows}
    for kind, path in paths.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[kind]))
    return paths


def model_and_record_options(home: Path) -> dict[str, list[str]]:
    """Write a model and records below `home`; return the options that name them, by kind of task."""
    model, records = write_model(home / "model"), write_records(home / "records")
    keys = ("model.hf_folder", "model.tokenizer_path", "checkpoint.initial_load_path")
    shared = [f"--{key}={model}" for key in keys]
    return {kind: [*shared, f"--training.dataset_path={path}"] for kind, path in records.items()}
