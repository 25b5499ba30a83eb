"""Translate command lines of ReLoRA's torchrun_main.py to jobs: its flags of July 2023, with defaults, and later ones.

A note records behavior of the script that a job does not reproduce. A flag without an equivalent is refused with the
reason. Flags are handled by subject, each in one place.
"""

import re
from pathlib import Path
from typing import Any

from torchtitan.config.options import show
from torchtitan.core.errors import JobError
from torchtitan.datasets.sources_pretokenized import Blocks
from torchtitan.datasets.streams import stream_count
from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.relora_flags import FLAGS, read_optimizer, with_file
from torchtitan.importers.script import Script
from torchtitan.importers.translation import family_in, from_folder
from torchtitan.lr_schedules import CYCLICAL, JAGGED
from torchtitan.models import SIZES
from torchtitan.models.hf.config import CONFIG, read_json
from torchtitan.models.llama import RELORA, relora_sizes

TOKENS = re.compile(r"(\d+)([KMB]?)", re.IGNORECASE)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
EVALUATED_TOKENS = 10**7
COUNTS = ("batch_size", "total_batch_size", "gradient_accumulation", "max_length", "num_training_steps")
DROPOUT = 0.1
"""Dropout of the adapters' inputs, for which the script had no flag."""
VOCABULARY = 32_100
"""Vocabulary size of the script's own model configs, which use T5's tokenizer."""


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
        options, values = self.given, self.values
        values |= {"training.seq_len": options["max_length"], "training.dataloader.num_workers": options["workers"]}
        path = options["dataset_path"]
        dataset, tokenizer = "c4", options["tokenizer"]
        values |= {"debug.seed": options["seed"], "training.shuffle": options["seed"] != 0 or path is None}
        if path is None:
            self.note("without --dataset_path the script streamed C4: here too, its documents packed and not padded,")
            self.note("and shuffled whatever the seed is")
            if options["dataset"] != FLAGS["dataset"].default:
                self.refuse("dataset", options["dataset"], "c4,en", "make another one with prepare, or pretokenize.py")
        else:
            in_order = "seed 0 leaves the data in their order, as the script does"
            self.note("data shuffled" if options["seed"] else in_order)
            dataset, values["training.dataset_path"] = "pretokenized", path
            tokenizer = self._tokenizer_of(Path(path))
        values |= {"training.dataset": dataset, "model.tokenizer_path": tokenizer}
        if tokenizer != "bytes" and not Path(tokenizer).exists():
            self.note(f"the tokenizer {tokenizer} has to be in a folder of that name here, see docs/data.md")

    def _tokenizer_of(self, folder: Path) -> str:
        try:
            arguments = read_json(folder / "args.json")
            name = arguments["tokenizer"]
        except (JobError, KeyError):
            name = None  # which check has its own words for
        tokenizer = self.given["tokenizer"]
        if not isinstance(name, str):
            return tokenizer
        if "tokenizer" in self.given and Path(tokenizer).name != Path(name).name:
            self.refuse("tokenizer", tokenizer, f"{name}, which {folder / 'args.json'} names", "leave the flag out")
        return tokenizer if "tokenizer" in self.given else name

    def model(self) -> None:
        options, config, folder = self.given, self.given["model_config"], self.given["model_name_or_path"]
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
        if options["use_hf_model"]:
            self.note("--use_hf_model: there is one Llama here, which computes what that of transformers does")
        if "model_revision" in options:
            self.note(f"--model_revision {options['model_revision']}: what is in the folder is taken, fetch that one")

    def _preset(self, path: Path) -> None:
        """Set the model size from a config file, or from the file's name if the file is not on this machine."""
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
                config = read_json(path)
                if config.get("model_type", "llama") != "llama":
                    raise JobError(f"it is of a {config['model_type']}")
                flavor, overrides = _sizes(config)
            except (JobError, KeyError, TypeError, ValueError) as error:
                self.refuse("model_config", str(path), "a config of a Llama", f"{type(error).__name__}: {error}")
                return
        self.values["model.flavor"] = flavor
        if overrides:
            self.values["model.overrides"] = overrides

    def batch(self) -> None:
        options, local, ranks = self.given, self.given["batch_size"], self.line.ranks
        total, passes = options["total_batch_size"], options["gradient_accumulation"]
        if local is None:
            self.refuse("batch_size", None, "a number of sequences", "the script needs it too")
        if ranks is None:
            self.refuse("nproc_per_node", None, "a number", "write how many ranks there are: --world-size N")
        if local is None or ranks is None or not self._are_counts():
            return
        if total is None:
            total = local * ranks * (passes or 1)
        required_passes, remainder = divmod(total, local * ranks)
        if remainder or not required_passes or passes not in (None, required_passes):
            has = f"batch_size {local} x {ranks} ranks" + f" x gradient_accumulation {passes}" * (passes is not None)
            self.refuse("total_batch_size", total, f"a multiple of {local * ranks}: {has}", "change one of them")
        self.values |= {"training.local_batch_size": local, "training.global_batch_size": total}
        tokens, steps = options["max_train_tokens"], options["num_training_steps"]
        if tokens is not None:
            match = TOKENS.fullmatch(tokens)
            steps = int(match[1]) * UNITS[match[2].upper()] // (total * options["max_length"]) if match else 0
            if steps:
                self.note(f"--max_train_tokens {tokens} are {steps} steps of {total} x {options['max_length']} tokens")
            else:
                self.refuse("max_train_tokens", tokens, "such as 100M, and at least those of a step", "")
        self.values["training.steps"] = max(steps, 1)

    def _are_counts(self) -> bool:
        wrong = [flag for flag in COUNTS if self.given[flag] is not None and self.given[flag] < 1]
        for flag in wrong:
            self.refuse(flag, self.given[flag], "at least 1")
        return not wrong

    def schedule(self) -> None:
        options, values = self.given, self.values
        kind, warmup, floor = options["scheduler"], options["warmup_steps"], options["min_lr_ratio"]
        ours = {"cosine": CYCLICAL, "linear": "linear", "cosine_restarts": JAGGED}[kind]
        values |= {"lr_scheduler.decay_type": ours, "lr_scheduler.warmup_steps": warmup}
        if not 0 < floor <= 1:
            self.refuse("min_lr_ratio", floor, "more than 0 and at most 1")
        values["lr_scheduler.min_lr_factor"] = 0.0 if kind == "linear" else floor
        for flag in ("restart_warmup_steps", "adjust_step"):
            if flag in options and kind == "cosine_restarts":
                values[f"lr_scheduler.{flag}"] = options[flag]
        if kind == "cosine_restarts" and options["adjust_step"]:
            self.note(
                "--adjust_step: the rate is cut where the step and it together are a multiple of the cycle, as by"
            )
            self.note("the script of July 2023; its later version leaves out the first of these cuts")
        if kind != "cosine_restarts" and options["restart_warmup_steps"]:
            self.note(f"no effect with --scheduler {kind}: --restart_warmup_steps")
        if kind != "cosine_restarts" and options["adjust_step"]:
            remedy = "it belongs to cosine_restarts"
            self.refuse("adjust_step", options["adjust_step"], f"nothing with --scheduler {kind}", remedy)
        if kind == "cosine_restarts" and options["restart_warmup_steps"] is None:
            self.refuse("restart_warmup_steps", None, "a number of updates with cosine_restarts", "give it")
        cycle = options["cycle_length"]
        if kind == "linear":
            if cycle is not None:
                self.note(f"--cycle_length {cycle} has no effect on the rate of the linear schedule")
        elif cycle is not None:
            values["lr_scheduler.cycle_length"] = cycle
        if warmup >= values.get("training.steps", warmup + 1) and kind != "cosine_restarts":
            values["lr_scheduler.total_steps"] = warmup + 1
            self.note(f"--warmup_steps {warmup} do not end in this run: the schedule is made longer than it")

    def adapter(self) -> None:
        options, values = self.given, self.values
        if not options["use_peft"]:
            if options["relora"] is None:
                if ignored := [flag for flag in ("lora_r", "lora_alpha", "train_scaling") if flag in options]:
                    self.note(f"no effect without --use_peft: --{', --'.join(ignored)}")
                return
            self.note("--relora means --use_peft, which is not given")
        needed = ("relora", "force_keep_original", "continue_from", "warmed_up_model", "continue_from_peft")
        if not any(options[flag] for flag in (*needed, "resume_from", "model_name_or_path", "quantize")):
            values["adapter.lora_only"] = True
            self.note("nothing needs the full matrices, so the script drops them and trains B A alone")
        values |= {"adapter.kind": "lora", "adapter.rank": options["lora_r"], "adapter.train_dense_rest": True}
        values["adapter.dropout"] = DROPOUT
        if "adapter.lora_only" not in values:
            self.note(
                "A begins at random and B at zero, at first and after each restart; in the script's last version A"
            )
            self.note("was zero too at first, so that neither learned anything before the first restart")
        if options["train_scaling"]:
            values["adapter.train_scaling"] = True
            if options["relora"] is not None:
                self.note("learned scales begin again at 1 after a restart: the script set them to 0, where they stay")
        else:
            values["adapter.alpha"] = options["lora_alpha"]
        if options["quantize"]:
            self._quantized()

    def _quantized(self) -> None:
        quantization = self.given["quantize"]
        if self.given["relora"] is not None:
            self.refuse(
                "quantize", quantization, "nothing with --relora", "each restart would round the packed matrices again"
            )
        elif quantization == "8bit":
            self.values["adapter.kind"] = "lora_int8"
            self.note("--quantize 8bit: weights alone are in 8 bits here, a scale for each row; inputs are not rounded")
        else:
            self.values["adapter.kind"] = "qlora"
            if not self.given["use_double_quant"]:
                self.refuse("use_double_quant", False, "true", "scales are always in 8 bits here")

    def reset(self) -> None:
        options, values, every, cycle = self.given, self.values, self.given["relora"], self.given["cycle_length"]
        pruned = {"random": options["optimizer_random_pruning"], "magnitude": options["optimizer_magnitude_pruning"]}
        for mode, ratio in pruned.items():
            if not 0 <= ratio < 1:
                self.refuse(f"optimizer_{mode}_pruning", ratio, "at least 0 and less than 1")
        chosen = {mode: ratio for mode, ratio in pruned.items() if 0 < ratio < 1}
        if every is None:
            if chosen or not options["reset_optimizer_on_relora"]:
                self.note("no effect without --relora: what is reset of the optimizer's state")
            return
        values["adapter.relora.every"] = every
        if cycle is not None and cycle != every:
            values["adapter.relora.reset_every"] = cycle
        if len(chosen) + options["reset_optimizer_on_relora"] > 1:
            remedy = "write --reset_optimizer_on_relora False beside one of the prunings"
            self.refuse("reset_optimizer_on_relora", options["reset_optimizer_on_relora"], "one kind of reset", remedy)
        elif options["reset_optimizer_on_relora"]:
            values["adapter.relora.reset"] = "zero"
            self.note("reset to zero: all of the moments, where the script left a thousandth of them")
        for mode, ratio in chosen.items():
            values |= {"adapter.relora.reset": mode, "adapter.relora.prune_ratio": ratio}
            self.note("the two moments of A keep the same entries, and so do B's; the script pruned each by itself, so")
            self.note('that steps may divide by nearly nothing: adapter.relora.mask = "independent" does that too')
        if not chosen and not options["reset_optimizer_on_relora"]:
            values["adapter.relora.reset"] = "none"

    def start(self) -> None:
        options, values = self.given, self.values
        warm_start_path = options["continue_from"] or options["warmed_up_model"]
        resume_path = options["continue_from_peft"] or options["resume_from"]
        if warm_start_path and resume_path:
            self.refuse("continue_from", warm_start_path, "nothing beside --continue_from_peft", "drop one of the two")
        elif warm_start_path:
            values |= {"checkpoint.initial_load_path": warm_start_path, "checkpoint.initial_load_counters": True}
        elif resume_path:
            values |= {"checkpoint.initial_load_path": resume_path, "checkpoint.initial_load_model_only": False}
            # the older flag loaded the optimizer state only on request, the newer one unless it was turned off
            taken = options["restore_optimizer" if options["continue_from_peft"] else "load_optimizer_state_on_resume"]
            if not taken:
                values["checkpoint.exclude_from_loading"] = ["optimizer"]
        elif options["restore_optimizer"]:
            self.note("no effect without --continue_from_peft: --restore_optimizer")
        if options["autoresume"]:
            self.note("--autoresume: a job started again goes on from the newest checkpoint in its folder anyway")

    def plan(self) -> None:
        options, values = self.given, self.values
        sharded = options["distributed_type"] == "fsdp" or options["optimizer"] == "adam_zero"
        if not sharded and self.line.ranks is not None:
            values |= {
                "parallelism.data_parallel_replicate_degree": self.line.ranks,
                "parallelism.data_parallel_shard_degree": 1,
            }
        values["activation_checkpoint.mode"] = "full" if options["activation_checkpointing"] else "none"
        if options["single_gpu"]:
            self.note("--single_gpu: one rank, as the line starts it")
        dtype = options["dtype"] or "bf16"
        if options["dtype"] is None:
            self.note("no --dtype: bfloat16, which the script took where it was supported")
        if dtype in ("fp16", "float16"):
            self.refuse("dtype", dtype, "bf16 or fp32", "float16 overflows without a scaler; bf16 needs none")
        name = "bfloat16" if dtype.startswith("b") else "float32"
        values |= {"training.dtype": name, "training.mixed_precision_param": name}

    def output(self) -> None:
        options, values = self.given, self.values
        config = Path(options["model_config"] or options["model_name_or_path"] or "model").stem
        values["job.dump_folder"] = options["save_dir"] or f"checkpoints/{config}"
        num_kept = options["keep_checkpoints"] or 0
        if num_kept == 1:
            self.note("--keep_checkpoints 1: two are kept, as the last one alone could not be trusted")
            num_kept = 2
        values |= {"checkpoint.enable": True, "checkpoint.interval": options["save_every"]}
        values |= {
            "checkpoint.keep_latest_k": num_kept,
            "validation.enable": True,
            "validation.freq": options["eval_every"],
        }
        values["validation.dataset"] = f"{values['training.dataset']}_validation"
        if options["dataset_path"] is not None:
            values["validation.dataset_path"] = options["dataset_path"]
        local, ranks = options["batch_size"], self.line.ranks
        held_out = self._held_out()
        if local and ranks and options["max_length"] > 0:
            values["validation.local_batch_size"] = local
            if held_out is not None and held_out * options["max_length"] < EVALUATED_TOKENS:
                values["validation.samples"] = held_out
            else:
                values["validation.steps"] = max(1, EVALUATED_TOKENS // (local * ranks * options["max_length"]))
        if options["tags"]:
            values["job.tags"] = [tag.strip() for tag in options["tags"].split(",") if tag.strip()]
        if options["comment"]:
            values["job.description"] = options["comment"]
        if options["profile"]:
            values["profiling.enable_profiling"] = True
        self.note("evaluated on at most 10M tokens each time; the script's last one, on 100M, is not made")
        self.note("the script logged to Weights & Biases: here metrics.enable_wandb = true does")

    def _held_out(self) -> int | None:
        """Return how many validation blocks are read before any repeats; None if the data are not on this machine."""
        try:
            blocks = len(Blocks(self.given["dataset_path"], "validation"))
        except (OSError, JobError):  # which check has its own words for
            return None
        return blocks - blocks % stream_count(blocks)

    def rest(self) -> None:
        """Handle the flags that have no equivalent in a job."""
        options = self.given
        if options["name"] is not None:
            self.note("--name: the script did nothing with it; --save_dir says where the run is")
        for flag in ("svd_optimizer_on_relora", "keep_first_opt_rows"):
            if options[flag]:
                reason = "--optimizer_magnitude_pruning 0.9 keeps a part of the state, as the script does since then"
                self.refuse(flag, options[flag], "0", reason)
        if not options["train_ln"]:
            self.refuse("train_ln", False, "true", "the norms are always trained")
        if options["wandb_watch"]:
            self.refuse("wandb_watch", True, "false", "gradients of single parameters are not logged")
        reasons = {
            "skip_batches": "no update of the data can be left out; what is damaged, training.on_bad_data leaves out",
            "megatron_dataset_config": "Megatron's index is not read; give --dataset_path, or make shards with prepare",
        }
        for flag, reason in reasons.items():
            if options[flag] is not None:
                self.refuse(flag, options[flag], "nothing", reason)


read = _ReLoRA.meaning_of


def _sizes(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the closest preset and the values that differ from it."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    width, hidden, heads, layers = shape = [config[name] for name in names]
    if not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"sizes {show(shape)}")
    length = config.get("max_sequence_length", config.get("max_position_embeddings", 2048))
    args = relora_sizes(width, hidden, heads, layers, config.get("vocab_size", 32_000), max_seq_len=length)
    model_args = vars(args) | {"norm_eps": config.get("rms_norm_eps", 1e-6)}

    def differing(flavor: str) -> dict[str, Any]:
        return {name: value for name, value in model_args.items() if vars(RELORA[flavor])[name] != value}

    flavor = min(RELORA, key=lambda candidate: (None in differing(candidate).values(), len(differing(candidate))))
    return flavor, differing(flavor)
