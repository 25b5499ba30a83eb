"""Translate LLaMA-Factory files, and the flags or keys that may follow one on a command line, to jobs.

The table in llama_factory_options.py translates options that are independent of others, hf_trainer.py those of the
Trainer, llama_factory_data.py the data. The rest is read here: model, method, adapter, preferences.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torchtitan.core import yaml_file
from torchtitan.core.errors import JobError
from torchtitan.models import CONFIG_CONVERTERS
from torchtitan.plugins.importers.adapter_targets import add_targets
from torchtitan.plugins.importers.axolotl_adapter import MODULES
from torchtitan.plugins.importers.hf_model import add_model, asks_for_router_loss, weight_type
from torchtitan.plugins.importers.hf_trainer import TrainerTranslation, options_of
from torchtitan.plugins.importers.llama_factory_data import FactoryData
from torchtitan.plugins.importers.llama_factory_options import LOSSES, OPTIONS
from torchtitan.plugins.importers.programs import table_in
from torchtitan.plugins.importers.translation import (
    FLOAT16,
    CommandLine,
    JobDraft,
    flag_value,
)

OTHER_BACKENDS = ("USE_MCA", "USE_MEGATRON_BRIDGE", "USE_KT")
"""Variables that choose another trainer than the one of transformers."""
GROUPS = 4
"""Number of groups per sequence in shifted attention."""
OF_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target")
OF_FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
NAMES = (
    *("dataset", "eval_dataset", "lora_target", "additional_target", "galore_target"),
    *("freeze_trainable_modules", "freeze_extra_modules"),
)
"""Options that LLaMA-Factory takes as a list too, besides a text with commas."""
PREFERENCE_OPTIONS = ("pref_beta", "pref_loss", "dpo_label_smoothing", "ref_model")


def read(line: CommandLine) -> JobDraft:
    draft = JobDraft(line.config or line.script, "" if line.config is not None else "--")
    _LlamaFactory(line, draft).read()
    return draft


class _LlamaFactory:
    def __init__(self, line: CommandLine, draft: JobDraft) -> None:
        values = self._values(line)
        values |= {name: ",".join(values[name]) for name in NAMES if _are_texts(values.get(name))}
        self.draft, self.options = draft, options_of(values, OPTIONS, draft)
        self.values, self.note, self.refuse = draft.values, draft.notes.append, draft.refuse
        if line.config is not None:
            self._refuse_quoted(values)
        self.folder = self.options["model_name_or_path"]
        trainer = TrainerTranslation("LLaMA-Factory", line, self.options, draft)
        if line.environment.get("USE_RAY") == "1" and self.options["ray_num_workers"] and line.ranks is None:
            trainer.ranks = self.options["ray_num_workers"]
        if chosen := [name for name in OTHER_BACKENDS if line.environment.get(name, "0") not in ("0", "false")]:
            self.refuse(chosen[0], line.environment[chosen[0]], "nothing", "parallelism.* is the plan here")
        self.trainer = trainer

    @staticmethod
    def _values(line: CommandLine) -> dict[str, Any]:
        """Return the values of a line. OmegaConf reads a file and the words name=value after it as YAML."""
        if line.config is None:
            return {name: flag_value(OPTIONS.get(name), text) for name, text in line.flags}
        overrides = {name: True if text is None else yaml_file.parse_value(text) for name, text in line.flags}
        return table_in(line.config) | overrides

    def _refuse_quoted(self, values: Mapping[str, Any]) -> None:
        """Refuse texts as truth values, which a file's dataclass takes unparsed: "false" is true there."""
        for name, value in values.items():
            if isinstance(value, str) and name in OPTIONS and OPTIONS[name].kind == "bool":
                self.refuse(name, value, "true or false without quotes", "LLaMA-Factory takes each text for true")

    def read(self) -> None:
        options = self.options
        if not options["do_train"]:
            self.refuse("do_train", options["do_train"], "true", "a job trains: see torchtitan evaluate and generate")
        elif options["do_predict"]:
            self.refuse("do_predict", True, "false", "`torchtitan generate` answers questions")
        self._model()
        self._preference()
        FactoryData(options, self.draft).read()
        self._precision()
        self._method()
        self._optimizer()
        self.trainer.read()
        self._without_clipping()
        if options["early_stopping_steps"] is not None and self.values.get("validation.enable"):
            self.values["early_stop.patience"] = options["early_stopping_steps"]
        elif options["early_stopping_steps"] is not None:
            self.refuse("early_stopping_steps", options["early_stopping_steps"], "nothing without held-out data")

    def _model(self) -> None:
        options, folder = self.options, self.folder
        if folder is None:
            return  # refused by the table
        weight, are_pairs = options["moe_aux_loss_coef"] or None, options["stage"] == "dpo"
        if are_pairs and weight:
            self.note("no effect with stage: dpo: moe_aux_loss_coef")
        weight, has_loss = (0.0, False) if are_pairs else (weight, asks_for_router_loss(folder))
        add_model(folder, self.draft, "moe_aux_loss_coef", weight, has_loss, are_pairs)
        if options["train_from_scratch"]:
            for name in ("checkpoint.initial_load_path", "checkpoint.initial_load_in_hf"):
                self.values.pop(name, None)
        length = options["cutoff_len"]
        if options["shift_attn"] and length % (2 * GROUPS):
            self.refuse("cutoff_len", length, f"a multiple of {2 * GROUPS} with shift_attn")
        elif options["shift_attn"]:
            self.values["model.s2_group_size"] = length // GROUPS
            self.note("shift_attn: shifted groups do not wrap around, so that no token sees a later one")

    def _preference(self) -> None:
        options, values = self.options, self.values
        if options["stage"] != "dpo":
            if ignored := [name for name in PREFERENCE_OPTIONS if name in options]:
                self.note(f"no effect without stage: dpo: {', '.join(ignored)}")
            return
        kind = LOSSES[options["pref_loss"]]
        values |= {"task.kind": kind, "dpo.beta": options["pref_beta"]}
        if options["dpo_label_smoothing"] and kind != "dpo":
            self.refuse("dpo_label_smoothing", options["dpo_label_smoothing"], "0 with another pref_loss than sigmoid")
        elif options["dpo_label_smoothing"]:
            values["dpo.label_smoothing"] = options["dpo_label_smoothing"]
        if options["ref_model"] is not None and kind == "orpo":
            self.note("no effect with pref_loss: orpo: ref_model")
        elif options["ref_model"] is not None:
            values["dpo.reference"] = options["ref_model"]
        elif options["adapter_name_or_path"] is not None and kind != "orpo" and self.folder is not None:
            values["dpo.reference"] = self.folder  # without the adapter that training starts from

    def _precision(self) -> None:
        """Translate the types of weights and computation, and recompute, which is on unless it is turned off."""
        options, values = self.options, self.values
        values["activation_checkpoint.mode"] = "none" if options["disable_gradient_checkpointing"] else "full"
        if options["pure_bf16"]:
            values |= {"training.dtype": "bfloat16", "training.mixed_precision_param": "bfloat16"}
        elif not options["bf16"] and options["finetuning_type"] != "full":
            kind = weight_type(self.folder)
            if kind == "float16":
                self.refuse("bf16", False, "true for a model in float16", FLOAT16)
            elif kind == "bfloat16":
                values["training.mixed_precision_param"] = "bfloat16"
                self.note("without bf16 frozen layers compute in the type of their weights, bfloat16, as here all do")

    def _method(self) -> None:
        options, kind = self.options, self.options["finetuning_type"]
        if kind != "lora":
            for name in ("quantization_bit", "loraplus_lr_ratio", "use_rslora", "use_dora", "adapter_name_or_path"):
                if options[name]:
                    self.refuse(name, options[name], "nothing without finetuning_type: lora")
            self._without_effect("lora", OF_LORA)
        if kind != "freeze" and not options["use_llama_pro"]:
            self._without_effect("freeze", OF_FREEZE)
        if kind == "freeze":
            self._freeze()
        elif kind == "lora":
            self._adapter(options["quantization_bit"])
        elif options["use_llama_pro"]:
            self.refuse("use_llama_pro", True, "false with finetuning_type: full", "LLaMA-Factory refuses it too")

    def _without_effect(self, method: str, names: Iterable[str]) -> None:
        if ignored := [name for name in names if name in self.options]:
            self.note(f"no effect without finetuning_type: {method}: {', '.join(ignored)}")

    def _adapter(self, bits: int | None) -> None:
        options, values = self.options, self.values
        if options["use_dora"] and bits:
            self.refuse("use_dora", True, "false with quantization_bit", "the base of DoRA is not quantized")
        if bits == 8:
            self.note(
                "quantization_bit 8: only weights are in 8 bits here, with a scale per row; inputs are not rounded"
            )
        kind = {4: "qlora", 8: "lora_int8"}.get(bits or 0, "dora" if options["use_dora"] else "lora")
        rank, dropout = options["lora_rank"], options["lora_dropout"]
        if options["stage"] == "dpo" and dropout:
            self.note("no effect with stage: dpo, which turns dropout off: lora_dropout")
            dropout = 0.0
        values |= {"adapter.kind": kind, "adapter.rank": rank, "adapter.dropout": dropout, "adapter.save": "alone"}
        values["adapter.alpha"] = float(options["lora_alpha"] or 2 * rank)
        if options["use_rslora"]:
            values["adapter.rslora"] = True
        if options["loraplus_lr_ratio"]:
            values["adapter.lr_ratio_b"] = options["loraplus_lr_ratio"]
        if (path := options["adapter_name_or_path"]) is not None and "," in path:
            self.refuse("adapter_name_or_path", path, "one folder", "merge the others before")
        elif path is not None:
            values["adapter.initial_path"] = path
        if options["use_llama_pro"] and (layers := self._expanded_layers()):
            values["adapter.layers"] = layers
        if modules := self._modules("additional_target"):
            values["adapter.train_fully"] = modules
            self.note("peft's layout has no place for fully trained parts: torchtitan export --merge writes the result")
        elif kind != "dora":
            values["adapter.last_save_in_peft"] = True
        if "model.name" in values:
            names, saved = _names(options["lora_target"]), _names(options["additional_target"])
            are_all, quantizer = names == ["all"], "LLaMA-Factory" if bits else ""
            names = [] if are_all else names
            add_targets(self.draft, "lora_target", names, are_all, self.folder or "", saved, quantizer)

    def _modules(self, option: str) -> list[str]:
        names = _names(self.options[option])
        if unknown := [name for name in names if name not in MODULES]:
            self.refuse(option, unknown, f"some of {', '.join(MODULES)}")
        return [MODULES[name] for name in names if name in MODULES]

    def _num_layers(self) -> int | None:
        family = self.values.get("model.name")
        if family is None:
            return None
        try:
            return int(CONFIG_CONVERTERS[family].args_from_folder(self.folder).n_layers)
        except JobError as error:
            allowed = f"a model with its config.json in {self.folder}"
            self.refuse("freeze_trainable_layers", self.options["freeze_trainable_layers"], allowed, str(error))
            return None

    def _expanded_layers(self) -> list[int]:
        """Return the layers that LLaMA Pro inserted: the last of each group of equal length."""
        layers, groups = self._num_layers(), self.options["freeze_trainable_layers"]
        if layers is None:
            return []
        if groups < 1 or layers % groups:
            self.refuse("freeze_trainable_layers", groups, f"a divisor of the {layers} layers with use_llama_pro")
            return []
        stride = layers // groups
        return list(range(stride - 1, layers, stride))

    def _freeze(self) -> None:
        number, layers = self.options["freeze_trainable_layers"], self._num_layers()
        if layers is None:
            return
        if self.options["use_llama_pro"]:
            chosen = self._expanded_layers()
        else:
            chosen = list(range(max(0, layers - number), layers) if number > 0 else range(min(-number, layers)))
        patterns = [f"layers.{layer}.*" for layer in chosen] + self._modules("freeze_extra_modules")
        if not patterns and not self.draft.faults:
            self.refuse("freeze_trainable_layers", number, "a number of layers other than 0")
        self.values["training.unfrozen"] = patterns

    def _optimizer(self) -> None:
        options, values = self.options, self.values
        if options["use_galore"] and options["use_muon"]:
            self.refuse("use_muon", True, "false with use_galore", "choose one of the two")
        elif options["use_galore"]:
            self._galore()
        elif options["use_muon"]:
            values |= {"optimizer.name": "Muon", "optimizer.decay_norms_and_biases": True}
            if "optim" in options:
                self.note("no effect with use_muon: optim")
        if not options["use_galore"] and (ignored := [n for n in OPTIONS if n.startswith("galore_") and n in options]):
            self.note(f"no effect without use_galore: {', '.join(ignored)}")

    def _galore(self) -> None:
        options, values = self.options, self.values
        inner = {"AdamW": "adamw", "AdamW8bit": "adamw_8bit", "Adafactor": "adafactor"}.get(values["optimizer.name"])
        if inner is None:
            self.refuse("optim", options["optim"], "adamw_torch, adamw_8bit or adafactor with use_galore")
        if options["finetuning_type"] == "lora":
            self.refuse("use_galore", True, "false with finetuning_type: lora", "LLaMA-Factory refuses it too")
        settings = {"rank": "galore_rank", "update_gap": "galore_update_interval", "scale": "galore_scale"}
        galore = {name: options[option] for name, option in settings.items()}
        galore |= {"side": options["galore_proj_type"], "inner": inner}
        if inner == "adamw":
            galore["formula"] = "galore_torch"
        values |= {"optimizer.name": "GaLore", "optimizer.options": galore}
        if options["galore_layerwise"]:
            values["optimizer.early_step_in_backward"] = True
            if options["gradient_accumulation_steps"] != 1:
                passes = options["gradient_accumulation_steps"]
                self.refuse("gradient_accumulation_steps", passes, "1 with galore_layerwise", "or turn that off")

    def _without_clipping(self) -> None:
        if self.options["use_galore"] and self.options["galore_layerwise"]:
            self.values["training.max_norm"] = 0.0
            if "max_grad_norm" in self.options:
                self.note("no effect with galore_layerwise: max_grad_norm")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _names(text: str | None) -> list[str]:
    """Return the names in a text that are separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]
