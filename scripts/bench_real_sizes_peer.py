"""The other side of bench_real_sizes.py: transformers.Trainer with peft, bitsandbytes or galore-torch.

    python scripts/bench_real_sizes_peer.py make FOLDER --config JSON
    python scripts/bench_real_sizes_peer.py METHOD MODEL --seq-len N --steps N --to FOLDER
    python scripts/bench_real_sizes_peer.py merge MODEL --adapter FOLDER --to FOLDER

`make` writes a Llama with random weights in bfloat16. METHOD is lora, dora, qlora, save (model and AdamW's moments),
generate-float32, generate-bfloat16, or an optimizer of transformers.TrainingArguments for training of all weights.
--lengths makes padded batches of --batch records; --recompute recomputes all blocks in backward. The seconds of each
step, save or new token go to FOLDER/seconds.json.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.utils.rnn import pad_sequence
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
    if method not in ("lora", "dora", "qlora"):
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


def save(path: Path, folder: Path) -> list[float]:
    """Save a model and AdamW's moments, all in float32, by torch.distributed.checkpoint; return its seconds."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    started = time.perf_counter()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    torch.distributed.checkpoint.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder / "saved")
    return [time.perf_counter() - started]


class TokenTimes:
    """A streamer of transformers that notes when tokens arrive: first the prompt's, then the new ones."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, ids: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(path: Path, dtype: torch.dtype, length: int, count: int) -> list[float]:
    """Continue a prompt of `length` tokens greedily; return the mean seconds of the new tokens after the first."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    prompt, streamer = torch.full((1, length), ord("x")), TokenTimes()
    model.generate(prompt, max_new_tokens=count, do_sample=False, streamer=streamer)
    _, first, *_, last = streamer.times
    return [(last - first) / (count - 1)]


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad samples to a batch [B, longest], with an attention mask and no loss on padding."""
    columns = {name: [sample[name] for sample in samples] for name in ("input_ids", "labels")}
    columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {name: pad_sequence(rows, batch_first=True, padding_value=fills[name]) for name, rows in columns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method")
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", type=json.loads)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lengths", type=json.loads)
    parser.add_argument("--recompute", action="store_true")
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
    if options.method == "save" or options.method.startswith("generate"):
        options.to.mkdir()
        if options.method == "save":
            seconds = save(options.model, options.to)
        else:
            dtype = getattr(torch, options.method.removeprefix("generate-"))
            seconds = generate(options.model, dtype, options.seq_len, options.steps)
        (options.to / "seconds.json").write_text(json.dumps(seconds))
        return
    model = load(options.method, options.model)
    full = not hasattr(model, "peft_config")
    timer = StepSeconds()
    arguments = TrainingArguments(
        output_dir=str(options.to),
        per_device_train_batch_size=options.batch,
        max_steps=options.steps,
        bf16=True,
        use_cpu=True,
        optim=options.method if full else "adamw_torch",
        optim_args="rank=256, update_proj_gap=200, scale=0.25" if options.method.startswith("galore") else None,
        optim_target_modules=["attn", "mlp"] if options.method.startswith("galore") else None,
        gradient_checkpointing=options.recompute,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    generator = torch.Generator().manual_seed(0)
    lengths = options.lengths or [options.seq_len] * options.steps * options.batch
    lines = [torch.randint(0, 256, (length,), generator=generator) for length in lengths]
    samples = [{"input_ids": line, "labels": line} for line in lines]
    collator = pad if options.lengths else None
    Trainer(model, arguments, train_dataset=samples, data_collator=collator, callbacks=[timer]).train()
    model.save_pretrained(options.to)
    (options.to / "seconds.json").write_text(json.dumps(timer.seconds))


if __name__ == "__main__":
    main()
