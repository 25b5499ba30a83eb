"""Callbacks with mistakes that a rehearsal names."""

import torch.distributed as dist

from torchtitan.engine import Callback


class Waits(Callback):
    """Reads a number in each step, waits for all ranks on rank 0 alone, and sums a number in a logged step."""

    def start(self, engine):
        self.weights = [parameter.detach().clone() for _, parameter in engine.model.named_parameters()]

    def after_step(self, result):
        print(float(result.loss_share))
        if self.engine.ranks.is_main:
            dist.barrier()


class Sums(Callback):
    """Sums a number of all ranks in each step, and adds one in a logged step."""

    def after_step(self, result):
        self.loss = self.engine.sum_over_ranks(result.loss_share)

    def on_log(self, metrics):
        metrics["loss_again"] = self.loss


class Fails(Callback):
    def after_backward(self):
        raise ValueError("not here")
