"""Translate how often an Axolotl file logs, validates and saves, and how it uses validation results."""

from fractions import Fraction
from math import ceil

from torchtitan.importers.axolotl_values import Values
from torchtitan.importers.translation import Meaning

Said = int | float | str
OF_VALIDATIONS = (
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "early_stopping_patience"),
    *("eval_table_size", "eval_table_max_new_tokens"),
)


class Pace:
    """The cadence of one Axolotl file. `steps`: the length of the run, or None if the file does not set it."""

    def __init__(self, options: Values, meaning: Meaning, steps: int | None) -> None:
        self.given, self.steps = options, steps
        self.values, self.note, self.refuse = meaning.values, meaning.notes.append, meaning.refuse

    def read(self) -> None:
        self.cadence()
        self.best()

    def cadence(self) -> None:
        options, values, last = self.given, self.values, self.steps
        evaluation = "evaluation_strategy" if options["eval_strategy"] is None else "eval_strategy"
        strategies = {name: (options[name] or "").lower() for name in (evaluation, "save_strategy")}
        for name, strategy in strategies.items():
            if strategy not in ("", "no", "steps", "epoch"):
                self.refuse(name, options[name], "no, steps or epoch")
        if log_freq := self._every("logging_steps", None):
            values["metrics.log_freq"] = log_freq
        save_interval = self._every(
            "save_steps", options["saves_per_epoch"], "saves_per_epoch", strategies["save_strategy"]
        )
        if save_interval:
            values["checkpoint.interval"] = save_interval
        elif strategies["save_strategy"] == "no" and last is not None:
            values["checkpoint.interval"] = last
        if not values.get("validation.enable"):
            if options["eval_steps"] or options["evals_per_epoch"]:
                self.note("no data to validate on, so no effect: eval_steps, evals_per_epoch")
            return
        validation_interval = self._every(
            "eval_steps", options["evals_per_epoch"], "evals_per_epoch", strategies[evaluation]
        )
        if strategies[evaluation] == "no":
            for key in [key for key in values if key.startswith("validation.")]:
                del values[key]
        elif validation_interval:
            values["validation.freq"] = validation_interval

    def _every(self, name: str, per_epoch: int | None, of_epoch: str = "", strategy: str = "") -> Said | None:
        """Return an interval as a job writes it: in steps, as a fraction of all steps, or as times per epoch."""
        value = self.given[name]
        if strategy == "no":
            return None
        if per_epoch and value:
            self.refuse(of_epoch, per_epoch, f"nothing beside {name}", "drop one of the two")
        elif (per_epoch or 0) < 0 or (value or 0) < 0:
            self.refuse(of_epoch if per_epoch else name, per_epoch or value, "a number above 0")
        elif per_epoch or strategy == "epoch":
            times = per_epoch or 1
            if self.steps is None:
                return "epoch" if times == 1 else f"{times}/epoch"
            return max(1, ceil(Fraction(self.steps, times * max(1, int(self.given.of("num_epochs", 1))))))
        elif value and value >= 1 and value != int(value):
            self.refuse(name, value, "a whole number, or a share below 1")
        elif value:
            return int(value) if value >= 1 else float(value)
        return None

    def best(self) -> None:
        """Translate the options that use validation results: the best model, early stopping, generated samples."""
        options, values = self.given, self.values
        if not values.get("validation.enable"):
            if ignored := [name for name in OF_VALIDATIONS if options[name]]:
                self.note(f"no validation, so no effect: {', '.join(ignored)}")
            return
        metric = str(options["metric_for_best_model"] or "loss").removeprefix("eval_")
        if metric != "loss":
            self.refuse("metric_for_best_model", metric, "loss or eval_loss", "no other is measured")
        if options["eval_table_size"]:
            values["validation.generated"] = options["eval_table_size"]
            values["validation.generated_tokens"] = options.of("eval_table_max_new_tokens", 128)
        elif options["eval_table_max_new_tokens"]:
            self.note("nothing is generated, so no effect: eval_table_max_new_tokens")
        if options["early_stopping_patience"]:
            values["early_stop.patience"] = options["early_stopping_patience"]
        if not options["load_best_model_at_end"]:
            return
        values |= {"checkpoint.best_metric": "validation_loss", "checkpoint.export_best": True}
        if options["greater_is_better"]:
            self.refuse("greater_is_better", True, "false", "the lowest loss is the best")
        if "adapter.last_save_in_peft" not in values:
            values |= {"checkpoint.last_save_model_only": True}
