"""How often an Axolotl file logs, validates and saves, and what it makes of its validations."""

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
    """`steps`: of the run, where the file says them."""

    def __init__(self, given: Values, meaning: Meaning, steps: int | None) -> None:
        self.given, self.steps = given, steps
        self.values, self.note, self.refuse = meaning.values, meaning.notes.append, meaning.refuse

    def read(self) -> None:
        self.cadence()
        self.best()

    def cadence(self) -> None:
        given, values, last = self.given, self.values, self.steps
        evaluation = "evaluation_strategy" if given["eval_strategy"] is None else "eval_strategy"
        strategies = {name: (given[name] or "").lower() for name in (evaluation, "save_strategy")}
        for name, said in strategies.items():
            if said not in ("", "no", "steps", "epoch"):
                self.refuse(name, given[name], "no, steps or epoch")
        if often := self._every("logging_steps", None):
            values["metrics.log_freq"] = often
        saved = self._every("save_steps", given["saves_per_epoch"], "saves_per_epoch", strategies["save_strategy"])
        if saved:
            values["checkpoint.interval"] = saved
        elif strategies["save_strategy"] == "no" and last is not None:
            values["checkpoint.interval"] = last
        if not values.get("validation.enable"):
            if given["eval_steps"] or given["evals_per_epoch"]:
                self.note("no data to validate on, so no effect: eval_steps, evals_per_epoch")
            return
        tested = self._every("eval_steps", given["evals_per_epoch"], "evals_per_epoch", strategies[evaluation])
        if strategies[evaluation] == "no":
            for key in [key for key in values if key.startswith("validation.")]:
                del values[key]
        elif tested:
            values["validation.freq"] = tested

    def _every(self, name: str, per_epoch: int | None, of_epoch: str = "", strategy: str = "") -> Said | None:
        """As a job says it: steps between two, a share of all steps, or so many times in an epoch."""
        given = self.given[name]
        if strategy == "no":
            return None
        if per_epoch and given:
            self.refuse(of_epoch, per_epoch, f"nothing beside {name}", "drop one of the two")
        elif (per_epoch or 0) < 0 or (given or 0) < 0:
            self.refuse(of_epoch if per_epoch else name, per_epoch or given, "a number above 0")
        elif per_epoch or strategy == "epoch":
            times = per_epoch or 1
            if self.steps is None:
                return "epoch" if times == 1 else f"{times}/epoch"
            return max(1, ceil(Fraction(self.steps, times * max(1, int(self.given.of("num_epochs", 1))))))
        elif given and given >= 1 and given != int(given):
            self.refuse(name, given, "a whole number, or a share below 1")
        elif given:
            return int(given) if given >= 1 else float(given)
        return None

    def best(self) -> None:
        """What is made of validations, behind their cadence."""
        given, values = self.given, self.values
        if not values.get("validation.enable"):
            if said := [name for name in OF_VALIDATIONS if given[name]]:
                self.note(f"no validation, so no effect: {', '.join(said)}")
            return
        metric = str(given["metric_for_best_model"] or "loss").removeprefix("eval_")
        if metric != "loss":
            self.refuse("metric_for_best_model", metric, "loss or eval_loss", "no other is measured")
        if given["eval_table_size"]:
            values["validation.generated"] = given["eval_table_size"]
            values["validation.generated_tokens"] = given.of("eval_table_max_new_tokens", 128)
        elif given["eval_table_max_new_tokens"]:
            self.note("nothing is generated, so no effect: eval_table_max_new_tokens")
        if given["early_stopping_patience"]:
            values["early_stop.patience"] = given["early_stopping_patience"]
        if not given["load_best_model_at_end"]:
            return
        values |= {"checkpoint.best_metric": "validation_loss", "checkpoint.export_best": True}
        if given["greater_is_better"]:
            self.refuse("greater_is_better", True, "false", "the lowest loss is the best")
        if "adapter.last_save_in_peft" not in values:
            values |= {"checkpoint.last_save_model_only": True}
