"""The parallel plan of a model: patterns of module names for each kind of parallelism."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from torchtitan.core.random_draws import clean_name


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Patterns of module names. `*` matches within one component: "layers.*" matches the blocks, not their submodules.

    `embedding` and `head` (the last norm and the output matrix) are None in a pipeline part without them. Tensor
    parallel shards the embedding and the output matrix by vocabulary.

    The fields from `gathered` to `keyed` are names inside a block, for tensor parallel. A region of sharded matrices
    begins at a `gathered` module, which gets all tokens as its first input, and ends at a `row` module, after which the
    ranks' partial sums are reduced.
    """

    blocks: str = "layers.*"
    embedding: str = "tok_embeddings"
    with_embedding: tuple[str, ...] = ()  # modules on the embedding's pipeline stage: learned positions, noise
    head: tuple[str, str] = ("norm", "output")
    gathered: tuple[str, ...] = ()  # modules at which a region begins
    column: tuple[str, ...] = ()  # linears sharded by output; in full heads if their parent module has a `head_dim`
    row: tuple[str, ...] = ()  # linears sharded by input
    replicated: tuple[str, ...] = ()  # inside a region, full on every rank, as all heads read the output
    by_head: tuple[str, ...] = ()  # inside a region, modules of a parameter [heads], as attention sinks
    split_norms: tuple[str, ...] = ()  # inside a region, RMS norms over sharded features, or over `groups` of them
    sequence: tuple[str, ...] = ()  # outside the regions, applied to this rank's tokens: norms
    keyed: tuple[str, ...] = ()  # the same, with a further input of integers for all tokens: dropout and its keys
    with_block: tuple[tuple[str, str], ...] = ()  # (module outside the blocks, block that shares its pipeline stage)
    optional: tuple[str, ...] = ()  # patterns above that match nothing in some sizes of the model
    experts: str = ""  # for expert parallel: the module inside a block that holds the stacked parameters of all experts


def match_modules(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of all modules that match, in the model's order, or raise ValueError if there is none.

    Names omit the components that wrappers add. For a wrapped module the outermost wrapper is returned.
    """
    components = pattern.split(".")
    matches: dict[str, nn.Module] = {}
    for wrapped_name, module in model.named_modules():
        name = clean_name(wrapped_name)
        parts = name.split(".")
        if len(parts) == len(components) and all(map(fnmatchcase, parts, components)):
            matches.setdefault(name, module)
    if not matches:
        names = sorted({clean_name(name) for name, _ in model.named_children()})
        raise ValueError(
            f"no module of {type(model).__name__} is called {pattern!r} (it has {', '.join(names)}): "
            f"correct the pattern in the model's plan"
        )
    return list(matches.items())


def get_end_module(model: nn.Module, name: str) -> nn.Module | None:
    """Return the embedding, last norm or head of that name; None in a pipeline part without it.

    Raises ValueError if the model has no such attribute at all.
    """
    parent, _, child = name.rpartition(".")
    owner = match_modules(model, parent)[0][1] if parent else model
    end = getattr(owner, child, NotImplemented)
    if end is None or isinstance(end, nn.Module):
        return end
    return match_modules(model, name)[0][1]  # raises an error that lists the modules


def is_pipeline_part(model: nn.Module, plan: ParallelPlan) -> bool:
    """Return True if this is a pipeline part: at least one end is cut off."""
    return any(get_end_module(model, name) is None for name in (plan.embedding, *plan.head))


def match_blocks(model: nn.Module, plan: ParallelPlan, inside: str = "") -> list[tuple[str, nn.Module]]:
    """Return the plan's blocks, or the modules that the pattern `inside` matches within them.

    The result may be empty for a pipeline part (only the embedding, or only dense layers where experts are requested)
    and for patterns of `plan.optional`. Otherwise no match raises ValueError.
    """
    try:
        return match_modules(model, f"{plan.blocks}.{inside}" if inside else plan.blocks)
    except ValueError:
        if inside in plan.optional or is_pipeline_part(model, plan):
            return []
        raise


def declaration_holds(obj: object, attribute: str, *methods: str) -> bool:
    """Return True if the class that defines `attribute` also defines each of `methods` as `obj` runs them.

    With an attribute a class declares a property of its methods that a parallelism relies on ("this is plain
    attention"). A subclass that overrides such a method has to repeat the declaration.
    """
    classes = type(obj).__mro__

    def depth(name: str) -> int:
        return next((index for index, cls in enumerate(classes) if name in vars(cls)), len(classes))

    declared = depth(attribute)
    return declared < len(classes) and all(depth(name) >= declared and name not in vars(obj) for name in methods)
