"""Rules on the training task, and on the model, data and parallelism that it needs."""

import math
from collections.abc import Iterator
from dataclasses import is_dataclass

from torchtitan.config.options import Fault, fault_of_entry, options
from torchtitan.config.sections.training import Data, Task, Validation
from torchtitan.core.errors import JobError
from torchtitan.datasets.tokenizer.chat_templates import NAMED, resolve_template
from torchtitan.losses.tasks import TASKS, mask_token
from torchtitan.rules.facts import Facts, Rule

HEADS = "train gpt2, gemma2, llama3, opt, qwen2, qwen3 or roberta"
ONE_HEAD = "train gpt2, gemma2, llama3, opt, qwen2 or qwen3, which have such heads"


def sequence_is_whole(facts: Facts) -> Iterator[Fault]:
    kind = facts.config.task.kind
    if facts.layout.cp > 1 and not facts.model.spec.loss_per_token:
        allowed = f"1 with task.kind = {kind}: its loss is not a sum over tokens, so ranks cannot split a sample"
        remedy = "shard the model further instead (parallelism.data_parallel_shard_degree)"
        yield facts.fault("parallelism.context_parallel_degree", allowed, remedy)


def model_can_learn_it(facts: Facts) -> Iterator[Fault]:
    """Require causal attention for next tokens, bidirectional attention for masked ones, and the head of the task."""
    kind, name, args = facts.config.task.kind, facts.config.model.name, facts.model.args
    labels, causal, classes = facts.model.spec.labels, getattr(args, "causal", True), getattr(args, "n_classes", 0)
    if labels == "next" and not causal:
        allowed = f"masked_lm or seq_cls for model {name}, which has bidirectional attention"
        yield facts.fault("task.kind", allowed, "write one of these, or train a decoder, such as gpt2")
    if labels == "same" and causal:
        allowed = f"pretrain for model {name}, which has causal attention"
        yield facts.fault("task.kind", allowed, "write that, or train an encoder, such as roberta")
    if labels == "ends" and (not causal or classes != 1):
        setting, allowed = f"n_classes = {classes}", f'n_classes = 1 of a causal model with task.kind = "{kind}"'
        remedy = "write model.overrides = {n_classes = 1}" if hasattr(args, "n_classes") else ONE_HEAD
        yield facts.fault("model.overrides", allowed, remedy, setting)
    if labels not in ("classes", "ends") and classes:
        setting, allowed = f"n_classes = {classes}", f'n_classes = 0 with task.kind = "{kind}"'
        yield facts.fault("model.overrides", allowed, 'leave it out, or write task.kind = "seq_cls"', setting)
    if labels == "classes" and not hasattr(args, "n_classes"):
        allowed = f'another task for model {name}, which has no classification head; "sft" can teach it class names'
        yield facts.fault("task.kind", allowed, HEADS)
    elif labels == "classes" and classes < 2:
        setting, allowed = f"n_classes = {classes}", f'n_classes of at least 2 with task.kind = "{kind}"'
        number = max(len(facts.config.task.labels), 2)
        yield facts.fault("model.overrides", allowed, f"write model.overrides = {{n_classes = {number}}}", setting)


def noise_is_the_same_again(facts: Facts) -> Iterator[Fault]:
    """Refuse NEFTune where embeddings are read again without its noise.

    A resumed run on documents replays cached data without noise, and MTP layers read the embeddings themselves.
    """
    key, kind = "training.neftune_alpha", facts.config.task.kind
    if not facts.config.training.neftune_alpha:
        return
    if facts.model.spec.streams_documents:
        allowed = f'0 with task.kind = "{kind}", because a resumed run replays cached documents without noise'
        yield facts.fault(key, allowed, "leave it out")
    if layers := getattr(facts.model.args, "n_mtp_layers", 0):
        allowed = f"0 for a model with n_mtp_layers = {layers}, as these layers embed tokens without noise"
        yield facts.fault(key, allowed, "leave it out, or write model.overrides = {n_mtp_layers = 0}")


def classes_have_names(facts: Facts) -> Iterator[Fault]:
    names = facts.config.task.labels
    if len(set(names)) < len(names):
        yield facts.fault("task.labels", "distinct names", "drop the repeated ones")
    classes = getattr(facts.model.args, "n_classes", 0)
    if names and classes > 1 and len(names) != classes:
        yield facts.fault("task.labels", f"{classes} names, one for each of n_classes", "correct either")


def words_are_hidden_by_something(facts: Facts) -> Iterator[Fault]:
    task = facts.config.task
    if facts.model.spec.labels == "same" and not isinstance(facts.tokenizer, Exception):
        try:
            mask_token(facts.tokenizer.special_tokens, task.mask_token)
        except JobError as error:
            remedy = "name one, or use the tokenizer of a masked language model"
            yield facts.fault("task.mask_token", f"a mask token: {error}", remedy)


OF_LABELS = {"label_field": "classes", "second_text_field": "classes", "labels": "classes"}
OF_LABELS |= {"mask_share": "same", "mask_token": "same"}


def options_are_of_the_task(facts: Facts) -> Iterator[Fault]:
    """Refuse options of other tasks, and for classification the options that select trained tokens."""
    task, data = facts.config.task, facts.config.data
    for name, labels in OF_LABELS.items():
        if getattr(task, name) != getattr(Task(), name) and labels != facts.model.spec.labels:
            other_kind = next(kind for kind, spec in TASKS.items() if spec.labels == labels)
            yield facts.fault(
                f"task.{name}", f"unset with task.kind = {task.kind}", f'drop it, or write "{other_kind}"'
            )
    if facts.model.spec.labels != "classes":
        return
    for name in ("train_on", "train_on_eos"):
        if getattr(data, name) != getattr(Data(), name):
            allowed = f"unset with task.kind = {task.kind}, which only learns the class of a record"
            yield facts.fault(f"data.{name}", allowed, "drop it")
    if data.too_long == "split":
        allowed = f"error, drop or truncate with task.kind = {task.kind}, as a class belongs to a whole record"
        yield facts.fault("data.too_long", allowed, 'write "truncate"')


OF_ANY_TASK = (
    "data.chat_template",
    "data.default_system",
    "data.drop_system",
    "data.num_proc",
    "data.cache_dir",
    "data.tokenization_version",
)

FORMER_DEFAULTS = {"data.packing": "best_fit", "data.pad_to": "seq_len"}
"""Earlier runs saved these defaults in their jobs."""


def whole_records_are_asked_for(facts: Facts) -> Iterator[Fault]:
    """Refuse options on whole records in a task that cuts its samples from continuous text."""
    if facts.model.spec.whole_records:
        return
    config, remedy = facts.config, 'set task.kind = "sft", or drop it'
    for key, option in options().items():
        section, _, name = key.partition(".")
        value = getattr(config.data, name) if section == "data" else None
        if section == "data" and key not in OF_ANY_TASK and value not in (option.default, FORMER_DEFAULTS.get(key)):
            yield facts.fault(key, f"{option.default!r} with task.kind = {config.task.kind}", remedy)
    if config.validation.split is not None:
        yield facts.fault("validation.split", f"unset with task.kind = {config.task.kind}", remedy)
    if config.validation.samples == 0 and not facts.model.spec.streams_documents:
        yield facts.fault("validation.samples", f"at least 1 with task.kind = {config.task.kind}", remedy)


def split_is_possible(facts: Facts) -> Iterator[Fault]:
    """Refuse separate validation data with validation.split, which holds out part of the training data."""
    part, key = facts.config.validation, "validation.split"
    if part.split is None or not facts.model.spec.whole_records:
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
        remedy = "drop or truncate long records, or give separate validation data"
        yield facts.fault(
            "data.too_long", "not split with validation.split: both sides could get parts of a record", remedy
        )


def prompts_can_be_continued(facts: Facts) -> Iterator[Fault]:
    """Require validation, a task that generates text, and a parallelism without pipeline or context parallel."""
    part, task, key = facts.config.validation, facts.model.spec, "validation.generated"
    if not part.generated:
        if part.generated_tokens != Validation().generated_tokens:
            yield facts.fault(f"{key}_tokens", "unset without validation.generated", "set both, or leave it out")
        return
    if not part.enable:
        yield facts.fault(key, "0 without validation.enable", "turn it on, or leave it out")
    if task.labels != "next" or task.streams_documents:
        kinds = ", ".join(name for name, spec in TASKS.items() if spec.labels == "next" and not spec.streams_documents)
        yield facts.fault(key, f"0 with task.kind = {facts.config.task.kind}, or one of {kinds}", "leave it out")
    for degree, name in ((facts.layout.pp, "pipeline"), (facts.layout.cp, "context")):
        if degree > 1:
            allowed = f"0 with {name}_parallel_degree = {degree}, as no single rank can generate text"
            yield facts.fault(key, allowed, "leave it out, and use torchtitan generate on a checkpoint")


def template_is_there(facts: Facts) -> Iterator[Fault]:
    template = facts.config.data.chat_template
    try:
        resolve_template(template or NAMED["chatml"])
    except JobError as error:
        yield facts.fault("data.chat_template", "the name or file of a chat template", str(error))


def task_has_these_options(facts: Facts) -> Iterator[Fault]:
    """Refuse entries of task.options that the task does not read, and a task whose section is none of a job."""
    kind, spec, config = facts.config.task.kind, facts.model.spec, facts.config
    if spec.options_section and not is_dataclass(getattr(config, spec.options_section, None)):
        allowed = f"a task with options of a section of a job, not of [{spec.options_section}]"
        yield facts.fault("task.kind", allowed, "declare them as TaskSpec.options in its package")
    for key, entry in config.task.options.items():
        if fault := fault_of_entry(spec.options, kind, f'task.kind = "{kind}"', key, entry):
            value, allowed, remedy = fault
            if hasattr(getattr(config, spec.options_section, None), key):
                remedy = f"write {spec.options_section}.{key}"
            yield facts.fault("task.options", allowed, remedy, value=value)


PAIRS = ("dpo", "ipo", "orpo")
OF_PAIRS = (*PAIRS, "reward")
"""Tasks on pairs of answers; the first three have options in [dpo]."""


def pairs_are_learned_as_asked(facts: Facts) -> Iterator[Fault]:
    """Refuse options of preference tasks in other tasks, and options that do not suit pairs."""
    config, kind = facts.config, facts.config.task.kind
    if kind not in PAIRS:
        for key, option in options().items():
            if key.startswith("dpo.") and getattr(config.dpo, key.split(".")[1]) != option.default:
                allowed = f"{'unset' if option.default is None else option.default} with task.kind = {kind}"
                yield facts.fault(key, allowed, 'set task.kind = "dpo", or drop it')
    if kind not in OF_PAIRS:
        return
    if kind == "reward" and config.data.padding == "left":
        yield facts.fault("data.padding", "right with task.kind = reward, which reads the last token", "drop it")
    if config.data.train_on != Data().train_on:
        yield facts.fault("data.train_on", f"unset with task.kind = {kind}, which trains on last answers", "drop it")
    if config.data.too_long == "split":
        yield facts.fault("data.too_long", f"not split with task.kind = {kind}", "drop or truncate them")
    if kind in PAIRS and kind != "dpo" and config.dpo.label_smoothing:
        yield facts.fault("dpo.label_smoothing", f"0 with task.kind = {kind}", "drop it")
    if kind == "orpo" and config.dpo.reference is not None:
        yield facts.fault("dpo.reference", f"unset with task.kind = {kind}, which has no reference", "drop it")
    if config.compile.enable and "loss" in config.compile.components:
        remedy = 'set compile.components = ["model"]'
        yield facts.fault(
            "compile.components", f"without loss with task.kind = {kind}, which computes metrics in it", remedy
        )
    elif config.compile.enable and config.compile.scope == "model":
        yield facts.fault(
            "compile.scope", f"block with task.kind = {kind}, which computes metrics in its loss", "write it"
        )


def samples_may_differ_in_length(facts: Facts) -> Iterator[Fault]:
    """Check grouping by length and padding below training.seq_len, which give batches of different lengths."""
    config, data = facts.config, facts.config.data
    if not facts.model.spec.whole_records:
        return
    uneven = data.pad_to not in (None, "seq_len")
    for key, is_set in (("data.pad_to", uneven), ("data.group_by_length", data.group_by_length)):
        if is_set and facts.data.is_packed:
            yield facts.fault(key, "unset with data.packing = best_fit", 'set data.packing = "off"')
    if data.group_by_length and not config.training.shuffle:
        allowed = "unset with training.shuffle = false, which keeps the stored order"
        yield facts.fault("data.group_by_length", allowed, "drop one of the two")
    if data.group_by_length and len(config.training.sources) > 1 and not facts.data.joins_sources:
        allowed = "true only with training.epochs, as sources mixed by weight cannot be grouped"
        yield facts.fault("data.group_by_length", allowed, 'set training.mixing = "sizes", or drop it')
    room = config.training.seq_len + (facts.model.spec.labels != "ends")
    if (data.max_tokens or 0) > room:
        remedy = f"write at most {room}, or raise training.seq_len"
        yield facts.fault("data.max_tokens", f"at most {room}, the room of a sample", remedy)
    if (data.min_tokens or 0) > (longest := data.max_tokens or room):
        yield facts.fault("data.min_tokens", f"at most {longest}, the tokens of the longest record", "correct either")
    if data.deduplicate:
        yield from _records_can_be_compared(facts)
    shard, shards = map(int, data.shards.split("/"))
    if shard > shards:
        yield facts.fault("data.shards", f"at most {shards}/{shards}", "correct it")
    if not uneven:
        return
    assert data.pad_to is not None
    if data.padding == "left":
        yield facts.fault("data.pad_to", 'seq_len with data.padding = "left"', "drop one of the two")
    for key in facts.layout.fixed_by():
        yield facts.fault("data.pad_to", f"seq_len with {key}, which requires batches of one shape", "drop it")
    needs = facts.layout.sequence_needs(facts.layout.sequence_parallel)
    multiple, needed = int(data.pad_to.partition(":")[2] or 1), math.lcm(*needs.values())
    if multiple % needed:
        allowed = f"seq_len, or multiple:N with N a multiple of {' and of '.join(needs)}"
        yield facts.fault("data.pad_to", allowed, f'write "multiple:{math.lcm(multiple, needed)}"')


def _records_can_be_compared(facts: Facts) -> Iterator[Fault]:
    """Refuse data.deduplicate for shards, which are as they were written, and for sources of different weights."""
    key = "data.deduplicate"
    if shards := [place for place, source in facts.data.all_sources.items() if source.dataset == "tokens"]:
        remedy = "give the records themselves, which the job tokenizes"
        yield facts.fault(key, f"false with prepared shards, as of {shards[0]}", remedy)
    if len(facts.config.training.sources) > 1 and not facts.data.joins_sources:
        allowed = "true only with training.epochs, as sources mixed by weight repeat their records at different rates"
        yield facts.fault(key, allowed, 'set training.mixing = "sizes", or drop it')


def groups_by_length_have_a_step(facts: Facts) -> Iterator[Fault]:
    training = facts.config.training
    if not facts.model.spec.whole_records or not facts.config.data.group_by_length or training.global_batch_size > 0:
        return
    samples = facts.layout.samples_per_pass
    if samples > training.local_batch_size:
        allowed = "true on several ranks only with training.global_batch_size, as samples are grouped by step"
        yield facts.fault("data.group_by_length", allowed, f"write training.global_batch_size = {samples}")


def documents_are_read_whole(facts: Facts) -> Iterator[Fault]:
    training, kind = facts.config.training, facts.config.task.kind
    if not facts.model.spec.streams_documents:
        return
    if training.document_mask:
        yield facts.fault(
            "training.document_mask", f"false with task.kind = {kind}", "a row has one document at a time"
        )
    if training.epochs is not None:
        remedy = "set training.steps: rows finish their documents at different times"
        yield facts.fault("training.epochs", f"unset with task.kind = {kind}", remedy)
    if training.tokens is not None:
        remedy = "set training.steps: the last segment of a document is padded with tokens that do not count"
        yield facts.fault("training.tokens", f"unset with task.kind = {kind}", remedy)
    for section in ("training", "validation"):
        for number, source in enumerate(getattr(facts.config, section).sources):
            if source.weight != 1:
                key = f"{section}.sources[{number}].weight"
                yield facts.fault(key, f"1 with task.kind = {kind}, which reads all documents", "leave it out")


RULES: tuple[Rule, ...] = (
    sequence_is_whole,
    model_can_learn_it,
    noise_is_the_same_again,
    classes_have_names,
    words_are_hidden_by_something,
    split_is_possible,
    samples_may_differ_in_length,
    groups_by_length_have_a_step,
    prompts_can_be_continued,
    pairs_are_learned_as_asked,
    template_is_there,
    task_has_these_options,
    documents_are_read_whole,
)
WITHOUT_EFFECT: tuple[Rule, ...] = (
    options_are_of_the_task,
    whole_records_are_asked_for,
)
