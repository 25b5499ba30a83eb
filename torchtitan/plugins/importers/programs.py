"""Recognition of the program that an options file or a command line is written for, by keys that only it has.

A program that is not translated is recognised too, so that its file is refused by its name and not key by key.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.core import yaml_file
from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import read_json
from torchtitan.plugins.importers.translation import CommandLine

CONFIGS = (".yaml", ".yml", ".json")
"""Suffixes of options files."""


class OtherProgram(NamedTuple):
    """A program. `marks`: keys that only its files have, separated by blanks.

    `commands`: the first words of its own commands. The second words of these are `subcommands`, any if empty.
    `refusal`: why its files are not translated, if they are not.
    """

    title: str
    marks: str
    commands: tuple[str, ...] = ()
    subcommands: tuple[str, ...] = ()
    refusal: str = ""


PROGRAMS = {
    "axolotl": OtherProgram(
        "Axolotl",
        """base_model base_model_config sequence_len micro_batch_size sample_packing val_set_size train_on_inputs
            adapter lora_target_linear num_epochs pretraining_dataset test_datasets dataset_prepared_path rl
            train_data_uri flash_attention sample_packing_eff_est pad_to_sequence_len eot_tokens""",
        ("axolotl",),
    ),
    "llamafactory": OtherProgram(
        "LLaMA-Factory",
        """stage finetuning_type dataset dataset_dir eval_dataset template val_size lora_rank lora_target pref_beta
            pref_loss pref_ftx quantization_bit quantization_method preprocessing_num_workers neat_packing mask_history
            train_on_prompt pure_bf16 mix_strategy plot_loss max_samples tokenized_path freeze_trainable_layers
            additional_target use_galore use_badam""",
        ("llamafactory-cli", "lmf"),
        ("train",),
    ),
    "trl": OtherProgram(
        "trl",
        """dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming use_peft
            completion_only_loss assistant_only_loss dataset_text_field packing_strategy eval_packing lora_task_type
            chat_template_path model_init_kwargs sync_ref_model loss_type loss_weights truncation_mode
            padding_free""",
        ("trl",),
        ("sft", "dpo", "grpo", "kto", "reward", "rloo", "distillation"),
    ),
    "deepspeed": OtherProgram(
        "DeepSpeed",
        """zero_optimization train_micro_batch_size_per_gpu train_batch_size gradient_clipping steps_per_print
            wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer""",
    ),
    "llamafactory_v1": OtherProgram(
        "LLaMA-Factory's second version",
        """model_class train_dataset sample_backend dist_config peft_config kernel_config quant_config init_config
            optim_config batching_strategy""",
        refusal="it is experimental, and only files of the first version (stage, finetuning_type) are translated",
    ),
    "axolotl_cloud": OtherProgram(
        "Axolotl's cloud runners",
        "provider secrets gpu gpu_count node_count volumes memory_preprocess timeout_preprocess dockerfile_commands",
        refusal="it says on which machines axolotl train --cloud runs a file: give that file; torchtitan manifest "
        "writes jobs of Kubernetes and SLURM",
    ),
    "accelerate": OtherProgram(
        "accelerate config",
        "compute_environment distributed_type machine_rank main_training_function num_machines",
        refusal="it says how a script is started: give the line, accelerate launch --config_file FILE SCRIPT ...",
    ),
    "torchtune": OtherProgram(
        "torchtune",
        "",
        ("tune",),
        ("run",),
        refusal="it has ended, and its files name Python classes: begin with one of `torchtitan presets ls`",
    ),
}
COMPONENT = "_component_"
"""Key of torchtune's tables."""
SECOND_VERSION = "model_class"
"""Key of a file of LLaMA-Factory's second version, which its command reads too if USE_V1 is set."""
OWN_SCRIPTS = {"sft.py": "trl", "dpo.py": "trl", "reward.py": "trl"}
"""Script -> its program, where the flags do not tell."""
MAJORITY = 2
"""A file with keys of several programs is of the one that has this many times as many of them as any other, and a line
without a file has at least so many flags of its program."""


def command_in(args: Sequence[str]) -> tuple[str, int]:
    """Return the program whose command a line runs, and the index of its word; ("", 0) if it runs none."""
    for i, arg in enumerate(args):
        name, following = arg.replace("\\", "/").rpartition("/")[2], args[i + 1 : i + 2]
        if i and args[i - 1] == "-m":
            name = name.partition(".")[0]
        for program, entry in PROGRAMS.items():
            names = (program,) if entry.commands and i and args[i - 1] == "-m" else entry.commands
            if name in names and (not entry.subcommands or {*following} & {*entry.subcommands}):
                return program, i
        if arg.endswith((".py", *CONFIGS)):
            break
    return "", 0


def table_in(path: str) -> dict[str, Any]:
    """Return the table in an options file. Raises JobError if it cannot be read."""
    return read_json(Path(path).expanduser()) if path.endswith(".json") else yaml_file.read(path)


def program_of(line: CommandLine) -> str:
    """Return the program that a line is for, by its command, its options file and its flags; empty if unknown.

    Raises JobError for a program that is not translated, and for a file whose program is not clear.
    """
    program, table = line.program, {}
    if line.config is not None and program in ("", "llamafactory"):
        table = table_in(line.config)
    if not program or SECOND_VERSION in table:
        program = _recognised(line.config or line.script, table, [name for name, _ in line.flags])
    entry = PROGRAMS.get(program)
    if entry is not None and entry.refusal:
        raise JobError(f"{line.config or line.script}: of {entry.title}; {entry.refusal}")
    return program


def refuse_other_file(line: CommandLine, program: str) -> None:
    """Raise JobError if the options file has no key of this program, but keys of one that is not translated."""
    table = {} if line.config is None else table_in(line.config)
    marks = {name: {*entry.marks.split()} & table.keys() for name, entry in PROGRAMS.items()}
    candidates = [name for name, entry in PROGRAMS.items() if entry.refusal and len(marks[name]) >= MAJORITY]
    if candidates and not marks[program]:
        other = PROGRAMS[max(candidates, key=lambda name: len(marks[name]))]
        raise JobError(f"{line.config}: of {other.title}; {other.refusal}")


def _recognised(source: str, table: Mapping[str, Any], flags: Collection[str]) -> str:
    if any(isinstance(value, dict) and COMPONENT in value for value in table.values()):
        return "torchtune"
    marks = {name: sorted({*entry.marks.split()} & {*table, *flags}) for name, entry in PROGRAMS.items()}
    ranking = sorted((name for name in marks if marks[name]), key=lambda name: -len(marks[name]))
    if not table and (not ranking or len(marks[ranking[0]]) < MAJORITY):
        return OWN_SCRIPTS.get(source, "")  # another script may have a flag of this name
    if not ranking and table:
        examples = "; ".join(
            f"{entry.title}: {', '.join(entry.marks.split()[:3])}" for entry in PROGRAMS.values() if entry.marks
        )
        raise JobError(
            f"{source}: of which program is not clear, as it has no key that only one has ({examples}); "
            "name it with --from"
        )
    if len(ranking) > 1 and len(marks[ranking[0]]) < MAJORITY * len(marks[ranking[1]]):
        keys = "; ".join(f"{PROGRAMS[name].title}: {', '.join(marks[name][:5])}" for name in ranking)
        raise JobError(f"{source}: has keys of several programs ({keys}); correct them, or name it with --from")
    return ranking[0] if ranking else ""
