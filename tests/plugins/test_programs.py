"""Recognition of the program of an options file or a command line."""

import json

import pytest
import yaml

from torchtitan.core.errors import JobError
from torchtitan.plugins.importers import SOURCES, parse, programs, split
from torchtitan.plugins.importers.command import translate

AXOLOTL = {"base_model": "llama", "sequence_len": 64, "micro_batch_size": 1, "learning_rate": 1e-4}
FACTORY = {"model_name_or_path": "llama", "stage": "sft", "finetuning_type": "lora", "template": "llama3"}
TRL = {"model_name_or_path": "llama", "dataset_name": "a", "use_peft": True, "learning_rate": 1e-4}
TUNE = {"model": {"_component_": "torchtune.models.llama3.llama3_8b"}, "epochs": 1, "dataset": {"_component_": "x"}}
SECOND = {"model": "llama", "model_class": "llm", "train_dataset": "a.yaml", "micro_batch_size": 1}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 2}
CLOUD = {"provider": "baseten", "secrets": ["HF_TOKEN"], "gpu": "h100", "gpu_count": 8}
ZERO = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto"}


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def program_of(line, table=None):
    if table is not None:
        for name in ("job.yml", "job.json"):
            with open(name, "w") as file:
                (yaml.safe_dump if name == "job.yml" else json.dump)(table, file)
    return programs.program_of(parse(split([line])))


@pytest.mark.parametrize(
    "table, program",
    [(AXOLOTL, "axolotl"), (FACTORY, "llamafactory"), (TRL, "trl"), (ZERO, "deepspeed")],
    ids=["axolotl", "llamafactory", "trl", "deepspeed"],
)
@pytest.mark.parametrize("line", ["job.yml", "job.json", "torchrun train.py job.yml", "job.yml --world-size 2"])
def test_a_file_is_recognised_by_its_keys(line, table, program, monkeypatch):
    monkeypatch.setattr(programs, "PROGRAMS", {name: p._replace(refusal="") for name, p in programs.PROGRAMS.items()})
    assert program_of(line, table) == program


@pytest.mark.parametrize(
    "table, message",
    [
        (TUNE, "job.yml: of torchtune; it has ended"),
        (SECOND, "job.yml: of LLaMA-Factory's second version; it is experimental"),
        (ACCELERATE, "job.yml: of accelerate config; it says how a script is started"),
        (CLOUD, "job.yml: of Axolotl's cloud runners; it says on which machines"),
        (
            {"learning_rate": 1e-4},
            "job.yml: of which program is not clear, as it has no key that only one has (Axolotl",
        ),
        (
            {"base_model": "a", "cutoff_len": 4, "template": "b"},
            "has keys of several programs (Axolotl: base_model; LLaMA-Factory: template); correct them, or name it",
        ),
    ],
    ids=["torchtune", "second version", "accelerate", "cloud", "none", "two"],
)
def test_a_file_of_another_program_is_refused_in_one_sentence(table, message):
    with pytest.raises(JobError) as error:
        program_of("job.yml", table)
    assert message in str(error.value)


def test_a_file_of_a_cloud_runner_is_refused_in_one_sentence_with_a_named_source_too():
    with open("cloud.yml", "w") as file:
        yaml.safe_dump(CLOUD, file)
    with pytest.raises(JobError, match="^cloud.yml: of Axolotl's cloud runners; .*: give that file; "):
        translate(parse(split(["cloud.yml"])), "axolotl")


def test_one_foreign_key_does_not_hide_the_program():
    """The reader then refuses it by name."""
    assert program_of("job.yml", AXOLOTL | {"lora_rank": 8}) == "axolotl"


LINES = {
    "axolotl train a.yml": ("axolotl", None),
    "accelerate launch --num_processes 4 -m axolotl.cli.train a.yml": ("axolotl", 4),
    "llamafactory-cli train a.yaml learning_rate=1e-5 --logging_steps 1": ("llamafactory", None),
    "FORCE_TORCHRUN=1 NPROC_PER_NODE=4 NNODES=2 llamafactory-cli train a.yaml": ("llamafactory", 8),
    "CUDA_VISIBLE_DEVICES=0,3 llamafactory-cli train a.yaml": ("llamafactory", 2),
    "env CUDA_VISIBLE_DEVICES=0 lmf train --stage sft": ("llamafactory", 1),
    "llamafactory-cli train a.yaml --world-size 3": ("llamafactory", 3),
    "trl sft --model_name_or_path a --lora_target_modules q_proj v_proj --num_processes 3": ("trl", 3),
    "trl dpo --config a.yaml --accelerate_config zero3": ("trl", 8),
    "trl sft --accelerate_config multi_gpu --num_processes 2": ("trl", 2),
    "tune run --nproc_per_node 2 lora_finetune_distributed --config a.yaml": ("torchtune", None),
}


@pytest.mark.parametrize("line", LINES)
def test_commands(line):
    with open("a.yaml", "w") as file, open("a.yml", "w") as other:
        yaml.safe_dump(FACTORY, file)
        yaml.safe_dump(AXOLOTL, other)
    parsed = parse(split([line]))
    assert (parsed.program, parsed.ranks) == LINES[line]


def test_what_a_command_says():
    parsed = parse(split(["A=1 llamafactory-cli train a.yaml learning_rate=1e-5 --logging_steps 1 > log"]))
    assert (parsed.script, parsed.config, parsed.environment) == ("a.yaml", "a.yaml", {"A": "1"})
    assert parsed.flags == [("learning_rate", "1e-5"), ("logging_steps", "1")]
    parsed = parse(split(["trl sft --lora_target_modules q_proj v_proj --packing --mixed_precision bf16 --debug x"]))
    assert (parsed.script, parsed.config, parsed.launcher) == ("trl sft", None, "accelerate")
    assert parsed.flags == [("lora_target_modules", "q_proj v_proj"), ("packing", None), ("debug", "x")]
    assert parsed.launched == {"mixed_precision": "bf16"}
    assert parse(split(["trl sft --accelerate_config zero2"])).launched["zero_stage"] == "2"


def test_scripts_by_their_flags():
    assert program_of("python train.py --dataset a --lr 1") == ""  # any script may have this flag
    with pytest.raises(JobError, match="train.py: not a supported program"):
        translate(parse(split(["python train.py --dataset a --lr 1"])), None)


def test_every_source_with_a_program_names_a_known_one():
    assert {entry.program for entry in SOURCES.values()} <= {"", *programs.PROGRAMS}
    assert all("of" in str(entry) for entry in SOURCES.values() if entry.program)
