"""Neurocache as an adapter: a frozen model with a memory, and an attention to it in some of its layers.

Beside it the model's own linears may have low-rank matrices, of a kind that stands alone too; those in few bits keep
the matrices that they stand beside so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import nn

from torchtitan.adapters import ADAPTERS
from torchtitan.adapters.interface import Adapter
from torchtitan.adapters.neurocache.attention import CachedAttention
from torchtitan.adapters.neurocache.folder import load, names, save
from torchtitan.adapters.neurocache.memory import Memory
from torchtitan.adapters.neurocache.sizes import apart, layers_of, misfits_of
from torchtitan.adapters.peft_folder import from_peft, to_peft
from torchtitan.adapters.targets import of_linears
from torchtitan.config.sections.adapter import Adapter as Options
from torchtitan.deferred import Deferred, Value
from torchtitan.errors import JobError
from torchtitan.models.hf.names import Form
from torchtitan.models.layers import GroupedQueryAttention
from torchtitan.parallelisms.plan import ParallelPlan


class Neurocache(Adapter):
    other_form = "keep the run's checkpoints, which have all of it"

    def __init__(self, options: Options, seed: int = 0):
        super().__init__(options, seed)
        beside = of_linears(options)
        self.beside: Adapter | None = None
        if beside is not None:
            self.beside = resolve_name(ADAPTERS[beside.kind])(beside, seed)

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        options, blocks = self.options.neurocache, model.layers
        if wrong := list(misfits_of(options, len(blocks), model.args.dim)):
            raise JobError("; ".join(map(str, wrong)))
        self.n_layers = len(blocks)
        layers = self.layers = layers_of(options, len(blocks))
        norm = blocks[str(layers.first)].attention_norm
        if self.beside is not None:
            plan = self.beside.convert(model, plan)
            self.replaced |= self.beside.replaced
        like = dict(dtype=norm.weight.dtype, device=norm.weight.device)
        for layer in layers.attending:
            attention = blocks[str(layer)].attention
            if type(attention) is not GroupedQueryAttention or attention.q_norm is not None or not model.kernel.causal:
                raise JobError(
                    f"adapter.kind = 'neurocache' with {type(model).__name__}: it stands beside causal attention of "
                    f"grouped heads without norms of queries; allowed are Llama, Mistral and OPT"
                )
            attention.__class__ = CachedAttention
            with norm.weight.device:
                attention.add_cache(
                    model.args.dim // options.compression,
                    options.context,
                    options.compat_head_layout,
                    options.init == "self_attention",
                )
            attention.cache.to(**like)
        reads_stream = blocks[str(layers.first)].order == "post"
        with norm.weight.device:
            model.memory = Memory(options, layers, model.args.dim, reads_stream).to(**like)
        return replace(
            plan,
            column=(*plan.column, "attention.cache.wq"),
            replicated=(*plan.replicated, "attention.cache.reading"),
            row=(*plan.row, "attention.cache.wo"),
            may_lack=(
                *plan.may_lack,
                "attention.cache.wq",
                "attention.cache.reading",
                "attention.cache.wo",
            ),
            with_block=(*plan.with_block, ("memory", plan.blocks.replace("*", str(layers.first)))),
        )

    def read_folder(self, folder: Path, form: Form) -> dict[str, torch.Tensor]:
        own, others = load(folder, self.options.neurocache, self.n_layers, self.shapes)
        low_rank = {name: shape for name, shape in self.shapes.items() if name not in own}
        try:
            return own | from_peft(others, form, low_rank)
        except JobError as error:
            raise JobError(f"{folder}: {error}") from None

    def write_folder(self, folder: Path, form: Form, whole: Mapping[str, torch.Tensor], base: str) -> None:
        self.refuse_what_has_no_place()
        options = self.options.neurocache
        low_rank = {name: whole[name] for name in self.shapes if name not in names(options, self.n_layers)}
        save(folder, whole, to_peft(low_rank, form), options, self.n_layers, base)

    def merged(self, parts: Sequence[nn.Module], original: Mapping[str, Deferred] | None = None) -> dict[str, Value]:
        raise JobError(
            "adapter.kind = 'neurocache': a model without a cache cannot be what this one is; write the adapter alone "
            "(torchtitan export without --merge)"
        )

    def check_parts(self, parts: Iterable[nn.Module]) -> None:
        for part in parts:
            layers = {int(name) for name, block in part.layers.items()}
            needed = set(range(self.layers.first, self.layers.last + 1))
            if layers & needed and not needed <= layers:
                raise JobError(apart(self.layers))

    def rate_of(self, name: str) -> float:
        return 1.0 if self.beside is None else self.beside.rate_of(name)

    @property
    def recalls(self) -> int:
        return self.options.neurocache.cache_size if self.options.neurocache.resume_warmup == "replay" else 0

    def begin_recall(self, parts: Iterable[nn.Module]) -> None:
        for memory in memories(parts):
            memory.forget()
            memory.train()

    def describe(self) -> str:
        beside = "" if self.beside is None else f", beside it {self.options.neurocache.beside}"
        return f"{super().describe()}; {self.options.neurocache.cache_size:,} entries a lane{beside}"

    def after_batch(self, parts: Sequence[nn.Module]) -> None:
        for memory in memories(parts):
            memory.commit()


def memories(parts: Iterable[nn.Module]) -> list[Memory]:
    return [part.memory for part in parts if getattr(part, "memory", None) is not None]
