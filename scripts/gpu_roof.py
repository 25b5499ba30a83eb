"""Estimate what steps take on one H100, from kernels and bytes counted on the fake CUDA. Runs on a CPU in a minute.

    python scripts/gpu_roof.py

A kernel takes the longer of its bytes at 2.8 TB/s and its products at 660 TFLOP/s (attention 350), and 2 us. Attention,
a norm and a compiled function are one kernel each; that the compiler makes one is not shown here. Prints the tables of
docs/gpus.md: a step of a 1B model, a layer of Llama 3 8B with adapters (a model of 3 layers less one of 1, halved), and
the optimizers' steps for all of 8B.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan.planner import fake_cuda

COMMON = ["--model.tokenizer_path=bytes", "--compile.no_enable", "--training.seq_len=4096"]
ONE_B = ["--job.config_file=train_configs/debug_model.toml", "--model.name=llama3.2", "--model.flavor=1B", *COMMON]
ONE_B += ["--training.local_batch_size=4", "--training.global_batch_size=4", "--activation_checkpoint.mode=none"]
ONE_B += ["--training.mixed_precision_param=bfloat16"]
LAYER = [*COMMON, "--model.name=llama3", "--model.flavor=8B", "--model.hf_folder=", "--training.local_batch_size=1"]
LAYER += ["--activation_checkpoint.mode=full"]
LORA, QLORA = (f"--job.config_file=train_configs/sft_{kind}.toml" for kind in ("lora", "qlora"))
DROPOUT = "--adapter.dropout="
LAYERS = {
    "LoRA": [LORA, *LAYER, DROPOUT + "0.0"],
    "LoRA with dropout 0.05": [LORA, *LAYER, DROPOUT + "0.05"],
    "QLoRA": [QLORA, *LAYER, DROPOUT + "0.0"],
}
BF16 = ["--training.dtype=bfloat16"]
OPTIMIZERS = {name: [name] for name in ("AdamW", "AdamW8bit", "Adafactor", "Lion", "APOLLO", "Muon", "GaLore")} | {
    "AdamWBF16, Kahan": ["AdamWBF16", *BF16],
    "AdamWBF16, stochastic": ["AdamWBF16", *BF16, '--optimizer.options={rounding = "stochastic"}'],
}
DEPTH = 32
UNITS = ("kernels", "bytes", "seconds")


def ask(card: fake_cuda.FakeCuda, question: str, options: list[str]) -> dict[str, float]:
    """Return the sums of a job's costs on one rank. Raises RuntimeError with the traceback of a job that fails."""
    ok, answer = card.ask(f"tests.support.fake_cuda_questions:{question}", options, 0, 1)
    if not ok:
        raise RuntimeError(answer)
    return {unit: answer[unit]["all"] for unit in UNITS}


def at_depth(card: fake_cuda.FakeCuda, question: str, options: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the costs of one layer, and of all DEPTH layers with the rest of the model."""
    one, three = (ask(card, question, [*options, f"--model.overrides={{n_layers = {n}}}"]) for n in (1, 3))
    layer = {unit: (three[unit] - one[unit]) / 2 for unit in UNITS}
    return layer, {unit: one[unit] + (DEPTH - 1) * layer[unit] for unit in UNITS}


def row(name: str, costs: dict[str, float]) -> str:
    return f"| {name} | {costs['kernels']:,.0f} | {costs['bytes'] / 1e9:,.1f} | {costs['seconds'] * 1e3:,.1f} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        card = fake_cuda.FakeCuda(fake_cuda.build(Path(folder)))
        print("| | kernels | GB | ms |\n|---|---|---|---|")
        print(
            row("1B, 4 x 4,096 tokens, forward and backward", ask(card, "costs_with_fused_kernels", ONE_B)), flush=True
        )
        for name, options in LAYERS.items():
            layer, _ = at_depth(card, "costs_with_fused_kernels", options)
            print(row(f"8B, a layer, {name}", layer), flush=True)
        for name, (optimizer, *options) in OPTIMIZERS.items():
            job = ["--job.config_file=train_configs/llama3_8b.toml", *COMMON, f"--optimizer.name={optimizer}", *options]
            print(row(f"8B, step of {name}", at_depth(card, "optimizer_costs", job)[1]), flush=True)
        card.close()


if __name__ == "__main__":
    main()
