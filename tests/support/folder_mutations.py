"""Random changes of a valid config.json, and what transformers and this project compute from the changed folder."""

import copy
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForMultimodalLM

from tests.support.hf_parity import build, close
from torchtitan.core.errors import JobError
from torchtitan.models import CONFIG_CONVERTERS, family_for_model_type
from torchtitan.models.hf.wrappers import PART_KEYS, PLAIN_TYPES, TEXT, WRAPPERS
from torchtitan.models.spec import MODELS, HuggingFace

TOLERANCE = 1e-4
"""Of the largest logit: both compute in float32. A mutation that matters changes logits by more than 1 %."""
UNLISTED = {"mistral4": transformers.Mistral4ForCausalLM}
"""Models that AutoModelForCausalLM does not know."""
COEFFICIENT = "router_aux_loss_coef"
LENGTH = 24
"""Tokens; more than the windows of the tiny models, and positions at which rotary scaling tells."""
ROPES = (
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0},
    {"type": "linear", "rope_type": "default", "factor": 2.0},
    {"rope_type": "default", "rope_theta": 77.0},
    {"rope_type": "default", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 0.5},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "factor": 2.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 77.0}},
    {"sliding_attention": {"rope_type": "linear", "factor": 2.0}, "full_attention": {"rope_type": "default"}},
    {"rope_theta": None},
    {"rope_type": None},
    {"factor": 2.0},
    {},
    None,
    "yarn",
    [1],
)
ADDED: dict[str, tuple] = {
    "is_causal": (False, True, None, 0),
    "layer_types": (["full_attention"] * 2, ["sliding_attention"] * 2, ["sliding_attention", "full_attention"])
    + (
        ["full_attention"] * 3,
        ["sliding_attention", "sliding_attention", "full_attention"],
        [],
        None,
        "full_attention",
    ),
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "rope_theta": (77.0, 5000.0, 500000.0, 10000.0, None),
    "partial_rotary_factor": (0.5, 1.0, None),
    "original_max_position_embeddings": (16, 20, 128, None),
    "attention_bias": (True, False, None),
    "mlp_bias": (True, False),
    "head_dim": (8, 16, 4, None),
    "sliding_window": (4, 5, 2048, None, 0),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 28),
    "tie_word_embeddings": (True, False, None),
    "sliding_window_pattern": (1, 2, 3),
    "_sliding_window_pattern": (1, 2, 3),
    "use_bidirectional_attention": (True, False),
    "attn_logit_softcapping": (2.0, None),
    "final_logit_softcapping": (2.0, None),
    "query_pre_attn_scalar": (8, 24),
    "rope_local_base_freq": (50.0, 77.0),
    "rope_interleave": (True, False, None),
    "n_group": (1, 2, 4, 8, None),
    "topk_group": (1, 2, 4, None),
    "routed_scaling_factor": (1.0, 2.5, 16.0),
    "topk_method": ("greedy", "noaux_tc", "group_limited_greedy", None),
    "scoring_func": ("softmax", "sigmoid"),
    "norm_topk_prob": (True, False, None),
    "first_k_dense_replace": (0, 1, 3),
    "moe_layer_freq": (1, 2),
    "num_experts": (6, 8, 4),
    "num_local_experts": (6, 8, 4),
    "num_mtp_layers": (0, 1),
    "num_nextn_predict_layers": (0, 1, None),
    "use_qk_norm": (True, False, None),
    "qkv_bias": (True, False, None),
    "shared_expert_intermediate_size": (16, 32, 24, None),
    "router_jitter_noise": (0.0, 0.1, None),
    "mlp_only_layers": ([0], [], None),
    "decoder_sparse_step": (1, 2),
    "linear_num_key_heads": (1, 2, 4),
    "linear_num_value_heads": (2, 4),
    "linear_conv_kernel_dim": (2, 4),
    "full_attention_interval": (1, 2, 3, 4),
    "attn_output_gate": (True, False),
    "hidden_size": (32, 64, 16),
    "n_embd": (32, 64),
    "num_attention_heads": (2, 4),
    "num_hidden_layers": (1, 2),
    "max_position_embeddings": (64, 128, 2048),
    "n_positions": (64, 128),
    "n_inner": (48, 128, None),
    "hidden_act": ("silu", "gelu", "relu", None),
    "hidden_activation": ("gelu_pytorch_tanh", "silu"),
    "activation_function": ("relu", "gelu_new", "gelu", "gelu_pytorch_tanh"),
    "rms_norm_eps": (1e-6, 1e-2),
    "layer_norm_eps": (1e-5, 1e-2),
    "layer_norm_epsilon": (1e-5, 1e-2),
    "scale_attn_weights": (True, False),
    "scale_attn_by_inverse_layer_idx": (True, False),
    "reorder_and_upcast_attn": (True, False),
    "add_cross_attention": (True, False),
    "is_decoder": (True, False),
    "is_encoder_decoder": (True, False),
    "position_embedding_type": ("absolute", "relative_key"),
    "do_layer_norm_before": (True, False, None),
    "_remove_final_layer_norm": (True, False),
    "enable_bias": (True, False),
    "layer_norm_elementwise_affine": (True, False),
    "word_embed_proj_dim": (16, 32, None),
    "pad_token_id": (0, 1, 3, None),
    "type_vocab_size": (1, 2),
    "per_layer_config": ({"0": {"num_key_value_heads": 1}}, None),
    "pruned_heads": ({"0": [1]}, {}),
    "chunk_size_feed_forward": (0, 4),
    "attn_implementation": ("eager", "sdpa"),
    "quantization_config": (None, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "embedding_multiplier": (2.0,),
    "logits_scaling": (2.0,),
    "attention_multiplier": (0.5,),
    "attention_dropout": (0.0, 0.1, None),
    "residual_dropout": (0.0, 0.1, None),
    "attention_out_bias": (True, False, None),
    "torch_dtype": ("float32", "bfloat16"),
    "use_cache": (False,),
    "pretraining_tp": (1, 2, None),
    "next_month": (None, 1, "x", [], False, 0),
}
"""Keys that transformers reads for one of the families, or may read one day, and values to set."""


def other_values(value: object) -> list:
    """Return values that may stand in place of this one: of other types, and of its own."""
    wrong = [None, "x", [1], {}, 1.5, True, 0, -1]
    if isinstance(value, bool):
        return [*wrong, not value, int(value)]
    if isinstance(value, int):
        return [*wrong, value + 1, value * 2, max(value - 1, 1), float(value)]
    if isinstance(value, float):
        return [*wrong, value * 2, value / 3, int(value)]
    if isinstance(value, list):
        return [*wrong, value[:1], value[::-1], value * 2]
    if isinstance(value, dict):
        return [*wrong, *({**value, key: other} for key in value for other in (None, 3, "x"))]
    return wrong


def mutate(config: dict, draws: random.Random) -> tuple[dict, str]:
    """Return a changed copy of a config, or of the text_config in it, and the change in words.

    The configs of other parts stay: an absent one would be that of a large part.
    """
    if TEXT in config and draws.random() < 0.7:
        text, words = mutate(config[TEXT], draws)
        return config | {TEXT: text}, f"{TEXT}: {words}"
    config, words = copy.deepcopy(config), []
    for _ in range(draws.choice((1, 1, 1, 2, 2, 3))):
        kind = draws.random()
        keys = sorted(config.keys() - PART_KEYS - {TEXT})
        if kind < 0.2:
            key = draws.choice(keys)
            del config[key]
            words.append(f"without {key}")
            continue
        if kind < 0.45:
            key = draws.choice(keys)
            value = draws.choice(other_values(config[key]))
        else:
            key = draws.choice(list(ADDED))
            value = draws.choice(ADDED[key])
        config[key] = copy.deepcopy(value)
        words.append(f"{key} = {value!r}")
    return config, ", ".join(words)


def tokens_of(config: dict) -> torch.Tensor:
    """Return tokens [2, LENGTH] with ids that no table has as its padding."""
    rows = config.get(TEXT, config).get("vocab_size", 64)
    return torch.randint(4, rows, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def family_of(model_type: str) -> str:
    """Return the family that reads folders of a model_type, or their text part."""
    text_type = WRAPPERS[model_type].text_type if model_type in WRAPPERS else model_type
    return family_for_model_type(PLAIN_TYPES.get(text_type, text_type))


class ReferenceFailure(Exception):
    """transformers cannot load the folder, or only with weights that are not in it."""


@torch.no_grad()
def reference_logits(folder: Path, model_type: str, tokens: torch.Tensor) -> torch.Tensor:
    kind = AutoModelForMaskedLM if model_type == "roberta" else AutoModelForCausalLM
    kind = AutoModelForMultimodalLM if model_type in WRAPPERS else UNLISTED.get(model_type, kind)
    try:
        config = AutoConfig.from_pretrained(folder)
        config._experts_implementation = "eager"  # of models that have experts
        model, report = kind.from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
        if report["missing_keys"] or report["mismatched_keys"]:
            raise ReferenceFailure(str(report))
        return model.eval()(input_ids=tokens, use_cache=False).logits
    except ReferenceFailure:
        raise
    except Exception as error:
        raise ReferenceFailure(f"{type(error).__name__}: {error}") from error


@torch.no_grad()
def our_logits(folder: Path, model_type: str, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the model that this project reads from a folder. Raises JobError."""
    hf = MODELS[family_of(model_type)].hf
    args = hf.config.args_from_folder(folder)
    model = hf.build(args)
    hf.load_hf(folder, model, args)
    return model.eval()(tokens)


@dataclass
class Counts:
    drawn: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def write_weights(folder: Path, hf: HuggingFace, args: object) -> None:
    """Write a folder with random weights, far from their initial ones."""
    model = build(hf.build, args)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1 and "positions" not in name and "gate" not in name:
                tensor.mul_(3)
    hf.save_hf(folder, model.state_dict(), args)


def try_mutations(home: Path, weights: Path, config: dict, count: int, seed: int) -> Counts:
    """Compare `count` mutations of a config. Returns how many were equal or refused, and the faults, in words."""
    transformers.utils.logging.disable_progress_bar()
    counts, draws, model_type = Counts(), random.Random(seed), config["model_type"]
    tokens = tokens_of(config)
    for number in range(count):
        changed, words = mutate(config, draws)
        folder = home / f"{number}"
        folder.mkdir(parents=True)
        for file in weights.iterdir():
            if file.name != "config.json":
                os.link(file, folder / file.name)
        (folder / "config.json").write_text(json.dumps(changed))
        outcome, detail = compare(folder, model_type, tokens)
        counts.drawn[outcome] += 1
        if outcome == "fault":
            counts.faults.append(f"{model_type}: {words}: {detail}")
    return counts


def without_harmless_keys(folder: Path, model_type: str) -> Path:
    harmless = CONFIG_CONVERTERS[family_of(model_type)].keys.harmless | {"attention_dropout", "router_aux_loss_coef"}
    config = json.loads((folder / "config.json").read_text())
    kept = {key: config[key] for key in config if key not in harmless}
    if TEXT in kept:
        pad = 0 if "gemma4" in model_type else None  # which takes the places of images
        kept[TEXT] = {key: value for key, value in kept[TEXT].items() if key not in harmless} | {"pad_token_id": pad}
    elif model_type != "roberta":  # the default of an absent pad may be beyond the tiny vocabulary
        kept["pad_token_id"] = None
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def compare(folder: Path, model_type: str, tokens: torch.Tensor) -> tuple[str, str]:
    """Return "equal", "refused" or "fault", and a description of a fault."""
    try:
        ours = our_logits(folder, model_type, tokens)
    except JobError:
        return "refused", ""
    except Exception as error:
        return "fault", f"{type(error).__name__}: {error}"
    try:
        try:
            reference = reference_logits(folder, model_type, tokens)
        except ReferenceFailure:  # of the type of a key that has no effect on logits, as an initializer_range of "x"
            reference = reference_logits(without_harmless_keys(folder, model_type), model_type, tokens)
    except ReferenceFailure as error:
        return "fault", f"read here, though transformers fails: {str(error)[:300]}"
    if ours.shape == reference.shape and close(ours, reference, TOLERANCE):
        return "equal", ""
    return "fault", f"other logits, by {float((ours - reference).abs().max() / reference.abs().max()):.2g}"
