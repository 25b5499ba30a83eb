"""Mistakes of the corpus of mutants, planted in fresh ranks: the changed file is run again in each rank's process."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from tests.mutants import corpus
from torchtitan.process import gloo_ranks


def run_with(name: str) -> Callable[..., list[Any]]:
    """Return `run_on_ranks` for ranks that have the mistake of this name, unless there is only one rank."""

    def run(ranks: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        call = (function, *args) if ranks == 1 else (plant, name, function, *args)
        return gloo_ranks.run_on_ranks(ranks, *call, **options)

    return run


def plant(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Make the mistake in this process, and return `function(*args)`."""
    (mutant,) = [mutant for mutant in corpus.load() if mutant.name == name]
    module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
    text = mutant.mutated((corpus.ROOT / mutant.file).read_text())
    before = dict(vars(module))
    exec(compile(text, mutant.file, "exec"), vars(module))
    changed = {id(old): vars(module)[name] for name, old in before.items() if vars(module)[name] is not old}
    for other in [other for name, other in sys.modules.items() if name.startswith("torchtitan.")]:
        for name, value in list(vars(other).items()):
            if id(value) in changed and not name.startswith("__"):  # it has imported the name
                setattr(other, name, changed[id(value)])
    return function(*args)
