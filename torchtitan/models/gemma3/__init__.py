"""Gemma 3 for text: arguments, published sizes, and conversion from and to config.json (Gemma3TextConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.core.errors import JobError
from torchtitan.core.files import agreed_value
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.gemma2 import CAPS, DEBUG, DEFAULTS, USED, WindowedGemmaArgs, gemma_config, gemma_sizes
from torchtitan.models.hf.config import check_supported, read_number, rope_config
from torchtitan.models.hf.config_keys import config_keys
from torchtitan.models.hf.layer_kinds import FULL, SLIDING, rope_of_kind
from torchtitan.models.sizes import Rope, RopeScaling


@dataclass(frozen=True, kw_only=True)
class Gemma3Args(WindowedGemmaArgs):
    """Sizes of Gemma 3. `rope_theta` and `rope_scaling` are those of the global layers."""

    vocab_size: int = 262208
    rope_theta: float = 1000000.0
    local_rope_theta: float = 10000.0
    sliding_window: int = 1024
    global_interval: int = 6
    max_seq_len: int = 131072

    qk_norm: ClassVar = True

    def rope(self, layer: int) -> Rope:
        return super().rope(layer) if self.is_global(layer) else (self.local_rope_theta, None)


_small: dict[str, Any] = dict(n_heads=4, n_kv_heads=1, vocab_size=262144, sliding_window=512, max_seq_len=32768)
_scaled: dict[str, Any] = dict(rope_scaling=RopeScaling(8.0, kind="linear"))
GEMMA3 = {
    "debugmodel": Gemma3Args(**DEBUG, global_interval=3, max_seq_len=32768),
    "270M": Gemma3Args(dim=640, n_layers=18, ffn_dim=2048, **_small),
    "1B": Gemma3Args(dim=1152, n_layers=26, ffn_dim=6912, **_small),
    # of the models that read images too, the text part
    "4B": Gemma3Args(dim=2560, n_layers=34, n_heads=8, n_kv_heads=4, ffn_dim=10240, **_scaled),
    "12B": Gemma3Args(dim=3840, n_layers=48, n_heads=16, n_kv_heads=8, ffn_dim=15360, **_scaled),
    "27B": Gemma3Args(
        dim=5376, n_layers=62, n_heads=32, n_kv_heads=16, head_dim=128, ffn_dim=21504, query_scalar=168, **_scaled
    ),
}
LOCAL, GLOBAL = SLIDING, FULL


def _to_hf(args: Gemma3Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Gemma3TextConfig."""
    return gemma_config(args, dtype) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rope_local_base_freq": args.local_rope_theta,
        "sliding_window_pattern": args.global_interval,
    }


def _from_hf(config: Mapping[str, Any]) -> Gemma3Args:
    check_supported(config, dict.fromkeys((key for key, _ in CAPS.values())))
    sizes = gemma_sizes(_global_part(config), 131072, "sliding_window_pattern", 6, theta=1000000.0)
    return Gemma3Args(**sizes, local_rope_theta=_local_theta(config))


def _local_theta(config: Mapping[str, Any]) -> float:
    """Return theta of the local layers, which transformers 4 writes as rope_local_base_freq."""
    table = rope_of_kind(config, LOCAL)
    theta = read_number(config, "rope_local_base_freq", 10000.0)
    rope = rope_config({"rope_parameters": table}, theta)
    check_supported(rope, {"rope_type": "default"})
    if "rope_local_base_freq" in config:
        sources = {f"rope_parameters's {LOCAL}": rope["rope_theta"], "rope_local_base_freq": theta}
        agreed_value("theta of the local layers", sources, "remove the one that the model was not trained with")
    return float(rope["rope_theta"])


def _global_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the rotary positions of the global layers in place of those of all."""
    scaling = config.get("rope_scaling") or {}
    if isinstance(scaling, Mapping) and "type" in scaling and "rope_type" not in scaling:
        raise JobError(
            f"rope_scaling = {scaling!r}; allowed: a table with rope_type, as transformers ignores type in this family"
        )
    return {**config, "rope_parameters": rope_of_kind(config, GLOBAL)}


KEYS = config_keys(
    USED | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"}, defaults=DEFAULTS
)
CONFIG = ConfigConverter(model_types=("gemma3_text",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=GEMMA3, config=CONFIG, spec="torchtitan.models.gemma3.model:SPEC", publisher="google")
