"""Keys of config.json: those that any model may have without effect on it, and the tables of the families.

A key is used by the family's reader, has no effect, or is refused by name (core/files.py).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torchtitan.core.files import DeclaredKeys

DECODER_KEYS = frozenset(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
        *("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings", "attention_bias"),
    )
)
"""Keys that the readers of all families with rotary positions use."""
WINDOW_KEYS = frozenset(("use_sliding_window", "sliding_window", "layer_types"))
"""Keys of `read_windows` (layer_kinds.py)."""
ALWAYS_USED = frozenset(("model_type", "quantization_config", "is_causal", "attention_dropout"))
"""Keys that `ConfigConverter` checks for all families."""

_FILE = ("torch_dtype", "dtype", "transformers_version", "architectures", "auto_map", "tokenizer_class", "name_or_path")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id")
_TOKENS += ("unk_token_id", "decoder_start_token_id", "untrained_token_ids")
_TRAINING = ("initializer_range", "init_std", "use_cache", "gradient_checkpointing", "pretraining_tp")
_TRAINING += ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "loss_type", "neftune_noise_alpha")
_TASK = ("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params")
_TASK += ("classifier_dropout", "keys_to_ignore_at_inference")
_COMPUTING = ("chunk_size_feed_forward", "attn_implementation", "experts_implementation", "use_flash_attn")
_COMPUTING += ("flash_attn", "use_bfloat16", "use_flash_attention_2", "use_kernel_forward_from_hub")
_OUTPUTS = ("return_dict", "output_hidden_states", "output_attentions", "output_past", "output_scores", "torchscript")
_OUTPUTS += ("return_dict_in_generate", "tf_legacy_loss", "tie_encoder_decoder", "cross_attention_hidden_size")
_GENERATION = ("do_sample", "temperature", "top_k", "top_p", "typical_p", "min_p", "max_length", "min_length")
_GENERATION += ("max_new_tokens", "num_beams", "num_beam_groups", "num_return_sequences", "diversity_penalty")
_GENERATION += ("length_penalty", "repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
_GENERATION += ("early_stopping", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens")
_GENERATION += ("begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values", "prefix")
_GENERATION += ("cache_implementation",)
_ORIGIN = ("unsloth_fixed", "unsloth_version", "is_llama_config", "rope_interleaved", "transformers.js_config")
_ORIGIN += ("model_max_length", "tokenizer_model_max_length", "max_sequence_length", "bos_token", "eos_token")
_ORIGIN += ("pad_token", "unk_token", "tokenizer_padding_side", "trust_remote_code", "model_name", "name", "language")
_ORIGIN += ("license", "sentence_transformers")
HARMLESS = frozenset(
    (*_FILE, *_TOKENS, *_TRAINING, *_TASK, *_COMPUTING, *_OUTPUTS, *_GENERATION, *_ORIGIN),
)
"""Keys without effect on the logits of any family: what wrote the file, special tokens, initial values, how and where
it computes, labels of classes, defaults of generation (generation_config.json has them now), names for other tools."""


DEFAULTS: dict[str, Any] = {"is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False}
DEFAULTS |= {"layer_types": None}  # transformers demands one entry for each layer


def config_keys(
    used: Iterable[str], harmless: Iterable[str] = (), defaults: Mapping[str, Any] | None = None, private: str = ""
) -> DeclaredKeys:
    """Return a family's table. `private`: the key with an underscore that transformers reads, if there is one."""
    return DeclaredKeys(
        used=ALWAYS_USED | frozenset(used),
        harmless=HARMLESS | frozenset(harmless),
        defaults=DEFAULTS | (defaults or {}),
        read_when_private=frozenset([private]) - {""},
    )


def of_family(fields: Mapping[str, Any], used: Collection[str]) -> dict[str, Any]:
    """Return the fields of a config.json without those of other families: keys of decoders that are not in `used`."""
    return {key: value for key, value in fields.items() if key in used or key not in DECODER_KEYS | {"head_dim"}}


_DECODING = ("max_time", "min_new_tokens", "top_h", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "constraints")
_DECODING += ("force_words_ids", "renormalize_logits", "sequence_bias", "guidance_scale", "low_memory", "dola_layers")
_DECODING += ("encoder_repetition_penalty", "token_healing", "watermarking_config", "output_logits", "use_mtp")
_DECODING += ("cache_config", "max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile")
_DECODING += ("continuous_batching_config", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule")
_DECODING += ("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "speculation_type")
_DECODING += ("assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size")
_DECODING += ("return_legacy_cache", "chat_format", "max_window_size")
GENERATION_KEYS = DeclaredKeys(
    used=frozenset(("eos_token_id",)),
    harmless=frozenset((*_FILE, *_TOKENS, *_TRAINING, *_OUTPUTS, *_GENERATION, *_ORIGIN, *_DECODING)),
)
"""Keys of generation_config.json. Of those for sampling, `sampling_options` (config.py) reads some."""
INDEX_KEYS = DeclaredKeys(used=frozenset(("weight_map",)), harmless=frozenset(("metadata",)))
"""Keys of model.safetensors.index.json."""
ROUNDED = "rounded_as"
"""Key in the index's metadata: the options of [qat] that the weights are rounded with."""
