"""The model, and how a block of it computes."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, Form, Fraction, NameIn, NonNegative, Place


@dataclass(config=STRICT, kw_only=True)
class Model:
    """The model family, its size, and its tokenizer."""

    name: Annotated[str, NameIn("torchtitan.models:SIZES")] = "llama3"
    """Model family."""
    flavor: str = "debugmodel"
    """Size within the family. "from_hf": take it, and all constants, from the config.json in hf_folder."""
    hf_folder: Place | None = None
    """Folder in Hugging Face format whose config.json gives the sizes for flavor = "from_hf"."""
    tokenizer_path: Place = "debug"
    """Tokenizer: a tiktoken .model (Llama 3), a sentencepiece .model (Llama 2), a Hugging Face tokenizer.json (the file
    or its folder), or one of two words: `bytes`, or `debug` for 2,048 tokens shipped with the package."""
    overrides: dict[str, int | float | bool | str | dict[str, int | float | str]] = field(default_factory=dict)
    """Sizes to change in the flavor, by the field names of the family's arguments, e.g. {n_layers = 4} or {rope_scaling
    = {kind = "yarn", factor = 4.0}}; rope_scaling = false turns the scaling off."""
    s2_group_size: NonNegative = 0
    """Tokens in a group of shifted sparse attention (LongLoRA, which uses a quarter of training.seq_len), in training
    only; half of the heads use groups shifted by half a group. Experimental. 0: off."""
    attention_backend: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention kernel. auto: flex attention for document masks on a GPU, otherwise scaled_dot_product_attention."""


@dataclass(config=STRICT, kw_only=True)
class ActivationCheckpoint:
    """Recompute of activations in the backward pass."""

    mode: Literal["none", "full", "full_keep_comm", "selective", "memory_budget"] = "selective"
    """Activations recomputed in backward instead of stored: none, those of every block (full), the same without
    all-to-all outputs (full_keep_comm, needs pipeline_parallel_expert_parallel_overlap), some (selective, see
    selective_ac_option), or as many as memory_budget requires (needs compile)."""
    selective_ac_option: Annotated[
        str, Field(pattern=r"^(op|[1-9]\d*)$"), Form('"op" or a whole number >= 1 in quotes, as "2"')
    ] = "2"
    """"op": keep matrix products and attention, recompute the rest; a number n: recompute every n-th block."""
    memory_budget: Fraction = 0.5
    """Fraction of activations to store. 0 recomputes everything, 1 nothing; in between the compiler stores what is most
    expensive to recompute."""
    preserve_rng_state: bool = True
    """Restore the random state for recompute, so that dropout is repeated exactly."""
    early_stop: bool = False
    """Stop recomputing as soon as backward has everything it needs."""


@dataclass(config=STRICT, kw_only=True)
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile with torch.compile."""
    scope: Literal["block", "model"] = "block"
    """Unit of compilation. block: each transformer block (works with FSDP, compiled once for all blocks). model: the
    whole model with its loss (fastest; one rank or replicas)."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """Parts that are compiled."""
    backend: str = "inductor"
    """Backend of torch.compile."""
