"""The plan of a model's parallelism: patterns of the module names that each kind of parallelism applies to."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from torchtitan.core.initialization import clean_name


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Module names; `*` stands for anything within one component, so "layers.*" means the blocks, not their parts.

    The ends, which are None in a pipeline part that lacks them: `embedding`, and as `head` the last norm and the matrix
    that makes logits. Embedding and matrix are split by vocabulary under tensor parallel.

    The others but the last are tensor parallelism's, with names as they are inside a block. A region begins at a
    `gathered` module, whose first input comes with all tokens, and ends at `row`, where the ranks' partial sums are
    added up.
    """

    blocks: str = "layers.*"
    embedding: str = "tok_embeddings"
    with_embedding: tuple[str, ...] = ()  # modules that a pipeline cuts off with it: learned positions, noise
    head: tuple[str, str] = ("norm", "output")
    gathered: tuple[str, ...] = ()  # modules at which a region begins
    column: tuple[str, ...] = ()  # linears split by output; below a module with `head_dim` in whole heads of that width
    row: tuple[str, ...] = ()  # linears split by input
    replicated: tuple[str, ...] = ()  # inside a region, but whole on every rank, as its output is for all heads
    across: tuple[str, ...] = ()  # inside a region, RMS norms of split features, such as of all heads at once
    sequence: tuple[str, ...] = ()  # outside the regions, on the tokens of this rank: norms
    indexed: tuple[str, ...] = ()  # outside too, with a further input of integers for all tokens: dropout and its keys
    with_block: tuple[tuple[str, str], ...] = ()  # a module of the model, and the block that a pipeline keeps it with
    may_lack: tuple[str, ...] = ()  # which of these patterns some sizes of the model have no module for
    experts: str = ""  # expert parallelism's: the module inside a block whose parameters are stacked by expert


def match(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules whose names fit, in the model's order. Names come without the components that wrappers add, and of a
    wrapped module the outermost wrapper is returned. ValueError when nothing fits.
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


def match_end(model: nn.Module, name: str) -> nn.Module | None:
    """The embedding, last norm or head of that name; None in a pipeline part that lacks it. ValueError where the model
    has no such module at all.
    """
    parent, _, child = name.rpartition(".")
    owner = match(model, parent)[0][1] if parent else model
    end = getattr(owner, child, NotImplemented)
    if end is None or isinstance(end, nn.Module):
        return end
    return match(model, name)[0][1]  # which says what there is


def is_part(model: nn.Module, plan: ParallelPlan) -> bool:
    """Return True if this is a pipeline part: at least one end is cut off."""
    return any(match_end(model, name) is None for name in (plan.embedding, *plan.head))


def match_blocks(model: nn.Module, plan: ParallelPlan, inside: str = "") -> list[tuple[str, nn.Module]]:
    """The plan's blocks, or what a pattern names inside them. A pipeline part may have none of them: a first one with
    the embedding alone, or one whose few layers are all of the other kind (dense, experts). And what the plan says that
    a model may lack, some sizes have not.
    """
    try:
        return match(model, f"{plan.blocks}.{inside}" if inside else plan.blocks)
    except ValueError:
        if inside in plan.may_lack or is_part(model, plan):
            return []
        raise


def declaration_holds(obj: object, attribute: str, *methods: str) -> bool:
    """Return True if the class that defines `attribute` also defines each of `methods` as `obj` runs them.

    A class declares with an attribute what a parallelism may assume of its methods ("this is plain attention"). A
    subclass that overrides such a method inherits the attribute, so it has to repeat the declaration for its method.
    """
    classes = type(obj).__mro__

    def depth(name: str) -> int:
        return next((index for index, cls in enumerate(classes) if name in vars(cls)), len(classes))

    declared = depth(attribute)
    return declared < len(classes) and all(depth(name) >= declared and name not in vars(obj) for name in methods)
