"""Masked language modeling (arXiv:1810.04805): some tokens of a batch are masked, and only these have labels.

The choice of tokens and their replacements is a function of (seed, step, sample, token), independent of the parallelism
plan and of resuming.
"""

from dataclasses import dataclass

import torch

from torchtitan.core.random_draws import STRIDES, of_tokens, scrambled
from torchtitan.losses.objective import IGNORE_INDEX

MASKED, RANDOM = 0.8, 0.1
"""Fractions of the chosen tokens that are replaced by the mask and by a random word; the others stay unchanged."""
HELD_OUT = "held out"
"""Used in place of the step in validation, so that the same tokens are masked each time."""


@dataclass(frozen=True)
class Masking:
    """Options of masked language modeling.

    `share`: fraction of the labeled tokens to mask. `mask_id`: id of the mask token. `special_ids`: ids that are never
    masked. `pad_id`: id that is never drawn as a random word, so that its embedding gets no gradient as an input, as
    with transformers' `padding_idx`.
    """

    seed: int
    share: float
    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    pad_id: int | None = None

    def mask_tokens(
        self, batch: dict[str, torch.Tensor], samples: torch.Tensor, step: int | str
    ) -> dict[str, torch.Tensor]:
        """Return the batch with some tokens replaced, and labels of these tokens only.

        tokens and labels are [B, S]; tokens with an ignored label are never masked. samples [B]: numbers of the rows
        among all samples of the step.
        """
        tokens, labels = batch["tokens"], batch["labels"]
        keys = of_tokens(f"{self.seed}/mask/{step}", samples, tokens.shape[1])  # [B, S]
        candidates = (labels != IGNORE_INDEX) & ~torch.isin(tokens, tokens.new_tensor(self.special_ids))
        chosen = candidates & (keys < self.share * 2**32)
        fate = scrambled(keys + STRIDES[1])
        any_word = self._any_word(keys)
        shown = torch.where(fate < MASKED * 2**32, self.mask_id, tokens)
        shown = torch.where((fate >= MASKED * 2**32) & (fate < (MASKED + RANDOM) * 2**32), any_word, shown)
        masked_batch = {"tokens": torch.where(chosen, shown, tokens), "labels": labels.where(chosen, IGNORE_INDEX)}
        return {**batch, **masked_batch}

    def _any_word(self, keys: torch.Tensor) -> torch.Tensor:
        """Draw an id for each of the keys [B, S], uniformly over all but the pad."""
        drawn = scrambled(keys + STRIDES[2]) % self.vocab_size
        if self.pad_id is None or self.vocab_size < 2:
            return drawn
        other_id = scrambled(keys - STRIDES[2]) % (self.vocab_size - 1)
        return torch.where(drawn == self.pad_id, other_id + (other_id >= self.pad_id), drawn)
