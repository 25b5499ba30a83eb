"""Tiny models that read images or sound too (models/hf/wrappers.py), as transformers builds and saves them."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM

from tests.support.family_folders import BY_MODEL_TYPE
from torchtitan.models import CONFIG_CONVERTERS, family_for_model_type
from torchtitan.models.hf.wrappers import PLAIN_TYPES, TEXT, WRAPPERS

_TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
_CLIP = _TOWER | dict(model_type="clip_vision_model", image_size=28, patch_size=14, projection_dim=8)
_SIGLIP = _TOWER | dict(model_type="siglip_vision_model", image_size=28, patch_size=14)
_PIXTRAL = _TOWER | dict(model_type="pixtral", image_size=28, patch_size=14, head_dim=8)
_IDEFICS = _TOWER | dict(image_size=28, patch_size=14)
_QWEN = dict(depth=1, hidden_size=64, num_heads=2, patch_size=14, out_hidden_size=64)
_LLAMA4 = _TOWER | dict(image_size=28, patch_size=14, projector_input_dim=16, projector_output_dim=16)
_LLAMA4 |= dict(vision_output_dim=16)
_GEMMA4 = _TOWER | dict(head_dim=8, num_key_value_heads=2, position_embedding_size=8)
_SOUND = dict(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, num_mel_bins=8)
_SOUND |= dict(max_source_positions=8)
PARTS_OF = {
    "gemma3": dict(vision_config=_SIGLIP, mm_tokens_per_image=4),
    "gemma4": dict(vision_config=_GEMMA4),
    "gemma4_unified": dict(vision_config=dict(mm_embed_dim=16, output_proj_dims=16, mm_posemb_size=8)),
    "got_ocr2": dict(vision_config=dict(hidden_size=16, output_channels=8, num_hidden_layers=1, num_attention_heads=2)),
    "idefics2": dict(vision_config=_IDEFICS, perceiver_config=dict(resampler_depth=1, resampler_n_heads=4)),
    "idefics3": dict(vision_config=_IDEFICS),
    "internvl": dict(vision_config=_TOWER | dict(image_size=[28, 28], patch_size=[14, 14])),
    "lighton_ocr": dict(vision_config=_PIXTRAL),
    "llama4": dict(vision_config=_LLAMA4),
    "llava": dict(vision_config=_CLIP),
    "llava_next": dict(vision_config=_CLIP),
    "llava_next_video": dict(vision_config=_CLIP),
    "llava_onevision": dict(vision_config=_SIGLIP),
    "mistral3": dict(vision_config=_PIXTRAL),
    "qwen2_5_vl": dict(vision_config=_QWEN),
    "qwen2_audio": dict(audio_config=_SOUND | dict(model_type="qwen2_audio_encoder")),
    "qwen2_vl": dict(vision_config=_QWEN | dict(embed_dim=64)),
    "qwen3_5": dict(vision_config=_QWEN),
    "qwen3_5_moe": dict(vision_config=_QWEN),
    "qwen3_vl": dict(vision_config=_QWEN | dict(deepstack_visual_indexes=[0])),
    "smolvlm": dict(vision_config=_IDEFICS),
    "video_llava": dict(vision_config=_CLIP),
    "vipllava": dict(vision_config=_CLIP, vision_feature_layer=[-2]),
    "voxtral": dict(audio_config=_TOWER | dict(model_type="voxtral_encoder", num_mel_bins=8, max_source_positions=8)),
}
"""Keys of the other parts."""


def text_config(kind: str, text_type: str | None = None) -> dict:
    """Return the text_config of a kind, with the sizes of a tiny text model. `text_type`: another than its own."""
    text_type = text_type or WRAPPERS[kind].text_type
    plain_type = PLAIN_TYPES.get(text_type, text_type)
    args = BY_MODEL_TYPE[plain_type.replace("_unified", "")]
    fields = CONFIG_CONVERTERS[family_for_model_type(plain_type)].to_hf(args) | {"model_type": text_type}
    del fields["architectures"]
    fields |= {"pad_token_id": 0} if "gemma4" in text_type else {}  # in the place of images
    if text_type in PLAIN_TYPES:
        pairs = args.head_dim // 2
        fields["rope_scaling"] = {
            "rope_type": "default",
            "mrope_section": [pairs - 2 * (pairs // 3), *[pairs // 3] * 2],
        }
    return fields


@torch.no_grad()
def write_wrapper(folder: Path, kind: str, text: dict, **outside: object) -> torch.nn.Module:
    """Write a folder with random weights as transformers 5 does. Returns the model."""
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(CONFIG_MAPPING[kind](text_config=text, **PARTS_OF[kind] | outside))
    for name, tensor in model.named_parameters():
        if tensor.dim() > 1 and "positions" not in name:
            tensor.normal_(std=0.1)
        elif "norm" in name or name.endswith("bias"):
            tensor += 0.1 * torch.randn(tensor.shape)
    model.save_pretrained(folder)
    return model.eval()


def write_memory_names(folder: Path, model: torch.nn.Module, target: Path) -> None:
    """Copy a folder with the names of tensors that its model has in memory, as transformers 4.52 to 4.57 wrote them."""
    target.mkdir()
    tied = {"lm_head.weight"} if getattr(model.config, "tie_word_embeddings", False) else set()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", target)


def write_flat_config(folder: Path, target: Path) -> None:
    """Copy a folder with the keys of the text beside all others, as Qwen 2 and 2.5 VL were published."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in config.pop(TEXT).items() if key != "model_type"}
    (target / "config.json").write_text(json.dumps(text | config))
