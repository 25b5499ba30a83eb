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
    """Size within the family; "from_hf" takes it, and all constants, from the config.json in hf_folder."""
    hf_folder: Place | None = None
    """Folder in the form of Hugging Face whose config.json has the sizes of flavor "from_hf"."""
    tokenizer_path: Place = "debug"
    """Tokenizer: a tiktoken .model (Llama 3), a sentencepiece .model (Llama 2), a Hugging Face tokenizer.json (the
    file or its folder), or a word: `bytes`, or `debug`, 2,048 tokens that come with the package."""
    overrides: dict[str, int | float | bool | str | dict[str, int | float | str]] = field(default_factory=dict)
    """Sizes to change in the flavor, by the field names of the family's arguments, e.g. {n_layers = 4} or
    {rope_scaling = {kind = "yarn", factor = 4.0}}; rope_scaling = false leaves the scaling out."""
    s2_group_size: NonNegative = 0
    """Experimental. In training, attention inside groups of so many tokens, of half of the heads in groups that are
    shifted by half of it (LongLoRA, which takes a quarter of training.seq_len); evaluation sees everything. 0: off."""
    attention_backend: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention kernel. auto: flex attention for document masks on a GPU, scaled_dot_product_attention else."""


@dataclass(config=STRICT, kw_only=True)
class ActivationCheckpoint:
    """Recompute of activations in the backward pass."""

    mode: Literal["none", "full", "full_keep_comm", "selective", "memory_budget"] = "selective"
    """What is recomputed in backward instead of kept: nothing, every block, every block but what all-to-alls brought
    (needs pipeline_parallel_expert_parallel_overlap), some (selective_ac_option), or what fits memory_budget (needs
    compile)."""
    selective_ac_option: Annotated[
        str, Field(pattern=r"^(op|[1-9]\d*)$"), Form('"op" or a whole number >= 1 in quotes, as "2"')
    ] = "2"
    """"op": keep matrix products and attention, recompute the rest; a number n: recompute every n-th block."""
    memory_budget: Fraction = 0.5
    """0 recomputes everything, 1 nothing; between, the compiler keeps what is dearest to recompute."""
    preserve_rng_state: bool = True
    """Restore the random state for recompute, so that dropout repeats itself."""
    early_stop: bool = False
    """Stop recomputing once everything that backward needs is there."""


@dataclass(config=STRICT, kw_only=True)
class Compile:
    """torch.compile."""

    enable: bool = False
    """torch.compile."""
    scope: Literal["block", "model"] = "block"
    """Each transformer block by itself (composes with FSDP, compiles once for all blocks), or the whole model with
    its loss (fastest; one rank or replicas)."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """What is compiled."""
    backend: str = "inductor"
    """A backend of torch.compile."""
