"""Folders of models that read images or sound too, of which the text part is a model here. No torch.

transformers builds such a model from a language model and other parts, such as a vision tower. Its config.json has the
language model's in `text_config`, or, in older files of Qwen 2 and 2.5 VL, the keys of both side by side. The language
model alone computes a text without images. So this part is read, trained and saved as a text model.

Qwen's models have three rotary positions for each token, of time, height and width (arXiv:2409.12191). In a text all
three are equal, and a rotation by them is the one by a single position.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.core.files import DeclaredKeys, agreed_value
from torchtitan.models.hf.config_keys import HARMLESS

TEXT, OUTSIDE = "text_config", "outside text_config"
"""Key of a wrapper's config.json; and the one under which `text_part` leaves what is outside of it."""
TIED = "tie_word_embeddings"


def _sizes(vocabulary: int, dim: int, ffn_dim: int | None, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"vocab_size": vocabulary, "hidden_size": dim} | ({"intermediate_size": ffn_dim} if ffn_dim else {})
    return sizes | {"num_hidden_layers": layers, "num_attention_heads": heads}


_QWEN2_VL = _sizes(152064, 8192, 29568, 80, 64) | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
_QWEN2_VL |= {"max_window_layers": 80}
_GEMMA4 = _sizes(262144, 2304, 9216, 30, 8) | {TIED: True}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8) | {TIED: True},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "llama": _sizes(32000, 4096, 11008, 32, 32),
    "llama4_text": _sizes(202048, 5120, 8192, 48, 40),
    "ministral3": _sizes(131072, 4096, 14336, 34, 32),
    "mistral": _sizes(32000, 4096, 14336, 32, 32),
    "mistral4": {},
    "qwen2": _sizes(151936, 4096, 22016, 32, 32),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": _sizes(151936, 4096, 22016, 32, 32),
    "qwen3_5_moe_text": _sizes(248320, 2048, None, 40, 16),
    "qwen3_5_text": _sizes(248320, 4096, 12288, 32, 16),
    "qwen3_vl_text": _sizes(151936, 4096, 22016, 32, 32) | {"max_position_embeddings": 128000, "rope_theta": 5e5},
}
"""Model types of a text_config, with transformers' values of absent keys where a reader here has another or none."""
PLAIN_TYPES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text models that differ from another one only in the positions of images."""
SECTION = "mrope_section"
"""Key of rotary positions: the number of pairs of features that turn by each of the three."""
_HEAD = (("lm_head.", "lm_head."),)
_PARTED = (("model.language_model.", "model."), *_HEAD)
_NESTED = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."), ("language_model.", "model."))
_NESTED += _PARTED
_IDEFICS = (("model.text_model.", "model."), *_HEAD)
_QWEN = (*_PARTED, ("model.", "model."))
_WITH_DEPTHS = (*_PARTED, ("mtp.", "mtp."))  # of multi-token prediction, which the text model's reader ignores


@dataclass(frozen=True)
class Wrapper:
    """A kind of model with a text part.

    `text_type`: model type of a text_config without one. `tied`: transformers' default of tie_word_embeddings, outside
    of text_config; None if the head is never tied. `or_text_tied`: that in text_config ties it too. `text_defaults`:
    of keys that text_config may lack. `may_be_flat`: text_config may be missing, with its keys in its place.
    `prefixes`: beginnings of the text part's tensors -> beginnings in a text model. transformers 4.52 to 4.57 wrote
    "model." first.
    """

    text_type: str
    tied: bool | None = False
    or_text_tied: bool = False
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    may_be_flat: bool = False
    prefixes: tuple[tuple[str, str], ...] = _NESTED


_VOXTRAL = _sizes(131072, 3072, 8192, 30, 32) | {"num_key_value_heads": 8, "max_position_embeddings": 131072}
_VOXTRAL |= {"rms_norm_eps": 1e-5, "rope_theta": 1e8, "head_dim": 128}
WRAPPERS = {
    "gemma3": Wrapper("gemma3_text", True),
    "gemma4": Wrapper("gemma4_text", True, prefixes=_PARTED),
    "gemma4_unified": Wrapper("gemma4_unified_text", True, prefixes=_PARTED),
    "got_ocr2": Wrapper("qwen2", True),
    "idefics2": Wrapper("mistral", prefixes=_IDEFICS),
    "idefics3": Wrapper("llama", prefixes=_IDEFICS),
    "internvl": Wrapper("qwen2", True),
    "lighton_ocr": Wrapper("qwen3", True, prefixes=_PARTED),
    "llama4": Wrapper("llama4_text"),
    "llava": Wrapper("llama", or_text_tied=True),
    "llava_next": Wrapper("llama"),
    "llava_next_video": Wrapper("llama", or_text_tied=True),
    "llava_onevision": Wrapper("qwen2", or_text_tied=True),
    "mistral3": Wrapper("mistral", True),
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text", or_text_tied=True, may_be_flat=True, prefixes=_QWEN),
    "qwen2_audio": Wrapper("qwen2", None),
    "qwen2_vl": Wrapper("qwen2_vl_text", or_text_tied=True, may_be_flat=True, prefixes=_QWEN),
    "qwen3_5": Wrapper("qwen3_5_text", prefixes=_WITH_DEPTHS),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text", prefixes=_WITH_DEPTHS),
    "qwen3_vl": Wrapper("qwen3_vl_text", prefixes=_PARTED),
    "smolvlm": Wrapper("llama", prefixes=_IDEFICS),
    "video_llava": Wrapper("llama"),
    "vipllava": Wrapper("llama"),
    "voxtral": Wrapper("llama", None, text_defaults=_VOXTRAL),
}
"""By model_type of config.json."""

_PARTS = ("vision_config", "audio_config", "perceiver_config")
_TOKENS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio", "vision") for end in ("id", "index"))
_TOKENS += ("vision_start_token_id", "vision_end_token_id", "boi_token_index", "eoi_token_index", "ignore_index")
_TOKENS += ("boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index")
_LENGTHS = ("mm_tokens_per_image", "image_seq_length", "video_seq_length", "image_grid_pinpoints", "spatial_merge_size")
_LENGTHS += ("spatial_pool_mode", "spatial_pool_stride", "downsample_ratio", "scale_factor", "vision_aspect_ratio")
_LENGTHS += ("vision_soft_tokens_per_image",)
_PROJECTOR = ("projector_hidden_act", "projector_layernorm_eps", "multimodal_projector_bias")
_PROJECTOR += ("vision_feature_layer", "vision_feature_select_strategy", "use_image_newline_parameter")
PART_KEYS = frozenset((*_PARTS, *_TOKENS, *_LENGTHS, *_PROJECTOR))
"""Keys of the other parts, and of what joins them to the text. A text without images does not depend on them."""
MOVED = ("quantization_config", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
"""Keys outside of text_config that transformers takes for the whole model."""
OUTSIDE_KEYS = DeclaredKeys(used=frozenset(("model_type", TIED, *MOVED)), harmless=HARMLESS | PART_KEYS)


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a wrapper's text_config as the config.json of a text model; any other config unchanged.

    OUTSIDE holds the keys outside of text_config, for `check_outside` and `text_tensors`. Raises JobError.
    """
    kind = config.get("model_type")
    wrapper = WRAPPERS.get(kind) if isinstance(kind, str) else None
    if wrapper is None:
        return dict(config)
    text = config.get(TEXT)
    outside = {key: value for key, value in config.items() if key != TEXT}
    if text is None and wrapper.may_be_flat:
        text = {key: value for key, value in config.items() if key not in PART_KEYS | {TEXT, "model_type", TIED}}
        outside = {key: value for key, value in outside.items() if key not in text}
    if not isinstance(text, Mapping):
        raise JobError(f"{TEXT} = {text!r}; allowed: an object, the config of the text model in this {kind}")
    text_type = text.get("model_type", wrapper.text_type)
    if not isinstance(text_type, str) or text_type not in DEFAULTS:
        raise JobError(f"{TEXT} has model_type = {text_type!r}; allowed: {', '.join(DEFAULTS)}")
    text = _with_defaults(text, DEFAULTS[text_type] | wrapper.text_defaults)
    text |= {TIED: _is_tied(wrapper, outside, text), "model_type": PLAIN_TYPES.get(text_type, text_type)}
    if text_type in PLAIN_TYPES:
        text = _with_plain_positions(text)
    text |= {key: outside[key] for key in MOVED if outside.get(key) is not None}
    return text | {OUTSIDE: outside}


def check_outside(
    config: Mapping[str, Any], ignored_keys: Iterable[str], remedy: Callable[[Iterable[str]], str]
) -> None:
    """Raise JobError if a key outside of text_config would be ignored, or contradicts the one in it.

    `remedy`: what to do about unknown keys.
    """
    outside = {key: value for key, value in config[OUTSIDE].items() if key not in ignored_keys}
    for key in sorted(outside.keys() & config.keys() - OUTSIDE_KEYS.used - OUTSIDE_KEYS.harmless):
        agreed_value(key, {f"{TEXT}'s": config[key], "the one outside of it": outside.pop(key)}, "remove the second")
    OUTSIDE_KEYS.check(outside, f"outside of {TEXT} it", remedy(OUTSIDE_KEYS.unknown(outside)))


def _with_defaults(text: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a text_config with values of absent keys, and without those of other parts, which some files have."""
    tables = [text[name] for name in ("rope_parameters", "rope_scaling") if isinstance(text.get(name), Mapping)]
    if any("rope_theta" in table for table in tables):
        defaults = {key: value for key, value in defaults.items() if key != "rope_theta"}
    return {**defaults, **{key: value for key, value in text.items() if key not in PART_KEYS}}


def _is_tied(wrapper: Wrapper, outside: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """Return tie_word_embeddings as transformers reads it; a value of another type stays, for its error."""
    of_model, of_text = outside.get(TIED, bool(wrapper.tied)), text.get(TIED, False)
    if invalid := [value for value in (of_model, of_text) if not isinstance(value, bool)]:
        return invalid[0]
    return wrapper.tied is not None and (of_model or (wrapper.or_text_tied and of_text))


def _with_plain_positions(text: dict[str, Any]) -> dict[str, Any]:
    """Return a text_config with one rotary position for each token. Raises JobError where transformers fails."""
    is_split = text["model_type"] == "qwen2"  # Qwen 3 takes every third pair, whatever the numbers
    sections = [16, 24, 24] if is_split else None
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(table := text.get(name), Mapping):
            sections = table.get(SECTION, sections)
            plain = {key: value for key, value in table.items() if key not in (SECTION, "mrope_interleaved")}
            plain |= {key: "default" for key in ("rope_type", "type") if is_split and plain.get(key) == "mrope"}
            text = text | {name: plain}
    if sections is not None and (not isinstance(sections, list) or [type(size) for size in sections] != [int] * 3):
        raise JobError(f"{SECTION} = {sections!r}; allowed: three numbers of pairs of features")
    windows = [] if is_split else [key for key in ("use_sliding_window", "layer_types") if text.get(key)]
    if windows:
        raise JobError(f"{windows[0]} = {text[windows[0]]!r}; transformers ignores it in this model: remove it")
    heads, dim = text["num_attention_heads"], text["hidden_size"]
    if not is_split or type(heads) is not int or type(dim) is not int or heads < 1:
        return text  # the reader of the text model refuses it
    if text.get("head_dim") not in (None, dim // heads):
        raise JobError(f"head_dim = {text['head_dim']!r}; allowed: hidden_size / num_attention_heads = {dim // heads}")
    if sum(sections) != dim // heads // 2:
        raise JobError(f"{SECTION} = {sections!r}; allowed: three numbers that add up to {dim // heads // 2}")
    return text


PARTS = ("vision_tower.", "vision_model.", "multi_modal_projector.", "visual.", "image_newline", "image_tower.")
PARTS += ("video_tower.", "audio_tower.", "connector.", "vision_encoder.", "vision_projection.")
PARTS += ("embed_vision.", "embed_audio.", "vision_embedder.")
"""Beginnings of names of other tensors, after "model." in files of transformers 5."""


def memory_prefix(config: Mapping[str, Any] | None) -> str:
    """Return the beginning of the names of a text model in transformers' memory, where it may be part of a wrapper."""
    if config is None or OUTSIDE not in config:
        return "model."
    prefixes = WRAPPERS[config[OUTSIDE]["model_type"]].prefixes
    return next(prefix for prefix, plain in prefixes if prefix.startswith(plain) and prefix != plain)


def text_tensors(config: Mapping[str, Any] | None, names: Iterable[str]) -> dict[str, str]:
    """Return the stored names by those of a text model, without the tensors of a wrapper's other parts.

    Unknown tensors of a wrapper are under names that no text model has. Raises JobError for two of the same tensor.
    """
    if config is None or OUTSIDE not in config:
        return {name: name for name in names}
    prefixes, stored = WRAPPERS[config[OUTSIDE]["model_type"]].prefixes, dict[str, str]()
    for name in names:
        if name.removeprefix("model.").startswith(PARTS):
            continue
        text_names = (plain + name.removeprefix(prefix) for prefix, plain in prefixes if name.startswith(prefix))
        text_name = next(text_names, f"{OUTSIDE}: {name}")
        if text_name in stored:
            raise JobError(f"{stored[text_name]} and {name} are both {text_name} of the text part; remove one of them")
        stored[text_name] = name
    return stored
