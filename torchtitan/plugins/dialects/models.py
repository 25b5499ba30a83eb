"""Models of the eras of PyTorch's torchtitan: the same name may mean another model.

`llama3` of v0.2 scales rotary positions as Llama 3.1 does, the large DeepSeeks mask documents, and constants of the
routers differ. Different numbers become model.overrides. A difference that names and numbers cannot express becomes a
note, or the reason why there is no translation.
"""

from dataclasses import dataclass, field
from typing import Any

from torchtitan.core.errors import JobError

AUGUST_2026 = "August 2026"
V0_2_2 = "v0.2.2"
V0_1 = "v0.1.0 to August 2025"
JULY_2024 = "July 2024"


@dataclass
class CurrentModel:
    name: str
    flavor: str
    overrides: dict[str, Any] = field(default_factory=dict)
    document_mask: bool = False
    notes: list[str] = field(default_factory=list)


MASKED = ("_flex_attn", "_flex", "_varlen_attn", "_varlen")
"""Suffixes of flavors that were the same model with document masks."""
_LLAMA3 = ("llama", "llama3", "llama3_ft", "llama3_simple_fsdp")
EXPERIMENTS = ("simple_fsdp.", "compiler_toolkit.", "autoparallel.", "auto_parallel.")
"""Prefixes of a model's name, for other ways to run the same model."""
_LLAMA4 = 'its sizes are not translated; write a job with model.name = "llama4" and flavor scout or maverick'
NOT_HERE = {
    "llama4": _LLAMA4,
    "llama4_simple_fsdp": _LLAMA4,
    "gpt_oss": 'its sizes are not translated; write a job with model.name = "gpt_oss" and flavor 20B or 120B',
    "flux": "models of images (flux, vlm) are not in this version",
    "vlm": "models of images (flux, vlm) are not in this version",
    "qwen3_vl": "models of images (flux, vlm) are not in this version",
    "transformers_modeling_backend": "models of transformers are not run; their weights are read",
    "transformers_backend": "models of transformers are not run; their weights are read",
}
_LLAMA2_SIZES = {
    "271M": {"dim": 1024, "n_layers": 16, "n_heads": 8},
    "1B": {"dim": 2048, "n_layers": 18, "n_heads": 16},
    "26B": {"dim": 5120, "n_layers": 80, "n_heads": 40},
}
_ROUTED = {"expert_bias": True, "bias_rate": 0.001, "aux_loss_weight": 0.0}
_DEEPSEEK: dict[str, dict[str, Any]] = {
    "debugmodel": {
        "n_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "score": "softmax",
        "normalize_top_k": False,
    },
    "16B": {},
    "236B": {"group_score": "top2"},
    "671B": {},
}
_MSCALE = {"debugmodel": 0.7, "16B": 0.7, "236B": 1.0, "671B": 1.0}
_YARN_FROM = 4096
_QWEN3_DEBUG = {"n_layers": 8, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128, "expert_dim": 768, "n_experts": 64}
_QWEN3: dict[str, tuple[str, dict[str, Any]]] = {
    "debugmodel_moe": ("debugmodel", _QWEN3_DEBUG | {"top_k": 8}),
    "30B-A3B": ("30B-A3B", {}),
    "235B-A22B": ("235B-A22B", {"rope_theta": 5000000.0}),
}
_GPT_OSS: dict[str, tuple[str, dict[str, Any]]] = {
    "debugmodel": (
        "debugmodel",
        {"n_layers": 4, "n_heads": 64, "n_kv_heads": 8, "head_dim": 64, "expert_dim": 2880, "top_k": 4}
        | {"sliding_window": 128},
    ),
    "20b": ("20B", {}),
    "120b": ("120B", {}),
}
_DENSE_QWEN3 = {
    "debugmodel": {"n_layers": 8, "n_heads": 16, "n_kv_heads": 8, "head_dim": 128, "ffn_dim": 3072},
    **{flavor: {} for flavor in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
}


def current_model(era: str, name: str, flavor: str, seq_len: int) -> CurrentModel | None:
    """Return the model that an era had under this name, or None. Raises JobError if it is not supported any more."""
    for prefix in EXPERIMENTS:
        name = name.removeprefix(prefix)
    base = next((flavor.removesuffix(end) for end in MASKED if flavor.endswith(end)), flavor)
    if name == "gpt_oss" and era == AUGUST_2026 and base in _GPT_OSS:
        now, sizes = _GPT_OSS[base]
        model = CurrentModel("gpt_oss", now, sizes | _ROUTED)
    elif name in NOT_HERE:
        raise JobError(NOT_HERE[name])
    elif name in _LLAMA3:
        model = _llama3(era, base)
    elif name == "llama2" and era == JULY_2024:
        overrides = _LLAMA2_SIZES.get(base, {"n_layers": 8} if base == "debugmodel" else {})
        model = CurrentModel("llama2", "7B" if base in _LLAMA2_SIZES else base, overrides)
    elif name == "deepseek_v3":
        model = _deepseek(base, is_scaled=era == AUGUST_2026 or seq_len > _YARN_FROM)
    elif name == "qwen3":
        model = _qwen3(base, is_balanced=era == AUGUST_2026)
    else:
        return None
    model.document_mask |= base != flavor
    if base == "debugmodel" and era not in (V0_2_2, AUGUST_2026):
        model.notes.append("not the same: the vocabulary was as large as the tokenizer's; see vocab_size, dim = 256")
    return model


def advice(name: str) -> str:
    """Return advice on a name of an older dialect in a current job; empty for other names."""
    for prefix in EXPERIMENTS:
        name = name.removeprefix(prefix)
    ours = {"deepseek_v3": "deepseek"}
    if name in ours or name in _LLAMA3[2:]:
        return f"here it is {ours.get(name, 'llama3.1')}; `torchtitan check --upgrade` translates an old job's model"
    return NOT_HERE.get(name, "")


def _llama3(era: str, flavor: str) -> CurrentModel:
    if era in (V0_2_2, AUGUST_2026):  # positions were always scaled, by Llama 3.1's factors
        return CurrentModel("llama3.1", flavor, {"n_kv_heads": 16} if flavor == "debugmodel" else {})
    if flavor == "debugmodel" and era == JULY_2024:
        return CurrentModel("llama3", flavor, {"n_layers": 8})
    return CurrentModel("llama3", flavor, {"rope_scaling": False} if flavor == "405B" else {})


def _deepseek(flavor: str, is_scaled: bool) -> CurrentModel:
    model = CurrentModel("deepseek", flavor, document_mask=flavor in _DEEPSEEK and flavor != "debugmodel")
    if flavor in _DEEPSEEK:
        scale = _MSCALE[flavor]
        yarn = {"mscale": scale, "mscale_all_dim": scale} if is_scaled else False
        model.overrides = {**_DEEPSEEK[flavor], "rope_scaling": yarn, "norm_eps": 1e-5, **_ROUTED}
        if yarn is False:
            model.notes.append(f"written out, as YaRN began above {_YARN_FROM} tokens: model.overrides, rope_scaling")
        model.notes.append("not the same: norms of the latents had eps 1e-5; here it is 1e-6, as published")
    return model


def _qwen3(flavor: str, is_balanced: bool) -> CurrentModel:
    if flavor in _DENSE_QWEN3:
        return CurrentModel("qwen3", flavor, _DENSE_QWEN3[flavor])
    now, sizes = _QWEN3.get(flavor, (flavor, {}))
    if is_balanced:
        return CurrentModel("qwen3_moe", now, sizes | _ROUTED)
    notes = ["written out, as nothing evened the experts' load: model.overrides, aux_loss_weight"]
    return CurrentModel("qwen3_moe", now, {**sizes, "aux_loss_weight": 0.0}, notes=notes)
