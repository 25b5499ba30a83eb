"""`torchtitan import` for ReLoRA's script: every flag and default, regimes of its notes, and refused flags."""

import json
import shlex
import sys

import pytest

from tests.support import judged
from tests.support.saved_blocks import save
from torchtitan import cli
from torchtitan.config.layers import layer_of
from torchtitan.config.manager import assemble, load
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError
from torchtitan.models import SIZES
from torchtitan.plugins.importers import SOURCES, parse, split
from torchtitan.plugins.importers import command as importing
from torchtitan.plugins.importers.relora import FLAGS, GALORE_ONLY, read
from torchtitan.rules import check

anywhere = judged.anywhere
LAUNCHED = "torchrun --nproc-per-node 2 torchrun_main.py"
FULL = f"{LAUNCHED} --model_config configs/llama_250m.json --batch_size 24 --total_batch_size 96 --dtype bf16"
ONE_PASS = FULL.replace("_size 96", "_size 48")
RELORA = f"""{FULL} --lr 1e-3 --max_length 512 --use_peft --relora 10 --cycle_length 10 --restart_warmup_steps 5 \\
    --scheduler cosine_restarts --warmup_steps 5 --reset_optimizer_on_relora False --optimizer_magnitude_pruning 0.9 \\
    --num_training_steps 20000 --save_every 5000 --eval_every 5000 --distributed_type fsdp \\
    --continue_from checkpoints/model_5000 --tags relora_250M"""


def import_line(line):
    return read(parse(split([line])))


def faults_by_flag(line):
    """Return the faults by flag; no option may have one."""
    return {fault.key.removeprefix("--"): str(fault) for fault in import_line(line).faults}


def changed_options(flags, before=FULL):
    """Return the options that further flags change, and the notes that they add."""
    before = ONE_PASS if "per_layer" in flags else before
    first, then = import_line(before), import_line(f"{before} {flags}")
    assert then.faults == [], then.faults
    values = {k: then.values.get(k) for k in first.values.keys() | then.values.keys()}
    notes = " ".join(note for note in then.notes if note not in first.notes)
    return {key: value for key, value in values.items() if first.values.get(key) != value}, notes


def test_the_head_says_how_restarts_differ_from_the_script():
    """It names the initial A and B, the share of moments that survive, and the option that follows the script."""
    notes = " ".join(import_line(RELORA).notes)
    assert (
        "A begins at random and B at zero, at first and after each restart; in the script's last version A was" in notes
    )
    assert "keep the same entries, and so do B's; the script pruned each by itself" in notes
    assert 'adapter.relora.mask = "independent" does that too' in notes
    full_rank, lora_only = (" ".join(import_line(f"{FULL} {flags}").notes) for flags in ("--lr 1e-3", "--use_peft"))
    zero = " ".join(import_line(f"{FULL} --relora 10").notes)
    assert "A begins" not in full_rank + lora_only and "A begins" in zero
    assert "pruned each" not in full_rank + lora_only + zero


def test_a_relora_regime_of_the_notes():
    job = import_line(RELORA)
    assert job.faults == []
    expected = {
        "model.name": "llama2",
        "model.flavor": "250m",
        "model.overrides": {"vocab_size": 32_100},
        "adapter.kind": "lora",
        "adapter.rank": 128,
        "adapter.alpha": 32.0,
        "adapter.dropout": 0.1,
        "adapter.train_dense_rest": True,
        "adapter.relora.every": 10,
        "adapter.relora.reset": "magnitude",
        "adapter.relora.prune_ratio": 0.9,
        "lr_scheduler.decay_type": "relora_cosine",
        "lr_scheduler.cycle_length": 10,
        "lr_scheduler.warmup_steps": 5,
        "lr_scheduler.restart_warmup_steps": 5,
        "lr_scheduler.min_lr_factor": 0.1,
        "checkpoint.initial_load_path": "checkpoints/model_5000",
        "checkpoint.initial_load_counters": True,
        "checkpoint.interval": 5000,
        "validation.freq": 5000,
        "training.steps": 20_000,
        "training.local_batch_size": 24,
        "training.global_batch_size": 96,
        "training.seq_len": 512,
        "training.dtype": "bfloat16",
        "optimizer.name": "Adam",
        "optimizer.lr": 1e-3,
        "optimizer.beta2": 0.999,
        "optimizer.weight_decay": 0.0,
        "job.tags": ["relora_250M"],
    }
    assert {key: job.values.get(key) for key in expected} == expected
    assert not any(key.startswith("parallelism.") for key in job.values), "sharded over all ranks is the default"


CHANGES = [
    ("--dataset_path data/wiki", {"training.dataset": "pretokenized", "validation.dataset_path": "data/wiki"}, ""),
    ("--tokenizer bytes", {"model.tokenizer_path": "bytes"}, ""),
    ("--gradient_accumulation 2", {}, ""),
    ("--max_length 128", {"training.seq_len": 128}, ""),
    ("--lr 0.5", {"optimizer.lr": 0.5}, ""),
    ("--weight_decay 0.01", {"optimizer.weight_decay": 0.01}, ""),
    ("--adam_beta1 0.8", {"optimizer.beta1": 0.8}, ""),
    ("--adam_beta2=0.95", {"optimizer.beta2": 0.95}, ""),
    ("--clip_grad_norm 0", {"training.max_norm": 0.0}, ""),
    ("--optimizer Adam", {}, ""),
    (
        "--optimizer galore_adamw8bit --rank 64 --update_proj_gap 200 --galore_scale 0.25 --proj_type left",
        {
            "optimizer.name": "GaLore",
            "optimizer.options": dict(rank=64, update_gap=200, scale=0.25, side="left", inner="adamw_8bit"),
            "training.max_norm": 0.0,
        },
        "other parameters use the same moments",
    ),
    (
        "--optimizer galore_adamw8bit_per_layer",
        {"optimizer.early_step_in_backward": True, "training.max_norm": 0.0},
        "",
    ),
    (
        "--optimizer galore_adafactor --beta1 0.9 --grad_clipping 1.0",
        {
            "optimizer.options": dict(rank=128, update_gap=50, scale=1.0, side="std", inner="adafactor"),
            "optimizer.beta2": None,
        },
        "",
    ),
    ("--optimizer adafactor --beta1 0.9", {"optimizer.options": {"beta1": 0.9}, "optimizer.beta1": None}, ""),
    ("--optimizer adam8bit --single_gpu", {"optimizer.name": "AdamW8bit"}, "one rank"),
    ("--optimizer sgd --activation_checkpointing", {"activation_checkpoint.mode": "full"}, ""),
    ("--optimizer sgd --beta1 0.9", {"optimizer.options": {"momentum": 0.9}}, ""),
    (
        "--optimizer galore_adamw",
        {
            "optimizer.eps": 1e-6,
            "optimizer.options": dict(rank=128, update_gap=50, scale=1.0, side="std", inner="adamw")
            | {"formula": "galore_torch"},
        },
        "",
    ),
    ("--grad_clipping 0.5 --rank 8", {"training.max_norm": 0.5}, "no effect with --optimizer adam: --rank"),
    (
        "--optimizer galore_adamw8bit_per_layer --grad_clipping 1",
        {"training.max_norm": 0.0},
        "clips nothing, as in the script",
    ),
    ("--optimizer adam8bit --weight_decay 0.1", {"optimizer.name": "AdamW8bit"}, "weight decay is decoupled here"),
    ("--name test", {}, "the script ignored it"),
    ("--use_hf_model --streaming_dataset true --dataset c4,en", {}, "one Llama here"),
    ("--restart_warmup_steps 3", {}, "no effect with --scheduler cosine: --restart_warmup_steps"),
    (
        "--optimizer adam_zero",
        {"parallelism.data_parallel_replicate_degree": None},
        "FSDP shards the optimizer's state",
    ),
    ("--scheduler linear", {"lr_scheduler.decay_type": "linear", "lr_scheduler.min_lr_factor": 0.0}, ""),
    ("--warmup_steps 7", {"lr_scheduler.warmup_steps": 7}, ""),
    (
        "--scheduler cosine_restarts --restart_warmup_steps 3 --adjust_step 2 --cycle_length 50",
        {"lr_scheduler.restart_warmup_steps": 3, "lr_scheduler.adjust_step": 2, "lr_scheduler.cycle_length": 50},
        "as by the script of July 2023; its later version leaves out the first of these cuts",
    ),
    ("--min_lr_ratio 0.2", {"lr_scheduler.min_lr_factor": 0.2}, ""),
    ("--cycle_length 500", {"lr_scheduler.cycle_length": 500}, ""),
    ("--use_peft --force_keep_original", {"adapter.kind": "lora", "adapter.rank": 128}, ""),
    ("--use_peft true --force_keep_original true --lora_r 4 --lora_alpha 8", {"adapter.alpha": 8.0}, ""),
    ("--use_peft", {"adapter.kind": "lora", "adapter.lora_only": True}, "only A and B are trained, without them"),
    ("--lora_r 4", {}, "no effect without --use_peft: --lora_r"),
    ("--relora 10", {"adapter.relora.every": 10, "adapter.relora.reset": "zero"}, "--relora implies --use_peft"),
    ("--relora 10 --cycle_length 5", {"adapter.relora.reset_every": 5, "lr_scheduler.cycle_length": 5}, ""),
    ("--relora 10 --train_scaling", {"adapter.train_scaling": True}, ""),
    ("--relora 10 --reset_optimizer_on_relora false", {"adapter.relora.reset": "none"}, ""),
    (
        "--relora 10 --reset_optimizer_on_relora False --optimizer_random_pruning 0.5",
        {"adapter.relora.reset": "random", "adapter.relora.prune_ratio": 0.5},
        "",
    ),
    ("--optimizer_magnitude_pruning 0.5", {}, "no effect without --relora"),
    ("--continue_from a/b", {"checkpoint.initial_load_path": "a/b", "checkpoint.initial_load_counters": True}, ""),
    ("--warmed_up_model a/b", {"checkpoint.initial_load_counters": True}, ""),
    (
        "--continue_from_peft a/b",
        {"checkpoint.initial_load_model_only": False, "checkpoint.exclude_from_loading": ["optimizer"]},
        "",
    ),
    ("--continue_from_peft a/b --restore_optimizer", {"checkpoint.initial_load_path": "a/b"}, ""),
    ("--resume_from a/b", {"checkpoint.initial_load_model_only": False}, ""),
    ("--resume_from a --load_optimizer_state_on_resume false", {"checkpoint.exclude_from_loading": ["optimizer"]}, ""),
    ("--restore_optimizer", {}, "no effect without --continue_from_peft"),
    ("--num_training_steps 50", {"training.steps": 50, "lr_scheduler.total_steps": 1001}, "made longer"),
    ("--max_train_tokens 100M", {"training.steps": 100_000_000 // (96 * 256)}, "are 4069 steps of 96 x 256 tokens"),
    ("--eval_every 3", {"validation.freq": 3}, ""),
    ("--save_every 3", {"checkpoint.interval": 3}, ""),
    ("--save_dir there", {"job.dump_folder": "there"}, ""),
    ("--dtype float32", {"training.dtype": "float32", "training.mixed_precision_param": "float32"}, ""),
    ("--distributed_type fsdp", {"parallelism.data_parallel_shard_degree": None}, ""),
    ("--workers 0", {"training.dataloader.num_workers": 0}, ""),
    ("--seed 3", {"debug.seed": 3, "training.shuffle": None}, ""),
    ("--seed 3 --dataset_path wiki", {"training.shuffle": None}, "data shuffled"),
    ("--dataset_path wiki", {"training.shuffle": False}, "seed 0 keeps the data in their order"),
    ("--tags a,b", {"job.tags": ["a", "b"]}, ""),
    ("--comment 'a run'", {"job.description": "a run"}, ""),
    ("--train_ln true", {}, ""),
    ("--keep_checkpoints 3", {"checkpoint.keep_latest_k": 3}, ""),
    ("--keep_checkpoints 1", {"checkpoint.keep_latest_k": 2}, "two are kept"),
    ("--autoresume true", {}, "resumes from its newest checkpoint"),
    ("--profile true", {"profiling.enable_profiling": True}, ""),
    ("--use_peft --quantize 4bit", {"adapter.kind": "qlora"}, "A begins at random and B at zero"),
    ("--relora 10 --train_scaling", {"adapter.train_scaling": True}, "begin again at 1 after a restart"),
    ("--use_peft --quantize 8bit", {"adapter.kind": "lora_int8"}, "only weights are in 8 bits"),
    ("--use_peft --quantize 4bit --train_scaling", {"adapter.kind": "qlora", "adapter.train_scaling": True}, ""),
    ("--wandb_watch False", {}, ""),
    ("--model_config configs/llama_250m_50k.json", {"model.flavor": "250m_50k", "model.overrides": None}, ""),
]


@pytest.mark.parametrize("flags, expected, note", CHANGES, ids=[flags for flags, *_ in CHANGES])
def test_flags(flags, expected, note):
    values, notes = changed_options(flags)
    assert {key: values.get(key) for key in expected} == expected
    assert note in notes and (values or notes or not expected)
    if not expected and not note:
        assert values == {} and notes == ""


@pytest.mark.parametrize("optimizer", sorted(GALORE_ONLY))
def test_jobs_with_galores_optimizers_are_valid(optimizer):
    """The moments of AdamW, Adafactor and SGD read different options."""
    line = (
        f"{ONE_PASS} --max_length 64 --tokenizer bytes --warmup_steps 5 --optimizer {optimizer} --num_training_steps 20"
    )
    values = import_line(line).values | {"training.dataset": "python_stdlib"}
    config = assemble(layer_of("the line", values.items()).values, ["the line"])
    assert check(config, 2, "cpu") == []


REFUSED = [
    ("--lr fast", "lr", "a finite number"),
    ("--lr nan", "lr", "a finite number"),
    ("--batch_size 0", "batch_size", "at least 1"),
    ("--total_batch_size -64", "total_batch_size", "at least 1"),
    ("--max_length 0", "max_length", "at least 1"),
    ("--batch_size 2.5", "batch_size", "a whole number"),
    ("--use_peft maybe", "use_peft", "true or false"),
    ("--learning_rate 1", "learning_rate", "a flag of torchrun_main.py"),
    ("--lora_rr 1", "lora_rr", "did you mean lora_r?"),
    ("--total_batch_size 100", "total_batch_size", "a multiple of 48: batch_size 24 x 2 ranks; change one of them"),
    ("--gradient_accumulation 3", "total_batch_size", "batch_size 24 x 2 ranks x gradient_accumulation 3"),
    ("--optimizer shampoo", "optimizer", "other optimizers are not supported"),
    ("--optimizer adam_zero --distributed_type fsdp", "optimizer", "adam with --distributed_type fsdp"),
    ("--optimizer lamb", "optimizer", "one of adam, adam_zero, sgd"),
    ("--min_lr_ratio 0", "min_lr_ratio", "more than 0 and at most 1"),
    ("--scheduler cosine_restarts", "restart_warmup_steps", "a number of updates with cosine_restarts"),
    ("--adjust_step 3", "adjust_step", "it belongs to cosine_restarts"),
    ("--relora 10 --optimizer_random_pruning 0.5", "reset_optimizer_on_relora", "one kind of reset"),
    ("--relora 10 --optimizer_magnitude_pruning 1.0", "optimizer_magnitude_pruning", "at least 0 and less than 1"),
    ("--continue_from a --continue_from_peft b", "continue_from", "drop one of the two"),
    ("--max_train_tokens many", "max_train_tokens", "such as 100M"),
    ("--dtype fp16", "dtype", "float16 overflows without a scaler"),
    ("--train_ln false", "train_ln", "the norms are always trained"),
    ("--skip_batches 2,4", "skip_batches", "training.on_bad_data"),
    ("--relora 10 --quantize 4bit", "quantize", "each restart would round the quantized matrices again"),
    ("--use_peft --quantize 4bit --use_double_quant false", "use_double_quant", "scales are always in 8 bits here"),
    ("--wandb_watch true", "wandb_watch", "gradients of single parameters are not logged"),
    ("--megatron_dataset_config a.yaml", "megatron_dataset_config", "Megatron's index is not supported"),
    ("--optimizer galore_adamw --proj_quant", "proj_quant", "bases are not quantized"),
    ("--optimizer galore_adamw8bit_per_layer", "total_batch_size", "use --optimizer galore_adamw8bit, or a larger"),
    ("--dataset wikitext", "dataset", "make another dataset with torchtitan prepare"),
    ("--svd_optimizer_on_relora 8", "svd_optimizer_on_relora", "--optimizer_magnitude_pruning 0.9"),
    ("--keep_first_opt_rows 8", "keep_first_opt_rows", "--optimizer_magnitude_pruning 0.9"),
    ("--model_config configs/llama_8m.json", "model_config", "a file, or llama_SIZE of 9m, 20m"),
    ("--model_name_or_path EleutherAI/pythia-1b", "model_config", "one of --model_config and --model_name_or_path"),
]


@pytest.mark.parametrize("flags, flag, message", REFUSED, ids=[flags for flags, *_ in REFUSED])
def test_refused_flags(flags, flag, message):
    assert message in faults_by_flag(f"{FULL} {flags}")[flag]


OF_THE_SCRIPT = """adam_beta1 adam_beta2 adjust_step autoresume batch_size clip_grad_norm comment continue_from
    continue_from_peft cycle_length dataset_path distributed_type dtype eval_every force_keep_original
    gradient_accumulation keep_checkpoints load_optimizer_state_on_resume lora_alpha lora_r lr max_length
    max_train_tokens megatron_dataset_config min_lr_ratio model_config model_name_or_path model_revision
    num_training_steps optimizer optimizer_magnitude_pruning optimizer_random_pruning profile quantize relora
    reset_optimizer_on_relora restart_warmup_steps restore_optimizer resume_from save_dir save_every scheduler seed
    skip_batches tags tokenizer total_batch_size train_ln train_scaling training_config use_double_quant use_peft
    wandb_watch warmed_up_model warmup_steps weight_decay workers dataset streaming_dataset use_hf_model
    svd_optimizer_on_relora keep_first_opt_rows"""
"""Of July 2023, of its later versions and of its first."""
OF_GALORE = dict(rank=128, update_proj_gap=50, galore_scale=1.0, proj_type="std", grad_clipping=0.0, beta1=0.0)
OF_GALORE |= dict(activation_checkpointing=False, single_gpu=False, proj_quant=False, name=None)
"""Of GaLore's script beside them, with its defaults."""
DEFAULTS = dict(tokenizer="t5-base", max_length=256, lr=1e-4, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999)
DEFAULTS |= dict(clip_grad_norm=1.0, optimizer="adam", scheduler="cosine", warmup_steps=1000, min_lr_ratio=0.1)
DEFAULTS |= dict(adjust_step=0, use_peft=False, lora_r=128, lora_alpha=32.0, train_scaling=False, train_ln=True)
DEFAULTS |= dict(force_keep_original=False, reset_optimizer_on_relora=True, optimizer_random_pruning=0.0)
DEFAULTS |= dict(optimizer_magnitude_pruning=0.0, restore_optimizer=False, num_training_steps=10_000, workers=8)
DEFAULTS |= dict(eval_every=1000, save_every=10_000, distributed_type="ddp", seed=0)


def test_the_flags_are_the_scripts_with_its_defaults():
    assert set(FLAGS) == set(OF_THE_SCRIPT.split()) | OF_GALORE.keys()
    assert {name: FLAGS[name].default for name in DEFAULTS | OF_GALORE} == DEFAULTS | OF_GALORE


def test_every_flag_has_a_test():
    tried = {
        name for flags, *_ in (*CHANGES, *REFUSED) for name, _ in parse([*shlex.split(FULL), *shlex.split(flags)]).flags
    }
    assert set(FLAGS) - tried == {"model_revision", "training_config"}, "separate tests cover these"


def test_flags_from_a_training_config(tmp_path):
    """The script's README passes such a file; flags of the command line override it."""
    (tmp_path / "c.yaml").write_text("""
        model_config: configs/llama_250m.json
        batch_size: 24
        total_batch_size: 96
        dtype: bf16
        use_peft: true
        relora: 5320
        reset_optimizer_on_relora: false
        warmup_steps: 13_000
        num_training_steps: 133_000
        lr: 4e-4
        save_dir: null
    """)
    flags = "--use_peft --relora 5320 --reset_optimizer_on_relora False --warmup_steps 13000 --lr 4e-4"
    line = f"{LAUNCHED} --training_config {tmp_path}/c.yaml"
    assert import_line(line) == import_line(f"{FULL} {flags} --num_training_steps 133000")
    assert import_line(f"{line} --lr 1").values["optimizer.lr"] == 1.0
    (tmp_path / "c.yaml").write_text("lora_rr: 3\nbatch_size: [1, 2]")
    assert {"lora_rr", "batch_size", "model_config"} <= set(faults_by_flag(line))
    for path in ("nowhere.yaml", str(tmp_path)):
        with pytest.raises(JobError, match="can be read"):
            import_line(f"{LAUNCHED} --training_config {path}")


def test_flags_may_be_abbreviated_unless_ambiguous():
    assert changed_options("--gradient 2 --weight 0.5 --scheduler linear") == changed_options(
        "--gradient_accumulation 2 --weight_decay 0.5 --scheduler linear"
    )
    assert set(faults_by_flag(f"{FULL} --lora 3 --clip 1")) == {"lora"}, "lora_r or lora_alpha"


def test_shell_syntax_around_a_command_is_ignored():
    line = parse(split([f"CUDA_VISIBLE_DEVICES='0,1' nohup {FULL} --lr 3 &> there/log.txt &"]))
    assert line.flags[-1] == ("lr", "3") and line.ranks == 2
    launched = parse(split(["accelerate launch --mixed-precision bf16 --num_processes=3 a.py"])).launched
    assert launched == {"mixed_precision": "bf16", "num_processes": "3"}


def test_all_missing_flags_are_reported_together():
    assert set(faults_by_flag("torchrun --nproc_per_node=gpu torchrun_main.py")) == {
        "model_config",
        "batch_size",
        "nproc_per_node",
    }


def test_the_size_of_a_config(tmp_path):
    config = dict(hidden_size=128, intermediate_size=352, num_attention_heads=4, num_hidden_layers=4, vocab_size=32_000)
    config |= {"max_sequence_length": 1024, "rms_norm_eps": 1e-6, "model_type": "llama"}

    def size_of(**changes):
        (tmp_path / "c.json").write_text(json.dumps(config | changes))
        return import_line(f"{LAUNCHED} --batch_size 2 --model_config {tmp_path}/c.json")

    assert size_of().values["model.flavor"] == "9m" and "model.overrides" not in size_of().values
    other = size_of(num_hidden_layers=5, vocab_size=50_257, max_sequence_length=512).values
    assert other["model.overrides"] == {"n_layers": 5, "vocab_size": 50_257, "max_seq_len": 512}
    for change in ({"model_type": "gpt_neox"}, {"hidden_size": "wide"}, {"num_attention_heads": 5}):
        assert "a config of a Llama" in str(size_of(**change).faults[0])
    other = size_of(rope_theta=5e5, num_key_value_heads=2, tie_word_embeddings=True).values["model.overrides"]
    assert other == {"rope_theta": 5e5, "n_kv_heads": 2, "tied_embeddings": True}
    assert "attention_bias = True" in str(size_of(attention_bias=True).faults[0])
    odd = size_of(hidden_size=256, intermediate_size=512, num_attention_heads=4).values
    args = SIZES["llama2"][odd["model.flavor"]]
    assert type(args)(**vars(args) | odd["model.overrides"]).ffn_dim == 512


def test_a_model_in_a_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    line = f"{LAUNCHED} --batch_size 2 --model_name_or_path {tmp_path} --model_revision step1000"
    job = import_line(line)
    assert job.values["model.name"] == "llama3" and job.values["model.hf_folder"] == str(tmp_path)
    assert any("step1000: not checked" in note for note in job.notes)
    (tmp_path / "config.json").write_text('{"model_type": "mpt"}')
    assert "no other family is here" in faults_by_flag(line)["model_name_or_path"]
    (tmp_path / "config.json").unlink()
    assert "a folder in Hugging Face format" in faults_by_flag(line)["model_name_or_path"]


def test_a_tokenizer_without_a_folder():
    assert not any("has to be in a folder" in note for note in import_line(f"{FULL} --tokenizer bytes").notes)


def test_the_tokenizer_named_by_prepared_data(tmp_path):
    (tmp_path / "args.json").write_text('{"tokenizer": "gpt2", "sequence_length": 512}')
    assert changed_options(f"--dataset_path {tmp_path}")[0]["model.tokenizer_path"] == "gpt2"
    assert changed_options(f"--dataset_path {tmp_path} --tokenizer my/gpt2")[0]["model.tokenizer_path"] == "my/gpt2"
    assert "gpt2, as in" in faults_by_flag(f"{FULL} --dataset_path {tmp_path} --tokenizer t5-base")["tokenizer"]
    (tmp_path / "args.json").write_text("[")
    assert "model.tokenizer_path" not in changed_options(f"--dataset_path {tmp_path}")[0]


def test_small_held_out_data_are_read_once(tmp_path):
    """They are not repeated up to the script's 10M tokens."""
    values = changed_options(f"--max_length 16 --dataset_path {save(tmp_path / 'data', split='validation')}")[0]
    assert values["validation.samples"] == 8 and values["validation.steps"] is None
    data = save(tmp_path / "more", [[number % 250] * 16 for number in range(1030)])
    values = changed_options(f"--max_length 16 --dataset_path {data}")[0]
    assert values["validation.samples"] == 1024, "a whole number of rounds over the streams, so no sample twice"


def test_a_tilde_is_expanded_as_by_a_shell(tmp_path, monkeypatch):
    """This holds also where the importer itself reads the file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "data", split="validation")
    values = changed_options("--max_length 16 --dataset_path ~/data")[0]
    assert values["training.dataset_path"] == str(tmp_path / "data") and values["validation.samples"] == 8


def test_number_of_ranks_of_a_command_line():
    for text, ranks in {
        "torchrun --nnodes=2 --nproc-per-node=4 a/torchrun_main.py": 8,
        "OMP_NUM_THREADS=4 python -u torchrun_main.py": 1,
        "python -m torch.distributed.run --standalone --nproc_per_node 3 torchrun_main.py": 3,
        "torchrun --nproc-per-node auto torchrun_main.py": None,
    }.items():
        line = parse(split([text]))
        assert (line.ranks, line.script) == (ranks, "torchrun_main.py")


def test_the_command_prints_a_job_that_loads(capsys, tmp_path, monkeypatch):
    short = f"{FULL} --lr 1e-3 --max_length 64 --num_training_steps 20 --tokenizer bytes --save_dir {tmp_path}/run"
    # a command line as one argument, or as several
    for argv in (["--world-size", "4", short], [short, "--world-size=4"], ["--world-size", "4", *shlex.split(short)]):
        code = cli.main(["import", *argv])
        out, err = capsys.readouterr()
        (tmp_path / "job.toml").write_text(out)
        config = load([f"--job.config_file={tmp_path}/job.toml"])
        assert code == 0 and err == "" and config.training.global_batch_size == 96
        assert config.parallelism.data_parallel_replicate_degree == 4 and check(config, 4, "cpu") == []
    launched = []
    monkeypatch.setattr(importing, "launch", lambda ranks, argv: launched.append((ranks, argv)) or 0)
    assert cli.main(["import", short, "--run"]) == 0 and "imported.toml: on 2 ranks" in capsys.readouterr().out
    assert launched == [(2, ["--job.config_file", f"{tmp_path}/run/imported.toml"])]
    assert load([f"--job.config_file={tmp_path}/run/imported.toml"]).optimizer.lr == 1e-3
    assert cli.main(["import", "--run", f"{FULL} --tokenizer nowhere"]) == 2  # nothing is printed or started
    assert "cannot start without changes" in capsys.readouterr().err and len(launched) == 1


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["python train.py --lr 1"],
            "train.py: not a supported program; allowed: relora (torchrun_main.py), galore",
        ),
        (["--from", "galor", LAUNCHED], "--from: given 'galor'; allowed: relora, galore, "),
        (["echo hello"], "no script (a word that ends in .py)"),
        (['torchrun "open'], "cannot be split into words"),
        ([f"{LAUNCHED} stray"], "'stray' is neither a flag nor its value"),
        ([LAUNCHED, "--ranks", "3"], "no option --ranks"),
        ([LAUNCHED, "--world-size", "no"], "--world-size: given 'no'; allowed: a whole number >= 1"),
        ([f"{FULL} --lr x --min_lr_ratio 2"], "--min_lr_ratio: given 2.0"),
        ([f"{FULL} --save_dir {sys.executable}/x --tokenizer bytes --warmup_steps 5", "--run"], "job.dump_folder"),
    ],
    ids=str,
)
def test_refused_commands(argv, message, capsys):
    assert cli.main(["import", *argv]) == 2
    assert message in capsys.readouterr().err


def test_usage_and_sources(capsys):
    assert cli.main(["import", "--help"]) == 0 and cli.main(["import"]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{source}: {source.description}" in shown for source in SOURCES.values())
    with pytest.raises(ConfigError):
        importing.translate(parse(split([LAUNCHED])), None)
    with pytest.raises(JobError):
        importing.translate(parse(["a.py"]), None)
