"""A loss and a callback of our own, by the engine: rare letters count twice, and the run ends at a loss.

python examples/custom_loss.py                                  one process
torchtitan run examples/custom_loss.py --ranks 2                two ranks: the same losses
"""

from dataclasses import dataclass

import torch

from torchtitan.engine import Callback, Engine, LossInputs

OPTIONS = {"job.dump_folder": "outputs/custom_loss", "training.steps": 60, "checkpoint.enable": False}


def weighted_loss(inputs: LossInputs) -> torch.Tensor:
    """Return the sum of the losses of all tokens, twice those that the tokenizer had no word for."""
    weights = 1 + (inputs.labels < 260).float()  # the first ids are special tokens and single bytes
    return -(inputs.log_probs * weights * inputs.mask).sum()


@dataclass
class StopBelow(Callback):
    """Ends the run when the loss of a logged step is below a value."""

    loss: float

    def on_log(self, metrics: dict) -> None:
        if metrics["loss"] < self.loss:
            self.engine.stop(f"the loss is below {self.loss:g}")


def main() -> None:
    with Engine.from_job("examples/book.toml", callbacks=[StopBelow(7.0)], **OPTIONS) as engine:
        for batch in engine.data:
            loss = float(engine.forward_backward(batch, loss=weighted_loss))
            result = engine.optim_step()
            if engine.ranks.is_main and result.step % 5 == 0:
                print(f"step {result.step:2}  weighted loss {loss:.3f}")


if __name__ == "__main__":
    main()
