"""Lines of PyTorch's torchtitan with --module and --config: what its functions set, in the options of a job."""

import json
import random

import pytest

from tests.support.jobs import ROOT
from torchtitan import cli
from torchtitan.config.manager import load
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.plugins.dialects.config_lines import CONFIGS, LENGTH, NOTED, REPLACED, ROWS, STEP
from torchtitan.plugins.importers import parse, split
from torchtitan.plugins.importers.command import translate

PREFIX = (
    "torchrun --nproc_per_node=8 --rdzv_backend c10d --local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train"
)


@pytest.fixture(autouse=True)
def files_of_its_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests/assets/tokenizer").mkdir(parents=True)
    (tmp_path / "tests/assets/tokenizer/tokenizer.json").symlink_to(ROOT / "tests/assets/tokenizer/tokenizer.json")
    (tmp_path / "tests/assets/c4_test").mkdir()
    (tmp_path / "tests/assets/c4_test/data.json").write_text(json.dumps({"text": "a document"}) + "\n")


def line_of(config, *flags, prefix=PREFIX):
    return " ".join((prefix, "--module", CONFIGS[config].module, "--config", config, *flags))


def job(line):
    text, config, _ = translate(parse(split([line])), None)
    return text, config


def import_error(line):
    with pytest.raises((ConfigError, JobError)) as error:
        job(line)
    return str(error.value)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_function_is_a_job_of_its_model_and_its_tokens(config):
    recipe = CONFIGS[config]
    text, translated = job(line_of(config))
    training = translated.training
    assert (training.seq_len, training.local_batch_size) == (recipe.length, recipe.samples)
    assert training.document_mask and training.steps == recipe.values["training.steps"]
    assert translated.optimizer.lr == recipe.values["optimizer.lr"] and translated.optimizer.weight_decay == 0.1
    assert translated.lr_scheduler.convention == "torchtitan"
    assert translated.model.name == {"llama3": "llama3.1"}.get(recipe.module, recipe.module)
    assert not translated.checkpoint.enable and not translated.validation.enable
    assert training.shuffle == (training.dataset == "c4")
    assert "not the same: documents went on where samples" in text and ResolvedJob(translated).model.args.n_layers


def test_numbers_of_the_8b_and_the_405b():
    _, config = job(line_of("llama3_8b"))
    assert (config.optimizer.lr, config.lr_scheduler.warmup_steps, config.training.steps) == (3e-4, 200, 1000)
    assert config.activation_checkpoint.mode == "selective"
    assert config.activation_checkpoint.selective_ac_option == "op"
    assert config.profiling.enable_profiling and config.metrics.enable_tensorboard
    text, config = job(line_of("llama3_405b"))
    assert config.training.float8 == "tensorwise" and config.compile.enable and config.lr_scheduler.warmup_steps == 600
    assert config.parallelism.tensor_parallel_degree == 8 and config.activation_checkpoint.mode == "full"
    assert "parallelism.enable_async_tensor_parallel" in text, "beside float8 it is left out, with a note"


def test_the_debug_functions_have_their_own_model_data_and_schedule():
    assert job(line_of("qwen3_debugmodel"))[1].model.overrides["tied_embeddings"] is True
    flags = ("--validator.enable", "--parallelism.pipeline_parallel_degree 2", "--training.disable_cuda_graphs")
    _, config = job(line_of("llama3_debugmodel", *flags))
    assert (config.validation.dataset, config.validation.dataset_path) == ("c4_test", "./tests/assets/c4_test")
    assert config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B"


def test_the_options_of_a_line_override_the_function():
    flags = ("--training.steps 100", "--checkpoint.enable", "--checkpoint.interval=7", "--dump-folder out/a")
    flags += ("--profiler.no-enable-profiling", "--validator.enable", "--validator.steps 3", "--training.steps=90")
    flags += ("--compile.components model", "--debug.seed 5", "--hf_assets_path tests/assets/tokenizer")
    _, config = job(line_of("llama3_8b", *flags))
    assert (config.training.steps, config.job.dump_folder, config.debug.seed) == (90, "out/a", 5)
    assert config.checkpoint.enable and config.checkpoint.interval == 7 and not config.profiling.enable_profiling
    validation = config.validation
    assert (validation.steps, validation.freq, validation.seq_len, validation.local_batch_size) == (3, 500, 8192, 1)
    assert validation.dataset == "c4_validation" and config.model.tokenizer_path == "tests/assets/tokenizer"


def test_batches_keep_their_tokens():
    """Draw lines, and compare the tokens of a microbatch and of a step with what such a line asks for."""
    rng = random.Random(0)
    for _ in range(20):
        length, samples, steps, stages, microbatches = (
            rng.choice(numbers) for numbers in ((512, 1024, 3072), (1, 2, 3), (None, 1, 4), (1, 2), (1, 2, 4))
        )
        rows = length * samples
        step = None if steps is None else rows * microbatches * 8 * steps
        flags = [f"--{ROWS} {rows}", f"--{LENGTH}={length}", f"--parallelism.num_pp_microbatches {microbatches}"]
        flags += [f"--{STEP} {step}"] if step else []
        flags += [f"--parallelism.pipeline_parallel_degree {stages}"] if stages > 1 else []
        _, config = job(line_of("qwen3_0_6b", *flags))
        training, microbatch = config.training, config.parallelism.pipeline_parallel_microbatch_size
        per_rank = rows * (microbatches if stages > 1 else 1)
        assert training.seq_len * training.local_batch_size == per_rank
        assert stages == 1 or microbatch * length == rows
        assert training.global_batch_size == (-1 if step is None else step // length)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"--{ROWS} 5000", f"--{ROWS}: given 5000; allowed: a multiple of {LENGTH} = 8192"),
        (f"--{STEP} 8193", "a batch has whole samples here"),
        (f"--{LENGTH} many", "allowed: a whole number, at least 1"),
        ("--training.seq_len 4096", f"give {LENGTH}"),
        ("--model.flavor 70B", "give another --config"),
        ("--training.stepz 3", "training.steps"),
        ("--comm.mode fake_backend", "has no translation"),
        ("--job.config_file a.toml", "torchtitan check --upgrade a.toml"),
        ("activation_checkpoint:full", "neither a flag nor its value"),
        ("--training.disable_cuda_graphs activation-checkpoint:full-ac", "allowed: true or false"),
    ],
)
def test_what_has_no_translation_is_refused_by_its_name(flags, message):
    assert message in " ".join(import_error(line_of("llama3_8b", flags)).split())


def test_other_functions_are_refused_with_those_that_are_known():
    for line, hint in (
        ("--module llama3 --config llama3_8bb", "did you mean llama3_8b?"),
        ("--module qwen3 --config llama3_8b", "llama3_8b is of the module llama3"),
        ("--module my.own.llama3 --config llama3_8b", "llama3_8b is of the module llama3"),
        ("--module flux --config flux_dev", "it is a function of Python, which is not run"),
        ("--training.steps 3", "--module nothing --config nothing"),
    ):
        error = import_error(f"{PREFIX} {line}")
        assert hint in error and "--module qwen3 --config qwen3_14b" in error
    for module in ("torchtitan.models.llama3", "torchtitan.models.llama3.config_registry"):
        job(f"{PREFIX} --module {module} --config llama3_8b")


def test_a_script_with_its_variables_is_such_a_line():
    line = parse(split(["NGPU=4 MODULE=llama3 CONFIG=llama3_8b ./run_train.sh --training.steps 7"]))
    assert line.ranks == 4 and translate(line, None)[1].training.steps == 7
    error = import_error("COMM_MODE=fake_backend NGPU=4 MODULE=llama3 CONFIG=llama3_8b ./run_train.sh")
    assert 'comm.mode: given "fake_backend"' in error
    line = parse(split(["./run_llama_train.sh --module llama3 --config llama3_8b"]))
    assert line.ranks is None and translate(line, None)[1].model.flavor == "8B"


def test_options_that_change_no_result_are_notes():
    flags = [f"--{name}" + " 3" * (name == "dataloader.seed") for name in NOTED]
    text, _ = job(line_of("llama3_8b", *flags))
    for name, note in NOTED.items():
        assert f"--{name}: {note}" in " ".join(line.removeprefix("# ") for line in text.splitlines())
    assert not {*NOTED} & {*REPLACED}


def test_the_commands_print_the_job_or_name_the_translation(capsys):
    assert cli.main(["import", line_of("llama3_debugmodel"), "--world-size", "2"]) in (0, 2)
    output = capsys.readouterr().out
    assert output.startswith("# Translated from a command line of torchtitan.train (torchtitan).")
    with pytest.raises(ConfigError, match="torchtitan import torchtitan.train --module llama3 --config llama3_8b"):
        load(["--module", "llama3", "--config", "llama3_8b"])
