"""How torchtitan's own checkpoints have the tensors that ours have (source: its v0.2.2, models/*/model/model.py and
models/moe/moe.py).

Its Llamas are ours, name by name. Its experts stand as [experts, out, in], their bias beside the router, and its Qwen
turns the pairs of features that transformers turns, so that rows come in another order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.models.hf.names import Form

EXPERTS = ("moe.experts.w1", "moe.experts.w2", "moe.experts.w3")
BIAS = {"moe.router.expert_bias": "moe.expert_bias"}


@dataclass(frozen=True)
class TorchtitanForm:
    """`renamed`: within a layer, ours -> theirs. `form`: that of Hugging Face, where rows come in the same order."""

    renamed: dict[str, str]
    form: Form | None = None

    def name(self, ours: str) -> str:
        if not ours.startswith("layers."):
            return ours
        _, layer, part = ours.split(".", 2)
        return f"layers.{layer}.{self.renamed.get(part, part)}"

    def shape(self, ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], shape[2], shape[1]) if ours.endswith(EXPERTS) else shape

    def to_ours(self, ours: str, tensor: torch.Tensor) -> torch.Tensor:
        """Of their shape -> of ours."""
        if ours.endswith(EXPERTS):
            return tensor.transpose(1, 2)
        if self.form is not None and self.form.is_turned(ours):
            return self.form.rows_from_hf(tensor)
        return tensor


def _deepseek(args: Any, form: Form) -> TorchtitanForm:
    compressed = {"attention.wq.weight": "attention.wq_b.weight"} if args.q_lora_rank else {}
    return TorchtitanForm(BIAS | compressed)


FORMS: dict[str, Callable[[Any, Form], TorchtitanForm]] = {
    **dict.fromkeys(("llama2", "llama3", "llama3.1", "llama3.2"), lambda args, form: TorchtitanForm({})),
    "deepseek": _deepseek,
    "qwen3": lambda args, form: TorchtitanForm({}, form),
    "qwen3_moe": lambda args, form: TorchtitanForm(BIAS, form),
}
"""By family: (args, its form of Hugging Face) -> torchtitan's. A family that torchtitan does not have is not here."""
