"""Unknown names and invalid values: each is reported without a traceback, causes no further faults, and hides none of
other options.
"""

import pytest

from tests.rules import test_model_and_data as test_rules
from tests.support import judged
from torchtitan.config.manager import ConfigError, load
from torchtitan.config.options import describe, option_at, options
from torchtitan.job import ResolvedJob
from torchtitan.rules import NAMES, Facts, check, with_faults_of_the_rest

anywhere = judged.anywhere
SMALL = "model.overrides={dim = 64, n_heads = 4, n_layers = 4, multiple_of = 16}"
RAMP = "lr_scheduler.restart_warmup_steps=2"
ROBERTA = ["model.name=roberta", "task.kind=seq_cls", "model.overrides={n_classes = 2}", "training.seq_len=64"]
BASES = {
    "defaults": [],
    "no validation samples": ["validation.samples=0", "task.kind=sft"],
    "records": ["task.kind=sft", "validation.enable", "validation.split=0.1", "data.too_long=drop"],
    "padded records": ["task.kind=sft", "data.packing=off", "data.pad_to=batch", "data.group_by_length"],
    "classes": [*ROBERTA, "training.dataset=sentiment"],
    "pairs": ["task.kind=dpo", "dpo.beta=0.2", "training.epochs=1"],
    "documents": ["task.kind=documents", "adapter.kind=neurocache", "validation.enable"],
    "beside a cache": ["task.kind=documents", "adapter.kind=neurocache", "adapter.neurocache.beside=lora"],
    "adapter": ["adapter.kind=lora", "adapter.rank=4", "training.tokens=1000000"],
    "restarts": ["adapter.kind=lora", "adapter.relora.every=1000", "lr_scheduler.decay_type=relora_cosine", RAMP],
    "projected": ["optimizer.name=GaLore", "optimizer.options.rank=8", "compile.enable"],
    "pipeline": ["parallelism.pipeline_parallel_degree=2", SMALL, "training.local_batch_size=4"],
    "experts": ["model.name=deepseek", "parallelism.expert_parallel_degree=2"],
    "mixed": ['training.sources=[{dataset = "python_stdlib"}, {dataset = "python_stdlib_validation", weight = 2.0}]'],
    "formatted": [
        *("training.dataset=text", "training.dataset_path=FOLDER/rows.jsonl", "training.format=alpaca"),
        *("training.template.separator=!", "task.kind=sft"),
    ],
    "watched": [
        "metrics.trackers=tensorboard",
        "metrics.histogram_freq=5",
        "early_stop.patience=2",
        "validation.enable",
    ],
    "kept by its loss": [
        *("checkpoint.enable", "checkpoint.best_metric=validation_loss", "validation.enable"),
        *("checkpoint.interval=20", "checkpoint.allow_config_change=optimizer.lr"),
    ],
}
OTHER_NAMES = (
    *("training.dataset", "validation.dataset", "training.sources", "training.format", "metrics.trackers"),
    *("adapter.neurocache.beside", "parallelism.pipeline_parallel_schedule", "model.tokenizer_path"),
    *("data.chat_template", "checkpoint.best_metric", "early_stop.metric", "checkpoint.allow_config_change"),
    *("optimizer.options", "model.overrides", "training.fields", "training.template", "training.unfrozen"),
)
WRONG = {
    "training.sources": '[{dataset = "pyhton_stdlib"}]',
    "optimizer.options": "{rnak = 3}",
    "model.overrides": "{n_layer = 3}",
    "training.fields": '{instructoin = "a"}',
    "training.template": '{separatr = "a"}',
}
ON_TWO_RANKS = ("pipeline", "experts")


def faults(arguments: list[str], ranks: int = 1) -> list:
    try:
        return check(load(arguments), ranks, "cpu")
    except ConfigError as error:
        return with_faults_of_the_rest(error, ranks, "cpu")


@pytest.fixture(scope="module", params=BASES)
def base(request, tmp_path_factory) -> tuple[list[str], int]:
    """The arguments of a job without faults, and its number of ranks."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "rows.jsonl").write_text('{"instruction": "say it", "output": "it"}\n')
    arguments = ["--model.tokenizer_path=bytes", *(f"--{argument}" for argument in BASES[request.param])]
    arguments, ranks = (
        [argument.replace("FOLDER", str(folder)) for argument in arguments],
        1 + (request.param in ON_TWO_RANKS),
    )
    assert faults(arguments, ranks) == []
    return arguments, ranks


@pytest.mark.parametrize("key", [*NAMES, *OTHER_NAMES])
def test_a_misspelt_name_is_the_only_fault(base, key):
    arguments, ranks = base
    value = WRONG.get(key, "misspeltt")
    other_arguments = [argument for argument in arguments if not argument.startswith((f"--{key}=", f"--{key}."))]
    reported = faults([*other_arguments, f"--{key}={value}"], ranks)  # no traceback
    if key in NAMES:
        is_set = NAMES[key](Facts(ResolvedJob(load(arguments)))) is not None
        assert [fault.key for fault in reported] == [key] * is_set


def test_all_options_with_registry_names_are_tested():
    """The help of an option says if its value is the key of a registry."""
    registry_options = {key for key, option in options().items() if "key of torchtitan." in option.help}
    assert registry_options <= {*NAMES, *OTHER_NAMES}


# Invalid values of other options


OFFENDERS = [*test_rules.NAMES, *test_rules.MODEL, *test_rules.TRAINING]


@pytest.mark.parametrize("case", OFFENDERS, ids=judged.name)
@pytest.mark.parametrize("slip", ["debug.seed=one", "metrics.log_frequency=5", "comm.trace_buf_size=-1"])
def test_a_wrong_value_hides_no_fault_of_another_option(case, slip):
    arguments, *_ = case
    ranks = 2
    expected = [str(fault) for fault in faults([*arguments, "--model.tokenizer_path=bytes"], ranks)]
    reported = [str(fault) for fault in faults([*arguments, "--model.tokenizer_path=bytes", f"--{slip}"], ranks)]
    assert slip.split("=")[0] in reported[0] and reported[1:] == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lr_scheduler.decay_type=cosin"],
        ["--optimizer.name=adamw"],
        ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1FB1"],
        ["--model.name=lama3"],
        ["--training.max_norm=1.0", "--optimizer.early_step_in_backward"],
        ["--training.dataset=pythn_stdlib"],
        ["--checkpoint.keep_latest_k=1"],
    ],
)
def test_faults_are_reported_in_addition_to_a_wrong_number_of_steps(arguments):
    expected, reported = (
        [str(fault) for fault in faults([*arguments, "--model.tokenizer_path=bytes", *extra], 2)]
        for extra in ([], ["--training.steps=ten"])
    )
    assert len(expected) == 1 and reported[1:] == expected and "training.steps" in reported[0]


def test_what_depends_on_a_wrong_value_is_not_judged():
    """Twenty steps of warmup do not fit into ten steps, but may fit into "ten"."""
    arguments = ["--model.tokenizer_path=bytes", "--lr_scheduler.warmup_steps=20"]
    assert [fault.key for fault in faults([*arguments, "--training.steps=10"])] == ["lr_scheduler.warmup_steps"]
    assert [fault.key for fault in faults([*arguments, "--training.steps=ten"])] == ["training.steps"]


def test_a_file_that_cannot_be_read_hides_no_fault_of_the_command_line(tmp_path):
    """The rules judge only the options of the command line."""
    (tmp_path / "job.toml").write_text("[training\n")
    for file in ("none.toml", str(tmp_path / "job.toml")):
        arguments = [file, "--optimizer.name=adamw", "--training.global_batch_size=3"]
        assert [option_at(fault.key).rpartition(".")[2] for fault in faults(arguments)] in (
            ["config_file", "name"],
            ["", "name"],
        )


def test_no_description_of_an_option_is_a_regular_expression():
    for key, option in options().items():
        assert not set("^\\") & set(describe(option.annotation)), key


def test_rules_do_not_read_invalid_options():
    with pytest.raises(ConfigError) as caught:
        load(["--training.steps=ten"])
    assert caught.value.unknown == {"training.steps"}
    assert Facts(ResolvedJob(caught.value.rest)).steps == 10000, "other options have their defaults"
