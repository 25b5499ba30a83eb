"""torchrun_main.py of ReLoRA as jobs: its flags of July 2023 with their defaults, and those that came later.

What the script did and does not happen here is said in a note; a flag that means nothing here is refused with the
reason. Flags are looked at by subject, each in one place.
"""

import re
from pathlib import Path
from typing import Any

from torchtitan.config.options import show
from torchtitan.core.errors import JobError
from torchtitan.datasets.sources_pretokenized import Blocks
from torchtitan.datasets.streams import lanes_for
from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.relora_flags import FLAGS, read_optimizer, with_file
from torchtitan.importers.script import Script
from torchtitan.importers.translation import family_in, from_folder
from torchtitan.lr_schedules.restarts import CYCLICAL, JAGGED
from torchtitan.models import SIZES
from torchtitan.models.hf.config import CONFIG, read_json
from torchtitan.models.llama import RELORA, relora_sizes

TOKENS = re.compile(r"(\d+)([KMB]?)", re.IGNORECASE)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
EVALUATED_TOKENS = 10**7
COUNTS = ("batch_size", "total_batch_size", "gradient_accumulation", "max_length", "num_training_steps")
DROPOUT = 0.1
"""Of what adapters read, which the script had no flag for."""
VOCABULARY = 32_100
"""Of the script's own model configs: T5's tokenizer."""


class _ReLoRA(Script):
    FLAGS = FLAGS

    def __init__(self, line: CommandLine) -> None:
        super().__init__(with_file(line))

    def read(self) -> None:
        self.data()
        self.model()
        self.batch()
        read_optimizer(self)
        self.schedule()
        self.adapter()
        self.reset()
        self.start()
        self.plan()
        self.output()
        self.rest()

    def data(self) -> None:
        given, values = self.given, self.values
        values |= {"training.seq_len": given["max_length"], "training.dataloader.num_workers": given["workers"]}
        path = given["dataset_path"]
        dataset, tokenizer = "c4", given["tokenizer"]
        values |= {"debug.seed": given["seed"], "training.shuffle": given["seed"] != 0 or path is None}
        if path is None:
            self.note("without --dataset_path the script streamed C4: here too, its documents packed and not padded,")
            self.note("and shuffled whatever the seed is")
            if given["dataset"] != FLAGS["dataset"].default:
                self.refuse("dataset", given["dataset"], "c4,en", "make another one with prepare, or pretokenize.py")
        else:
            in_order = "seed 0 leaves the data in their order, as the script does"
            self.note("data shuffled" if given["seed"] else in_order)
            dataset, values["training.dataset_path"] = "pretokenized", path
            tokenizer = self._tokenizer_of(Path(path))
        values |= {"training.dataset": dataset, "model.tokenizer_path": tokenizer}
        if tokenizer != "bytes" and not Path(tokenizer).exists():
            self.note(f"the tokenizer {tokenizer} has to be in a folder of that name here, see docs/data.md")

    def _tokenizer_of(self, folder: Path) -> str:
        try:
            said = read_json(folder / "args.json")
            name = said["tokenizer"]
        except (JobError, KeyError):
            name = None  # which check has its own words for
        asked = self.given["tokenizer"]
        if not isinstance(name, str):
            return asked
        if "tokenizer" in self.given and Path(asked).name != Path(name).name:
            self.refuse("tokenizer", asked, f"{name}, which {folder / 'args.json'} names", "leave the flag out")
        return asked if "tokenizer" in self.given else name

    def model(self) -> None:
        given, config, folder = self.given, self.given["model_config"], self.given["model_name_or_path"]
        if (config is None) == (folder is None):
            self.refuse("model_config", config, "one of --model_config and --model_name_or_path", "give one")
        elif config is not None:
            self._preset(Path(config))
        elif Path(folder, CONFIG).is_file():
            name = family_in(Path(folder))
            if name is None:
                self.refuse("model_name_or_path", folder, f"a model of {', '.join(SIZES)}", "no other family is here")
                return
            self.values |= from_folder(name, folder)
        else:
            self.refuse("model_name_or_path", folder, "a folder in the form of Hugging Face", "fetch the model to one")
        if given["use_hf_model"]:
            self.note("--use_hf_model: there is one Llama here, which computes what that of transformers does")
        if "model_revision" in given:
            self.note(f"--model_revision {given['model_revision']}: what is in the folder is taken, fetch that one")

    def _preset(self, path: Path) -> None:
        """A shipped size by the file's name, where it cannot be read; else the size that it says."""
        flavor = path.stem.removeprefix("llama_").lower()
        self.values["model.name"] = "llama2"
        if not path.is_file():
            if flavor not in RELORA:
                self.refuse("model_config", str(path), f"a file, or llama_SIZE of {', '.join(RELORA)}", "give its path")
                return
            vocabulary = RELORA[flavor].vocab_size
            self.note(
                f"{path} is not here: {flavor} by its name" + f", vocabulary {VOCABULARY}" * (vocabulary == 32_000)
            )
            sizes = RELORA[flavor].vocab_size if vocabulary != 32_000 else VOCABULARY
            overrides = {"vocab_size": sizes} if sizes != vocabulary else {}
        else:
            try:
                said = read_json(path)
                if said.get("model_type", "llama") != "llama":
                    raise JobError(f"it is of a {said['model_type']}")
                flavor, overrides = _sizes(said)
            except (JobError, KeyError, TypeError, ValueError) as error:
                self.refuse("model_config", str(path), "a config of a Llama", f"{type(error).__name__}: {error}")
                return
        self.values["model.flavor"] = flavor
        if overrides:
            self.values["model.overrides"] = overrides

    def batch(self) -> None:
        given, local, ranks = self.given, self.given["batch_size"], self.line.ranks
        total, passes = given["total_batch_size"], given["gradient_accumulation"]
        if local is None:
            self.refuse("batch_size", None, "a number of sequences", "the script needs it too")
        if ranks is None:
            self.refuse("nproc_per_node", None, "a number", "write how many ranks there are: --world-size N")
        if local is None or ranks is None or not self._are_counts():
            return
        if total is None:
            total = local * ranks * (passes or 1)
        whole, left = divmod(total, local * ranks)
        if left or not whole or passes not in (None, whole):
            has = f"batch_size {local} x {ranks} ranks" + f" x gradient_accumulation {passes}" * (passes is not None)
            self.refuse("total_batch_size", total, f"a multiple of {local * ranks}: {has}", "change one of them")
        self.values |= {"training.local_batch_size": local, "training.global_batch_size": total}
        tokens, steps = given["max_train_tokens"], given["num_training_steps"]
        if tokens is not None:
            found = TOKENS.fullmatch(tokens)
            steps = int(found[1]) * UNITS[found[2].upper()] // (total * given["max_length"]) if found else 0
            if steps:
                self.note(f"--max_train_tokens {tokens} are {steps} steps of {total} x {given['max_length']} tokens")
            else:
                self.refuse("max_train_tokens", tokens, "such as 100M, and at least those of a step", "")
        self.values["training.steps"] = max(steps, 1)

    def _are_counts(self) -> bool:
        wrong = [flag for flag in COUNTS if self.given[flag] is not None and self.given[flag] < 1]
        for flag in wrong:
            self.refuse(flag, self.given[flag], "at least 1")
        return not wrong

    def schedule(self) -> None:
        given, values = self.given, self.values
        kind, warmup, floor = given["scheduler"], given["warmup_steps"], given["min_lr_ratio"]
        ours = {"cosine": CYCLICAL, "linear": "linear", "cosine_restarts": JAGGED}[kind]
        values |= {"lr_scheduler.decay_type": ours, "lr_scheduler.warmup_steps": warmup}
        if not 0 < floor <= 1:
            self.refuse("min_lr_ratio", floor, "more than 0 and at most 1")
        values["lr_scheduler.min_lr_factor"] = 0.0 if kind == "linear" else floor
        for flag in ("restart_warmup_steps", "adjust_step"):
            if flag in given and kind == "cosine_restarts":
                values[f"lr_scheduler.{flag}"] = given[flag]
        if kind == "cosine_restarts" and given["adjust_step"]:
            self.note(
                "--adjust_step: the rate is cut where the step and it together are a multiple of the cycle, as by"
            )
            self.note("the script of July 2023; its later version leaves out the first of these cuts")
        if kind != "cosine_restarts" and given["restart_warmup_steps"]:
            self.note(f"no effect with --scheduler {kind}: --restart_warmup_steps")
        if kind != "cosine_restarts" and given["adjust_step"]:
            remedy = "it belongs to cosine_restarts"
            self.refuse("adjust_step", given["adjust_step"], f"nothing with --scheduler {kind}", remedy)
        if kind == "cosine_restarts" and given["restart_warmup_steps"] is None:
            self.refuse("restart_warmup_steps", None, "a number of updates with cosine_restarts", "give it")
        cycle = given["cycle_length"]
        if kind == "linear":
            if cycle is not None:
                self.note(f"--cycle_length {cycle} has no effect on the rate of the linear schedule")
        elif cycle is not None:
            values["lr_scheduler.cycle_length"] = cycle
        if warmup >= values.get("training.steps", warmup + 1) and kind != "cosine_restarts":
            values["lr_scheduler.total_steps"] = warmup + 1
            self.note(f"--warmup_steps {warmup} do not end in this run: the schedule is made longer than it")

    def adapter(self) -> None:
        given, values = self.given, self.values
        if not given["use_peft"]:
            if given["relora"] is None:
                if ignored := [flag for flag in ("lora_r", "lora_alpha", "train_scaling") if flag in given]:
                    self.note(f"no effect without --use_peft: --{', --'.join(ignored)}")
                return
            self.note("--relora means --use_peft, which is not given")
        needed = ("relora", "force_keep_original", "continue_from", "warmed_up_model", "continue_from_peft")
        if not any(given[flag] for flag in (*needed, "resume_from", "model_name_or_path", "quantize")):
            values["adapter.lora_only"] = True
            self.note("nothing needs the full matrices, so the script drops them and trains B A alone")
        values |= {"adapter.kind": "lora", "adapter.rank": given["lora_r"], "adapter.train_dense_rest": True}
        values["adapter.dropout"] = DROPOUT
        if "adapter.lora_only" not in values:
            self.note(
                "A begins at random and B at zero, at first and after each restart; in the script's last version A"
            )
            self.note("was zero too at first, so that neither learned anything before the first restart")
        if given["train_scaling"]:
            values["adapter.train_scaling"] = True
            if given["relora"] is not None:
                self.note("learned scales begin again at 1 after a restart: the script set them to 0, where they stay")
        else:
            values["adapter.alpha"] = given["lora_alpha"]
        if given["quantize"]:
            self._quantized()

    def _quantized(self) -> None:
        asked = self.given["quantize"]
        if self.given["relora"] is not None:
            self.refuse(
                "quantize", asked, "nothing with --relora", "each restart would round the packed matrices again"
            )
        elif asked == "8bit":
            self.values["adapter.kind"] = "lora_int8"
            self.note("--quantize 8bit: weights alone are in 8 bits here, a scale for each row; inputs are not rounded")
        else:
            self.values["adapter.kind"] = "qlora"
            if not self.given["use_double_quant"]:
                self.refuse("use_double_quant", False, "true", "scales are always in 8 bits here")

    def reset(self) -> None:
        given, values, every, cycle = self.given, self.values, self.given["relora"], self.given["cycle_length"]
        pruned = {"random": given["optimizer_random_pruning"], "magnitude": given["optimizer_magnitude_pruning"]}
        for mode, ratio in pruned.items():
            if not 0 <= ratio < 1:
                self.refuse(f"optimizer_{mode}_pruning", ratio, "at least 0 and less than 1")
        chosen = {mode: ratio for mode, ratio in pruned.items() if 0 < ratio < 1}
        if every is None:
            if chosen or not given["reset_optimizer_on_relora"]:
                self.note("no effect without --relora: what is reset of the optimizer's state")
            return
        values["adapter.relora.every"] = every
        if cycle is not None and cycle != every:
            values["adapter.relora.reset_every"] = cycle
        if len(chosen) + given["reset_optimizer_on_relora"] > 1:
            remedy = "write --reset_optimizer_on_relora False beside one of the prunings"
            self.refuse("reset_optimizer_on_relora", given["reset_optimizer_on_relora"], "one kind of reset", remedy)
        elif given["reset_optimizer_on_relora"]:
            values["adapter.relora.reset"] = "zero"
            self.note("reset to zero: all of the moments, where the script left a thousandth of them")
        for mode, ratio in chosen.items():
            values |= {"adapter.relora.reset": mode, "adapter.relora.prune_ratio": ratio}
            self.note("the two moments of A keep the same entries, and so do B's; the script pruned each by itself, so")
            self.note('that steps may divide by nearly nothing: adapter.relora.mask = "independent" does that too')
        if not chosen and not given["reset_optimizer_on_relora"]:
            values["adapter.relora.reset"] = "none"

    def start(self) -> None:
        given, values = self.given, self.values
        warm = given["continue_from"] or given["warmed_up_model"]
        again = given["continue_from_peft"] or given["resume_from"]
        if warm and again:
            self.refuse("continue_from", warm, "nothing beside --continue_from_peft", "drop one of the two")
        elif warm:
            values |= {"checkpoint.initial_load_path": warm, "checkpoint.initial_load_counters": True}
        elif again:
            values |= {"checkpoint.initial_load_path": again, "checkpoint.initial_load_model_only": False}
            # the older flag left the state out unless it was asked for, the newer one took it unless it was not
            taken = given["restore_optimizer" if given["continue_from_peft"] else "load_optimizer_state_on_resume"]
            if not taken:
                values["checkpoint.exclude_from_loading"] = ["optimizer"]
        elif given["restore_optimizer"]:
            self.note("no effect without --continue_from_peft: --restore_optimizer")
        if given["autoresume"]:
            self.note("--autoresume: a job started again goes on from the newest checkpoint in its folder anyway")

    def plan(self) -> None:
        given, values = self.given, self.values
        sharded = given["distributed_type"] == "fsdp" or given["optimizer"] == "adam_zero"
        if not sharded and self.line.ranks is not None:
            values |= {
                "parallelism.data_parallel_replicate_degree": self.line.ranks,
                "parallelism.data_parallel_shard_degree": 1,
            }
        values["activation_checkpoint.mode"] = "full" if given["activation_checkpointing"] else "none"
        if given["single_gpu"]:
            self.note("--single_gpu: one rank, as the line starts it")
        dtype = given["dtype"] or "bf16"
        if given["dtype"] is None:
            self.note("no --dtype: bfloat16, which the script took where it was supported")
        if dtype in ("fp16", "float16"):
            self.refuse("dtype", dtype, "bf16 or fp32", "float16 overflows without a scaler; bf16 needs none")
        name = "bfloat16" if dtype.startswith("b") else "float32"
        values |= {"training.dtype": name, "training.mixed_precision_param": name}

    def output(self) -> None:
        given, values = self.given, self.values
        config = Path(given["model_config"] or given["model_name_or_path"] or "model").stem
        values["job.dump_folder"] = given["save_dir"] or f"checkpoints/{config}"
        kept = given["keep_checkpoints"] or 0
        if kept == 1:
            self.note("--keep_checkpoints 1: two are kept, as the last one alone could not be trusted")
            kept = 2
        values |= {"checkpoint.enable": True, "checkpoint.interval": given["save_every"]}
        values |= {"checkpoint.keep_latest_k": kept, "validation.enable": True, "validation.freq": given["eval_every"]}
        values["validation.dataset"] = f"{values['training.dataset']}_validation"
        if given["dataset_path"] is not None:
            values["validation.dataset_path"] = given["dataset_path"]
        local, ranks = given["batch_size"], self.line.ranks
        held_out = self._held_out()
        if local and ranks and given["max_length"] > 0:
            values["validation.local_batch_size"] = local
            if held_out is not None and held_out * given["max_length"] < EVALUATED_TOKENS:
                values["validation.samples"] = held_out
            else:
                values["validation.steps"] = max(1, EVALUATED_TOKENS // (local * ranks * given["max_length"]))
        if given["tags"]:
            values["job.tags"] = [tag.strip() for tag in given["tags"].split(",") if tag.strip()]
        if given["comment"]:
            values["job.description"] = given["comment"]
        if given["profile"]:
            values["profiling.enable_profiling"] = True
        self.note("evaluated on at most 10M tokens each time; the script's last one, on 100M, is not made")
        self.note("the script logged to Weights & Biases: here metrics.enable_wandb = true does")

    def _held_out(self) -> int | None:
        """Blocks to evaluate on, as many as are read before one is read twice; None where they are not here."""
        try:
            blocks = len(Blocks(self.given["dataset_path"], "validation"))
        except (OSError, JobError):  # which check has its own words for
            return None
        return blocks - blocks % lanes_for(blocks)

    def rest(self) -> None:
        """What is no option of a job."""
        given = self.given
        if given["name"] is not None:
            self.note("--name: the script did nothing with it; --save_dir says where the run is")
        for flag in ("svd_optimizer_on_relora", "keep_first_opt_rows"):
            if given[flag]:
                why = "--optimizer_magnitude_pruning 0.9 keeps a part of the state, as the script does since then"
                self.refuse(flag, given[flag], "0", why)
        if not given["train_ln"]:
            self.refuse("train_ln", False, "true", "the norms are always trained")
        if given["wandb_watch"]:
            self.refuse("wandb_watch", True, "false", "gradients of single parameters are not logged")
        reasons = {
            "skip_batches": "no update of the data can be left out; what is damaged, training.on_bad_data leaves out",
            "megatron_dataset_config": "Megatron's index is not read; give --dataset_path, or make shards with prepare",
        }
        for flag, why in reasons.items():
            if given[flag] is not None:
                self.refuse(flag, given[flag], "nothing", why)


read = _ReLoRA.meaning_of


def _sizes(said: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The nearest preset, and what is otherwise than in it."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    width, hidden, heads, layers = shape = [said[name] for name in names]
    if not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"sizes {show(shape)}")
    length = said.get("max_sequence_length", said.get("max_position_embeddings", 2048))
    args = relora_sizes(width, hidden, heads, layers, said.get("vocab_size", 32_000), max_seq_len=length)
    wanted = vars(args) | {"norm_eps": said.get("rms_norm_eps", 1e-6)}

    def differing(flavor: str) -> dict[str, Any]:
        return {name: value for name, value in wanted.items() if vars(RELORA[flavor])[name] != value}

    flavor = min(RELORA, key=lambda each: (None in differing(each).values(), len(differing(each))))
    return flavor, differing(flavor)
