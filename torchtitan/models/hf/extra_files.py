"""The files of a Hugging Face folder except the weights: config.json, generation_config.json, tokenizer. No torch.

If the model came from such a folder, its config.json is extended rather than replaced. So it keeps fields that the
model does not compute with: maximum lengths, constants of the router's balance, tokens that end a turn.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.models.family import ConfigForm
from torchtitan.models.hf.config import CONFIG, UNTRAINED, read_json

GENERATION = "generation_config.json"
OF_THE_SOURCE_ALONE = ("quantization_config", "auto_map", "transformers_version", "_name_or_path", "dtype")
"""Fields that describe the source's files (8 bits, code, author) and do not apply to the written ones."""
SPELLED_ANEW = ("torch_dtype", "rope_theta", "rope_scaling", "num_nextn_predict_layers")
"""Fields that `ConfigForm.to_hf` writes, in a spelling that older programs read, and the number of written depths."""
OF_THE_HEAD = ("architectures", "id2label", "label2id")
"""Fields of the model's task, which may differ from the source's."""


@dataclass(frozen=True)
class Source:
    """The config.json and generation_config.json (empty if absent) of the folder that a model came from."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)


def source_of(folder: str | Path, trained: bool = False) -> Source:
    """Read the configs of a folder. Raises JobError if config.json cannot be read.

    `trained`: the model has been trained since, so no token counts as untrained.
    """
    folder = Path(folder)
    generation = read_json(folder / GENERATION) if (folder / GENERATION).exists() else {}
    config = read_json(folder / CONFIG)
    return Source({key: value for key, value in config.items() if not (trained and key == UNTRAINED)}, generation)


def beside_weights(
    form: ConfigForm,
    args: Any,
    dtype: Any,
    *,
    source: Source | None,
    tokenizer_files: Mapping[str, bytes],
    bos_id: int | None,
    end_ids: Sequence[int],
    labels: Sequence[str] = (),
) -> dict[str, bytes]:
    """Return the files to write next to the weights, by name.

    `end_ids`: tokens that end a text. `labels`: names of the classes. Raises JobError for sizes that transformers does
    not support.
    """
    config_fields = form.to_hf(args, dtype)
    generation: dict[str, Any] = {}
    if source is not None and _is_same_model(form, args, source):
        source_config = {key: value for key, value in source.config.items() if key not in OF_THE_SOURCE_ALONE}
        source_config.pop("rope_parameters", None)  # of transformers 5, which reads the older spelling too
        config_fields = source_config | {
            key: config_fields[key] for key in (*SPELLED_ANEW, *OF_THE_HEAD) if key in config_fields
        }
        generation = {key: value for key, value in source.generation.items() if key != "transformers_version"}
    ends = list(end_ids) if len(end_ids) > 1 else next(iter(end_ids), None)
    ids = {"bos_token_id": bos_id, "eos_token_id": ends}
    config_fields |= {key: _agreed(config_fields.get(key), id_) for key, id_ in ids.items()}
    generation |= {key: _agreed(generation.get(key, config_fields[key]), id_) for key, id_ in ids.items()}
    if "id2label" in config_fields and config_fields.get("pad_token_id") is None:
        # transformers finds the last token of a text by it
        config_fields["pad_token_id"] = next(iter(end_ids), None)
    if labels:
        config_fields |= {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}
    configs = {CONFIG: config_fields, GENERATION: generation}
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in configs.items()}
    return {name: text.encode() for name, text in texts.items()} | dict(tokenizer_files)


def _is_same_model(form: ConfigForm, args: Any, source: Source) -> bool:
    """Return True if the source's config agrees with these arguments in all compared fields."""
    try:
        return not form.differing(form.args_from(source.config), args)
    except JobError:
        return False


def _agreed(source_ids: Any, tokenizer_ids: int | list[int] | None) -> Any:
    """Return the source's token ids if they include the tokenizer's, otherwise the tokenizer's."""
    source_list, tokenizer_list = (ids if isinstance(ids, list) else [ids] for ids in (source_ids, tokenizer_ids))
    return source_ids if set(tokenizer_list) <= set(source_list) else tokenizer_ids
