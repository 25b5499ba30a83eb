"""What of a model each parallelism takes hold of: patterns of module names, as data that stands beside the model."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from torchtitan.initialization import clean_name


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Module names; `*` stands for anything within one component, so "layers.*" means the blocks, not their parts."""

    blocks: str = "layers.*"
    embedding: str = "tok_embeddings"
    head: tuple[str, ...] = ("norm", "output")


def match(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules whose names fit, in the model's order. Names come without the components that wrappers add, and of a
    wrapped module the outermost wrapper is returned. ValueError when nothing fits.
    """
    components = pattern.split(".")
    found: dict[str, nn.Module] = {}
    for wrapped_name, module in model.named_modules():
        name = clean_name(wrapped_name)
        parts = name.split(".")
        if len(parts) == len(components) and all(map(fnmatchcase, parts, components)):
            found.setdefault(name, module)
    if not found:
        names = sorted({clean_name(name) for name, _ in model.named_children()})
        raise ValueError(
            f"no module of {type(model).__name__} is called {pattern!r} (it has {', '.join(names)}): "
            f"correct the pattern in the model's plan"
        )
    return list(found.items())
