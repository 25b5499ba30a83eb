"""Translate which parameters an Axolotl file trains: an adapter, or the parameters that match unfrozen_parameters."""

from collections.abc import Sequence
from typing import Any

from torchtitan.adapters.targets import ALL_LINEAR
from torchtitan.plugins.importers.adapter_targets import PARAMETERS, add_targets, has_experts
from torchtitan.plugins.importers.axolotl_names import unfrozen
from torchtitan.plugins.importers.axolotl_options import HALF_TYPES
from torchtitan.plugins.importers.translation import BFLOAT16_INSTEAD, JobDraft, Options

MODULES = {"embed_tokens": "tok_embeddings.weight", "lm_head": "output.weight", "norm": "norm.weight"}
"""Modules outside the layers, by their names in the Llama of transformers."""
VOCABULARY_MODULES = ("embed_tokens", "lm_head")
"""Modules with one row per token of the vocabulary."""
PRUNE_RATIO = 0.999
"""Fraction of the moments of A and B that a restart prunes."""
TARGETS = "lora_target_modules"
OF_RESTARTS: tuple[str, ...] = ("jagged_restart_steps", "jagged_restart_warmup_steps", "jagged_restart_anneal_steps")
OF_RESTARTS += ("relora_prune_ratio", "relora_prune_method")
"""Options that only belong to relora: true."""
EXPERTS = "quantize_moe_experts"
ADAPTER_OPTIONS: tuple[str, ...] = (TARGETS, PARAMETERS, "lora_modules_to_save", "peft_use_dora")
REQUIRING_ADAPTER: tuple[str, ...] = (EXPERTS, "relora_steps", "relora", *OF_RESTARTS)
NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "load_in_4bit": True}
"""The 4-bit options of bitsandbytes with the only supported values."""


class AdapterTranslation:
    """The adapter of one file. `new_tokens`: added tokens; their rows have to be trained."""

    def __init__(self, options: Options, draft: JobDraft, new_tokens: Sequence[str]) -> None:
        self.options, self.draft, self.new_tokens = options, draft, new_tokens
        self.values, self.note, self.refuse = draft.values, draft.notes.append, draft.refuse

    def read(self) -> None:
        options, values, kind = self.options, self.values, self.options["adapter"]
        for name, required_kind in {"load_in_4bit": "qlora", "load_in_8bit": "lora"}.items():
            if options[name] and kind != required_kind:
                allowed = f"false, or adapter: {required_kind}"
                self.refuse(name, True, allowed, "weights are only quantized below an adapter")
        if kind == "qlora" and options["load_in_4bit"] is False:
            self.refuse("load_in_4bit", False, "true with adapter: qlora, as Axolotl demands", "or give adapter: lora")
        if kind not in ("lora", "qlora", "dora"):
            self._no_adapter(kind)
            return
        if regexes := options["unfrozen_parameters"]:
            reason = "Axolotl freezes the adapter too, whose names begin with base_model, and trains nothing: drop it"
            self.refuse("unfrozen_parameters", regexes, "nothing with an adapter", reason)
        if options["peft_use_dora"] and kind != "lora":
            self.refuse("peft_use_dora", True, "false, or adapter: lora", "the base of DoRA is not quantized")
        if options["load_in_8bit"]:
            self.note("load_in_8bit: only weights are in 8 bits here, with a scale per row; inputs are not rounded")
        kind = "dora" if options["peft_use_dora"] else "lora_int8" if options["load_in_8bit"] else kind
        values |= {"adapter.kind": kind, "adapter.dropout": values.get("adapter.dropout", 0.0)}
        for name in ("lora_r", "lora_alpha"):
            if options[name] is None:
                self.refuse(name, None, "a number", "Axolotl needs it too")
        self._targets()
        self._check_4bit()
        self._restarts()

    def _no_adapter(self, kind: str | None) -> None:
        """Handle the options of adapters in a file without a supported one."""
        options, values = self.options, self.values
        if kind is not None:
            self.refuse("adapter", kind, "lora, qlora or dora", "others are not supported")
        for name in REQUIRING_ADAPTER:
            if options[name]:
                self.refuse(name, options[name], "nothing without an adapter", "give adapter: lora")
        for name in ADAPTER_OPTIONS:
            if options[name]:
                self.note(f"no adapter, so {name} has no effect: all weights are trained, as in Axolotl")
        for key in [key for key in values if key.startswith("adapter.")]:
            self.note(f"no adapter, so no effect: {key} = {values.pop(key)}")
        if regexes := options["unfrozen_parameters"]:
            values["training.unfrozen"] = unfrozen(regexes, options["base_model"] or "", self.draft)

    def _targets(self) -> None:
        options, values = self.options, self.values
        full_modules = list(options["lora_modules_to_save"] or [])
        if options["reward_model"]:  # peft trains the head of classes, whose name is score
            full_modules = ["lm_head", *(name for name in full_modules if name not in ("score", "lm_head"))]
        if self.new_tokens and (missing := [name for name in VOCABULARY_MODULES if name not in full_modules]):
            self.note(f"rows of new tokens are trained, so {' and '.join(missing)} are trained with the adapter")
            full_modules += missing
        if unknown := [name for name in full_modules if name not in MODULES]:
            self.refuse("lora_modules_to_save", unknown, f"some of {', '.join(MODULES)}")
        elif full_modules:
            values["adapter.train_fully"] = [MODULES[name] for name in full_modules]
        if full_modules:
            self.note("peft's layout has no place for fully trained parts: torchtitan export --merge writes the result")
        elif values["adapter.kind"] != "dora":
            values["adapter.last_save_in_peft"] = True
        if "model.name" in values:
            self._linears(full_modules)

    def _linears(self, full_modules: Sequence[str]) -> None:
        """Translate which linear layers get an adapter."""
        modules, all_linear = self.options[TARGETS] or [], bool(self.options["lora_target_linear"])
        is_regex = isinstance(modules, str) and modules != ALL_LINEAR and not all_linear
        if modules == ALL_LINEAR:
            modules, all_linear = [], True
        elif isinstance(modules, str) and all_linear:  # peft gets a list, in which it is a name
            modules = [modules]
        if not isinstance(modules, str | list) or any(not isinstance(name, str) for name in modules):
            self.refuse(TARGETS, modules, "a list of texts, or a regex")
            return
        parameters = self.options[PARAMETERS] or []
        if not (modules or all_linear or parameters):
            self.refuse(TARGETS, None, "names of linear layers, or lora_target_linear: true")
            return
        if is_regex and "adapter.layers" in self.values:
            self.refuse(TARGETS, modules, "names with peft_layers_to_transform", "write the layers into the regex")
            return
        quantizer = "Axolotl" if self.options["load_in_4bit"] or self.options["load_in_8bit"] else ""
        folder = self.options["base_model"]
        targets = add_targets(self.draft, TARGETS, modules, all_linear, folder, full_modules, quantizer, parameters)
        if targets is None:
            return
        if self.options[EXPERTS]:
            self._quantized_experts(quantizer)
        if (parameters or targets.renamed) and (layers := self.values.get("adapter.layers")):
            allowed = "nothing with experts among the targets"
            self.refuse("peft_layers_to_transform", layers, allowed, "peft adapts those of all layers")
        if included := [name for name in modules if all_linear and name not in targets.unmatched]:
            self.note(f"lora_target_linear includes {', '.join(included)}")

    def _quantized_experts(self, quantizer: str) -> None:
        """Translate that all stacks of experts are quantized, also those without an adapter."""
        if not quantizer or self.options["lora_target_linear"]:
            allowed = "true with load_in_4bit or load_in_8bit, without lora_target_linear"
            self.refuse(EXPERTS, True, allowed, "as Axolotl demands: give them, or drop it")
        elif has_experts(self.values["model.name"]):
            self.values["adapter.quantized_experts"] = "all"
        else:
            self.note(f"{EXPERTS}: no effect in a model without experts")

    def _check_4bit(self) -> None:
        """Check the 4-bit options of bitsandbytes. Only one 4-bit format is supported here."""
        for name, value in (self.options["bnb_config_kwargs"] or {}).items():
            if name in NF4 and value != NF4[name]:
                self.refuse(f"bnb_config_kwargs.{name}", value, str(NF4[name]), "other formats are not supported")
            elif name == "bnb_4bit_compute_dtype" and value in HALF_TYPES:
                self.note(f"bnb_config_kwargs.{name}: {BFLOAT16_INSTEAD}")
            elif name not in NF4 and name != "bnb_4bit_compute_dtype":
                self.refuse(f"bnb_config_kwargs.{name}", value, ", ".join([*NF4, "bnb_4bit_compute_dtype"]))

    def _restarts(self) -> None:
        options, values = self.options, self.values
        every, warmup = options["relora_steps"], options["relora_warmup_steps"]
        if options["relora"] and not every:
            self._jagged_restarts()
            return
        for name in OF_RESTARTS:
            if options[name]:
                self.refuse(name, options[name], "nothing without relora: true", "give it too, or drop this one")
        if every:
            values |= {"adapter.relora.every": every, "adapter.relora.reset": "magnitude"}
            values |= {"adapter.relora.prune_ratio": PRUNE_RATIO, "adapter.relora.warmup_steps": warmup or 0}
            values.pop("adapter.last_save_in_peft", None)
            return
        values["adapter.save"] = "alone"
        if warmup:
            self.refuse("relora_warmup_steps", warmup, "nothing without relora_steps")

    def _jagged_restarts(self) -> None:
        """Translate ReLoRA as of 2025, with the restarts of its learning rate."""
        options, values, optimizer = self.options, self.values, self.values["optimizer.name"]
        every, method = options["jagged_restart_steps"], options["relora_prune_method"] or "magnitude"
        if not every:
            self.refuse("relora", True, "true with jagged_restart_steps", "give it, as Axolotl demands")
            return
        settings: dict[str, Any] = {"every": every, "reset": "magnitude" if method == "magnitude" else "random"}
        default_ratio = PRUNE_RATIO if method == "reset" else 0.9
        settings["prune_ratio"] = options["relora_prune_ratio"] or default_ratio
        settings["warmup_steps"] = options["jagged_restart_warmup_steps"] or 10
        settings["anneal_steps"] = options["jagged_restart_anneal_steps"] or 1
        values |= {f"adapter.relora.{name}": value for name, value in settings.items()}
        values.pop("adapter.last_save_in_peft", None)
        self.note("relora: not the same: a restart follows the step of the lowest rate, which it precedes there,")
        self.note('and prunes the same entries of both moments; adapter.relora.mask = "independent" does as there')
        if values["adapter.kind"] in ("qlora", "lora_int8"):
            values["adapter.kind"] = "lora"
            values.pop("adapter.quantized_experts", None)
            self.note("relora: not the same: the frozen matrices are in float32, as each restart would round")
            self.note("quantized ones again; they take more memory")
        if optimizer == "AdamW8bit":
            values["optimizer.name"] = "AdamW"
            self.note("relora: not the same: AdamW's moments are in float32, as codes of 8 bits are not pruned")
        if options["cosine_min_lr_ratio"]:
            self.note("cosine_min_lr_ratio: not the same: a restart begins at a thousandth of the rate")
