"""Models, datasets, tasks, optimizers and the other kinds of names that installed packages add by entry points."""

import os
import subprocess
import sys

import pytest

from tests.support import jobs
from tests.support.packages import install, installed_package
from tests.support.pool import run_alone
from torchtitan import cli
from torchtitan.config.changes import changes, kept_job, refused
from torchtitan.config.manager import load
from torchtitan.core import registry
from torchtitan.core.errors import JobError
from torchtitan.models import CONFIG_CONVERTERS, SIZES
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.rules import check

LIGHT = """
from torchtitan.adapters import AdapterSpec
from torchtitan.config.options import Option
from torchtitan.datasets import DATASETS
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.models.family import Family
from torchtitan.models.llama import LLAMA3
from torchtitan.models.llama import CONFIG
from torchtitan.optimizers.spec import OptimizerSpec
from torchtitan.losses.tasks import TaskSpec

FAMILY = Family(sizes=LLAMA3, config=CONFIG, spec="acme_titan.heavy:SPEC")
HALVED = OptimizerSpec(
    make="acme_titan.heavy:halved", options={"half": Option(float, 0.0, "Half the momentum.")}, state=lambda options: 1
)
ADAPTER = AdapterSpec(make="acme_titan.heavy:Adapter")
TASK = TaskSpec(
    "acme_titan.heavy:NextToken",
    options={"halves": Option(float, 4.0, "Halves of a token's loss."), "noted": Option(list[str], [], "Remarks.")},
)


def letters(path, text_field):
    return DATASETS["text"](path, text_field)


def encoded(rest):
    return build_tokenizer(rest)


def falling(p, cycles):
    return 1 - p
"""
HEAVY = """
import torch

from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.models.spec import MODELS

SPEC = MODELS["llama3"]


def halved(groups, lr, half):
    return torch.optim.SGD(groups, lr=lr, momentum=2 * half, foreach=True)


class NextToken(SummedCrossEntropy):
    def __init__(self, num_chunks, halves, noted):
        super().__init__(num_chunks)
        self.halves = halves

    def compute_loss(self, head, hidden, *targets):
        return self.halves / 2 * super().compute_loss(head, hidden, *targets)
"""
ENTRIES = """
[torchtitan.models]
acme = acme_titan.light:FAMILY
[torchtitan.datasets]
letters = acme_titan.light:letters
[torchtitan.tokenizers]
encoded = acme_titan.light:encoded
[torchtitan.tasks]
next = acme_titan.light:TASK
[torchtitan.optimizers]
Halved = acme_titan.light:HALVED
[torchtitan.adapters]
fence = acme_titan.light:ADAPTER
[torchtitan.schedules]
falling = acme_titan.light:falling
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a package that adds one of each kind; the folder."""
    modules = dict(light=LIGHT, heavy=HEAVY)
    with installed_package(tmp_path / "site", monkeypatch, "acme-titan", ENTRIES, **modules) as folder:
        yield folder


WORDS = {
    "model.name": "acme",
    "training.dataset": "letters",
    "model.tokenizer_path": "encoded:bytes",
    "task.kind": "next",
    "task.options": "{halves = 2}",
    "optimizer.name": "Halved",
    "optimizer.options": "{half = 0.25}",
    "lr_scheduler.decay_type": "falling",
}


def test_names_of_an_installed_package_are_known_like_ours(installed, tmp_path, capsys):
    assert (
        "acme" in SIZES
        and SIZES["acme"] is SIZES["llama3"]
        and list(SIZES)[-1] == "acme" == list(CONFIG_CONVERTERS)[-1]
    )
    argv = [f"--{key}={value}" for key, value in (WORDS | {"training.dataset": "python_stdlib"}).items()]
    (fault,) = check(load([*argv, "--model.flavor=9B"]), 1, "cpu")
    assert str(fault).startswith('the job: model.flavor: given "9B"; allowed: one of "debugmodel", "8B"')
    faults = check(load(["--model.name=akme", "--optimizer.name=Halve", "--model.tokenizer_path=bytes"]), 1, "cpu")
    assert [fault.remedy for fault in faults] == ['did you mean "acme"?', 'did you mean "Halved"?']
    argv.remove("--optimizer.options={half = 0.25}")
    (fault,) = check(load([*argv, "--optimizer.options={halves = 1}"]), 1, "cpu")
    assert str(fault) == (
        "the job: optimizer.options: given halves = 1; allowed: options of Halved: half; did you mean half?"
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("{halve = 1}", "given halve = 1; allowed: options of next: halves, noted; did you mean halves?"),
        ("{weight = 1}", "given weight = 1; allowed: options of next: halves, noted; leave it out"),
        ('{halves = "2"}', 'given halves = "2"; allowed: halves = a number'),
        ('{noted = "a,b"}', 'given noted = "a,b"; allowed: noted = a list, each text; write noted = ["a", "b"]'),
    ],
)
def test_options_of_a_task_are_judged_by_its_package(installed, options, line):
    arguments = ["--model.tokenizer_path=bytes", "--task.kind=next", f"--task.options={options}"]
    assert [str(fault) for fault in check(load(arguments), 1, "cpu")] == [f"the job: task.options: {line}"]


def test_tasks_of_ours_have_no_options_in_the_table():
    fault = "the job: task.options: given beta = 0.2; allowed: nothing with task.kind"
    for kind, remedy in (("pretrain", "leave it out"), ("dpo", "write dpo.beta")):
        arguments = ["--model.tokenizer_path=bytes", f"--task.kind={kind}", "--task.options.beta=0.2"]
        assert f'{fault} = "{kind}"; {remedy}' in [str(fault) for fault in check(load(arguments), 1, "cpu")]


def test_a_checkpoint_keeps_the_options_of_a_task(installed):
    jobs_of_runs = [load(["--task.kind=next", f"--task.options={{halves = {halves}}}"]) for halves in (2, 3)]
    saved, now = (kept_job(job, {}, 8) for job in jobs_of_runs)
    assert saved["job"]["task"]["options"] == {"halves": 2}
    (change,) = refused(changes(saved, now), [])
    assert str(change) == "task.options {halves = 2} -> {halves = 3}"


def test_a_section_that_no_job_has_is_refused(installed):
    spec = "from torchtitan.losses.tasks import TaskSpec\nX = TaskSpec('acme_titan.heavy:X', options_section='acme')"
    install(installed, "other", "[torchtitan.tasks]\nodd = other.light:X\n", light=spec)
    registry.installed_entries.cache_clear()
    (fault,) = check(load(["--model.tokenizer_path=bytes", "--task.kind=odd"]), 1, "cpu")
    assert str(fault) == (
        'the job: task.kind: given "odd"; allowed: a task with options of a section of a job, not of [acme]; declare '
        "them as TaskSpec.options in its package"
    )


def test_a_job_of_such_names_trains_as_one_of_ours(installed, tmp_path):
    texts = jobs.write_texts(tmp_path / "data")
    builtin_arguments = jobs.arguments(
        tmp_path / "ours",
        texts,
        training__steps=3,
        optimizer__name="SGD",
        optimizer__options="{momentum = 0.5}",
        optimizer__weight_decay=0,
    )
    options = {key.replace(".", "__"): value for key, value in WORDS.items()}
    plugin_arguments = jobs.arguments(
        tmp_path / "theirs", texts, training__steps=3, optimizer__weight_decay=0, **options
    )
    assert run_alone(trained, str(installed), plugin_arguments) == run_alone(trained, str(installed), builtin_arguments)


def trained(folder, argv):
    sys.path.insert(0, folder)
    registry.installed_entries.cache_clear()  # what was imported before this process was forked may have looked already
    rows, state = jobs.train(argv)
    return [row["loss"] for row in rows], state


def test_checking_imports_what_the_job_names_and_no_torch(installed, tmp_path):
    (installed / "acme_titan" / "heavy.py").write_text("raise SystemExit(9)")
    install(installed, "other", "[torchtitan.models]\nunused = other.light:X\n", light="raise SystemExit(8)")
    texts = jobs.write_texts(tmp_path / "data")
    argv = jobs.arguments(tmp_path / "run", texts, **{key.replace(".", "__"): value for key, value in WORDS.items()})
    program = "import sys; from torchtitan import cli; code = cli.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    for arguments in (argv, ["--model.tokenizer_path=bytes"], ["--help-config"]):
        environment = {**os.environ, "PYTHONPATH": f"{installed}:{jobs.ROOT}"}
        command = [sys.executable, "-c", f"{program}; sys.exit(code)", "check", "--no-memory", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), arguments


def test_listed_with_their_package(installed, capsys):
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "  Adam" in out and "  acme: debugmodel, 8B, 70B, 405B  [acme-titan]" in out
    assert "  Halved: half (a number; default 0.0)  [acme-titan]" in out
    assert "  next: halves (a number; default 4.0), noted (a list, each text; default [])  [acme-titan]" in out
    foreign = [line.split()[0].rstrip(":") for line in out if line.endswith("[acme-titan]")]
    assert foreign == ["acme", "letters", "encoded", "next", "Halved", "fence", "falling"]
    assert cli.main(["list", "adapters"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("adapters  (adapter.kind)\n") and out.endswith("\n  fence  [acme-titan]\n")
    assert cli.main(["list", "adaptors"]) == 2
    assert capsys.readouterr().err == (
        "torchtitan list: KIND: given 'adaptors'; allowed: models, datasets, tokenizers, tasks, optimizers, adapters, "
        "trackers, callbacks, schedules, jobs; did you mean adapters?; torchtitan list --help lists the options\n"
    )
    assert cli.main(["list", "--help"]) == 0 and "usage: torchtitan list" in capsys.readouterr().out


BROKEN = {
    "torn = broken.torn:X": "'torn' of group torchtitan.optimizers, by the installed package broken (broken.torn:X): "
    "cannot be imported (ZeroDivisionError: division by zero); mend or uninstall the package",
    "torn = broken.none:X": "'torn' of group torchtitan.optimizers, by the installed package broken (broken.none:X): "
    "cannot be imported (ModuleNotFoundError: No module named 'broken.none'); mend or uninstall the package",
    "torn = broken.odd:X": "'torn' of group torchtitan.optimizers, by the installed package broken (broken.odd:X): "
    "leads to a int, where a OptimizerSpec is needed; mend or uninstall the package",
}


@pytest.mark.parametrize("entry", BROKEN)
def test_a_broken_package_is_one_line_that_names_it(entry, installed, capsys):
    install(installed, "broken", f"[torchtitan.optimizers]\n{entry}\n", torn="1 / 0", odd="X = 3")
    registry.installed_entries.cache_clear()
    job = ["--optimizer.name=torn", "--model.tokenizer_path=bytes"]
    assert cli.main(["check", *job]) == 2
    assert capsys.readouterr().err.splitlines()[0] == BROKEN[entry]
    assert (
        cli.main(["check", "--no-memory", "--model.tokenizer_path=bytes"]) == 0
    )  # who does not use it is not troubled
    capsys.readouterr()
    assert cli.main(["list", "optimizers"]) == 2
    streams = capsys.readouterr()
    assert streams.err == BROKEN[entry] + "\n" and "torn" not in streams.out and "Halved" in streams.out


def test_names_that_are_taken(installed, capsys):
    entries = "[torchtitan.optimizers]\nHalved = other.light:X\nAdamW = other.light:X\n"
    install(installed, "other", entries, light="from acme_titan.light import HALVED as X")
    registry.installed_entries.cache_clear()
    with pytest.raises(JobError, match="'Halved' .* by the installed package acme-titan .*: other gives it too"):
        OPTIMIZERS["Halved"]
    assert OPTIMIZERS["AdamW"].shared and len(OPTIMIZERS) == len(list(OPTIMIZERS))
    assert cli.main(["list", "optimizers"]) == 2
    assert "'AdamW' of other is not used: the project has one of that name; rename it\n" in capsys.readouterr().err
