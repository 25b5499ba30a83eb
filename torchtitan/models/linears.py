"""The linears of a model by name, with their sizes, and the names of all its parameters, as far as its arguments say
them: what an adapter can be put beside and what can be trained, known without building anything. No torch here; tests
hold it against the models.
"""

from typing import Any

HEAD = "output"
Sizes = dict[str, tuple[int, int]]
"""Name -> outputs, inputs. Of a stack of experts, those of the first of its matrices."""
Names = tuple[str, ...]
NORMS: Names = ("attention_norm.weight", "ffn_norm.weight")
QK_NORMS: Names = ("attention.q_norm.weight", "attention.k_norm.weight")
ENDS: Names = ("tok_embeddings.weight", "norm.weight")
"""What families have in a block, and outside of the blocks, beside linears."""
STACK = "moe.experts"
SPLIT = dict.fromkeys(("wq", "wk", "wv", "wkv_b", "w1", "w3", "tok_embeddings", HEAD), 0) | {"wo": 1, "w2": 1}
"""Last part of a linear's name -> which of (outputs, inputs) tensor parallel splits."""


def linears(args: Any) -> Sizes:
    """Of a whole decoder, the head among them. Empty for a family that says nothing of them."""
    if not hasattr(args, "block_linears"):
        return {}
    found: Sizes = {}
    for layer in range(args.n_layers + getattr(args, "n_mtp_layers", 0)):
        found |= {f"layers.{layer}.{name}": sizes for name, sizes in args.block_linears(layer).items()}
    return found | getattr(args, "head_linears", {HEAD: (args.vocab_size, args.dim)})


def split_side(name: str) -> int | None:
    """Which of (outputs, inputs) of the linear tensor parallel splits; None where every rank has it whole, as what
    stands beside experts, or where a family has another name for it.
    """
    *around, own = name.split(".")
    return None if "moe" in around else SPLIT.get(own)


def parameters(args: Any) -> list[str]:
    """Of a whole decoder by name, a tied head among them. Empty for a family that says nothing of them: `block_others`
    of a layer and `end_others`, which are no matrices of linears.
    """
    found: list[str] = []
    if not hasattr(args, "block_others"):
        return found
    for name in linears(args):
        found += [f"{name}.w{i}" for i in (1, 2, 3)] if name.endswith(STACK) else [f"{name}.weight"]
    for layer in range(args.n_layers + getattr(args, "n_mtp_layers", 0)):
        found += [f"layers.{layer}.{name}" for name in args.block_others(layer)]
    return [*found, *args.end_others]


def grouped_attention(dim: int, heads: int, kv_heads: int, head_dim: int) -> Sizes:
    q, kv = heads * head_dim, kv_heads * head_dim
    return {"attention.wq": (q, dim), "attention.wk": (kv, dim), "attention.wv": (kv, dim), "attention.wo": (dim, q)}


def ungated(name: str, dim: int, width: int) -> Sizes:
    """Of a feed-forward without a gate."""
    return {f"{name}.w1": (width, dim), f"{name}.w2": (dim, width)}


def gated(name: str, dim: int, width: int) -> Sizes:
    """Of a gated feed-forward."""
    return {f"{name}.w1": (width, dim), f"{name}.w2": (dim, width), f"{name}.w3": (width, dim)}
