"""Rules on how the records of the data are read."""

import math
from collections.abc import Iterator

from torchtitan.config.batch_shape import fixed_by, is_packed
from torchtitan.config.job import joins_sources
from torchtitan.config.options import Fault, options, show
from torchtitan.core.constraints import LimitError
from torchtitan.datasets import has_records
from torchtitan.rules.facts import Facts

HOW = ("format", "fields", "template")


def records_are_read_as_said(facts: Facts) -> Iterator[Fault]:
    """Every format, field and part of a prompt is known, and there are records that it is of."""
    for place, source in facts.sources.items():
        try:
            facts.reading(source)
        except LimitError as error:
            name = error.option.rpartition(".")[2]
            key = f"{place}.{name}" if "[" in place and _said(facts, place, name) else f"training.{name}"
            yield facts.fault(key, error.allowed, error.remedy, error.given)
    read = {place: not facts.tells_classes and has_records(each.dataset) for place, each in facts.sources.items()}
    for place, source in facts.sources.items():
        for name in HOW if "[" in place and not read[place] else ():
            if _said(facts, place, name):
                yield facts.fault(f"{place}.{name}", _unset(facts, show(source.dataset)), "drop it")
    readers = [source for place, source in facts.sources.items() if read[place]]
    for name in HOW:
        said = getattr(facts.config.training, name)
        if said and not any(getattr(source, name) == said for source in readers):
            remedy = "drop it, or read text or huggingface"
            yield facts.fault(f"training.{name}", _unset(facts), remedy)
    if facts.config.data.default_system is not None and not readers:
        yield facts.fault("data.default_system", _unset(facts), "drop it")


def prompts_are_text(facts: Facts) -> Iterator[Fault]:
    """A special token in a prompt of one's own is read as the text that it is: in pieces, beside the one that begins
    every record."""
    if isinstance(facts.tokenizer, Exception):
        return
    for place, source in facts.sources.items():
        for text in source.template.values():
            if named := next((name for name in facts.tokenizer.special_tokens if name in text), None):
                key = f"{place}.template" if "[" in place and _said(facts, place, "template") else "training.template"
                allowed = f"text without {named}, which a prompt would have in pieces, as it is a special token"
                remedy = "records begin and end by themselves; for turns write messages, with data.chat_template"
                yield facts.fault(key, allowed, remedy)
                break


def fields_are_said_once(facts: Facts) -> Iterator[Fault]:
    """A format says which fields are read."""
    training = facts.config.training
    remedy = "drop it, and name the fields in fields where they are called otherwise"
    own = training.text_field != options()["training.text_field"].default and not training.sources
    if own and (training.format or training.template):
        yield facts.fault("training.text_field", "unset with training.format", remedy)
    for place in facts.sources:
        own = "[" in place and (_said(facts, place, "format") or _said(facts, place, "template"))
        if own and _said(facts, place, "text_field"):
            yield facts.fault(f"{place}.text_field", "unset beside format", remedy)


def samples_may_differ_in_length(facts: Facts) -> Iterator[Fault]:
    """Without padding up to training.seq_len, each sample is one record, and nothing has the shapes of one batch for
    those of all."""
    config, data = facts.config, facts.config.data
    if not facts.packs:
        return
    uneven = data.pad_to not in (None, "seq_len")
    for key, said in (("data.pad_to", uneven), ("data.group_by_length", data.group_by_length)):
        if said and is_packed(config):
            yield facts.fault(key, "unset with data.packing = best_fit", 'set data.packing = "off"')
    if data.group_by_length and not config.training.shuffle:
        allowed = "unset with training.shuffle = false, which keeps the stored order"
        yield facts.fault("data.group_by_length", allowed, "drop one of the two")
    several_ranks = facts.samples is not None and facts.samples > config.training.local_batch_size
    if data.group_by_length and config.training.global_batch_size < 1 and several_ranks:
        allowed = "on several ranks with training.global_batch_size, as the order is of steps and not of the ranks"
        yield facts.fault("data.group_by_length", allowed, f"write training.global_batch_size = {facts.samples}")
    if data.group_by_length and len(config.training.sources) > 1 and not joins_sources(config):
        allowed = "with training.epochs, as sources that are mixed by weight have no steps of their own"
        yield facts.fault("data.group_by_length", allowed, 'set training.mixing = "sizes", or drop it')
    shard, shards = map(int, data.shards.split("/"))
    if shard > shards:
        yield facts.fault("data.shards", f"at most {shards}/{shards}", "correct it")
    if not uneven:
        return
    assert data.pad_to is not None
    if data.padding == "left":
        yield facts.fault("data.pad_to", 'seq_len with data.padding = "left"', "drop one of the two")
    for key in fixed_by(config):
        yield facts.fault("data.pad_to", f"seq_len with {key}, which wants all batches of one shape", "drop it")
    needs = facts.needs_of_a_sequence(split=bool(facts.sequence_parallel))
    multiple, needed = int(data.pad_to.partition(":")[2] or 1), math.lcm(*needs.values())
    if multiple % needed:
        allowed = f"seq_len, or multiple:N with N a multiple of {' and of '.join(needs)}"
        yield facts.fault("data.pad_to", allowed, f'write "multiple:{math.lcm(multiple, needed)}"')


def _unset(facts: Facts, dataset: str = "") -> str:
    if facts.tells_classes:
        return f"unset with task.kind = {facts.config.task.kind}, whose fields [task] names"
    if not dataset:
        return "unset where no source has records of several fields"
    return f"unset with dataset {dataset}, which has no records of several fields"


def _said(facts: Facts, place: str, name: str) -> object:
    """Of one of a list of sources, what it says itself."""
    section, _, number = place.rstrip("]").partition(".sources[")
    return getattr(getattr(facts.config, section).sources[int(number)], name)
