"""The other side of bench_real_sizes.py: transformers.Trainer with peft, bitsandbytes or galore-torch.

    python scripts/bench_real_sizes_peer.py make FOLDER --config JSON
    python scripts/bench_real_sizes_peer.py METHOD MODEL --seq-len N --steps N --to FOLDER
    python scripts/bench_real_sizes_peer.py merge MODEL --adapter FOLDER --to FOLDER

`make` writes a Llama with random weights in bfloat16. METHOD is lora, dora, qlora, lora-recompute, or an optimizer of
transformers.TrainingArguments for training of all weights; the seconds of each step go to FOLDER/seconds.json.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def make(folder: Path, config: dict[str, int]) -> None:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = LlamaForCausalLM(LlamaConfig(**config, torch_dtype="bfloat16")).to(torch.bfloat16)
    model.save_pretrained(folder)


class StepSeconds(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def load(method: str, path: Path) -> torch.nn.Module:
    """Load the model as its users do: in bfloat16 or 4 bits under an adapter, in float32 for full training."""
    if method not in ("lora", "dora", "qlora", "lora-recompute"):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    arguments = {}
    if method == "qlora":
        from transformers import BitsAndBytesConfig

        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **arguments)
    if method == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    lora = LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", use_dora=method == "dora", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, lora)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method")
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", type=json.loads)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    if options.method == "make":
        make(options.model, options.config)
        return
    if options.method == "merge":
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
        PeftModel.from_pretrained(base, options.adapter).merge_and_unload().save_pretrained(options.to)
        return
    model = load(options.method, options.model)
    full = not hasattr(model, "peft_config")
    timer = StepSeconds()
    arguments = TrainingArguments(
        output_dir=str(options.to),
        per_device_train_batch_size=1,
        max_steps=options.steps,
        bf16=True,
        use_cpu=True,
        optim=options.method if full else "adamw_torch",
        optim_args="rank=256, update_proj_gap=200, scale=0.25" if options.method.startswith("galore") else None,
        optim_target_modules=["attn", "mlp"] if options.method.startswith("galore") else None,
        gradient_checkpointing=options.method.endswith("recompute"),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    ids = torch.randint(0, 256, (options.steps, options.seq_len), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": line, "labels": line} for line in ids]
    Trainer(model, arguments, train_dataset=samples, callbacks=[timer]).train()
    model.save_pretrained(options.to)
    (options.to / "seconds.json").write_text(json.dumps(timer.seconds))


if __name__ == "__main__":
    main()
