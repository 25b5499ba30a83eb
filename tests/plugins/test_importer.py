"""`torchtitan import` of train_neurocache.py: the notes' two command lines, every flag, and runs of the jobs."""

import json
import math
import re

import pytest

from tests.support import judged
from tests.support.hf_parity import build
from tests.support.importing import difference
from tests.support.jobs import ROOT, train, write_texts
from tests.support.pool import run_ranks
from torchtitan import cli
from torchtitan.models.opt import OPTArgs
from torchtitan.models.opt.model import HF, OPT
from torchtitan.plugins.importers import launchers, parse, split
from torchtitan.plugins.importers.command import translate
from torchtitan.plugins.neurocache.authors_format import CONFIG
from torchtitan.plugins.neurocache.importer import FLAGS, read

anywhere = judged.anywhere
FIRST = """accelerate launch --mixed_precision fp16 train_neurocache.py --output_dir nc/baseline_opt350m \\
    --model_name_or_path facebook/opt-350m --dataset_name long_pile:1.1.0 --sequence_length 1024 \\
    --max_eval_steps 1000 --evaluate_every_steps 1000 --checkpointing_steps 5000 --with_tracking \\
    --gradient_accumulation_steps 4 --per_device_batch_size 8 &> nc/log.txt &"""
SECOND = """accelerate launch --num_processes 4 --mixed_precision bf16 train_neurocache.py \\
    --output_dir nc/opt1.3b --model_name_or_path facebook/opt-1.3b --dataset_name long_pile:1.1.0 \\
    --disable_grad_checkpointing --gradient_accumulation_steps 2 --per_device_train_batch_size 2 \\
    --per_device_eval_batch_size 4 --lora_modules fc1,fc2 --cache_size 16384 --cache_dtype bfloat16 \\
    --with_tracking --nf4"""
CACHE = "adapter.neurocache."


def import_line(flags="", line=SECOND):
    return read(parse(split([f"{line} {flags}"])))


def changes_by(flags):
    return difference(import_line(), import_line(flags))


def test_the_notes_first_line():
    """This line has the batch of one rank and no flag for LoRA or the cache."""
    job = import_line(line=FIRST)
    assert job.faults == []
    assert job.values == {
        "job.dump_folder": "nc/baseline_opt350m",
        "model.name": "opt",
        "model.flavor": "350M",
        "model.tokenizer_path": "facebook/opt-350m",
        "task.kind": "documents",
        "debug.seed": 1234567,
        "training.dataset": "text",
        "training.dataset_path": "long_pile/train",
        "training.seq_len": 1024,
        "training.local_batch_size": 8,
        "training.global_batch_size": 32,
        "training.steps": 25_000,
        "training.max_norm": 1.0,
        "training.mixed_precision_param": "bfloat16",
        "optimizer.name": "AdamW",
        "optimizer.lr": 1e-4,
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.0,
        "optimizer.decay_norms_and_biases": False,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.warmup_steps": 1000,
        "lr_scheduler.min_lr_factor": 0.0,
        "lr_scheduler.convention": "transformers",
        "activation_checkpoint.mode": "full",
        "validation.enable": True,
        "validation.dataset": "text",
        "validation.dataset_path": "long_pile/validation",
        "validation.local_batch_size": 8,
        "validation.freq": 1000,
        "validation.steps": 1000,
        "checkpoint.enable": True,
        "checkpoint.interval": 5000,
        "checkpoint.keep_latest_k": 2,
        "checkpoint.initial_load_path": "facebook/opt-350m",
        "checkpoint.initial_load_in_hf": True,
        "metrics.log_freq": 100,
        "metrics.trackers": ["tensorboard"],
        "adapter.kind": "neurocache",
        "adapter.rank": 32,
        "adapter.alpha": 64.0,
        "adapter.dropout": 0.1,
        "adapter.layers": [18, 19, 20, 21, 22, 23],
        "adapter.target": ["*feed_forward.w1", "*feed_forward.w2"],
        "adapter.neurocache.beside": "lora",
        "adapter.neurocache.cache_size": 16384,
        "adapter.neurocache.compression": 4,
        "adapter.neurocache.topk": 16,
        "adapter.neurocache.window": 2,
        "adapter.neurocache.context": 2,
        "adapter.neurocache.similarity": "l2",
        "adapter.neurocache.cache_dtype": "bfloat16",
        "adapter.neurocache.ordering": "fifo",
        "adapter.neurocache.scope": "lane",
    }
    notes = " ".join(job.notes)
    assert (
        "no --num_processes" in notes
        and "no --lora_modules: fc1,fc2" in notes
        and "bfloat16 instead of float16" in notes
    )


def test_the_notes_second_line():
    job, first = import_line(), import_line(line=FIRST).values
    assert job.faults == [] and job.values.keys() == first.keys()
    assert {key: value for key, value in job.values.items() if value != first[key]} == {
        "job.dump_folder": "nc/opt1.3b",
        "model.flavor": "1.3B",
        "model.tokenizer_path": "facebook/opt-1.3b",
        "checkpoint.initial_load_path": "facebook/opt-1.3b",
        "checkpoint.interval": 2000,
        "training.local_batch_size": 2,
        "training.global_batch_size": 16,
        "validation.local_batch_size": 4,
        "validation.freq": 500,
        "validation.steps": 250,
        "activation_checkpoint.mode": "none",
        "adapter.neurocache.beside": "qlora",
    }
    assert "only matrices with LoRA are stored in 4 bits" in " ".join(job.notes)


def test_the_docs_show_both_lines():
    lines = re.findall(r'torchtitan import "(.*?)"', (ROOT / "docs/neurocache.md").read_text(), re.DOTALL)
    first, second = (read(parse(split([line]))) for line in lines)
    assert second.values == import_line().values and first.faults == []
    assert first.values == import_line("--disable_neurocache", FIRST.partition("&>")[0]).values


def test_both_lines_become_valid_jobs_except_for_missing_folders(capsys):
    """Folders that do not exist are the only faults."""
    for line, extra in ((FIRST, []), (FIRST, ["--disable_neurocache"]), (SECOND, []), (SECOND, ["--world-size", "2"])):
        options, flags = (extra, []) if extra[:1] == ["--world-size"] else ([], extra)
        assert cli.main(["import", *options, " ".join([line.partition("&>")[0], *flags])]) == 2
        shown = capsys.readouterr()
        assert "Translated from a command line of train_neurocache.py (neurocache)." in shown.out
        faults = [fault for fault in shown.err.splitlines() if "allowed:" in fault]
        folder_options = ("training.dataset_path", "validation.dataset_path", "initial_load_path", "tokenizer_path")
        assert faults and all(any(option in fault for option in folder_options) for fault in faults), shown.err


CHANGES = [
    ("--model_name_or_path m/Llama-2-7b-hf --lora_modules up_proj", {"model.name": "llama2", "model.flavor": "7B"}, ""),
    ("--model_name mistralai/Mistral-7B-v0.1 --lora_m q_proj", {"adapter.target": ["*attention.wq"]}, ""),
    ("--lora_modules out_proj", {"adapter.target": ["*attention.wo"]}, ""),
    ("--tokenizer_name bytes", {"model.tokenizer_path": "bytes"}, ""),
    ("--dataset_name books --train_split a", {"training.dataset_path": "books/a"}, "into folders books/SPLIT"),
    ("--eval_split b", {"validation.dataset_path": "long_pile/b"}, ""),
    ("--test_split c", {}, "torchtitan evaluate nc/opt1.3b --validation.dataset_path=long_pile/c"),
    (
        "--dataset_name owner/pg19",
        {"training.dataset": "huggingface", "validation.dataset": "huggingface_validation"}
        | {"training.dataset_path": "owner/pg19", "validation.dataset_path": "owner/pg19"},
        "",
    ),
    ("--per_device_batch_size 3", {}, ""),
    ("--per_device_train_batch_size 4", {"training.local_batch_size": 4, "training.global_batch_size": 32}, ""),
    ("--per_device_eval_batch_size 5", {"validation.local_batch_size": 5}, ""),
    ("--sequence_length 512", {"training.seq_len": 512}, ""),
    ("--gradient_accumulation 1", {"training.global_batch_size": 8}, "the authors saw divergence"),
    ("--max_train_steps 9", {"training.steps": 9, "lr_scheduler.total_steps": 1001}, "is made longer than the run"),
    ("--max_eval_steps 3", {"validation.steps": 3}, ""),
    ("--evaluate_every_steps 4", {"validation.freq": 4}, ""),
    ("--checkpointing_steps 6", {"checkpoint.interval": 6}, ""),
    ("--keep_n_checkpoints 1", {}, "two are kept"),
    ("--keep_n_checkpoints 3", {"checkpoint.keep_latest_k": 3}, ""),
    ("--logging_steps 7", {"metrics.log_freq": 7}, ""),
    ("--learning_rate 2e-4", {"optimizer.lr": 2e-4}, ""),
    ("--num_warmup_steps 20", {"lr_scheduler.warmup_steps": 20}, ""),
    ("--lr_scheduler_type linear", {"lr_scheduler.decay_type": "linear"}, ""),
    ("--lr_scheduler_type cosine_with_restarts", {"lr_scheduler.decay_type": "cosine_restarts"}, ""),
    ("--lr_scheduler_type constant", {"lr_scheduler.decay_type": "constant", "lr_scheduler.warmup_steps": 0}, ""),
    ("--lr_scheduler_type constant_with_warmup", {"lr_scheduler.decay_type": "constant"}, ""),
    (
        "--lr_scheduler_type polynomial",
        {"lr_scheduler.decay_type": "linear", "lr_scheduler.min_lr_factor": pytest.approx(1e-3)},
        "",
    ),
    ("--weight_decay 0.1", {"optimizer.weight_decay": 0.1}, ""),
    ("--max_grad_norm 2", {"training.max_norm": 2.0}, ""),
    ("--seed 5", {"debug.seed": 5}, ""),
    ("--nf4 false", {CACHE + "beside": "lora"}, ""),
    ("--disable_grad false", {"activation_checkpoint.mode": "full"}, ""),
    ("--nf4 false --disable_lora", {CACHE + "beside": "none", "adapter.rank": None, "adapter.layers": None}, ""),
    ("--lora_r 8", {"adapter.rank": 8}, ""),
    ("--lora_alpha 16", {"adapter.alpha": 16.0}, ""),
    ("--lora_dropout 0", {"adapter.dropout": 0.0}, ""),
    ("--disable_neurocache", {"adapter.kind": "qlora", CACHE + "topk": None}, "no effect with --disable_neurocache"),
    (
        "--disable_neurocache --nf4 false --cache_layers 4 --pretrained_neurocache x",
        {"adapter.kind": "lora", "adapter.layers": [*range(4, 24)]},
        "--cache_size, --cache_dtype",
    ),
    ("--with_tracking false", {"metrics.trackers": None}, ""),
    ("--report_to wandb", {"metrics.trackers": ["wandb"]}, ""),
    ("--output_dir there", {"job.dump_folder": "there"}, "torchtitan export there --to FOLDER"),
    ("--cache_size 64", {CACHE + "cache_size": 64}, ""),
    ("--cache_type LRU", {CACHE + "ordering": "lru"}, ""),
    ("--cache_dtype float16", {CACHE + "cache_dtype": "float16"}, ""),
    ("--compression_factor 8", {CACHE + "compression": 8}, ""),
    ("--topk 4", {CACHE + "topk": 4}, ""),
    ("--neighborhood_size 4", {CACHE + "window": 4}, ""),
    ("--context_size 1", {CACHE + "context": 1}, ""),
    ("--similarity_fn dot", {CACHE + "similarity": "dot"}, ""),
    ("--global_cache", {CACHE + "scope": "global"}, ""),
    (
        "--retrieval_map '{12: 6, \"18\": 18}'",
        {CACHE + "retrieval_map": {"12": 6, "18": 18}, "adapter.layers": [*range(12, 24)]},
        "",
    ),
    (
        "--cache_layers 6,12 --attention_layers 12,20",
        {CACHE + "retrieval_map": {"6": 6, "12": 12}, CACHE + "attention_layers": [12, 20], "adapter.layers": [12, 20]},
        "",
    ),
]


@pytest.mark.parametrize("flags, expected, note", CHANGES, ids=[flags for flags, *_ in CHANGES])
def test_flags(flags, expected, note):
    values, notes = changes_by(flags)
    assert {key: values.get(key) for key in expected} == expected and note in notes
    if not expected and not note:
        assert values == {}


REFUSED = [
    ("--model_name_or_path EleutherAI/gpt-j-6b", "model_name_or_path", "or the name of one: opt-125m"),
    ("--dataset_name owner/pg19 --eval_split test", "eval_split", "download the splits into folders"),
    ("--per_device_batch_size 0", "per_device_batch_size", "at least 1"),
    ("--max_eval_steps 0", "max_eval_steps", "at least 1"),
    ("--topk many", "topk", "a whole number"),
    ("--lr_scheduler_type step", "lr_scheduler_type", "one of linear, cosine"),
    ("--disable", "disable", "a flag of train_neurocache.py"),
    ("--lora_modules up_proj", "lora_modules", "some of q_proj, k_proj, v_proj, out_proj, fc1, fc2"),
    ("--disable_lora", "nf4", "only matrices with LoRA are stored in 4 bits"),
    ("--nf4 false --disable_lora --disable_neurocache", "disable_lora", "nothing would be trained"),
    ("--only_evaluate", "only_evaluate", "an untrained cache would be evaluated"),
    ("--pretrained_neurocache nowhere", "pretrained_neurocache", f"a folder with {CONFIG}"),
    ("--save_and_quit", "save_and_quit", "torchtitan export RUN --to FOLDER"),
    ("--resume_from_checkpoint nc/step_5", "resume_from_checkpoint", "states of accelerate are not read"),
    ("--report_to comet_ml", "report_to", "some of tensorboard, wandb, mlflow, aim"),
    ("--retrieval_map __import__('os').getcwd()", "retrieval_map", "layer numbers such as {18: 18}; it is parsed"),
    ("--retrieval_map '{18: 9+9}'", "retrieval_map", "not executed"),
    ("--retrieval_map '{18: 18}' --cache_layers 18", "cache_layers", "nothing with --retrieval_map"),
    ("--attention_layers 18-23", "attention_layers", "layer numbers such as 18,19,20"),
]


@pytest.mark.parametrize("flags, flag, message", REFUSED, ids=[flags for flags, *_ in REFUSED])
def test_refused_flags(flags, flag, message):
    (fault,) = import_line(flags).faults
    assert fault.key == f"--{flag}" and message in str(fault)


def test_the_precision_of_the_launcher():
    def import_with(precision_flag):
        return import_line(line=SECOND.replace("--mixed_precision bf16", precision_flag))

    assert import_with("").values["training.mixed_precision_param"] == "bfloat16"
    wide = import_line("--cache_dtype float32", SECOND.replace("--mixed_precision bf16", "--mixed_precision=no"))
    assert wide.values["training.mixed_precision_param"] == "float32"
    (fault,) = import_with("--mixed_precision fp8").faults
    assert str(fault).endswith('--mixed_precision: given "fp8"; allowed: no, fp16, bf16')


def test_sizes_of_parallel_groups_are_refused_as_the_batch_of_a_step_depends_on_them():
    for size, message in ((2, "1 for this script"), (0, "at least 1")):
        options = f"--use_parallelism_config --parallelism_config_tp_size {size} --num_processes 4"
        line = parse(split([SECOND.replace("--num_processes 4", options)]))
        draft = read(line)
        launchers.add(line, draft, True)
        (fault,) = draft.faults
        assert fault.key.endswith("--parallelism_config_tp_size") and message in str(fault)


def test_missing_flags_are_all_reported():
    faults = import_line(line="python train_neurocache.py").faults
    assert [fault.key for fault in faults] == ["--model_name_or_path", "--dataset_name", "--output_dir"]


def test_every_flag_is_tested():
    tested = [*CHANGES, *REFUSED, (FIRST,), (SECOND,)]
    assert {flag for flag in FLAGS if not any(f"--{flag}" in flags for flags, *_ in tested)} == set()


# --- jobs that run


TINY = OPTArgs(dim=32, n_layers=4, n_heads=4, ffn_dim=48, vocab_size=260, max_seq_len=64, order="post", embed_dim=16)
RUN_FLAGS = "--sequence_length 16 --max_train_steps 2 --max_eval_steps 2 --evaluate_every_steps 1 --logging_steps 1"
RUN_FLAGS += " --with_tracking false --tokenizer_name bytes --cache_size 32 --topk 3 --lora_r 4 --num_warmup_steps 1"
RUN_FLAGS += " --per_device_train_batch_size 2 --gradient_accumulation_steps 2"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a tiny model of OPT-350m's architecture, and with documents in two splits."""
    folder = tmp_path_factory.mktemp("imported")
    HF.save_hf(folder / "opt", build(OPT, TINY).state_dict(), TINY)
    for split_ in ("train", "validation"):
        write_texts(folder / "books" / split_, documents=8)
    return folder


def command_line(home, out, flags):
    where = f"--output_dir {out} --model_name_or_path {home}/opt --dataset_name {home}/books"
    return f"accelerate launch --num_processes 1 train_neurocache.py {where} {RUN_FLAGS} {flags}"


def train_from_file(path):
    return [row["loss"] for row in train([f"--job.config_file={path}", "--metrics.plot=false"])[0]]


@pytest.mark.parametrize(
    "flags", ["", "--nf4", "--disable_lora --cache_type LRU", "--disable_neurocache", "--retrieval_map '{1:2}'"]
)
def test_imported_jobs_train(flags, home, tmp_path):
    text, config, measures = translate(parse(split([command_line(home, tmp_path / "run", flags)])), None)
    (tmp_path / "job.toml").write_text(text)
    assert measures is None and config.adapter.layers == (
        [] if "disable_lora" in flags else [1, 2, 3][-3 if "1:" in flags else -1 :]
    )
    (losses,) = run_ranks(1, train_from_file, tmp_path / "job.toml")
    assert len(losses) == 2 and all(map(math.isfinite, losses))


def import_and_run(tmp_path, capsys, line):
    assert cli.main(["import", "--run", line]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_line_that_only_evaluates_is_run(home, tmp_path, capsys, monkeypatch):
    """Evaluate the base model, and an adapter in the authors' format, with options read from its folder."""
    plain = command_line(home, tmp_path / "base", "--only_evaluate --disable_neurocache")
    table = import_and_run(tmp_path, capsys, plain)
    assert "bits per byte" in table and "cache of" not in table
    run = command_line(home, tmp_path / "run", "--learning_rate 0.05 --compression_factor 2")
    text, _, _ = translate(parse(split([run])), None)
    (tmp_path / "job.toml").write_text(text)
    run_ranks(1, train_from_file, tmp_path / "job.toml")
    assert cli.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "adapter")]) == 0
    arguments = [
        "evaluate",
        str(tmp_path / "run"),
        "--cache-sizes=32",
        "--samples=8",
        "--out",
        str(tmp_path / "own.json"),
    ]
    assert cli.main(arguments) == 0
    line = command_line(home, tmp_path / "measured", f"--only_evaluate --pretrained_neurocache {tmp_path}/adapter")
    text, config, measures = translate(parse(split([line])), None)
    assert config.adapter.neurocache.compression == 2 and config.adapter.neurocache.compat_head_layout
    assert "no effect with --pretrained_neurocache, which sets them: --cache_size, --topk" in text
    (tmp_path / "job.toml").write_text(text.replace("compat_head_layout = true", "compat_head_layout = false"))
    arguments = ["evaluate", *measures, "--config", str(tmp_path / "job.toml"), "--cache-sizes=32"]
    assert cli.main([*arguments, "--out", str(tmp_path / "found.json")]) == 0
    original, reloaded = (json.loads((tmp_path / f"{name}.json").read_text())["runs"] for name in ("own", "found"))
    assert (
        reloaded[0]["loss"] == pytest.approx(original[0]["loss"], rel=1e-5)
        and reloaded[0]["tokens"] == original[0]["tokens"]
    )
    out = import_and_run(tmp_path, capsys, line)
    assert "cache of 32 entries" in out
    (tmp_path / "adapter" / CONFIG).write_text('{"retrieval_map": {"a": "b"}}')
    (fault,) = read(parse(split([line]))).faults
    assert f"layer numbers in its {CONFIG}" in str(fault)
