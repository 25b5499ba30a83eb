"""`torchtitan contract`: planted faults of an outside package are named in words, and right ones hold."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tomli

from tests.support.jobs import ROOT
from tests.support.outside_package import ENTRIES, HEAVY, LIGHT
from tests.support.packages import install, installed_package
from torchtitan import cli
from torchtitan.adapters import ADAPTERS
from torchtitan.commands import contract
from torchtitan.contract.checks import differences
from torchtitan.contract.items import Item, Row, items_of, rows_of, with_options
from torchtitan.core import registry
from torchtitan.losses.tasks import TASKS
from torchtitan.lr_schedules import DECAYS
from torchtitan.models import SIZES
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.process import gloo_ranks


@pytest.fixture(autouse=True)
def registries_stay():
    """The command adds what a module brings to the registries, for the life of its process."""
    before = [(one, dict(one.data)) for one in (ADAPTERS, DECAYS, SIZES, OPTIMIZERS, TASKS)]
    yield
    for one, entries in before:
        one.data.clear()
        one.data.update(entries)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    modules = dict(light=LIGHT, heavy=HEAVY)
    with installed_package(tmp_path / "site", monkeypatch, "acme-titan", ENTRIES, **modules) as folder:
        yield folder


def judged(item: str, check: str, folder) -> tuple[str, str]:
    (brought,) = (other for other in items_of("acme-titan") if str(other) == item)
    outcome, lines = contract._judge(Row(brought, check), {}, folder)
    return outcome, "\n".join(lines)


FAULTS = {
    ("family:summed_twice", "TP 2"): "the gradient of layers.0.attention_norm.weight (and of 4 like it) is 2 times one "
    "device's: it is summed over tp once too often, or each rank computes it in full; declare its module in the "
    "ParallelPlan",
    ("family:undeclared", "TP 2 with sequence parallel"): "layers.0.attention_norm.weight: no pattern of the "
    "tensor-parallel plan covers this parameter; add its module to column, row, by_head, replicated or sequence",
    ("adapter:partial", "TP 2"): "each rank has a part of it, and they are not added up over tp; return its gradient's "
    "placement from `tensor_placements`",
    ("optimizer:ShardNormed", "FSDP2 2"): "its step reads what depends on the shard, as a norm or a maximum of "
    "`to_local()` would",
    ("optimizer:GroupNormed", "PP 2, DualPipeV"): "of its largest change: its step reads other parameters, of which a "
    "stage has only some: make it per parameter, or sum over all stages",
    ("adapter:forgetful", "save and resume"): "after a resume the loss of step 4 is ",
    ("task:longest", "count"): "`count` of 8 rows is 48, and 144 summed over parts of two rows: it is not additive",
    ("schedule:counting", "function of the step"): "f(0, 1) is 1 in one call and 0.0294118 in a later one: it is no "
    "function of the step",
}


@pytest.mark.parametrize(("item", "check"), FAULTS, ids=[" ".join(row) for row in FAULTS])
def test_a_planted_fault_is_named_in_words(item, check, installed, tmp_path):
    outcome, text = judged(item, check, tmp_path)
    assert outcome == contract.FAILS and FAULTS[item, check] in text


def test_a_step_with_both_faults_is_judged_by_the_rows_without_stages():
    for check, failing, part in (
        ("PP 2 x FSDP2 2", [], "of which a stage has only some"),
        ("PP 2 x FSDP2 2", ["save and resume", "PP 2, DualPipeV"], "of which a stage has only some"),
        ("PP 2 x FSDP2 2", ["FSDP2 2"], "what depends on the shard"),
        ("PP 2, DualPipeV", ["FSDP2 2"], "of which a stage has only some"),
        ("FSDP2 2", [], "what depends on the shard"),
    ):
        ones = np.ones(2)
        answer = {"loss": None, "norm": None, "names": ["w"], "faulty": {"w": 2 * ones}}
        expected = {"names": ["w"], "scales": {"w": 1.0}}
        (line,) = differences(Row(Item("optimizer", "X", ""), check), expected, [answer], {"w": ones}, failing)
        assert part in line and line.startswith("w differs after three steps by 1 of its largest change: ")


RIGHT = [
    ("family:acme", "CP 2 x TP 2, recompute"),
    ("family:acme", "PP 2 x FSDP2 2"),
    ("task:acme_pairs", "PP 2, DualPipeV"),
    ("task:acme_pairs", "save and resume"),
    ("optimizer:Normed", "HSDP 2x2"),
    ("adapter:vector", "TP 2"),
    ("adapter:forgetful", "FSDP2 2"),
]


@pytest.mark.parametrize(("item", "check"), RIGHT, ids=[" ".join(row) for row in RIGHT])
def test_what_is_right_holds(item, check, installed, tmp_path):
    assert judged(item, check, tmp_path) == (contract.HOLDS, "")


def test_what_check_refuses_is_left_out(installed, tmp_path):
    outcome, text = judged("family:acme", "EP 2", tmp_path)
    assert outcome == contract.LEFT_OUT
    assert text.startswith("torchtitan check refuses it: parallelism.expert_parallel_degree: given 2; allowed: 1 for")
    assert judged("task:acme_pairs", "CP 2", tmp_path)[0] == contract.LEFT_OUT


def test_a_family_with_experts_runs_them_in_parallel(tmp_path):
    item = Item("family", "qwen3_moe", "torchtitan.models.qwen3_moe:FAMILY")
    assert contract._judge(Row(item, "EP 2"), {}, tmp_path) == (contract.HOLDS, [])


def test_the_documented_package_holds(tmp_path, monkeypatch):
    page = (ROOT / "docs/adding_a_model.md").read_text()
    blocks = re.findall(r"```\w+\n(.*?)```", page[page.index("`pyproject.toml`:") :], re.DOTALL)
    project = tomli.loads(blocks[0])["project"]
    ((group, entries),) = project["entry-points"].items()
    lines = "".join(f"{name} = {place}\n" for name, place in entries.items())
    package = install(
        tmp_path / "site", project["name"], f"[{group}]\n{lines}", __init__=blocks[1], optimizer=blocks[2]
    )
    monkeypatch.syspath_prepend(package)
    registry.installed_entries.cache_clear()
    try:
        (item,) = items_of("rms-momentum")
        item.check()
        for check in ("PP 2 x FSDP2 2", "FSDP2 2 x TP 2", "save and resume"):
            assert contract._judge(Row(item, check), {}, tmp_path) == (contract.HOLDS, [])
    finally:
        registry.installed_entries.cache_clear()


def test_options_are_tried_in_place_of_the_defaults(installed, tmp_path):
    (item,) = items_of("acme_titan.light:POWERED")
    assert contract._judge(Row(item, "FSDP2 2"), {}, tmp_path) == (contract.HOLDS, [])
    outcome, _ = contract._judge(Row(with_options([item], ["power=2"]), "FSDP2 2"), {}, tmp_path)
    assert outcome == contract.FAILS


def test_a_hang_ends_the_rows_of_its_item(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(gloo_ranks, "LIMIT", 15.0)
    (item,) = items_of("acme_titan.light:WAITING")
    expected = {}
    outcome, (line,) = contract._judge(Row(item, "TP 2"), expected, tmp_path)
    assert outcome == contract.FAILS
    assert re.match(
        r"ranks 0, 1 did not end within 15 s: ranks may wait in different collectives; "
        r"rank 0 is at \S*/acme_titan/heavy.py:\d+; rank 1 is at \S*/heavy.py:\d+$",
        line,
    )
    assert contract._judge(Row(item, "CP 2"), expected, tmp_path) == (contract.LEFT_OUT, ["not tried after a hang"])


def test_exit_codes_and_the_table(installed, capsys):
    assert cli.main(["contract", "acme_titan", "--only", "schedule:straight"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("[1/1] schedule:straight  function of the step: holds  (")
    assert out[-1].split() == ["schedule:straight", "1", "0", "0"]
    assert cli.main(["contract", "acme-titan", "--ranks", "1", "--only", "task:longest"]) == 1
    out = capsys.readouterr().out.splitlines()
    resume = next(number for number, line in enumerate(out) if "save and resume: left out" in line)
    assert out[resume + 1] == "    it needs 2 ranks; --ranks is 1"
    assert out[-1].split() == ["task:longest", "0", "1", "14", "count"]


def test_an_item_without_a_row_is_refused(installed, capsys):
    assert cli.main(["contract", "acme-titan", "--ranks", "1", "--only", "optimizer:Normed"]) == 2
    assert capsys.readouterr().err.strip() == (
        "--ranks 1: no row of optimizer:Normed has that few ranks; the smallest needs 2"
    )


def test_the_rows(installed, capsys):
    assert cli.main(["contract", "acme-titan", "--list", "--ranks", "2", "--only", "optimizer:Normed"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "optimizer:Normed  save and resume  (2 ranks)",
        "optimizer:Normed  FSDP2 2  (2 ranks)",
    ]
    assert len(items_of("acme-titan")) == 13
    (item,) = items_of("acme_titan.light:falling")
    assert item == Item("schedule", "falling", "acme_titan.light:falling")
    assert max(row.ranks for row in rows_of(items_of("acme-titan")[0])) == 4


ERRORS = {
    "nothing-there": "nothing-there: no installed package of this name; install it, or write MODULE:NAME",
    "other": "other: it brings nothing to check; allowed: entry points of torchtitan.models, torchtitan.tasks, "
    "torchtitan.optimizers, torchtitan.adapters, torchtitan.schedules",
    "torn": "'torn' of group torchtitan.optimizers, by the installed package torn (torn.broken:X): cannot be imported "
    "(ZeroDivisionError: division by zero); mend or uninstall the package",
    "torn.broken:X": "torn.broken:X: cannot be imported (ZeroDivisionError: division by zero); mend the package",
    "torn.missing:X": "torn.missing:X: cannot be imported (ModuleNotFoundError: No module named 'torn.missing'); mend "
    "the package",
    "acme_titan.light:SIZES": "acme_titan.light:SIZES: given a dict; allowed: Family, TaskSpec, OptimizerSpec, "
    "AdapterSpec, or a function f(p, cycles)",
    "acme_titan.light:given_three": "acme_titan.light:given_three: given a function of other arguments; allowed: ",
    "acme_titan.heavy:Normed": "acme_titan.heavy:Normed is a class; give the Family, TaskSpec, OptimizerSpec or "
    "AdapterSpec that its entry point leads to",
    "acme_titan.light:NO_MODULE": "optimizer:NO_MODULE: make = acme_titan.hevy:Normed: cannot be imported "
    "(ModuleNotFoundError: No module named 'acme_titan.hevy'); mend the package",
    "acme_titan.light:NO_OPTION": "optimizer:NO_OPTION: make = acme_titan.heavy:Normed: options has limit, which the "
    "constructor does not take; mend the package",
    "acme_titan.light:UNSAID": "optimizer:UNSAID: make = acme_titan.heavy:Powered: the constructor needs power, which "
    "options lacks; mend the package",
    "acme_titan.light:NO_TASK_OPTION": "task:NO_TASK_OPTION: objective = acme_titan.heavy:Longest: options has limit, "
    "which the constructor does not take",
    "acme_titan.light:WITHOUT_DEBUG": "family:WITHOUT_DEBUG: it has no size called debugmodel; add one to its `sizes`",
    "acme-titan --options limit=1": "--options: allowed: for one task, optimizer or adapter; choose it with --only",
    "acme_titan.light:POWERED --options power": "--options: given power; allowed: NAME=VALUE",
    "acme_titan.light:POWERED --options powr=2": "--options: optimizer.options: given powr = 2; allowed: options of "
    "POWERED: power; did you mean power?",
    "acme_titan.light:IA3 --options rnk=2": "command line: adapter.rnk: ",
    "acme-titan --only family:acne": "--only: given family:acne; allowed: family:acme, ",
}


@pytest.mark.parametrize("arguments", ERRORS)
def test_what_cannot_be_tried_is_a_sentence(arguments, installed, capsys):
    install(installed, "other", "[torchtitan.trackers]\nours = other.light:X\n", light="X = 3")
    install(installed, "torn", "[torchtitan.optimizers]\ntorn = torn.broken:X\n", broken="1 / 0")
    registry.installed_entries.cache_clear()
    assert cli.main(["contract", *arguments.split()]) == 2
    assert " ".join(capsys.readouterr().err.split()).startswith(ERRORS[arguments])


def test_it_needs_nothing_of_the_tests(tmp_path):
    """A copy of the package alone, as a wheel installs it, tries one of its own."""
    (tmp_path / "torchtitan").symlink_to(ROOT / "torchtitan")
    arguments = ["contract", "torchtitan.models.qwen3:FAMILY", "--ranks", "1"]
    command = [sys.executable, "-m", "torchtitan", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "family:FAMILY  export: holds" in done.stdout
