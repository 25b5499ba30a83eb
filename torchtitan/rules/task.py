"""Rules on what is learned, and on the batches and plans that it needs."""

from collections.abc import Iterator

from torchtitan.config.options import Fault
from torchtitan.rules.facts import Facts
from torchtitan.tasks import TASKS


def samples_stay_together(facts: Facts) -> Iterator[Fault]:
    """What one loss is made of is in one batch, and in one microbatch of a pipeline."""
    kind = facts.config.task.kind
    together = TASKS[kind].together if kind in TASKS else 1
    keys = ["training.local_batch_size"]
    keys += ["validation.local_batch_size"] * facts.config.validation.enable
    keys += ["parallelism.pipeline_parallel_microbatch_size"] * (facts.pp > 1)
    for key in keys:
        section, name = key.split(".")
        size = getattr(getattr(facts.config, section), name)
        if size % together:
            allowed = f"a multiple of {together} with task.kind = {kind}, whose losses are of {together} samples each"
            yield facts.fault(key, allowed, f"write {size + together - size % together}")


def sequence_is_whole(facts: Facts) -> Iterator[Fault]:
    kind = facts.config.task.kind
    if facts.cp > 1 and kind in TASKS and not TASKS[kind].of_tokens:
        allowed = f"1 with task.kind = {kind}, whose loss is no sum over the tokens that ranks share out"
        remedy = "shard the model further instead (parallelism.data_parallel_shard_degree)"
        yield facts.fault("parallelism.context_parallel_degree", allowed, remedy)


def model_can_learn_it(facts: Facts) -> Iterator[Fault]:
    """The next token is a secret only to a model whose tokens do not see it, and that tells words apart."""
    if facts.config.task.kind != "pretrain" or facts.args is None:
        return
    if not getattr(facts.args, "causal", True):
        allowed = f"another one for model {facts.config.model.name}, whose tokens see those behind them"
        yield facts.fault("task.kind", allowed, "train a decoder, such as gpt2")
    if classes := getattr(facts.args, "n_classes", 0):
        given = f"n_classes = {classes}"
        yield facts.fault("model.overrides", 'n_classes = 0 with task.kind = "pretrain"', "leave it out", given)
