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
    names = {"llama3": "llama3.1", "deepseek_v3": "deepseek"}
    has_experts = hasattr(ResolvedJob(translated).model.args, "n_experts")
    name = "qwen3_moe" if recipe.module == "qwen3" and has_experts else names.get(recipe.module, recipe.module)
    assert translated.model.name == name
    assert not translated.checkpoint.enable and not translated.validation.enable
    assert training.shuffle == (training.dataset == "c4" or recipe.module in ("deepseek_v3", "gpt_oss"))
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


EXPERTS = {  # configs at b5bcd76, torchtitan/models/*/__init__.py: sizes, routing, rotary scaling
    "deepseek_v3_debugmodel": dict(n_layers=6, dim=256, n_heads=16, q_lora_rank=0, kv_lora_rank=512, n_experts=8,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, ffn_dim=1024, expert_dim=256, n_shared_experts=2,
        top_k=3, score="softmax", normalize_top_k=False, route_scale=1.0, n_groups=1, vocab_size=2048, mscale=0.7),
    "deepseek_v3_16b": dict(n_layers=27, dim=2048, n_heads=16, q_lora_rank=0, kv_lora_rank=512, n_experts=64,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, ffn_dim=10944, expert_dim=1408, n_shared_experts=2,
        top_k=6, score="softmax", normalize_top_k=False, route_scale=1.0, n_groups=1, vocab_size=102400, mscale=0.7),
    "deepseek_v3_671b": dict(n_layers=61, dim=7168, n_heads=128, q_lora_rank=1536, kv_lora_rank=512, n_experts=256,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, ffn_dim=18432, expert_dim=2048, n_shared_experts=1,
        top_k=8, score="sigmoid", normalize_top_k=True, route_scale=2.5, n_groups=8, top_groups=4, group_score="top2",
        n_dense_layers=3, vocab_size=129280, mscale=1.0),
    "qwen3_moe_debug": dict(n_layers=8, dim=256, n_heads=16, n_kv_heads=8, head_dim=128, expert_dim=768, n_experts=64,
        top_k=8, score="softmax", normalize_top_k=True, rope_theta=1e6, norm_eps=1e-6, vocab_size=2048),
    "qwen3_30b_a3b": dict(n_layers=48, dim=2048, n_heads=32, n_kv_heads=4, head_dim=128, expert_dim=768, n_experts=128,
        top_k=8, score="softmax", normalize_top_k=True, rope_theta=1e6, norm_eps=1e-6, vocab_size=151936),
    "gpt_oss_debugmodel": dict(n_layers=4, dim=256, n_heads=64, n_kv_heads=8, head_dim=64, expert_dim=2880, n_experts=8,
        top_k=4, score="softmax", normalize_top_k=True, rope_theta=150000.0, norm_eps=1e-5, vocab_size=2048,
        sliding_window=128, global_interval=2, swiglu_limit=7.0, attention_bias=True),
    "gpt_oss_20b": dict(n_layers=24, dim=2880, n_heads=64, n_kv_heads=8, head_dim=64, expert_dim=2880, n_experts=32,
        top_k=4, score="softmax", normalize_top_k=True, rope_theta=150000.0, norm_eps=1e-5, vocab_size=201088,
        sliding_window=128, global_interval=2, swiglu_limit=7.0, attention_bias=True),
    "gpt_oss_120b": dict(n_layers=36, dim=2880, n_experts=128, top_k=4, sliding_window=128, vocab_size=201088),
}  # fmt: skip


@pytest.mark.parametrize("config", EXPERTS)
def test_models_with_experts_have_the_sizes_and_balance_of_the_function(config):
    """Every MoE had a bias of load_balance_coeff 1e-3 and no loss; DeepSeek's YaRN held for each length."""
    args = ResolvedJob(job(line_of(config))[1]).model.args
    expected, mscale = dict(EXPERTS[config]), EXPERTS[config].get("mscale")
    expected.pop("mscale", None)
    assert {name: getattr(args, name) for name in expected} == expected
    assert (args.expert_bias, args.bias_rate, args.aux_loss_weight) == (True, 0.001, 0.0)
    if mscale is not None:
        scaling = args.rope_scaling
        assert (scaling.mscale, scaling.mscale_all_dim, scaling.factor, args.norm_eps) == (mscale, mscale, 40.0, 1e-5)
        assert (scaling.beta_fast, scaling.beta_slow, scaling.original_max_seq_len) == (32.0, 1.0, 4096)
    elif config.startswith("gpt_oss"):
        scaling = args.rope_scaling
        assert (scaling.factor, scaling.original_max_seq_len, scaling.truncate, scaling.kind) == (
            32.0,
            4096,
            False,
            "yarn",
        )


def test_schedules_and_plans_of_the_models_with_experts():
    _, config = job(line_of("deepseek_v3_16b"))
    schedule, plan = config.lr_scheduler, config.parallelism
    assert (schedule.warmup_steps, schedule.decay_ratio, schedule.decay_type, schedule.min_lr_factor) == (
        200,
        0.8,
        "cosine",
        0.1,
    )
    assert (plan.expert_parallel_degree, config.compile.enable, config.compile.components) == (8, True, ["loss"])
    _, config = job(line_of("deepseek_v3_671b", "--parallelism.pipeline_parallel_degree 4"))
    assert config.lr_scheduler.warmup_steps == 2000 and config.parallelism.expert_parallel_degree == 2
    assert config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B"
    _, config = job(line_of("gpt_oss_20b"))
    assert (config.lr_scheduler.warmup_steps, config.training.steps, config.activation_checkpoint.mode) == (
        2000,
        10000,
        "full",
    )
    assert job(line_of("gpt_oss_debugmodel"))[1].activation_checkpoint.mode == "none"


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
        ("--compile.enable --compile.no-enable --compile.enable", "given false after true"),
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
        ("--module flux --config flux_dev", "models of images are not in this version"),
        ("--module llama4 --config llama4_debugmodel", 'model.name = "llama4" and flavor scout or maverick'),
        ("--module kimi_k2_7 --config moonlight_16b_a3b", "its optimizer, Muon with updates of AdamW's size"),
        ("--module qwen3_5 --config qwen35_9b", "models of images"),
        ("--module llama3 --config llama3_8b_mxfp8", "those with scales of blocks are not supported"),
        ("--module deepseek_v3 --config deepseek_v3_671b_float8", "stacks of experts are not multiplied in float8"),
        ("--module deepseek_v3 --config deepseek_v3_16b_hybridep", "give the --config without it"),
        ("--module qwen3 --config sft_qwen3_8b_math", "its records are made by a function of Python"),
        ("--module my_model --config my_config", "it is a function of Python, which is not run"),
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
