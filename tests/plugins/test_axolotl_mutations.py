"""Mutations of valid Axolotl files: each says the same as its explicit form, or is refused by the key's name."""

import datetime
import random

import pytest
import yaml

from torchtitan import cli
from torchtitan.config.layers import layer_of
from torchtitan.core.errors import JobError
from torchtitan.plugins.importers import axolotl, parse, split
from torchtitan.plugins.importers.axolotl_options import DEFAULTS, NEVER_NULL, OPTIONS

PLAIN = {
    "base_model": "llama",
    "datasets": [{"path": "a.jsonl", "type": "alpaca"}],
    "sequence_len": 1024,
    "bf16": False,
    "gradient_checkpointing": True,
    "optimizer": "adamw_bnb_8bit",
    "learning_rate": 2e-4,
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.5,
    "lr_scheduler": "linear",
    "warmup_steps": 7,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
    "seed": 7,
    "save_total_limit": 3,
    "output_dir": "out",
    "val_set_size": 0.1,
    "evals_per_epoch": 4,
    "saves_per_epoch": 2,
    "sample_packing": True,
    "train_on_inputs": True,
    "logging_steps": 1,
}
ADAPTED = PLAIN | {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True}
OFF = {"sample_packing": False, "train_on_inputs": False, "val_set_size": 0.0, "gradient_accumulation_steps": 1}
OFF |= {"lora_dropout": 0.0, "lora_target_linear": False}
"""What further options mean that a file lacks, in Axolotl's own schema."""
SAME = {
    "bool": [("yes", True), ("no", False), ("true", True), (1, True), (0, False)],
    "int": [("8", 8), (8.0, 8)],
    "float": [("1e-4", 1e-4), ("0.5", 0.5), (1, 1.0)],
}
"""Other spellings of a value, as YAML 1.1 and Axolotl's schema read them."""
WRONG = [
    [],
    [1, 2],
    {},
    {"a": 1},
    "garbage",
    "",
    -1,
    10**30,
    float("nan"),
    float("inf"),
    True,
    datetime.date(2024, 1, 1),
]


@pytest.fixture(autouse=True)
def in_folder_with_model(tmp_path, monkeypatch):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path)


def import_text(text: str, line: str = "accelerate launch --num_processes 2 -m axolotl.cli.train job.yml"):
    with open("job.yml", "w") as file:
        file.write(text)
    return axolotl.read(parse(split([line])))


def import_table(table, **kwargs):
    return import_text(yaml.safe_dump(table), **kwargs)


def is_refused(job, key) -> bool:
    assert all(str(fault).startswith("job.yml: ") for fault in job.faults)
    return any(key in str(fault) for fault in job.faults)


def faults_of(job):
    """Return the faults of a job, including those that only its own options have."""
    return [*job.faults, *layer_of(job.source, job.values.items()).all_faults()]


@pytest.mark.parametrize("base", [PLAIN, ADAPTED], ids=["full", "lora"])
def test_a_missing_key_has_the_default_of_axolotl(base):
    assert import_table(base).faults == []
    for key in base:
        job = import_table({name: value for name, value in base.items() if name != key})
        if key in ("base_model", "datasets", "learning_rate", "lora_r", "lora_alpha"):
            assert is_refused(job, key)
        elif key in DEFAULTS | OFF:
            explicit = import_table(base | {key: (DEFAULTS | OFF)[key]})
            assert (job.values, bool(job.faults)) == (explicit.values, bool(explicit.faults)), key
        elif key in ("evals_per_epoch", "saves_per_epoch"):
            option = {"evals_per_epoch": "validation.freq", "saves_per_epoch": "checkpoint.interval"}[key]
            assert job.values[option] == "epoch"
    assert import_table({key: value for key, value in base.items() if key != "warmup_steps"}).values[
        "lr_scheduler.warmup_steps"
    ] == pytest.approx(0.03)


@pytest.mark.parametrize("base", [PLAIN, ADAPTED], ids=["full", "lora"])
def test_a_key_without_a_value(base):
    """It is as if the key was missing, but for bf16, which is then off, and for keys with which Axolotl fails."""
    for key in base:
        job = import_table(base | {key: None})
        missing = import_table({name: value for name, value in base.items() if name != key})
        if key in NEVER_NULL:
            assert is_refused(job, key)
        elif key == "bf16":
            assert job.values == import_table(base | {"bf16": False}).values
        else:
            assert (job.values, job.faults) == (missing.values, missing.faults)


def test_other_spellings_of_a_value_are_the_same(is_full_run):
    draw = random.Random("spellings")
    for key, option in OPTIONS.items():
        spellings = SAME.get(option.kind, [])
        for spelling, value in spellings if is_full_run else draw.sample(spellings, min(1, len(spellings))):
            jobs = [import_table(ADAPTED | {key: one}) for one in (spelling, value)]
            assert jobs[0].values == jobs[1].values, (key, spelling)
            assert [fault.key for fault in jobs[0].faults] == [fault.key for fault in jobs[1].faults], (key, spelling)


def test_values_of_other_types_are_read_as_axolotl_does_or_refused_by_name(is_full_run):
    draw, counts = random.Random("types of values"), {"refused": 0, "noted": 0, "off": 0, "read": 0}
    adapted = import_table(ADAPTED)
    for key, option in OPTIONS.items():
        base = {name: entry for name, entry in ADAPTED.items() if name != key}
        without = import_table(base) if key in ADAPTED else adapted
        for value in draw.sample(WRONG, 5 if is_full_run else 2):
            job = import_table(base | {key: value})
            if is_refused(job, key) or (faults_of(job) and not faults_of(without)):
                counts["refused"] += 1
            elif any(key in note for note in job.notes):
                counts["noted"] += 1
            elif job.values == without.values:
                counts["off"] += 1
                assert value in ("", [], {}, -1, True, "garbage") or option.kind == "any", (key, value)
            else:
                counts["read"] += 1
                fits = {"bool": bool, "int": int, "float": (int, float), "text": (str, int, float), "choice": bool}
                fits |= {"list": (list, str, int), "words": (list, str), "table": dict, "word": (str, bool)}
                is_unset = value == ""  # bf16 is on where it is missing, and off where it is unset
                assert is_unset or option.kind == "any" or isinstance(value, fits[option.kind]), (key, value)
    assert counts["refused"] > 100 and counts["read"] > 10


def test_yaml_itself():
    text = yaml.safe_dump({key: value for key, value in PLAIN.items() if key != "learning_rate"})
    assert import_text(text + "learning_rate: 1e-4\n").values["optimizer.lr"] == 1e-4  # text in YAML 1.1
    octal = import_text(text.replace("seed: 7", "seed: 010") + "learning_rate: 1e-4\n")
    assert octal.values["debug.seed"] == 8  # as PyYAML reads it for Axolotl
    assert is_refused(import_text(text + "learning_rate: 2024-01-01\n"), "learning_rate")
    for wrong, message in {
        "learning_rate: 1e-4\nlearning_rate: 2e-4\n": "'learning_rate' twice",
        "learning_rate: &rate 1e-4\nweight_decay2: *rate\n": "an alias",
        "learning_rate: !!python/object/apply:os.system ['x']\n": "not valid YAML",
        "- 1\n": "not valid YAML",
        "learning_rat: 1e-4\n": None,
        "1: 2\n": "not a table",
    }.items():
        if message is None:
            assert is_refused(import_text(text + wrong), "learning_rat")
            continue
        with pytest.raises(JobError, match=message):
            import_text(text + wrong)


FLAGS = [  # flags, and the option that they are in a file, as click and _coerce_value read them; None: refused
    ("--seed 010", {"seed": 10}),
    ("--output_dir=010", {"output_dir": "010"}),
    ("--no-sample-packing", {"sample_packing": False}),
    ("--sample-packing", {"sample_packing": True}),
    ("--bf16 false", {"bf16": False}),
    ("--bf16 True", {"bf16": True}),
    ("--bf16 None", {"bf16": False}),
    ("--bf16 full", None),  # false for Axolotl, as the file has a truth value
    ("--gradient_checkpointing offload", None),
    ("--learning-rate 1e-5 --learning_rate 3e-5", {"learning_rate": 3e-5}),
    ("--sample_packing no", {"sample_packing": False}),
    ("--datasets '[{path: b.jsonl, type: alpaca}]'", {"datasets": [{"path": "b.jsonl", "type": "alpaca"}]}),
    ("--sample_packing on", None),
    ("--seed 1:30", None),
    ("--seed 0x10", None),
    ("--no-seed", None),
]


@pytest.mark.parametrize("flags, options", FLAGS, ids=[flags for flags, _ in FLAGS])
def test_flags_are_not_read_as_yaml(flags, options):
    job = import_table(PLAIN, line=f"job.yml --world-size 2 {flags}")
    if options is None:
        assert job.faults
    else:
        expected = import_table(PLAIN | options, line="job.yml --world-size 2")
        assert (job.values, job.faults, expected.faults) == (expected.values, [], [])


def test_strict_files_take_no_further_keys_from_flags():
    table = {key: value for key, value in PLAIN.items() if key != "seed"} | {"strict": True}
    (fault,) = import_table(table, line="job.yml --world-size 2 --seed 3 --weight_decay 0").faults
    assert "seed: given 3" in str(fault).replace('"', "") and "Axolotl ignores it: write it into the file" in str(fault)


RANKS = {
    "job.yml": None,
    "job.yml --world-size 4": 4,
    "job.yml --num-processes 3": 3,
    "axolotl train job.yml": None,
    "axolotl train job.yml --world-size=2 --seed 3": 2,
    "axolotl train job.yml --num_processes 4": 4,
    "axolotl train job.yml --launcher torchrun": 1,
    "axolotl train job.yml --launcher torchrun -- --nproc-per-node=2 --nnodes 2": 4,
    "axolotl train job.yml --launcher accelerate -- --num_processes 8": 8,
    "axolotl train job.yml -- --num_processes=8": 8,
    "axolotl train job.yml --launcher python": 1,
    "axolotl train job.yml --no-accelerate": 1,
    "python -m axolotl.cli.train job.yml": 1,
    "accelerate launch -m axolotl.cli.train job.yml": None,
    "accelerate launch --num_processes 4 -m axolotl.cli.train job.yml": 4,
    "torchrun --nproc-per-node 4 -m axolotl.cli.train job.yml": 4,
    "torchrun --nproc-per-node gpu -m axolotl.cli.train job.yml": None,
    "deepspeed --num_gpus 2 -m axolotl.cli.train job.yml": 2,
    "deepspeed -m axolotl.cli.train job.yml": None,
}


@pytest.mark.parametrize("line", RANKS)
def test_the_global_batch_is_that_of_all_ranks(line):
    ranks = RANKS[line]
    job = import_table(PLAIN, line=line)
    if ranks is None:
        assert is_refused(job, "gradient_accumulation_steps") and "--world-size N" in str(job.faults[0])
        job = import_table(PLAIN | {"gradient_accumulation_steps": 1}, line=line)
        assert job.faults == [] and "training.global_batch_size" not in job.values
        assert "a step has 2 samples of each rank, as Axolotl starts all GPUs" in " ".join(job.notes)
    else:
        assert job.faults == [] and job.values["training.global_batch_size"] == 2 * 4 * ranks
    assert job.values["training.local_batch_size"] == 2 and not any("world_size" in note for note in job.notes)


@pytest.mark.parametrize(
    "line, message",
    {
        "job.yml --world-size none": "--world-size: given none; allowed: a whole number >= 1",
        "job.yml --world-size": "--world-size: given nothing",
        "job.yml --launcher slurm": "--launcher: given 'slurm'; allowed: accelerate, torchrun or python",
        "job.yml --launcher python -- --nnodes 2": "python starts none; drop them",
        "axolotl train job.yml -- stray": "'stray' after -- is no option of accelerate",
        "torchrun -m axolotl.cli.train job.yml -- --nnodes 2": "only Axolotl's own command passes words on",
    }.items(),
)
def test_refused_launchers(line, message):
    with pytest.raises(JobError, match=message):
        import_table(PLAIN, line=line)


def test_a_file_starts_as_axolotl_starts_it(monkeypatch, capsys):
    """`--run` may follow the file. Without a number of ranks it takes all GPUs."""
    started = []
    monkeypatch.setattr("torchtitan.plugins.importers.command.launch", lambda ranks, argv: started.append(ranks) or 0)
    monkeypatch.setattr("torchtitan.plugins.importers.command.check", lambda *args: [])
    import_table(PLAIN)
    assert cli.main(["import", "job.yml", "--run"]) == 0 and started == [1]  # on a CPU one, as accelerate does
    monkeypatch.setattr("torchtitan.plugins.importers.command.likely_device", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert cli.main(["import", "job.yml", "--run"]) == 0 and started == [1, 3]
    assert cli.main(["import", "job.yml", "--world-size", "4", "--run"]) == 0 and started == [1, 3, 4]
