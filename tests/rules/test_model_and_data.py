"""Tests of the rules on names, the model, data and training, and of all rules together: bad jobs and their faults.

The other test_rules_*.py cover rules on plans and on output.
"""

from pathlib import Path

import pytest

from tests.support import judged
from tests.support.judged import lines, name
from torchtitan.config.manager import load
from torchtitan.config.options import show
from torchtitan.job import ResolvedJob
from torchtitan.models import SIZES
from torchtitan.models.llama import LlamaArgs
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.rules import BACKENDS, RULES, Facts, check

anywhere = judged.anywhere
TOKENIZER = Path(__file__).parents[1] / "assets/tokenizer/tiktoken.model"


def test_the_default_job_is_fine_on_any_number_of_ranks():
    for ranks in (1, 2, 3, 8):
        assert lines(ranks=ranks) == []


@pytest.mark.parametrize("kind", ["tiktoken.model", "sentencepiece.model", "tokenizer.json"])
def test_shipped_tokenizers_fit_the_debug_model(kind):
    config = load([f"--model.tokenizer_path={TOKENIZER.parent / kind}"])
    assert check(config, 1, "cpu") == []


# Jobs -> faults

NAMES = [
    (
        ["--model.name=lama3"],
        f'model.name: given "lama3"; allowed: one of {", ".join(map(show, SIZES))}; did you mean "llama3"?',
    ),
    (
        ["--model.flavor=70b"],
        'model.flavor: given "70b"; allowed: one of "debugmodel", "8B", "70B", "405B", "from_hf"; did you mean "70B"?',
    ),
    (
        ["--optimizer.name=adamw"],
        f'optimizer.name: given "adamw"; allowed: one of {", ".join(map(show, OPTIMIZERS))}; did you mean "AdamW"?',
    ),
    (
        ["--compile.enable", "--compile.backend=inducter"],
        'compile.backend: given "inducter"; allowed: one of "inductor", "eager", "aot_eager", "cudagraphs"; '
        'did you mean "inductor"?',
    ),
]
MODEL = [
    (
        ["--model.overrides={rope_scaling = true}"],
        "model.overrides: given rope_scaling = true; allowed: rope_scaling = false, or a table of factor, "
        "low_freq_factor, high_freq_factor, original_max_seq_len, kind, beta_fast, beta_slow, attention_factor, "
        "truncate",
    ),
    (
        ["--model.overrides={rope_scaling = {kind = 'dynamic'}}"],
        'model.overrides: given rope_scaling = {kind = "dynamic"}; allowed: rope_scaling = {kind = one of "llama3", '
        '"linear", "ntk", "yarn"}',
    ),
    (
        ["--model.overrides={rope_scaling = {facto = 2.0}}"],
        "model.overrides: given rope_scaling = {facto}; allowed: parts of rope_scaling: factor, low_freq_factor, "
        "high_freq_factor, original_max_seq_len, kind, beta_fast, beta_slow, attention_factor, truncate; "
        "did you mean factor?",
    ),
    (  # lists are read from folders only
        ["--model.name=phi3", "--model.overrides={longrope = {short_factors = 'ab'}}"],
        "model.overrides: given longrope = {short_factors}; allowed: parts of longrope: attention_factor, "
        "original_max_seq_len",
    ),
    (
        ["--model.overrides={rope_scaling = {factor = 0}}"],
        "model.overrides: given rope_scaling = {factor = 0}; allowed: rope_scaling = {factor > 0}",
    ),
    (
        ["--model.name=deepseek", "--model.overrides={score = 'relu'}"],
        'model.overrides: given score = "relu"; allowed: score = one of "softmax", "sigmoid"',
    ),
    (
        ["--model.overrides={n_layer = 3}"],
        "model.overrides: given n_layer; allowed: sizes of llama3: dim, n_layers, n_heads, n_kv_heads, vocab_size, "
        "multiple_of, ffn_dim_multiplier, norm_eps, rope_theta, rope_scaling, tied_embeddings, max_seq_len, "
        "head_width, attention_bias, mlp_bias, n_classes; did you mean n_layers?",
    ),
    (
        ["--model.name=phi3", "--model.overrides={kv_lora_rank = 8}"],
        "model.overrides: given kv_lora_rank; allowed: sizes of phi3: dim, n_layers, n_heads, n_kv_heads, ffn_dim, "
        "head_dim, vocab_size, norm_eps, rope_theta, rope_scaling, tied_embeddings, max_seq_len, sliding_window, "
        "rotary_factor, longrope; kv_lora_rank is a size of deepseek, glm4_moe_lite, mistral4",
    ),
    (
        ["--model.hf_folder=here"],
        'model.hf_folder: given "here"; allowed: nothing with flavor "debugmodel"; set model.flavor = "from_hf", or '
        "drop it",
    ),
    (
        ["--model.flavor=from_hf"],
        'model.hf_folder: given nothing; allowed: a folder with config.json, with flavor "from_hf"; set it',
    ),
    (
        ["--model.overrides={n_layers = 1.5}"],
        "model.overrides: given n_layers = 1.5; allowed: n_layers = a whole number",
    ),
    (
        ["--model.overrides={norm_eps = -1e-5}"],
        "model.overrides: given norm_eps = -1e-05; allowed: norm_eps > 0",
    ),
    (
        ["--model.overrides={norm_eps = 0}"],
        "model.overrides: given norm_eps = 0; allowed: norm_eps > 0",
    ),
    (
        ["--model.overrides={dim = true}"],
        "model.overrides: given dim = true; allowed: dim = a whole number",
    ),
]
TRAINING = [
    (
        ["--training.global_batch_size=12", "--training.local_batch_size=4"],
        "training.global_batch_size: given 12; allowed: a multiple of local_batch_size 4 x 2 data-parallel ranks = 8; "
        "write 8 or 16",
    ),
    (
        ["--training.global_batch_size=4", "--training.local_batch_size=4"],
        "training.global_batch_size: given 4; allowed: a multiple of local_batch_size 4 x 2 data-parallel ranks = 8; "
        "write 8 or fewer samples a rank",
    ),
    (
        ["--training.global_batch_size=0"],
        "training.global_batch_size: given 0; allowed: at least 1, or -1 for one forward pass a step; write -1",
    ),
    (
        ["--lr_scheduler.decay_ratio=0.5", "--lr_scheduler.decay_type=constant"],
        'lr_scheduler.decay_ratio: given 0.5; allowed: unset with decay_type = "constant"; drop one of the two',
    ),
    (
        ["--lr_scheduler.warmup_type=cosine", "--lr_scheduler.warmup_steps=0"],
        'lr_scheduler.warmup_type: given "cosine"; allowed: "linear" with lr_scheduler.warmup_steps = 0; leave it out',
    ),
    (
        ["--lr_scheduler.warmup_type=quadratic", "--lr_scheduler.decay_type=relora_cyclical"],
        'lr_scheduler.warmup_type: given "quadratic"; allowed: "linear" with decay_type = "relora_cyclical"; '
        "leave it out",
    ),
    (
        ["--lr_scheduler.convention=torchtitan", "--lr_scheduler.decay_type=relora_cyclical"],
        'lr_scheduler.convention: given "torchtitan"; allowed: "default" with decay_type = "relora_cyclical"; drop it',
    ),
    (
        ["--lr_scheduler.num_cycles=2"],
        'lr_scheduler.num_cycles: given 2; allowed: 1, except with decay_type = "cosine_restarts"; drop it',
    ),
    (
        ["--optimizer.name=SGD", "--optimizer.beta1=0.8", "--optimizer.options={momentun = 0.9}"],
        'optimizer.beta1: given 0.8; allowed: its default with optimizer.name = "SGD", which does not read it; leave '
        "it out",
        "optimizer.options: given momentun = 0.9; allowed: options of SGD: momentum, nesterov; did you mean momentum?",
    ),
    (
        ["--optimizer.name=SGD", "--optimizer.options={momentum = 1, nesterov = 1}"],
        "optimizer.options: given momentum = 1; allowed: momentum = a number >= 0 and < 1",
        "optimizer.options: given nesterov = 1; allowed: nesterov = true or false",
    ),
    (
        ["--optimizer.name=SGD", "--optimizer.options={nesterov = true}", "--optimizer.implementation=fused"],
        "optimizer.options: given nesterov = true; allowed: false without momentum; give momentum too, e.g. 0.9",
        'optimizer.implementation: given "fused"; allowed: "foreach", "for-loop" with optimizer.name = "SGD"; leave it '
        "out",
    ),
    (
        ["--optimizer.options={beta1 = 0.8, momentum = 0.9}"],
        "optimizer.options: given beta1 = 0.8; allowed: beta1 as an option of its own; write optimizer.beta1",
        'optimizer.options: given momentum = 0.9; allowed: nothing with optimizer.name = "AdamW"; leave it out',
    ),
    (
        ["--optimizer.early_step_in_backward"],
        "training.max_norm: given 1.0; allowed: 0 with optimizer.early_step_in_backward; clipping needs all gradients "
        "at once, but each is freed before the next is computed",
    ),
    (
        ["--optimizer.early_step_in_backward", "--training.max_norm=0", "--training.global_batch_size=32"],
        "training.global_batch_size: given 32; allowed: -1 or 16 with optimizer.early_step_in_backward; accumulation "
        "keeps gradients from one forward pass to the next",
    ),
    (
        ["--training.dtype=bfloat16", "--training.mixed_precision_param=float32"],
        'training.mixed_precision_param: given "float32"; allowed: "bfloat16" with training.dtype = "bfloat16"; '
        "computing in float32 adds nothing to weights kept in bfloat16",
    ),
    (
        ["--training.frozen_dtype=float32"],
        'training.frozen_dtype: given "float32"; allowed: unset without an adapter or training.unfrozen; no weights '
        "are frozen; leave it out",
    ),
    (
        ["--training.frozen_dtype=bfloat16", "--training.dtype=bfloat16", "--adapter.kind=lora"],
        'training.frozen_dtype: given "bfloat16"; allowed: unset with training.dtype = "bfloat16"; all weights have '
        "that type; leave it out",
    ),
    (
        ["--training.frozen_dtype=bfloat16", "--training.mixed_precision_param=float32", "--adapter.kind=lora"],
        'training.frozen_dtype: given "bfloat16"; allowed: "float32" with training.mixed_precision_param = "float32"; '
        "frozen weights would be rounded and cast back in each step; set both, or leave it out",
    ),
    (
        ["--validation.enable", "--validation.steps=3", "--validation.samples=7"],
        "validation.steps: given 3; allowed: unset with validation.samples; drop one of the two",
    ),
    (
        ["--activation_checkpoint.mode=memory_budget"],
        'activation_checkpoint.mode: given "memory_budget"; allowed: "memory_budget" only with a compiled model, as '
        "the compiler "
        'applies the budget; set compile.enable = true with "model" in compile.components, or another mode',
    ),
    (
        ["--activation_checkpoint.mode=memory_budget", "--compile.enable", "--compile.components=loss"],
        'activation_checkpoint.mode: given "memory_budget"; allowed: "memory_budget" only with a compiled model, as '
        "the compiler "
        'applies the budget; set compile.enable = true with "model" in compile.components, or another mode',
    ),
    (
        ["--activation_checkpoint.mode=memory_budget", "--compile.enable", "--compile.backend=aot_eager"],
        'compile.backend: given "aot_eager"; allowed: "inductor" with activation_checkpoint.mode = "memory_budget"; '
        "the others do not choose what to compute again",
    ),
    (
        ["--compile.enable", "--compile.components="],
        'compile.components: given []; allowed: "model", "loss" or both; or set compile.enable = false',
    ),
    (
        ["--compile.enable", "--compile.scope=model"],
        'compile.scope: given "model"; allowed: "block" if parameters are sharded (here over 2 ranks); write '
        '"block", or parallelism.data_parallel_shard_degree = 1 with replicas',
    ),
]


@pytest.mark.parametrize("case", [*NAMES, *MODEL, *TRAINING], ids=name)
def test_bad_jobs(case):
    arguments, *expected = case
    assert lines(*arguments, ranks=2) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--training.global_batch_size=64"],
        ["--lr_scheduler.total_steps=5", "--training.steps=10"],  # the rate stays at its floor
        ["--training.steps=1"],
        ["--lr_scheduler.warmup_steps=2", "--training.steps=10", "--lr_scheduler.decay_ratio=0.8"],
        ["--optimizer.early_step_in_backward", "--training.max_norm=0"],
        ["--optimizer.name=SGD", "--optimizer.options={momentum = 0.9, nesterov = true}"],
        ["--training.dtype=bfloat16"],
        ["--activation_checkpoint.mode=memory_budget", "--compile.enable"],
        ["--compile.enable", "--compile.scope=model", "--parallelism.data_parallel_shard_degree=1"]
        + ["--parallelism.data_parallel_replicate_degree=2"],
        ["--checkpoint.enable", "--checkpoint.keep_latest_k=0", "--checkpoint.load_step=5"],
        ["--model.overrides={n_kv_heads=4, norm_eps=1e-6, tied_embeddings=true, rope_theta=10000}"],
        ["--compile.backend=mine"],  # compile is off
        ["--validation.dataset=mine"],  # validation is off
        ["--validation.enable"],
    ],
    ids=" ".join,
)
def test_good_jobs(arguments):
    assert lines(*arguments, ranks=2) == []


def test_schedules_that_do_not_fit_the_run_are_refused():
    """The fault quotes the reason that the schedule raises."""
    (line,) = lines("--lr_scheduler.warmup_steps=10", "--training.steps=10")
    assert line.startswith("lr_scheduler.warmup_steps: given 10; allowed: ")
    assert "10 steps" in line and "training.steps" in line
    (line,) = lines("--lr_scheduler.warmup_steps=3", "--training.steps=10", "--lr_scheduler.decay_ratio=0.8")
    assert line.startswith("lr_scheduler.decay_ratio: given 0.8; allowed: ") and "3" in line and "8" in line


@pytest.mark.parametrize("sizes", ["{n_kv_heads = 3}", "{n_heads = 3}"])
def test_sizes_that_do_not_fit_together_are_refused(sizes):
    (line,) = lines(f"--model.overrides={sizes}")
    assert line.startswith(f"model.overrides: given {sizes}; allowed: sizes that fit together: ")
    assert sizes.strip("{}") in line


@pytest.mark.parametrize("size", ["n_dense_layers", "n_shared_experts", "q_lora_rank", "aux_loss_weight", "bias_rate"])
def test_sizes_that_may_be_zero(size):
    assert lines("--model.name=deepseek", f"--model.overrides={{{size} = 0}}") == []
    (line,) = lines("--model.name=deepseek", f"--model.overrides={{{size} = -1}}")
    assert line == f"model.overrides: given {size} = -1; allowed: {size} >= 0"


def test_sizes_that_overflow_are_refused():
    (line,) = lines("--model.overrides={ffn_dim_multiplier = 1e308}")
    assert line == "model.overrides: given {ffn_dim_multiplier = 1e+308}; allowed: possible sizes of a model"


def test_impossible_file_names_are_refused(tmp_path):
    job = '[checkpoint]\nenable = true\ninitial_load_path = "{0}"\n[model]\ntokenizer_path = "{0}"\n'
    job += '[training]\ndataset = "text"\ndataset_path = "{0}"\n'
    (tmp_path / "job.toml").write_text(job.replace("{0}", "x" * 5000))
    faults = check(load(["--job.config_file=job.toml", "--job.dump_folder", "x" * 5000]), 1, "cpu")
    keys = ["model.tokenizer_path", "training.dataset_path", "checkpoint.initial_load_path", "job.dump_folder"]
    assert [fault.key for fault in faults] == keys


def test_a_bug_in_a_models_sizes_keeps_its_traceback(monkeypatch):
    """Only errors that the sizes raise on purpose become faults."""

    def broken(args):
        _one, _two = (1,)

    monkeypatch.setattr(LlamaArgs, "__post_init__", broken)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        lines("--model.overrides={n_layers = 2}")


def test_all_wrong_sizes_are_reported():
    assert len(lines("--model.overrides={n_layer = 1, dim = 1.5, n_heads = 3, foo = 1}")) == 3


def test_offload_is_refused_with_a_compiled_model():
    (line,) = lines("--compile.enable", "--compile.scope=model", "--training.enable_cpu_offload")
    assert line == 'compile.scope: given "model"; allowed: "block" with training.enable_cpu_offload; write "block"'


# Files


def test_a_missing_tokenizer_is_refused():
    (fault,) = check(load(["--model.tokenizer_path=no.model"]), 1, "cpu")
    assert (fault.file, fault.key, fault.value) == ("the job", "model.tokenizer_path", '"no.model"')
    assert "No such file" in fault.remedy and "huggingface.co" not in fault.remedy
    (fault,) = check(load(["--model.tokenizer_path=no.model", "--model.flavor=8B"]), 1, "cpu")
    assert "huggingface.co/meta-llama, after the licence is accepted" in fault.remedy
    arguments = ["--model.tokenizer_path=no.model", "--model.name=qwen3_moe", "--model.flavor=30B-A3B"]
    (fault,) = check(load(arguments), 1, "cpu")
    assert fault.remedy.endswith("huggingface.co/Qwen")


def test_a_vocabulary_larger_than_the_model_is_refused():
    (line,) = lines("--model.overrides={vocab_size = 100}", tokenizer=TOKENIZER)
    assert line == (
        f'model.tokenizer_path: given "{TOKENIZER}" with 2048 tokens; allowed: at most the 100 tokens of model '
        "debugmodel; use its tokenizer, or set model.overrides = {vocab_size = 2048}"
    )


@pytest.mark.parametrize("dataset", ["text", "tokens", "pretokenized", "c4_test", "huggingface"])
def test_datasets_that_need_a_path_are_refused_without(dataset):
    (line,) = lines(f"--training.dataset={dataset}")
    assert line.startswith(f'training.dataset_path: given nothing; allowed: a path with data for dataset "{dataset}"; ')


def test_data_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "tokens").mkdir()
    arguments = ["--validation.enable", "--validation.dataset=tokens", f"--validation.dataset_path={tmp_path}/tokens"]
    arguments += ["--training.dataset=text", f"--training.dataset_path={tmp_path}/empty.txt"]
    training, validation = lines(*arguments)
    assert "empty" in training and training.startswith("training.dataset_path: ")
    assert "header.json" in validation and validation.startswith("validation.dataset_path: ")


def test_an_unknown_dataset_has_one_fault():
    (line,) = lines("--training.dataset=c4_tst")
    assert line.startswith('training.dataset: given "c4_tst"; allowed: one of "python_stdlib"')
    assert line.endswith('did you mean "c4_test"?')


# All together


def test_all_rules_report_at_once():
    arguments = [
        "--model.name=x",
        "--training.global_batch_size=0",
        "--checkpoint.keep_latest_k=1",
        "--optimizer.name=y",
    ]
    arguments += ["--lr_scheduler.num_cycles=3", "--training.dataset=z", "--job.dump_folder="]
    assert len(lines(*arguments)) == 7
    assert len(RULES) == len(set(RULES))


def test_faults_name_the_files_of_the_job(tmp_path):
    (tmp_path / "job.toml").write_text("[checkpoint]\nkeep_latest_k = 1\n")
    (fault,) = check(load(["--job.config_file=job.toml"]), 1, "cpu")
    assert fault.file == "job.toml"


def test_facts_are_computed_once():
    facts = Facts(ResolvedJob(load([f"--model.tokenizer_path={TOKENIZER}"])))
    assert facts.tokenizer is facts.tokenizer


def test_names_equal_the_registries():
    from torch._dynamo import list_backends

    from torchtitan.models.spec import MODELS

    assert list(MODELS) == list(SIZES)
    assert set(BACKENDS) <= set(list_backends(exclude_tags=()))


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch):
    job = load(["--compile.enable", "--model.tokenizer_path=bytes"])
    assert not check(job, 1, "cpu")
    monkeypatch.setattr("shutil.which", lambda name: None)
    (fault,) = check(job, 1, "cpu")
    assert fault.key == "compile.enable" and "g++" in fault.remedy
    assert not check(job, 1, "cuda")
    assert not check(
        load(["--compile.enable", "--compile.backend=aot_eager", "--model.tokenizer_path=bytes"]), 1, "cpu"
    )


def test_offload_with_steps_in_backward_is_refused_on_a_gpu():
    arguments = ["--training.enable_cpu_offload", "--optimizer.early_step_in_backward", "--training.max_norm=0"]
    job = load([*arguments, "--model.tokenizer_path=bytes"])
    assert not check(job, 2, "cpu")
    assert [fault.key for fault in check(job, 2, "cuda")] == ["optimizer.early_step_in_backward"]
