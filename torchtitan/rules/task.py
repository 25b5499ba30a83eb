"""Rules on what is learned, and on the batches and plans that it needs."""

from collections.abc import Iterator

from torchtitan.config.options import Fault, options
from torchtitan.config.sections.training import Validation
from torchtitan.datasets.tokenizer.chat_templates import NAMED, template_of
from torchtitan.errors import JobError
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


NEXT_TOKEN = ("pretrain", "sft", "documents")


def model_can_learn_it(facts: Facts) -> Iterator[Fault]:
    """The next token is a secret only to a model whose tokens do not see it, and that tells words apart."""
    if facts.config.task.kind not in NEXT_TOKEN or facts.args is None:
        return
    if not getattr(facts.args, "causal", True):
        allowed = f"another one for model {facts.config.model.name}, whose tokens see those behind them"
        yield facts.fault("task.kind", allowed, "train a decoder, such as gpt2")
    if classes := getattr(facts.args, "n_classes", 0):
        given = f"n_classes = {classes}"
        yield facts.fault(
            "model.overrides", f'n_classes = 0 with task.kind = "{facts.config.task.kind}"', "leave it out", given
        )


OF_ANY_TASK = ("data.chat_template", "data.num_proc", "data.cache_dir")


def whole_records_are_asked_for(facts: Facts) -> Iterator[Fault]:
    """What says how records become samples, in a job whose samples are cut from all text."""
    if facts.packs:
        return
    config, remedy = facts.config, 'set task.kind = "sft", or drop it'
    for key, option in options().items():
        section, _, name = key.partition(".")
        if section == "data" and key not in OF_ANY_TASK and getattr(config.data, name) != option.default:
            yield facts.fault(key, f"{option.default!r} with task.kind = {config.task.kind}", remedy)
    if config.validation.split is not None:
        yield facts.fault("validation.split", f"unset with task.kind = {config.task.kind}", remedy)
    if config.validation.samples == 0 and not TASKS[config.task.kind].in_lanes:
        yield facts.fault("validation.samples", f"at least 1 with task.kind = {config.task.kind}", remedy)


def split_is_possible(facts: Facts) -> Iterator[Fault]:
    """A part of the training data is held out, so nothing else is validated on, and all of it is of the same form."""
    part, key = facts.config.validation, "validation.split"
    if part.split is None or not facts.packs:
        return
    if not part.enable:
        yield facts.fault(key, "unset without validation.enable", "turn it on, or drop the split")
    if part.split >= 1 and part.split != int(part.split):
        yield facts.fault(key, "a share below 1, or a whole number of records", f"write {int(part.split)}")
    for name in ("dataset", "dataset_path", "sources"):
        if getattr(part, name) != getattr(Validation(), name):
            yield facts.fault(f"validation.{name}", "unset with validation.split", "drop one of the two")
    if part.seq_len not in (None, facts.config.training.seq_len):
        yield facts.fault("validation.seq_len", "training.seq_len with validation.split", "drop it")
    if facts.config.data.too_long == "split":
        remedy = "drop or truncate them, or give validation data of its own"
        yield facts.fault("data.too_long", "not split with validation.split, or both sides would have parts", remedy)


def template_is_there(facts: Facts) -> Iterator[Fault]:
    given = facts.config.data.chat_template
    try:
        template_of(given or NAMED["chatml"])
    except JobError as error:
        yield facts.fault("data.chat_template", "a chat template", str(error))
