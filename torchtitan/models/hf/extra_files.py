"""What a folder in the form of Hugging Face holds beside the weights, so that other programs open it: config.json,
generation_config.json, the tokenizer's files. No torch.

Where the model came from such a folder, its config.json goes on, with whatever it says that the model does not compute
with: how long texts may be, constants of the router's balance, names of tokens that end a turn.
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
"""Of its form (8 bits, code, who wrote it), which is not that of what is written."""
SPELLED_ANEW = ("torch_dtype", "rope_theta", "rope_scaling", "num_nextn_predict_layers")
"""By `ConfigForm.to_hf`, as older programs read it too; and the depths that are written."""
OF_THE_HEAD = ("architectures", "id2label", "label2id")
"""Of what the model is used for, which may be another use than the source's."""


@dataclass(frozen=True)
class Source:
    """The folder that a model came from; without its generation_config.json where it has none."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)


def source_of(folder: str | Path, trained: bool = False) -> Source:
    """JobError where the config cannot be read. `trained`: since then, so that no token of it is new."""
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
    """File name -> content. `end_ids`: of tokens that end a text, several perhaps; `labels`: names of classes. JobError
    for sizes that transformers does not have.
    """
    written = form.to_hf(args, dtype)
    generation: dict[str, Any] = {}
    if source is not None and _is_same_model(form, args, source):
        kept = {key: value for key, value in source.config.items() if key not in OF_THE_SOURCE_ALONE}
        kept.pop("rope_parameters", None)  # of transformers 5, which reads the older spelling too
        written = kept | {key: written[key] for key in (*SPELLED_ANEW, *OF_THE_HEAD) if key in written}
        generation = {key: value for key, value in source.generation.items() if key != "transformers_version"}
    ends = list(end_ids) if len(end_ids) > 1 else next(iter(end_ids), None)
    ids = {"bos_token_id": bos_id, "eos_token_id": ends}
    written |= {key: _agreed(written.get(key), id_) for key, id_ in ids.items()}
    generation |= {key: _agreed(generation.get(key, written[key]), id_) for key, id_ in ids.items()}
    if "id2label" in written and written.get("pad_token_id") is None:
        # what transformers looks for to find the last token of a text
        written["pad_token_id"] = next(iter(end_ids), None)
    if labels:
        written |= {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}
    own = {CONFIG: written, GENERATION: generation}
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in own.items()}
    return {name: text.encode() for name, text in texts.items()} | dict(tokenizer_files)


def _is_same_model(form: ConfigForm, args: Any, source: Source) -> bool:
    """Whether the source's config, as far as the model computes with it, is that of these arguments."""
    try:
        return not form.differing(form.args_from(source.config), args)
    except JobError:
        return False


def _agreed(said: Any, own: int | list[int] | None) -> Any:
    """What the source says, several ends of a text perhaps, if the tokenizer's are among it; else the tokenizer's."""
    known, needed = (each if isinstance(each, list) else [each] for each in (said, own))
    return said if set(needed) <= set(known) else own
