"""Decoders with mixers of Mamba 2: the model, its parallel plan, and the mixer's names in the Hugging Face format."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from torchtitan.core.random_draws import Init
from torchtitan.models.gated import GatedDecoder, tensor_map
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.linear_attention import StateKernel, state_init
from torchtitan.models.mamba2.layer import Mamba2Layer
from torchtitan.parallelisms.plan import ParallelPlan

state_kernel = partial(StateKernel, delta=False)


class MixerDecoder(GatedDecoder):
    """A decoder in which some layers have a mixer in place of attention; sizes of the kind Mamba2Args."""

    @staticmethod
    def kernel_of(args: Any, layer: int) -> Callable[[], nn.Module] | None:
        return state_kernel if args.has_state(layer) else None

    @staticmethod
    def build_attention(args: Any, layer: int, kernel: Any) -> nn.Module:
        return Mamba2Layer(args, kernel) if args.has_state(layer) else GatedDecoder.build_attention(args, layer, kernel)

    def init_rule(self, name: str) -> Init:
        return state_init(name, self.args.conv_taps) or super().init_rule(name)


NAMES = {
    **{f"attention.mixer.ssm_{part}.weight": "in_proj.weight" for part in ("z", "x", "b", "c", "dt")},
    **{f"attention.mixer.conv_{part}.weight": "conv1d.weight" for part in "xbc"},
    "attention.mixer.decay.log_rate": "A_log",
    "attention.mixer.decay.step_bias": "dt_bias",
    "attention.mixer.skip.weight": "D",
    "attention.mixer.ssm_out.weight": "out_proj.weight",
}
NORM = {"attention.mixer.ssm_norm.weight": "norm.weight"}
CONV_BIASES = {f"attention.mixer.conv_{part}.bias": "conv1d.bias" for part in "xbc"}


def mixer_map(
    args: Any, names: Mapping[str, str], ends: Mapping[str, str], mixer: str = "mamba", **layout: Any
) -> TensorMap:
    """Return the names; `names`, `ends`: see tensor_map. `mixer`: what a layer calls it. `layout`: of TensorMap."""
    of_mixer = NAMES | (NORM if args.ssm_norm else {}) | (CONV_BIASES if args.conv_bias else {})
    form = tensor_map(args, names | {name: f"{mixer}.{hf_name}" for name, hf_name in of_mixer.items()}, ends=ends)
    rows = {
        f"attention.mixer.{kind}_{part}.{tensor}": width
        for kind in ("ssm", "conv")
        for part, width in args.ssm_widths.items()
        for tensor in ("weight", "bias")
    }
    return replace(form, rows=form.rows | rows, **layout, _ours={})


COLUMN = ("attention.mixer.ssm_[zx]", "attention.mixer.ssm_dt", "attention.mixer.conv_x", "attention.mixer.decay")
# groups are few, and a rank's heads read some of them
SHARED = ("attention.mixer.ssm_[bc]", "attention.mixer.conv_[bc]")
OUT, SSM_NORM, SKIP = "attention.mixer.ssm_out", "attention.mixer.ssm_norm", "attention.mixer.skip"
ATTENTION = ("attention.w[qkv]", "attention.wo")


def mixer_plan(plan: ParallelPlan, in_all_layers: bool = False) -> ParallelPlan:
    """Return the plan of a decoder with mixers, which are parallel by heads."""
    of_some_layers = () if in_all_layers else (*COLUMN, *SHARED, OUT, SKIP, *ATTENTION)
    return replace(
        plan,
        column=(*plan.column, *COLUMN),
        row=(*plan.row, OUT),
        replicated=(*plan.replicated, *SHARED),
        by_head=(*plan.by_head, SKIP),
        split_norms=(SSM_NORM,),
        optional=(*plan.optional, SSM_NORM, *of_some_layers),
    )
