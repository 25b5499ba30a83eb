"""What is learned: the summed loss of a task, with the output head inside so that logits can stay small.

The usual one is cross-entropy of the next token, counted in tokens. Another (classes of sequences, pairs of answers) is
an Objective of its own, and runs under every plan, in pieces too.

Logits are the largest tensors of a step (8192 tokens x 128256 words: 4.2 GB in float32). With num_chunks > 1 the head
and the loss run on pieces of the rows, such as tokens, and each piece's gradients are taken at once, in forward, before
the next piece is touched: never more than one piece of logits lives, and nothing is computed twice (recomputing the
head in backward would cost 2 % of an 8B step and 7 % of a 1B one).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Batch = Mapping[str, torch.Tensor]
IGNORE_INDEX = -100
CHUNK_BYTES = 512 * 2**20


def auto_chunks(tokens: int, vocab_size: int) -> int:
    """The number of pieces that keeps a piece's float32 logits within 512 MiB."""
    return min(tokens, -(-tokens * vocab_size * 4 // CHUNK_BYTES))


class Objective(nn.Module):
    """(hidden [B, S, D], head, batch) -> the sum of the losses of all units that are here, a float32 scalar. Divide by
    their global number to get the mean. The batch holds `targets` and, as the model has them, positions [B or 1, S] and
    perhaps document_ids [B, S]; under context parallel, hidden states and all that is [B, S] are of this rank's tokens.

    `head` makes logits of hidden states. It is called as a module, once per piece, so it must not be an FSDP unit by
    itself: its gradient would be reduced once per piece.
    """

    targets: tuple[str, ...] = ("labels",)
    """Tensors of a batch that only the loss reads, [B, S] or [B]. All are cut into microbatches along B."""
    measured: tuple[str, ...] = ()
    """What it measures beside its loss in training, by names in metrics."""

    def __init__(self, num_chunks: int = 1):
        super().__init__()
        if num_chunks < 1:
            raise ValueError(f"num_chunks = {num_chunks}: must be at least 1 (1 runs the loss in one piece)")
        self.num_chunks = num_chunks

    def count(self, batch: Batch) -> int:
        """How many units of a whole batch have a loss: what the sum is divided by, over all batches of a step."""
        raise NotImplementedError

    def first(self, batch: Batch, rows: int) -> dict[str, torch.Tensor]:
        """The batch of which only the first samples have a loss."""
        kept = {name: batch[name].clone() for name in self.targets}
        for tensor in kept.values():
            tensor[rows:] = IGNORE_INDEX
        return {**batch, **kept}

    def rows(self, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
        """What can be cut along its first dimension: hidden states [N, ..., D] and what else their losses need."""
        raise NotImplementedError

    def loss_of(self, head: nn.Module, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """The sum, a scalar, of the losses of some of the rows: hidden states [n, ..., D] and what else `rows` gave."""
        raise NotImplementedError

    def take_sums(self) -> torch.Tensor | None:
        """[M + 1], of the M in `measured` and what they are divided by, since the last time; None where none were."""
        return None

    def forward(self, hidden: torch.Tensor, head: nn.Module, batch: Batch) -> torch.Tensor:
        """hidden states [B, S, D] -> the sum of all losses, a scalar. Of a batch that has `last` [B], the places of
        tokens, the logits [B, V] of the words behind them instead.
        """
        if "last" in batch:
            return logits_behind(batch["last"], hidden, head)
        hidden, *others = self.rows(hidden, batch)
        if self.num_chunks == 1:
            return self.loss_of(head, hidden, *others)
        if not torch.is_grad_enabled():
            pieces = zip(*(x.chunk(self.num_chunks) for x in (hidden, *others)), strict=True)
            return torch.stack([self.loss_of(head, *piece) for piece in pieces]).sum()
        weights = [p for p in head.parameters() if p.requires_grad]
        return _ChunkedLoss.apply(hidden, others, head, self, *weights)


class SummedCrossEntropy(Objective):
    """Of the next token, whose number is in labels [B, S]; tokens whose label is IGNORE_INDEX do not count."""

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORE_INDEX).sum())

    def rows(self, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
        return hidden.flatten(0, 1), batch["labels"].flatten()  # [B S, D], [B S]

    def loss_of(self, head: nn.Module, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return summed_cross_entropy(head(hidden), *others)


def logits_behind(last: torch.Tensor, hidden: torch.Tensor, head: nn.Module) -> torch.Tensor:
    """last [B], hidden states [B, S, D] -> the whole logits [B, V], also where tensor parallel has split them by V."""
    logits = head(hidden[torch.arange(len(last), device=last.device), last])
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """logits [N, V], which tensor parallel may have split by V, labels [N] -> a scalar, at least float32."""
    return cross_entropies(logits, labels).sum()


def cross_entropies(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same of each row, [N], for objectives that are no sum of them; 0 where the label does not count."""
    if isinstance(logits, DTensor):
        assert logits.placements[0].is_shard(1) and logits.device_mesh.ndim == 1
        return _VocabularyParallelLoss.apply(logits.to_local(), labels, logits.device_mesh)
    # or a bfloat16 model gets its loss back in bfloat16, with 3 digits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if torch.compiler.is_compiling():
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return _CrossEntropy.apply(logits, labels)


class _CrossEntropy(torch.autograd.Function):
    """Logits [N, V], labels [N] -> each row's loss. Backward turns the probabilities that forward kept into the
    gradient, in their place, where torch's takes two more tensors of that size: at 512 rows of 32,000 words both passes
    take 53 ms of its 117, at 2,048 rows of 2,048 5.3 of 7.0 (torch 2.13, 1 core).
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        probabilities = logits.softmax(1)
        valid = labels != IGNORE_INDEX
        words = labels.where(valid, 0)[:, None]
        ctx.save_for_backward(probabilities, words, valid)
        # The largest probability, which is never near 0, is exp(largest logit - log of the sum of all powers). Logits
        # are taken from each other first, or the loss would be rounded at their size.
        behind = logits.amax(1) - logits.gather(1, words)[:, 0]
        return (behind - probabilities.amax(1).log()).where(valid, 0)

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor, None]:
        probabilities, words, valid = ctx.saved_tensors
        scale = (valid * scale)[:, None]
        # a backward in two halves, of activations and of weights, may come here again
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        grad = probabilities * scale if kept else probabilities.mul_(scale)
        return grad.scatter_add_(1, words, -scale), None


class _VocabularyParallelLoss(torch.autograd.Function):
    """Logits [tokens, V / tp], this rank's words of all tokens, and all labels -> each token's loss, on every rank.

    Three numbers per token travel, in two all-reduces; logits never do. torch's loss_parallel() takes three, and its
    context, a switch of the whole process, must still be open in backward ("got mixed torch.Tensor and DTensor"), which
    here the trainer or a pipeline schedule runs.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = scores - funcol.all_reduce(scores.amax(1), "max", (mesh, 0))[:, None]
        words = labels - mesh.get_local_rank() * logits.shape[1]
        mine = (words >= 0) & (words < logits.shape[1])
        words = words.where(mine, 0)[:, None]
        chosen = scores.gather(1, words)[:, 0].where(mine, 0)
        powers = scores.exp_()
        total, chosen = funcol.all_reduce(torch.stack((powers.sum(1), chosen)), "sum", (mesh, 0)).unbind()
        valid = labels != IGNORE_INDEX
        ctx.save_for_backward(powers.div_(total[:, None]), words, mine, valid)
        ctx.dtype = logits.dtype
        return (total.log() - chosen).where(valid, 0)

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, words, mine, valid = ctx.saved_tensors
        grad = probabilities.scatter_add(1, words, -mine[:, None].to(probabilities.dtype))
        return (grad * (valid * scale)[:, None]).to(ctx.dtype), None, None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, others, head, objective, *weights):
        total, hidden_grads, weight_grads = None, [], None
        for h, *rest in zip(*(x.chunk(objective.num_chunks) for x in (hidden, *others)), strict=True):
            h = h.detach().requires_grad_()
            with torch.enable_grad():
                loss = objective.loss_of(head, h, *rest)
            h_grad, *w_grads = torch.autograd.grad(loss, (h, *weights))
            hidden_grads.append(h_grad)
            if weight_grads is None:
                total = loss.detach()
                # summed in float32, so that a bfloat16 gradient is rounded once and not once per piece
                weight_grads = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in w_grads]
            else:
                total = total + loss.detach()
                for grad, piece in zip(weight_grads, w_grads, strict=True):
                    grad += piece
        ctx.save_for_backward(torch.cat(hidden_grads), *weight_grads)
        ctx.dtypes = [hidden.dtype, *(w.dtype for w in weights)]
        return total

    @staticmethod
    def backward(ctx, scale):
        # multiply in the loss's type: next to a bfloat16 tensor, torch would round `scale` itself to 3 digits
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        hidden_grad, *weight_grads = ((grad.to(scale.dtype) * scale).to(dtype) for grad, dtype in pairs)
        return hidden_grad, None, None, None, *weight_grads
