"""The summed loss of a task, computed together with the output head so that the logits can stay small.

The default objective is cross-entropy of the next token, normalized by tokens. Other tasks (classification, preference
pairs) subclass Objective and run under every plan, chunked too.

Logits are the largest tensors of a step (8192 tokens x 128256 words: 4.2 GB in float32). With num_chunks > 1, head and
loss run on chunks of the rows, and the gradients of each chunk are computed in forward, before the next chunk starts.
So only one chunk of logits exists at a time, and nothing is computed twice (recomputing the head in backward would cost
2 % of an 8B step and 7 % of a 1B step). The gradient of a linear head is summed over the chunks by the matrix products
themselves, in float32.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from torchtitan.losses.tasks import auto_chunks
from torchtitan.torch_internals.collectives import reduce_over_mesh
from torchtitan.torch_internals.dispatch import FakeTensor, graph_task_keeps_graph, has_hooks, local_parameters

Batch = Mapping[str, torch.Tensor]
IGNORE_INDEX = -100
LEAST_SAVED = 1 / 8
"""Tokens without a part in the loss are left out if they are this share of a batch: choosing others costs a copy."""
MULTIPLE = 8
"""Numbers of tokens that are chosen are multiples of this if possible, as kernels are slow for others."""


class Objective(nn.Module):
    """Map hidden states [B, S, D], the head and the batch to the sum of this rank's losses, a float32 scalar.

    Divide by the global number of loss terms to get the mean. The batch holds `targets` and, if the model uses them,
    positions [B or 1, S] and document_ids [B, S]. Under context parallel, hidden states and all [B, S] tensors cover
    the tokens of this rank.

    `head` computes logits from hidden states, once per chunk, so it must not be an FSDP unit itself: its gradient would
    be reduced once per chunk.
    """

    targets: tuple[str, ...] = ("labels",)
    """Batch tensors that only the loss reads, [B, S] or [B]. All are split into microbatches along B."""
    measured: tuple[str, ...] = ()
    """Names of the metrics that it measures in training in addition to the loss."""
    leaves_out = False
    """True if `rows`, `compute_loss` and `forward` of the class that sets it give a token without a label no part in
    the loss, so that it may be left out. An instance may set False."""

    def __init__(self, num_chunks: int = 1):
        """`num_chunks`: 0 chooses it for each batch by the size of its logits; forward then raises ValueError unless
        `logits_width` has been set.
        """
        super().__init__()
        if num_chunks < 0:
            raise ValueError(f"num_chunks = {num_chunks}: must be at least 0 (0 chooses it by the size of a batch)")
        self.num_chunks = num_chunks
        self.logits_width = 0
        """Logits of a token on this rank; whoever builds the objective of a job sets it."""
        self.device_type: str | None = None
        """Type of device, a key of `CHUNK_BYTES`, that a rehearsal sets. None: the device of the hidden states."""

    def chunks_of(self, hidden: torch.Tensor) -> int:
        """Return the number of chunks for hidden states [N, ..., D]."""
        if self.num_chunks:
            return self.num_chunks
        if not self.logits_width:
            raise ValueError(
                "num_chunks = 0 needs logits_width: set it to the number of logits of a token on this rank"
            )
        width = math.prod(hidden.shape[1:-1]) * self.logits_width
        return auto_chunks(len(hidden), width, self.device_type or hidden.device.type)

    def count(self, batch: Batch) -> int:
        """Return the number of loss terms in a batch. Summed over all batches of a step it is the normalizer."""
        raise NotImplementedError

    def first(self, batch: Batch, rows: int) -> dict[str, torch.Tensor]:
        """Return the batch with the targets of all but the first `rows` samples set to IGNORE_INDEX."""
        targets = {name: batch[name].clone() for name in self.targets}
        for tensor in targets.values():
            tensor[rows:] = IGNORE_INDEX
        return {**batch, **targets}

    def rows(self, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return hidden states [N, ..., D] and what their losses read, all to be chunked along the first dimension."""
        raise NotImplementedError

    def rows_with_loss(self, head: nn.Module, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results of `rows`, [N, ...], or those that have a loss, where they are chosen without a wait."""
        return rows

    def join_documents(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the batch [B, S], or the tokens that matter to this loss in one row [1, T].

        Call it only for a model that computes a document in the same way wherever it is in a batch.
        """
        return batch

    def _join_labelled(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Return the tokens [1, T] of documents with a label, of a batch of tensors [B, S]; None where all are kept."""
        documents = batch.get("document_ids")
        if documents is None or not (self.may_leave_out(documents) and self.may_leave_out(batch["labels"])):
            return None
        if any(x.shape != documents.shape for x in batch.values()) or bool((documents.diff() < 0).any()):
            return None  # a number that comes again would be another document here; kernels refuse it
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        numbers = begins.flatten().cumsum(0) - 1  # of documents, [B S]
        has_label = torch.zeros_like(numbers, dtype=torch.bool)
        has_label[numbers[batch["labels"].flatten() != IGNORE_INDEX]] = True
        chosen = choose(has_label[numbers], MULTIPLE)
        if chosen is None:
            return None
        joined = {name: x.flatten()[chosen][None] for name, x in batch.items()}
        return joined | {"document_ids": numbers[chosen][None]}

    def may_leave_out(self, integers: torch.Tensor) -> bool:
        """Return True if tokens may be left out by these integers, of any shape.

        A subclass that overrides a part of the loss has to repeat `leaves_out`, as it may read all tokens.
        """
        declaring = next(cls for cls in type(self).__mro__ if "leaves_out" in vars(cls))
        names = ("rows", "compute_loss", "forward")
        is_declared = all(getattr(type(self), name) is getattr(declaring, name) for name in names)
        return self.leaves_out and is_declared and _may_choose(integers)

    def compute_loss(self, head: nn.Module, hidden: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        """Return the summed loss, a scalar, of one chunk: hidden states [n, ..., D] and the other tensors of `rows`.

        `head` may only be called. In training with chunks it may be a stand-in that sums the gradient of the weight and
        has no attributes of the module.
        """
        raise NotImplementedError

    def take_sums(self) -> torch.Tensor | None:
        """Return and reset the sums of the M `measured` metrics and of their normalizer, [M + 1]; None without any."""
        return None

    def forward(self, hidden: torch.Tensor, head: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss, a scalar, of hidden states [B, S, D].

        If the batch has `last` [B], indices of tokens, return the logits [B, V] of the next token instead.
        """
        if "last" in batch:
            return next_token_logits(batch["last"], hidden, head)
        hidden, *targets = self.rows_with_loss(head, *self.rows(hidden, batch))
        num_chunks = self.chunks_of(hidden)
        if num_chunks == 1:
            return self.compute_loss(head, hidden, *targets)
        chunks = list(zip(*(x.chunk(num_chunks) for x in (hidden.detach(), *targets)), strict=True))
        if not torch.is_grad_enabled():
            return torch.stack([self.compute_loss(head, *chunk) for chunk in chunks]).sum()
        weights: list[torch.Tensor] = [p for p in head.parameters() if p.requires_grad]
        if linear := _is_plain_linear(head):
            weights = [p.to_local() if isinstance(p, DTensor) else p for p in weights]
        return _ChunkedLoss.apply(self, head, linear and bool(weights), chunks, hidden, *weights)


class SummedCrossEntropy(Objective):
    """Cross-entropy of the next token, given by labels [B, S]; IGNORE_INDEX marks tokens without a loss."""

    leaves_out = True

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORE_INDEX).sum())

    def rows(self, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
        return hidden.flatten(0, 1), batch["labels"].flatten()  # [B S, D], [B S]

    def rows_with_loss(self, head: nn.Module, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return hidden states [N, D] and labels [N] of tokens with a label, or of all, where it is not cheap.

        Ranks that share the vocabulary exchange numbers of all tokens, as is predicted.
        """
        if not self.may_leave_out(rows[-1]) or isinstance(getattr(head, "weight", None), DTensor):
            return rows
        hidden, labels = rows
        chosen = choose(labels != IGNORE_INDEX)
        return rows if chosen is None else (hidden.index_select(0, chosen), labels[chosen])

    def join_documents(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Leave out documents without a label, such as padding: they have no part in the loss."""
        return self._join_labelled(batch) or batch

    def compute_loss(self, head: nn.Module, hidden: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        return summed_cross_entropy(head(hidden), *targets)


def _may_choose(integers: torch.Tensor) -> bool:
    """Return True unless a choice by these integers, of any shape, waits for a device or breaks a graph."""
    return integers.device.type == "cpu" and not isinstance(integers, FakeTensor) and not torch.compiler.is_compiling()


def choose(flags: torch.Tensor, multiple: int = 1) -> torch.Tensor | None:
    """Return the indices of flagged tokens, bool [N], with the first others that make their number a multiple.

    None means all: if those not flagged are few, or none is flagged.
    """
    count = int(flags.sum())
    if not 0 < count <= (1 - LEAST_SAVED) * len(flags):
        return None
    if missing := -count % multiple:
        flags = flags | (~flags & ((~flags).cumsum(0) <= missing))
    return flags.nonzero().flatten()


def next_token_logits(last: torch.Tensor, hidden: torch.Tensor, head: nn.Module) -> torch.Tensor:
    """Return the full logits [B, V] at token indices last [B] of hidden states [B, S, D], gathered if sharded by V."""
    logits = head(hidden[torch.arange(len(last), device=last.device), last])
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy, a scalar, of logits [N, V] (may be sharded by V) and labels [N]."""
    return cross_entropies(logits, labels).sum()


def cross_entropies(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each row, [N], at least in float32; 0 where the label is IGNORE_INDEX."""
    if isinstance(logits, DTensor):
        assert logits.placements[0].is_shard(1) and logits.device_mesh.ndim == 1
        return _VocabularyParallelLoss.apply(logits.to_local(), labels, logits.device_mesh)
    # without the cast, the loss of a bfloat16 model has 3 digits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if torch.compiler.is_compiling():
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return _CrossEntropy.apply(logits, labels)


def head_losses(head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy [N] of hidden states [N, D] and labels [N]."""
    return cross_entropies(head(hidden), labels)


def in_recomputed_chunks(
    function: Callable[..., torch.Tensor], head: nn.Module, num_chunks: int, *rows: torch.Tensor
) -> torch.Tensor:
    """Return function(head, *rows) [..., N] of rows [N, ...], with one chunk's logits, computed again in backward.

    It is for losses in which a token's gradient depends on other tokens, so that it cannot be computed before.
    """
    if num_chunks == 1:
        return function(head, *rows)
    run = partial(checkpoint, function, head, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([run(*chunk) for chunk in zip(*(x.chunk(num_chunks) for x in rows), strict=True)], -1)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits [N, V] and labels [N], per row [N].

    Backward turns the saved probabilities into the gradient in place; torch's implementation allocates two more tensors
    of that size. Forward and backward take 53 ms instead of 117 for 512 rows of 32,000 words, and 5.3 ms instead of 7.0
    for 2,048 rows of 2,048 (torch 2.13, 1 core).
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        probabilities = logits.softmax(1)
        valid = labels != IGNORE_INDEX
        targets = labels.where(valid, 0)[:, None]
        ctx.save_for_backward(probabilities, targets, valid)
        # The largest probability, which is never near 0, is exp(largest logit - logsumexp). Subtracting logits first
        # keeps the loss from being rounded at their magnitude.
        margin = logits.amax(1) - logits.gather(1, targets)[:, 0]
        return (margin - probabilities.amax(1).log()).where(valid, 0)

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor, None]:
        probabilities, targets, valid = ctx.saved_tensors
        scale = (valid * scale)[:, None]
        # a pipeline that splits backward into input and weight gradients may run this twice
        retain_graph = graph_task_keeps_graph()
        grad = probabilities * scale if retain_graph else probabilities.mul_(scale)
        return grad.scatter_add_(1, targets, -scale), None


def entropies(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats of each row, [N], of logits [N, V] (may be sharded by V), at least in float32."""
    if isinstance(logits, DTensor):
        assert logits.placements[0].is_shard(1) and logits.device_mesh.ndim == 1
        return _Entropy.apply(logits.to_local(), logits.device_mesh)
    return _Entropy.apply(logits, None)


class _Entropy(torch.autograd.Function):
    """The entropy H per token [N], on every rank, of logits [N, V], or of a vocabulary shard of them with its mesh.

    H = log sum e^z - sum p z, and dH / dz_j = -p_j (log p_j + H), which needs no communication.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
        def reduced(x: torch.Tensor, operation: str) -> torch.Tensor:
            return x if mesh is None else reduce_over_mesh(x, operation, (mesh, 0))

        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = scores - reduced(scores.amax(1), "max")[:, None]
        powers = scores.exp()
        total, weighted = reduced(torch.stack((powers.sum(1), (powers * scores).sum(1))), "sum").unbind()
        entropy = total.log() - weighted / total
        ctx.save_for_backward(scores - total.log()[:, None], entropy)
        ctx.dtype = logits.dtype
        return entropy

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor, None]:
        log_probs, entropy = ctx.saved_tensors
        grad = -log_probs.exp() * (log_probs + entropy[:, None])
        return (grad * scale[:, None]).to(ctx.dtype), None


class _VocabularyParallelLoss(torch.autograd.Function):
    """Cross-entropy per token [N], on every rank, of vocabulary-sharded logits [N, V / tp] and all labels [N].

    Three numbers per token are reduced, in two all-reduces, instead of gathering logits. torch's loss_parallel() needs
    three all-reduces, and its process-wide context must still be active in backward ("got mixed torch.Tensor and
    DTensor"), which the trainer or a pipeline schedule runs.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = scores - reduce_over_mesh(scores.amax(1), "max", (mesh, 0))[:, None]
        targets = labels - mesh.get_local_rank() * logits.shape[1]
        is_local = (targets >= 0) & (targets < logits.shape[1])
        targets = targets.where(is_local, 0)[:, None]
        chosen = scores.gather(1, targets)[:, 0].where(is_local, 0)
        powers = scores.exp_()
        total, chosen = reduce_over_mesh(torch.stack((powers.sum(1), chosen)), "sum", (mesh, 0)).unbind()
        valid = labels != IGNORE_INDEX
        ctx.save_for_backward(powers.div_(total[:, None]), targets, is_local, valid)
        ctx.dtype = logits.dtype
        return (total.log() - chosen).where(valid, 0)

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, targets, is_local, valid = ctx.saved_tensors
        grad = probabilities.scatter_add(1, targets, -is_local[:, None].to(probabilities.dtype))
        return (grad * (valid * scale)[:, None]).to(ctx.dtype), None, None


def _is_plain_linear(head: nn.Module) -> bool:
    """Return True if logits are hidden states times the transposed weight, and calling the head does nothing else.

    So it is a linear layer without bias, hooks and parametrizations. Under tensor parallel, `head.plain` is the class
    of the module that runs on a rank's rows of the weight.
    """
    plain = getattr(head, "plain", type(head))
    is_linear = plain.forward is nn.Linear.forward and head.bias is None
    return is_linear and "weight" in local_parameters(head) and not has_hooks(head)


class _SummingHead:
    """A linear head that adds the gradient of its weight to `matrix_grad` [V, D] in each backward.

    `matrix` [V, D] holds this rank's rows of the weight in the dtype of the products. The sum has its dtype, but at
    least float32. autograd would write a gradient for each chunk, rounded to that dtype, to be read and added.
    """

    def __init__(self, head: nn.Module, weight: torch.Tensor):
        device = weight.device.type
        mixed = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        self.matrix = weight.detach().to(torch.get_autocast_dtype(device) if mixed else weight.dtype)
        self.matrix_grad = torch.empty_like(self.matrix, dtype=torch.promote_types(self.matrix.dtype, torch.float32))
        self.is_empty = True
        self.place: Callable[[torch.Tensor], torch.Tensor] | None = getattr(head, "place", None)

    @torch.compiler.disable
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's logits [N, V] of hidden states [N, D]."""
        logits = _SummingLinear.apply(hidden.to(self.matrix.dtype), self)
        return logits if self.place is None else self.place(logits)

    def __getattr__(self, name: str) -> Any:
        # the module's own weight would get no gradient from here
        raise AttributeError(f"compute_loss may only call the head, not read its `{name}`: in chunks it is a stand-in")

    def take_grad(self) -> torch.Tensor:
        """Return the summed gradient [V, D]. Raise RuntimeError if there is none."""
        if self.is_empty:
            raise RuntimeError(
                "compute_loss did not call the head, so its weight has no gradient; freeze it if it is not used"
            )
        return self.matrix_grad

    def add_product(self, logits_grad: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add logits_grad [N, V] transposed times hidden [N, D] to the gradient."""
        total, product = self.matrix_grad, (logits_grad.T, hidden)
        beta = 0 if self.is_empty else 1  # 0 ignores the content
        self.is_empty = False
        if hidden.dtype == total.dtype:
            torch.addmm(total, *product, beta=beta, out=total)
        elif hidden.device.type == "cuda":
            torch.addmm(total, *product, out_dtype=total.dtype, beta=beta, out=total)
        elif beta == 0:
            total.copy_(torch.mm(*product))  # CPUs lack products of bfloat16 with a float32 result
        else:
            total += torch.mm(*product)


class _SummingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: _SummingHead) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.head = head
        return F.linear(hidden, head.matrix)

    @staticmethod
    def backward(ctx: Any, logits_grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (hidden,) = ctx.saved_tensors
        ctx.head.add_product(logits_grad, hidden)
        return logits_grad @ ctx.head.matrix, None


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss of chunks, each the hidden states and targets of compute_loss. Forward computes all gradients.

    `hidden`: the hidden states of all chunks. `weights`: the trained parameters of `head`. `linear`: True if the only
    one is the weight of a plain linear layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        objective: Objective,
        head: nn.Module,
        linear: bool,
        chunks: list[tuple[torch.Tensor, ...]],
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        losses, hidden_grads, weight_grads = [], [], list[torch.Tensor]()
        summing = _SummingHead(head, *weights) if linear else None
        called: Any = summing or head
        trained = () if summing else weights  # by autograd
        for h, *targets in chunks:
            h = h.detach().requires_grad_()
            with torch.enable_grad():
                loss = objective.compute_loss(called, h, *targets)
            h_grad, *w_grads = torch.autograd.grad(loss, (h, *trained))
            hidden_grads.append(h_grad)
            losses.append(loss.detach())
            # summed in float32, so that a bfloat16 gradient is rounded once and not once per chunk
            w_grads = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in w_grads]
            weight_grads = [a.add_(b) for a, b in zip(weight_grads, w_grads, strict=True)] if weight_grads else w_grads
            del w_grads  # as large as the sums, they would live beside the next chunk's logits
        if summing:
            weight_grads = [summing.take_grad()]
        ctx.save_for_backward(torch.cat(hidden_grads), *weight_grads)
        ctx.dtypes = [hidden.dtype, *(w.dtype for w in weights)]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple:
        # a pipeline that splits backward into input and weight gradients may run this twice
        retain_graph = graph_task_keeps_graph()

        def scaled(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            # multiply in the loss's dtype: with a bfloat16 tensor, torch would round `scale` itself to 3 digits
            grad = grad.to(scale.dtype)
            in_place = grad.dtype == dtype and not retain_graph
            return torch.mul(grad, scale, out=grad if in_place else grad.new_empty(grad.shape, dtype=dtype))

        grads = [scaled(grad, dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return None, None, None, None, *grads
