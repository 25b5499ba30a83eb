"""Neurocache as an adapter: a frozen model with a memory, and an attention to it in some of its layers.

In addition, the model's linears may have low-rank pairs of another adapter kind; quantized kinds also quantize their
base matrices.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.adapters import ADAPTERS
from torchtitan.adapters.interface import Adapter, require_complete_format, weights_per_token
from torchtitan.adapters.peft_folder import from_peft, to_peft
from torchtitan.adapters.targets import linear_adapter_options
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import local_part
from torchtitan.core.tensor_storage import Deferred, Value
from torchtitan.models.attention import GroupedQueryAttention
from torchtitan.models.decoder import ResidualBlock
from torchtitan.models.flops import FlopsPerToken
from torchtitan.models.hf.names import TensorMap
from torchtitan.parallelisms.parallel_model import Batch, StatefulAdapter
from torchtitan.parallelisms.plan import ParallelPlan
from torchtitan.plugins.neurocache.attention import CachedAttention
from torchtitan.plugins.neurocache.authors_format import load, save, tensor_names
from torchtitan.plugins.neurocache.cache import HitStatistics
from torchtitan.plugins.neurocache.memory import CacheMemory
from torchtitan.plugins.neurocache.sizes import cache_flops, cache_misfits, layers_of, split_layers_message

_MISFIT = (
    "adapter.kind = 'neurocache' with {}: it is added to causal attention of grouped heads without query norms; "
    "allowed are Llama, Mistral and OPT"
)
PCA_SEGMENTS = 256
"""Number of segments that initialize the compression with init = "pca"."""


class Neurocache(Adapter, StatefulAdapter):
    folder_format = "the layout of the authors' library"
    alternative = "keep the run's checkpoints, which have all of it"

    def __init__(self, options: Options, seed: int = 0):
        super().__init__(options, seed)
        extra_options = linear_adapter_options(options)
        self.linear_adapter: Adapter | None = None
        if extra_options is not None:
            self.linear_adapter = resolve_name(ADAPTERS[extra_options.kind].make)(extra_options, seed)

    def install(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        plan = super().install(model, plan)
        cache_names = tensor_names(self.options.neurocache, self.n_layers)
        self.added_weights_per_token = weights_per_token(
            model, self.added_parameters - cache_names.keys()
        )  # cache_flops counts the cache
        return plan

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        options, blocks = self.options.neurocache, model.layers
        if problems := list(cache_misfits(options, len(blocks), model.args.dim)):
            raise JobError("; ".join(map(str, problems)))
        self.n_layers, self.dim = len(blocks), model.args.dim
        self.heads, self.head_dim = model.args.n_heads, model.args.head_dim
        layers = self.layers = layers_of(options, len(blocks))
        if not isinstance(blocks[str(layers.first)], ResidualBlock):
            raise JobError(_MISFIT.format(type(model).__name__))
        norm = blocks[str(layers.first)].attention_norm
        if self.linear_adapter is not None:
            plan = self.linear_adapter.convert(model, plan)
            self.replaced_parameters |= self.linear_adapter.replaced_parameters
        kwargs = dict(dtype=norm.weight.dtype, device=norm.weight.device)
        for layer in layers.attending:
            attention = blocks[str(layer)].attention
            if (
                type(attention) is not GroupedQueryAttention
                or attention.q_norm is not None
                or not attention.kernel.causal
            ):
                raise JobError(_MISFIT.format(type(model).__name__))
            attention.__class__ = CachedAttention
            with norm.weight.device:
                attention.add_cache(
                    model.args.dim // options.compression,
                    options.context,
                    options.compat_head_layout,
                    options.init != "random",
                )
            attention.cache.to(**kwargs)
            attention.measures = options.track_hits
        reads_stream = blocks[str(layers.first)].order == "post"
        with norm.weight.device:
            model.memory = CacheMemory(options, layers, model.args.dim, reads_stream).to(**kwargs)
        return replace(
            plan,
            column=(*plan.column, "attention.cache.wq"),
            replicated=(*plan.replicated, "attention.cache.reading"),
            row=(*plan.row, "attention.cache.wo"),
            optional=(
                *plan.optional,
                "attention.cache.wq",
                "attention.cache.reading",
                "attention.cache.wo",
            ),
            with_block=(*plan.with_block, ("memory", plan.blocks.replace("*", str(layers.first)))),
        )

    def read_folder(self, folder: Path, form: TensorMap) -> dict[str, torch.Tensor]:
        cache_tensors, extra_tensors = load(folder, self.options.neurocache, self.n_layers, self.added_shapes)
        low_rank = {name: shape for name, shape in self.added_shapes.items() if name not in cache_tensors}
        try:
            return cache_tensors | from_peft(extra_tensors, form, low_rank)
        except JobError as error:
            raise JobError(f"{folder}: {error}") from None

    def write_folder(self, folder: Path, form: TensorMap, tensors: Mapping[str, torch.Tensor], base: str) -> None:
        require_complete_format(self)
        options = self.options.neurocache
        low_rank = {
            name: tensors[name] for name in self.added_shapes if name not in tensor_names(options, self.n_layers)
        }
        save(folder, tensors, to_peft(low_rank, form), options, self.n_layers, base)

    def merged_tensors(
        self, parts: Sequence[nn.Module], original: Mapping[str, Deferred] | None = None
    ) -> dict[str, Value]:
        raise JobError(
            "adapter.kind = 'neurocache': a model without a cache cannot be what this one is; write the adapter alone "
            "(torchtitan export without --merge)"
        )

    def check_parts(self, parts: Iterable[nn.Module]) -> None:
        for part in parts:
            layers = {int(name) for name, block in part.layers.items()}
            needed = set(range(self.layers.first, self.layers.last + 1))
            if layers & needed and not needed <= layers:
                raise JobError(split_layers_message(self.layers))

    def lr_multiplier(self, name: str) -> float:
        return 1.0 if self.linear_adapter is None else self.linear_adapter.lr_multiplier(name)

    def before_training(
        self,
        parts: Sequence[nn.Module],
        run_batch: Callable[[Batch], object],
        replay: Callable[[int], Iterable[Batch]],
        calibration: Callable[[int], Iterable[Batch]] | None,
    ) -> None:
        options = self.options.neurocache
        restored, self.state_restored = self.state_restored, False
        for memory in memories(parts):
            if restored:
                memory.finish_restore()
            else:
                memory.clear()
            memory.train()  # replayed batches fill the caches of training
        if not restored and options.resume_warmup != "cold":
            for batch in replay(options.cache_size):
                run_batch(batch)
        if calibration is not None and options.init == "pca":
            self._initialize_from(calibration(PCA_SEGMENTS), parts, run_batch)

    @torch.no_grad()
    def _initialize_from(
        self, batches: Iterable[Batch], parts: Sequence[nn.Module], run_batch: Callable[[Batch], object]
    ) -> None:
        """Initialize the compression with the states' principal directions, and the cache attention to match."""
        for memory in memories(parts):
            memory.eval()
            memory.clear()
            memory.moments = torch.zeros(memory.dim, memory.dim, dtype=torch.float64)  # moves to the states' device
        for batch in batches:
            run_batch(batch)
        moments = torch.zeros(self.dim, self.dim, dtype=torch.float64)
        for memory in memories(parts):
            moments, memory.moments = memory.moments, None
            memory.clear()
        moments = moments.cpu()
        if dist.is_initialized():  # over gloo; states counted on several ranks do not change the directions
            dist.all_reduce(moments)
        directions = principal_directions(moments, self.dim // self.options.neurocache.compression)
        for module in (module for part in parts for module in part.modules() if hasattr(module, "reshard")):
            module.reshard()  # FSDP may still hold full weights from an earlier gather
        for memory in memories(parts):
            local, _, offset = local_part(memory.h_proj.weight)
            local.copy_(directions.t()[offset[0] : offset[0] + len(local)])
        for module in (module for part in parts for module in part.modules() if isinstance(module, CachedAttention)):
            module.init_from_directions(directions)

    def after_batch(self, parts: Sequence[nn.Module]) -> None:
        for memory in memories(parts):
            memory.commit()

    def evaluation_variants(self, parts: Iterable[nn.Module]) -> Iterator[str]:
        options, all_memories = self.options.neurocache, memories(parts)
        other_sizes = [size for size in options.eval_cache_sizes if size != options.cache_size]
        for size in (options.cache_size, *other_sizes):
            for memory in all_memories:
                memory.clear_evaluation()
                memory.cache_size[False] = size
            yield "" if size == options.cache_size else f"_cache_{size}"
        for memory in all_memories:
            memory.cache_size[False] = options.cache_size

    def state_tensors(self, parts: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
        if self.options.neurocache.resume_warmup != "saved":
            return {}
        return {name: tensor for memory in memories(parts) for name, tensor in memory.state_tensors().items()}

    def tensors_to_restore(
        self, parts: Iterable[nn.Module], shapes: Mapping[str, list[int]], rows: int, device: torch.device
    ) -> dict[str, torch.Tensor] | None:
        if self.options.neurocache.resume_warmup != "saved":
            return {}
        rows = 1 if self.options.neurocache.scope == "global" else rows
        restored: dict[str, torch.Tensor] = {}
        for memory in memories(parts):
            tensors = memory.tensors_to_restore(shapes, rows, device)
            if tensors is None:
                return None
            restored |= tensors
        return restored

    def flops_per_token(self, plain: FlopsPerToken, weights: int, seq_len: int) -> FlopsPerToken:
        options, model_flops = self.options.neurocache, super().flops_per_token(plain, weights, seq_len)
        cache = cache_flops(options, self.n_layers, self.dim, self.heads, self.head_dim, seq_len)
        return FlopsPerToken(full=model_flops.full + cache, causal=model_flops.causal + cache)

    def warnings(self, passes: int) -> Iterator[str]:
        if passes == 1:
            yield (
                "a step makes one pass, so the weights that stored a state have changed whenever it is read, and "
                "training may diverge; raise training.global_batch_size"
            )
        for reader, storing in self.layers.readers.items():
            if reader != storing:
                yield f"layer {reader} looks up by its own states what layer {storing} stored of others"

    def metrics(self, parts: Sequence[nn.Module]) -> dict[str, float]:
        extra_metrics = {} if self.linear_adapter is None else self.linear_adapter.metrics(parts)
        if not self.options.neurocache.track_hits:
            return extra_metrics
        sums = torch.zeros(len(HitStatistics.names) + 1, 2, dtype=torch.float64)
        for memory in memories(parts):
            sums[:-1] += memory.hits.take_sums().cpu()
        attending = (module for count in parts for module in count.modules() if isinstance(module, CachedAttention))
        if squares := [pair for module in attending for pair in module.take_squares()]:
            sums[-1] = torch.stack(squares).double().sum(0).cpu()
        if dist.is_initialized():  # over gloo; replicas count several times in both sum and total
            dist.all_reduce(sums)
        rates = {
            name: count / total
            for name, (count, total) in zip(HitStatistics.names, sums.tolist()[:-1], strict=True)
            if total
        }
        cache, attention = sums[-1].sqrt().tolist()
        return extra_metrics | rates | ({"cache_norm": cache / attention} if attention else {})

    def describe(self) -> str:
        extra = "" if self.linear_adapter is None else f", with {self.options.neurocache.beside}"
        return f"{super().describe()}; {self.options.neurocache.cache_size:,} entries a lane{extra}"


def principal_directions(moments: torch.Tensor, width: int) -> torch.Tensor:
    """Return the principal directions [D, width] of second moments [D, D], as columns, largest first.

    The projection on them has the least squared error of all projections to this width. Signs are chosen so that the
    largest component of each direction is positive.
    """
    directions = torch.linalg.eigh(moments).eigenvectors.flip(-1)[:, :width]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return directions * largest.sign()


def memories(parts: Iterable[nn.Module]) -> list[CacheMemory]:
    return [part.memory for part in parts if getattr(part, "memory", None) is not None]
