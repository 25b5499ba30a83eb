"""The measure of a run on its held-out data."""

from functools import partial

from torchtitan import distributed
from torchtitan.datasets.held_out import HeldOut
from torchtitan.datasets.segments import HeldOutSegments
from torchtitan.feed import Feed
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.progress import Progress


def measure(
    model: ParallelModel,
    feed: Feed,
    held_out: HeldOut | HeldOutSegments | None,
    progress: Progress,
    step: int,
    stop: bool,
) -> dict[str, float] | None:
    """Return the loss and the other metrics of the task, the same numbers on all ranks; None if any rank called it with
    `stop`. All ranks call it. Raises DataError, or PeerStopped on the ranks that have data while another has none.
    """
    assert held_out is not None, "the caller checks this"
    # all before the first forward, which communicates
    batches, failure = feed.take(iter(held_out), held_out.batches)
    valid_tokens, stopping = feed.agree(batches, failure, stop, "validation data")
    if stopping:
        return None
    watched = partial(progress.through, batches, "validate", step)
    totals = model.evaluate(lambda: map(feed.to_device, watched()))
    losses = {f"loss{way}": (model.whole(total) / valid_tokens).item() for way, total in totals.items()}
    measured = losses | feed.measured(model.parts)
    return dict(zip(measured, distributed.of_the_first(*measured.values()), strict=True))  # so that all judge alike
