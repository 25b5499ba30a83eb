"""config.json: the layers that have a sliding window, rotary positions of their own, or none. No torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.core.files import agreed_value
from torchtitan.models.hf.config import check_supported, read_flag, read_number, read_window
from torchtitan.models.sizes import layer_spans

SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
"""transformers' names of the kinds of layers."""


def only_layer_type(config: Mapping[str, Any]) -> str | None:
    """Return the one kind that all layers have by `layer_types`; None without this key. JobError for several kinds."""
    types = config.get("layer_types")
    if types is None:
        return None
    kinds = set(types) if isinstance(types, list) and all(isinstance(kind, str) for kind in types) else set()
    if len(kinds) != 1 or not kinds <= {SLIDING, FULL} or len(types) != config["num_hidden_layers"]:
        raise JobError(
            f"layer_types = {types!r}; allowed: {config['num_hidden_layers']} equal entries, {FULL!r} or {SLIDING!r}, "
            "as all layers of this family are alike"
        )
    return str(types[0])


def check_full_attention(config: Mapping[str, Any]) -> None:
    """Raise JobError if a layer has a sliding window, in a family that has none here."""
    check_supported(config, {"use_sliding_window": False})  # without it a sliding_window has no effect
    if only_layer_type(config) == SLIDING:
        raise JobError(f"layer_types has {SLIDING!r}, but this model only has {FULL!r}")


def read_windows(config: Mapping[str, Any], derived: Sequence[bool], nullable: bool = True) -> dict[str, Any]:
    """Return the sizes of the windows of a config with use_sliding_window, in which layer_types counts if it is there.

    `derived`: for each layer, whether it has a window by transformers' other rules. `nullable`: sliding_window may be
    null. Raises JobError for other kinds of layers, or for windows without a length.
    """
    read_number(config, "sliding_window", 4096, null=0)  # transformers judges the type even if there are no windows
    window = read_window(config, 4096, nullable) if read_flag(config, "use_sliding_window", False) else 0
    if (types := config.get("layer_types")) is None:
        has_window = [bool(window) and is_derived for is_derived in derived]
    elif isinstance(types, list) and len(types) == len(derived) and all(kind in (SLIDING, FULL) for kind in types):
        has_window = [kind == SLIDING for kind in types]
    else:
        raise JobError(f"layer_types = {types!r}; allowed: {len(derived)} entries, each {FULL!r} or {SLIDING!r}")
    layers = [layer for layer, is_windowed in enumerate(has_window) if is_windowed]
    if layers and not window:
        raise JobError(
            f"layer_types has {SLIDING!r}, but without use_sliding_window = true and a sliding_window nothing says how "
            "long the window is"
        )
    spans = layer_spans(layers, len(derived))
    return {"sliding_window": window, "window_layers": spans} if layers else {}


def window_config(args: Any) -> dict[str, Any]:
    """Return the fields that `read_windows` reads."""
    if not args.sliding_window:
        return {"use_sliding_window": False}
    types = [FULL if args.is_global(layer) else SLIDING for layer in range(args.n_layers)]
    return {"use_sliding_window": True, "sliding_window": args.sliding_window, "layer_types": types}


def every_nth(n_layers: int, interval: int, last: Any = FULL, other: Any = SLIDING) -> list[Any]:
    """Return an entry for each layer: `last` for every `interval`-th one, `other` for all before it."""
    return [other if not interval or (layer + 1) % interval else last for layer in range(n_layers)]


def read_interval(
    config: Mapping[str, Any],
    n_layers: int,
    entries_key: str,
    interval_key: str,
    default: int,
    last: Any = FULL,
    other: Any = SLIDING,
) -> int:
    """Return the interval of an `every_nth`: from its entries or, without them, from a key with its default.

    transformers writes this key with an underscore too. Raises JobError for other entries.
    """
    interval, private = read_number(config, interval_key, default), config.get(f"_{interval_key}")
    if (entries := config.get(entries_key)) is None:
        if interval < 1:
            raise JobError(f"{interval_key} = {interval}; allowed: at least 1")
        sources = {f"{interval_key} or its default": interval, f"_{interval_key}": private}
        return agreed_value("the layers of each kind", sources, f"set {interval_key} to the right one")
    if interval_key in config and interval > 0 and entries == every_nth(n_layers, interval, last, other):
        return interval
    if isinstance(entries, list) and last in entries:
        interval = entries.index(last) + 1
    elif interval <= n_layers:
        interval = n_layers + 1
    if entries != every_nth(n_layers, interval, last, other):
        raise JobError(
            f"{entries_key} = {entries!r}; allowed: {n_layers} entries, {last!r} for every n-th layer and {other!r} "
            "for all others"
        )
    return interval


LEGACY_KINDS = {"mamba": "linear_attention", "attention": FULL}
"""transformers' former names of kinds of layers."""


def read_pattern(config: Mapping[str, Any], n_layers: int, kinds: Mapping[str, str], key: str = "layer_types") -> str:
    """Return the layer_pattern (`LayerPattern`) of a list of kinds. `kinds`: letter -> transformers' name.

    Raises JobError for another list.
    """
    names, letters = config.get(key), {kind: letter for letter, kind in kinds.items()}
    letters |= {former: letters[kind] for former, kind in LEGACY_KINDS.items() if kind in letters}
    if not isinstance(names, list) or len(names) != n_layers or any(letters.get(str(name)) is None for name in names):
        raise JobError(f"{key} = {names!r}; allowed: {n_layers} entries, each one of {', '.join(kinds.values())}")
    return "".join(letters[name] for name in names)


def rope_of_kind(config: Mapping[str, Any], kind: str) -> Any:
    """Return the entry of rope_parameters for a kind of layers. Raises JobError for other entries."""
    tables = config.get("rope_parameters")
    if tables is None:
        return None
    if not isinstance(tables, Mapping) or tables.keys() - {SLIDING, FULL}:
        raise JobError(f"rope_parameters = {tables!r}; allowed: an object with {SLIDING} and {FULL}")
    return tables.get(kind)


def partial_rotary_factor(args: Any) -> float:
    """Return a factor of head_dim that makes rotary_dim, for readers who round the product down."""
    factor = args.rotary_dim / args.head_dim
    return factor if int(args.head_dim * factor) == args.rotary_dim else math.nextafter(factor, 1.0)
