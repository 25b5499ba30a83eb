"""Rules on the model's sizes, its tokenizer, the data and the format of its records."""

import importlib.util
from collections.abc import Iterator

from torchtitan.config.options import Fault, options, show
from torchtitan.config.sections.training import Validation
from torchtitan.core.cadence import CADENCE_OPTIONS
from torchtitan.core.errors import JobError, LimitError, check_persistence, check_prefetch
from torchtitan.datasets import DATASETS, has_records, open_source
from torchtitan.datasets.mixing import shares
from torchtitan.datasets.sample_packing import document_lengths
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.sources.pretokenized import PretokenizedBlocks
from torchtitan.datasets.token_shards import TokenReader, TokenShards
from torchtitan.job import overrides
from torchtitan.models import FROM_HF, PUBLISHERS
from torchtitan.process.machine import SHARED_MEMORY_REMEDY, shared_memory_obstacle
from torchtitan.rules.facts import Facts, Rule

MOST_PARAMETERS = 10**14
"""A hundred times the largest known models: no machine could hold more."""


def model_sizes(facts: Facts) -> Iterator[Fault]:
    """Check each override by itself, then all sizes together."""
    key, model = overrides.KEY, facts.config.model
    if wrong := list(overrides.wrong_overrides(model.name, facts.model.sizes, model.overrides)):
        yield from map(facts.refused, wrong)
        return
    if fault := next(facts.judged(lambda: facts.model.args), None):
        yield fault
    elif (parameters := facts.model.args.num_parameters) > MOST_PARAMETERS:
        size = f"{parameters:.3g} parameters"
        yield facts.fault(key, f"at most {MOST_PARAMETERS:.0e}", "check the sizes for a typing error", value=size)


def positions_are_known(facts: Facts) -> Iterator[Fault]:
    """Limit sequences to the number of learned position embeddings, or to the length of a LongRope's short factors."""
    positions = getattr(facts.model.args, "learned_positions", 0)
    longrope = getattr(facts.model.args, "longrope", None)
    for key, length in facts.data.lengths.items():
        if 0 < positions < length:
            remedy = f"write {positions}, or model.overrides = {{max_seq_len = {length}}}, where nothing is loaded"
            yield facts.fault(key, f"at most the {positions} positions that the model learns", remedy)
        elif longrope is not None and length > longrope.original_max_seq_len:
            allowed = f"at most the {longrope.original_max_seq_len} tokens up to which the model has its short factors"
            remedy = "those of longer texts depend on the length of each text, and are not supported"
            yield facts.fault(key, allowed, remedy)


def folder_has_sizes(facts: Facts) -> Iterator[Fault]:
    model, key = facts.config.model, "model.hf_folder"
    if model.flavor != FROM_HF:
        if model.hf_folder is not None:
            remedy = f'set model.flavor = "{FROM_HF}", or drop it'
            yield facts.fault(key, f"nothing with flavor {show(model.flavor)}", remedy)
        return
    yield from facts.judged(lambda: facts.model.sizes)
    if model.hf_folder is not None and model.tokenizer_path == options()["model.tokenizer_path"].default:
        remedy = f"write model.tokenizer_path = {show(model.hf_folder)}, or its path"
        yield facts.fault("model.tokenizer_path", "the tokenizer of the model in model.hf_folder", remedy)


def ignored_keys_are_of_a_folder(facts: Facts) -> Iterator[Fault]:
    """Refuse keys to ignore where the job reads no config.json."""
    config = facts.config
    folders = (config.model.hf_folder, config.checkpoint.initial_load_path, config.dpo.reference)
    if config.model.ignore_config_keys and not any(folders):
        yield facts.fault("model.ignore_config_keys", "unset without a folder that has a config.json", "leave it out")


def tokenizer_fits(facts: Facts) -> Iterator[Fault]:
    key = "model.tokenizer_path"
    if isinstance(facts.tokenizer, Exception):
        remedy = str(facts.tokenizer)
        home = PUBLISHERS.get(facts.config.model.name, "")
        if home and facts.config.model.flavor != "debugmodel" and "No such file" in remedy:
            remedy += f"; download it from a model of huggingface.co/{home}"
            remedy += ", after the licence is accepted" * (home == "meta-llama")
        yield facts.fault(key, "the path of a tokenizer", remedy)
    elif facts.tokenizer.vocab_size > (most := facts.model.args.vocab_size):
        yield facts.fault(
            key,
            f"at most the {most} tokens of model {facts.config.model.flavor}",
            f"use its tokenizer, or set model.overrides = {{vocab_size = {facts.tokenizer.vocab_size}}}",
            value=f"{show(facts.config.model.tokenizer_path)} with {facts.tokenizer.vocab_size} tokens",
        )


READ_AT_ONCE = 2**25
"""Size in bytes up to which labelled records are read to the last one before the run."""


def data_is_there(facts: Facts) -> Iterator[Fault]:
    """Require that every source can be opened and suits the tokenizer and the sample length."""
    if facts.model.learns_classes and facts.model.labelled_fields is None:  # model_can_learn_it reports it
        return
    for place, source_config in facts.data.all_sources.items():
        if source_config.dataset not in DATASETS:
            continue
        seq_len = facts.data.seq_len("validation" if place.startswith("validation") else "training")
        try:
            reading = facts.data.reader(source_config)
        except LimitError:  # records_are_read_as_said reports it
            continue
        try:
            source = open_source(
                source_config.dataset,
                source_config.dataset_path,
                reading,
                facts.model.labelled_fields,
                source_config.slice,
            )
            if facts.model.learns_classes and sum(file.size for file in source.files) <= READ_AT_ONCE:
                source.probe()
            for package in source.packages:
                if importlib.util.find_spec(package) is None:
                    remedy = "pip install 'torchtitan-toml[data]', or choose a dataset that needs none"
                    yield facts.fault(
                        f"{place}.dataset",
                        f"{show(source_config.dataset)} only with the package {package}, which is not installed",
                        remedy,
                    )
            if isinstance(source, TokenShards):
                if facts.model.spec.whole_records:
                    longest = document_lengths(TokenReader(source), seq_len).max(initial=0)
                    if longest > (facts.config.data.max_tokens or longest):
                        allowed = f"at least {longest}, the longest record of {source.name}, which is not cut again"
                        yield facts.fault("data.max_tokens", allowed, "prepare it again, or raise or drop the limit")
                else:
                    source.blocks(seq_len)
                if not isinstance(facts.tokenizer, Exception):
                    source.check_tokenizer(facts.tokenizer.fingerprint, facts.tokenizer.vocab_size)
            elif isinstance(source, PretokenizedBlocks) and not isinstance(facts.tokenizer, Exception):
                source.check(seq_len, facts.tokenizer, facts.config.model.tokenizer_path)
        except (OSError, DataError) as error:
            yield facts.fault(
                f"{place}.dataset_path", f"a path with data for dataset {show(source_config.dataset)}", str(error)
            )


def sources_are_said_once(facts: Facts) -> Iterator[Fault]:
    """Refuse data that are set both as a list of sources and in the short form. Defaults do not count."""
    for section in ("training", "validation"):
        part = getattr(facts.config, section)
        for name in ("dataset", "dataset_path"):
            if part.sources and getattr(part, name) != options()[f"{section}.{name}"].default:
                remedy = f"make it one of {section}.sources, or leave it out"
                yield facts.fault(f"{section}.{name}", f"nothing with {section}.sources", remedy)


def epochs_take_all(facts: Facts) -> Iterator[Fault]:
    """Refuse weights if every source is read exactly once per pass."""
    training, validation = facts.config.training, facts.config.validation
    end = "training.epochs" if training.epochs is not None else "training.tokens" * facts.model.spec.whole_records
    in_passes = training.epochs is not None or (facts.model.spec.whole_records and training.tokens is not None)
    joined = training.mixing == "sizes" and not in_passes
    for number, source in enumerate(training.sources if in_passes or joined else []):
        if source.weight != 1:
            end = 'training.mixing = "sizes"' if joined else end
            remedy = f"leave it out, or set training.steps instead of {end}"
            remedy = 'leave it out, or set training.mixing = "weights"' if joined else remedy
            yield facts.fault(f"training.sources[{number}].weight", f"1 with {end}", remedy)
    for number, source in enumerate(validation.sources if facts.model.spec.whole_records else []):
        if source.weight != 1:
            allowed = f"1 with task.kind = {facts.config.task.kind}, which validates on all records alike"
            yield facts.fault(f"validation.sources[{number}].weight", allowed, "leave it out")


def end_is_said_once(facts: Facts) -> Iterator[Fault]:
    training, kind = facts.config.training, facts.config.task.kind
    if training.tokens is not None and training.epochs is not None:
        yield facts.fault("training.tokens", "unset with training.epochs", "drop one of the two")
    if training.tokens is not None and not facts.model.spec.loss_per_token:
        remedy = "set training.epochs or training.steps"
        yield facts.fault("training.tokens", f"unset with task.kind = {show(kind)}, which counts samples", remedy)


def validation_is_said_once(facts: Facts) -> Iterator[Fault]:
    validation = facts.config.validation
    if validation.steps is not None and validation.samples != Validation().samples:
        yield facts.fault("validation.steps", "unset with validation.samples", "drop one of the two")


def weights_are_met(facts: Facts) -> Iterator[Fault]:
    for section in ("training", "validation"):
        sources = getattr(facts.config, section).sources
        try:
            shares([source.weight for source in sources] or [1.0])
        except JobError as error:
            yield facts.fault(f"{section}.sources", "weights that can be met", str(error))


BYTES_PER_TOKEN, PREFETCH = 32, 2
"""Of a batch: tokens, labels, documents and positions in int64; batches that a worker holds ready by default."""


def loader_workers(facts: Facts) -> Iterator[Fault]:
    loader = facts.config.training.dataloader
    if loader.num_workers:
        training = facts.config.training
        batch = training.local_batch_size * training.seq_len * BYTES_PER_TOKEN
        if obstacle := shared_memory_obstacle(loader.num_workers * (loader.prefetch_factor or PREFETCH) * batch):
            allowed = "0, or a machine whose processes can share memory"
            remedy = f"{obstacle}; {SHARED_MEMORY_REMEDY}, or set training.dataloader.num_workers = 0"
            yield facts.fault("training.dataloader.num_workers", allowed, remedy)
    elif (facts.config.data.num_proc or 1) > 1 and (obstacle := shared_memory_obstacle()):
        yield facts.fault(
            "data.num_proc", "1 on this machine", f"{obstacle}; {SHARED_MEMORY_REMEDY}, or set data.num_proc = 1"
        )
    yield from facts.judged(check_prefetch, loader.num_workers, loader.prefetch_factor)
    yield from facts.judged(check_persistence, loader.num_workers, loader.persistent_workers)


def epochs_are_counted(facts: Facts) -> Iterator[Fault]:
    """Refuse intervals in epochs without training.epochs."""
    for key in CADENCE_OPTIONS if facts.config.training.epochs is None else ():
        section, _, name = key.partition(".")
        if isinstance(getattr(getattr(facts.config, section), name), str):
            allowed = "steps, or a share of the run such as 0.1, without training.epochs"
            yield facts.fault(key, allowed, "write one of them, or training.epochs instead of training.steps")


HOW = ("format", "fields", "template")


def records_are_read_as_said(facts: Facts) -> Iterator[Fault]:
    """Require that every format, field and template is valid and that a source with records uses it."""
    for place, source in facts.data.all_sources.items():
        try:
            facts.data.reader(source)
        except LimitError as error:
            name = error.option.rpartition(".")[2]
            key = f"{place}.{name}" if "[" in place and _source_option(facts, place, name) else f"training.{name}"
            yield facts.fault(key, error.allowed, error.remedy, error.given)
    reads_records = {
        place: not facts.model.learns_classes and has_records(data_source.dataset)
        for place, data_source in facts.data.all_sources.items()
    }
    for place, source in facts.data.all_sources.items():
        for name in HOW if "[" in place and not reads_records[place] else ():
            if _source_option(facts, place, name):
                yield facts.fault(f"{place}.{name}", _unset(facts, show(source.dataset)), "drop it")
    for place, source in facts.data.all_sources.items():
        if source.slice is not None and not has_records(source.dataset):
            yield facts.fault(f"{place}.slice", _without_records(show(source.dataset)), "drop it")
    readers = [source for place, source in facts.data.all_sources.items() if reads_records[place]]
    for name in HOW:
        value = getattr(facts.config.training, name)
        if value and not any(getattr(source, name) == value for source in readers):
            remedy = "drop it, or read text or huggingface"
            yield facts.fault(f"training.{name}", _unset(facts), remedy)
    for name in ("default_system", "drop_system"):
        if getattr(facts.config.data, name) and not readers:
            yield facts.fault(f"data.{name}", _unset(facts), "drop it")


def prompts_are_text(facts: Facts) -> Iterator[Fault]:
    """Refuse special tokens in prompt templates, which are tokenized as plain text."""
    templates = {place: source.template.values() for place, source in facts.data.all_sources.items() if source.template}
    if not templates or isinstance(facts.tokenizer, Exception):
        return
    for place, texts in templates.items():
        for text in texts:
            if special_token := next((name for name in facts.tokenizer.special_tokens if name in text), None):
                key = (
                    f"{place}.template"
                    if "[" in place and _source_option(facts, place, "template")
                    else "training.template"
                )
                allowed = f"text without the special token {special_token}, as prompts are encoded as plain text"
                remedy = "begin and end tokens are added automatically; for turns use messages and data.chat_template"
                yield facts.fault(key, allowed, remedy)
                break


def fields_are_said_once(facts: Facts) -> Iterator[Fault]:
    """Refuse text_field with a format or template, which select the fields themselves."""
    training = facts.config.training
    remedy = "drop it, and map other field names in fields"
    applies = training.text_field != options()["training.text_field"].default and not training.sources
    if applies and (training.format or training.template):
        yield facts.fault("training.text_field", "unset with training.format", remedy)
    for place in facts.data.all_sources:
        applies = "[" in place and (_source_option(facts, place, "format") or _source_option(facts, place, "template"))
        if applies and _source_option(facts, place, "text_field"):
            yield facts.fault(f"{place}.text_field", "unset with format", remedy)


def _unset(facts: Facts, dataset: str = "") -> str:
    if facts.model.learns_classes:
        return f"unset with task.kind = {facts.config.task.kind}, where [task] names the fields"
    if not dataset:
        return "unset if no source has records with several fields"
    return _without_records(dataset)


def _without_records(dataset: str) -> str:
    return f"unset with dataset {dataset}, which has no records with several fields"


def _source_option(facts: Facts, place: str, name: str) -> object:
    """Return the option `name` of the source at `place`, an entry of a list of sources."""
    section, _, number = place.rstrip("]").partition(".sources[")
    return getattr(getattr(facts.config, section).sources[int(number)], name)


READ_FILES: tuple[Rule, ...] = (tokenizer_fits, data_is_there)
"""Rules that open the tokenizer and the data, which other machines may have elsewhere."""

RULES: tuple[Rule, ...] = (
    folder_has_sizes,
    ignored_keys_are_of_a_folder,
    model_sizes,
    positions_are_known,
    tokenizer_fits,
    records_are_read_as_said,
    fields_are_said_once,
    prompts_are_text,
    data_is_there,
    sources_are_said_once,
    validation_is_said_once,
    weights_are_met,
    end_is_said_once,
    epochs_take_all,
    epochs_are_counted,
    loader_workers,
)
WITHOUT_EFFECT: tuple[Rule, ...] = ()
