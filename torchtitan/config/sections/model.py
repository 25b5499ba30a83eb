"""The model: family and size, recompute, compilation, degrees of parallelism, the adapter trained in its place, and the
formats that it is trained for.
"""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import (
    STRICT,
    DegreeOrRest,
    Form,
    Fraction,
    NameIn,
    NonNegative,
    Place,
    Positive,
    with_plugin_sections,
)


@dataclass(config=STRICT, kw_only=True)
class Model:
    """The model family, its size, and its tokenizer."""

    name: Annotated[str, NameIn("torchtitan.models:SIZES")] = "llama3"
    """Model family."""
    flavor: str = "debugmodel"
    """Size within the family. "from_hf": take it, and all constants, from the config.json in hf_folder."""
    hf_folder: Place | None = None
    """Folder in Hugging Face format with the config.json that gives the sizes for flavor = "from_hf"."""
    tokenizer_path: Place = "debug"
    """Tokenizer: a tiktoken .model (Llama 3), a sentencepiece .model (Llama 2), a Hugging Face tokenizer.json (the file
    or its folder), or one of two words: `bytes`, or `debug` for 2,048 tokens shipped with the package."""
    overrides: dict[str, int | float | bool | str | dict[str, int | float | str]] = field(default_factory=dict)
    """Sizes to change in the flavor, by the field names of the family's arguments, e.g. {n_layers = 4} or {rope_scaling
    = {kind = "yarn", factor = 4.0}}; rope_scaling = false turns the scaling off."""
    ignore_config_keys: list[str] = field(default_factory=list)
    """Keys of the config.json, or of the tokenizer's files, of a Hugging Face folder that this program does not know
    and that do not matter, for example of a newer transformers. Keys that the model family uses cannot be ignored."""
    s2_group_size: NonNegative = 0
    """Tokens in a group of shifted sparse attention (LongLoRA, which uses a quarter of training.seq_len), in training
    only; half of the heads use groups shifted by half a group. Experimental. 0: off."""
    attention_backend: Literal["auto", "sdpa", "flex", "fa3"] = "auto"
    """Attention kernel. auto: flex attention for document masks on a GPU, otherwise scaled_dot_product_attention. fa3:
    the same, with FlashAttention 3 as torch's flash kernel (a Hopper GPU and the package flash_attn_interface)."""


@dataclass(config=STRICT, kw_only=True)
class ActivationCheckpoint:
    """Recompute of activations in the backward pass."""

    mode: Literal["none", "full", "full_keep_comm", "selective", "memory_budget"] = "selective"
    """Activations recomputed in backward instead of stored: none, all of every block (full), all except all-to-all
    outputs (full_keep_comm, needs pipeline_parallel_expert_parallel_overlap), some (selective, see
    selective_ac_option), or as many as memory_budget requires (needs compile)."""
    selective_ac_option: Annotated[
        str, Field(pattern=r"^(op|[1-9]\d*)$"), Form('"op" or a whole number >= 1 in quotes, as "2"')
    ] = "2"
    """"op": keep matrix products and attention, recompute the rest; a number n: recompute every n-th block."""
    memory_budget: Fraction = 0.5
    """Fraction of activations to store. 0 recomputes everything, 1 nothing; in between the compiler stores the
    activations that are most expensive to recompute."""
    preserve_rng_state: bool = True
    """Restore the random state for recompute, so that dropout is repeated exactly."""
    early_stop: bool = False
    """Stop recomputing as soon as backward has all needed activations."""


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


@dataclass(config=STRICT, kw_only=True)
class Parallelism:
    """Degrees of data, tensor, context, expert and pipeline parallelism."""

    data_parallel_replicate_degree: Positive = 1
    """Copies of the (sharded) model. Alone this is DDP; with a shard degree it is HSDP."""
    data_parallel_shard_degree: DegreeOrRest = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). -1: all remaining ranks."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] | Annotated[int, Field(ge=2)] = "default"
    """Free the gathered parameters of a block after its forward. default: always, except with pipeline parallel. A
    number of ranks, such as the GPUs of a machine: keep a second shard in every group of so many neighbors, in which
    backward gathers the parameters."""
    fsdp_prefetch: NonNegative = 0
    """Number of blocks to gather parameters for in advance, in forward and backward. 0: FSDP2's implicit prefetch, but
    at least 1 with expert parallel, where the host waits in each block."""
    fsdp_quantized_gather: Literal["none", "int8"] = "none"
    """Send parameters as int8 with a scale for each 32 of them, when they are gathered. Lossy: every rank computes with
    the rounded parameters; those stored and exported are exact. (ZeRO++)"""
    fsdp_quantized_reduce: Literal["none", "int8", "int4"] = "none"
    """Send gradients as integers with a scale for each 32 of them, when they are summed over shards, in float32. Lossy.
    A number in fsdp_reshard_after_forward makes it two hops, within such groups and between them. (ZeRO++)"""
    tensor_parallel_degree: Positive = 1
    """Ranks over which each weight matrix is split."""
    disable_sequence_parallel: bool = False
    """Keep whole sequences between blocks on every tensor-parallel rank instead of a part of each: uses more memory and
    as much traffic, and allows sequences of any length."""
    disable_loss_parallel: bool = False
    """Gather the logits for the loss instead of keeping the vocabulary sharded over tensor-parallel ranks."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel collectives with matrix products."""
    pipeline_parallel_degree: Positive = 1
    """Ranks over which the layers are split."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names of each pipeline stage. Unset: split by cost."""
    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """Number of layers that the first stage has fewer than others, because it has the embedding."""
    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """Number of layers that the last stage has fewer than others, because it has the output head."""
    pipeline_parallel_layers_per_stage: Positive | None = None
    """Layers of a stage; determines the number of stages per rank."""
    pipeline_parallel_schedule: str = "1F1B"
    """Schedule of the pipeline, by torch's name."""
    pipeline_parallel_schedule_csv: Place | None = None
    """CSV file with a custom schedule."""
    pipeline_parallel_microbatch_size: Positive = 1
    """Samples (or pairs) in a pipeline microbatch."""
    pipeline_parallel_expert_parallel_overlap: bool = False
    """Overlap the expert-parallel all-to-alls of one microbatch with the computation of another. Made for DualPipeV; in
    other schedules weight gradients fill the gaps."""
    context_parallel_degree: Positive = 1
    """Ranks over which the sequence is split."""
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """Balancing of causal attention's work over context-parallel ranks."""
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ring", "ulysses"] = "allgather"
    """Exchange of keys and values between context-parallel ranks."""
    expert_parallel_degree: Positive = 1
    """Ranks over which the experts are distributed."""


@dataclass(config=STRICT, kw_only=True)
class Relora:
    every: Annotated[int, Field(ge=2)] | None = None
    """Steps between restarts, which merge A and B into the frozen matrices and initialize them again (ReLoRA). Unset:
    never."""
    reset_every: Annotated[int, Field(ge=2)] | None = None
    """Steps between resets of A's and B's optimizer state. Unset: every."""
    reset: Literal["zero", "magnitude", "random", "none"] = "zero"
    """Part of the optimizer state that a reset clears: all (zero), the smallest entries (magnitude), random entries, or
    nothing."""
    prune_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Fraction of the optimizer state pruned by reset = "magnitude" or "random"."""
    mask: Literal["joint", "independent"] = "joint"
    """Entries pruned from the two moments: the same in both (joint), or chosen for each. independent is for comparison:
    it diverges."""
    warmup_steps: NonNegative = 0
    """Steps of warmup after each restart, from a thousandth of the rate as in Axolotl, for decays without built-in
    restarts."""
    anneal_steps: Positive = 1
    """Steps over which the rate falls before each restart, with warmup_steps. 1: none."""
    reset_step: bool = False
    """Restart the optimizer's step count of A and B too."""

    @property
    def reset_period(self) -> int | None:
        return self.reset_every or self.every


@dataclass(config=STRICT, kw_only=True)
@with_plugin_sections("adapter")
class Adapter:
    """LoRA, DoRA, quantized bases, ReLoRA, and adapters of plugins."""

    kind: Annotated[str, NameIn("torchtitan.adapters:ADAPTERS", ("none",))] = "none"
    """Adapter to train instead of the model's own parameters. none: train the model itself."""
    rank: Positive = 128
    """Rank of the low-rank matrices A and B."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of B A: their product is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate of the input of A, in linear layers of the blocks."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, which stabilizes training at high ranks (rsLoRA)."""
    train_scaling: bool = False
    """Multiply by tanh of a learned number per linear layer, initially 1, instead of alpha / rank."""
    lora_only: bool = False
    """Drop the original matrices of the targets and compute with A and B alone, to train a low-rank model from
    scratch."""
    target: list[str] = field(default_factory=lambda: ["*attn*", "*attention*", "*mlp*", "*feed_forward*"])
    """Names of the linear layers and stacks of experts that get low-rank matrices, or of single matrices of experts
    (*moe.experts.w2); * matches anything. "all-linear": all linear layers of the blocks."""
    gate_up_rank: NonNegative = 0
    """Rank of one pair for gate and up of each expert together, with an A for both, as peft has for transformers'
    stacks. 0: a pair of the usual rank for each."""
    quantized_experts: Literal["adapted", "all", "none"] = "adapted"
    """Stacks of experts that qlora and lora_int8 quantize: the matrices with an adapter, all, or none."""
    lr_ratio_b: Annotated[float, Field(gt=0)] = 1.0
    """Ratio of the learning rates of B and A (LoRA+, arXiv:2402.12354, which recommends about 16)."""
    initial_path: Place | None = None
    """Folder in peft's format from which the adapter starts; the model itself is checkpoint.initial_load_path."""
    save: Literal["whole", "alone"] | None = None
    """Content of checkpoints. whole: the whole model. alone: trained parameters and optimizer state, with a reference
    to the model in checkpoint.initial_load_path and its digest. Unset: alone if that path is itself a folder or file of
    weights, else whole; a resumed run keeps its form."""
    last_save_in_peft: bool = False
    """Also write the adapter in peft's format after the last step, into adapter/."""
    layers: list[NonNegative] = field(default_factory=list)
    """Numbers of the layers that are adapted. Empty: all."""
    train_dense_rest: bool = False
    """Also train all parameters that are not targets (embeddings, head, norms, biases), as in training from scratch."""
    train_fully: list[str] = field(default_factory=list)
    """Names of model parameters trained together with the adapter; * matches anything, e.g. ["*norm*",
    "output.weight"]."""
    relora: Relora = field(default_factory=Relora)


@dataclass(config=STRICT, kw_only=True)
class Qat:
    """Quantization-aware training: linears compute with numbers rounded to a format of few bits."""

    weight_dtype: Literal["none", "int4", "int8", "fp8", "nvfp4", "mxfp4"] = "none"
    """Format that the weights of all linears, with the head, are rounded to in each forward. Those trained, saved and
    exported are not rounded. none: no quantization-aware training."""
    activation_dtype: Literal["none", "int8", "fp8", "nvfp4", "mxfp4"] = "none"
    """Format that the inputs of these linears are rounded to, token by token: int8 or none with weights in int8, these
    or fp8 in int4, otherwise that of the weights."""
    group_size: Annotated[int, Field(ge=2)] | None = None
    """Weights of a row that share a scale. Unset: 32 (16 for nvfp4, the whole row for fp8)."""
    quantize_embedding: bool = False
    """Round the token embedding too, as weights alone (int4 or int8)."""
    after_steps: NonNegative = 0
    """Steps before rounding begins."""

    @property
    def group(self) -> int:
        """The number of weights of a row that share a scale; 1 if it is all of them."""
        return self.group_size or {"nvfp4": 16, "fp8": 1}.get(self.weight_dtype, 32)

    @property
    def of_weights(self) -> dict[str, Any]:
        """The options that the rounded weights depend on."""
        options = {"weight_dtype": self.weight_dtype, "activation_dtype": self.activation_dtype}
        return options | {"group_size": self.group, "quantize_embedding": self.quantize_embedding}

    @property
    def inputs(self) -> str | None:
        """The format of the inputs, if they are rounded."""
        return None if self.activation_dtype == "none" else self.activation_dtype
