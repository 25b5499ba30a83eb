"""README and docs are correct: commands run or at least parse, names exist, links resolve.

The commands of one page run one after another in a temporary folder that contains the files that the pages mention.
Training there is cut down to a model of a few thousand parameters. Commands that take long, install something or need
GPUs do not run: the test checks that their files and options exist.
"""

import contextlib
import gzip
import io
import json
import multiprocessing
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import tomli

from scripts import feature_matrix
from tests.plans.combinations import Combination
from tests.support import jobs
from tests.support.forked_job import fork_ranks
from tests.support.pool import run_alone
from torchtitan import cli
from torchtitan.config import manager
from torchtitan.config.options import free_table, options, sections
from torchtitan.process import exit

ROOT = jobs.ROOT
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NO_OPTIONS = {
    "gguf",
    "jsonl",
    "png",
    "py",
    "toml",
    "json",
    "previous",
    "redone",
}  # second parts of file names such as metrics.jsonl and training.png, which look like options
SMALL = {
    "model.overrides": "{dim = 32, n_layers = 2, n_heads = 4, multiple_of = 16}",
    "training.seq_len": "32",
    "training.local_batch_size": "2",
    "training.mixed_precision_param": "float32",
    "validation.samples": "2",
    "metrics.plot": "false",
}
MOST_STEPS = 6


class Command(NamedTuple):
    page: str
    line: str
    arguments: list[str]
    """The program and its arguments, without leading environment variables and trailing redirection."""
    environment: dict[str, str]
    output: str | None

    @property
    def program(self) -> str:
        return Path(self.arguments[0]).name

    @property
    def argv(self) -> list[str]:
        """The arguments of `torchtitan` that do the same on one rank; [] for another program."""
        if self.program == "run_llama_train.sh":
            config = self.environment.get("CONFIG_FILE", "train_configs/debug_model.toml")
            return ["train", "--job.config_file", config, *self.arguments[1:]]
        return self.arguments[1:] if self.program == "torchtitan" else []


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def parse(page: str, line: str) -> Command:
    arguments, environment = shlex.split(line, comments=True), {}
    while "=" in arguments[0] and not arguments[0].startswith("-"):
        name, _, environment[name] = arguments.pop(0).partition("=")
    output = arguments[arguments.index(">") + 1] if ">" in arguments else None
    return Command(page, line, arguments[: arguments.index(">")] if output else arguments, environment, output)


@cache
def commands() -> list[Command]:
    parsed = []
    for page in PAGES:
        lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
        parsed += [parse(page.name, line) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return parsed


# A folder for the pages' commands


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "tests/assets/c4_test").mkdir(parents=True)
    (tmp_path / "tests/assets/c4_test/data.json").write_text(
        '{"text": "a document"}\n'
    )  # a file of the repository of PyTorch's torchtitan
    for name in ("tests/assets/tokenizer", "train_configs"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "tests/assets/tokenizer/tokenizer.json", tmp_path)
    licensed = tmp_path / "assets/tokenizer/original/tokenizer.model"  # in place of Llama's licensed tokenizer
    licensed.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests/assets/tokenizer/tiktoken.model", licensed)
    shutil.copy(ROOT / "tests/fixtures/old_tomls/v0_2_2_debug_model.toml", tmp_path / "old.toml")
    jobs_of_docs = [text for text in blocks(ROOT / "docs/jobs.md", "toml") if text.startswith("# my_job.toml")]
    (tmp_path / "my_job.toml").write_text(jobs_of_docs[0])
    texts = jobs.write_texts(tmp_path / "my_texts", documents=30)
    with gzip.open(tmp_path / "my_texts/more.jsonl.gz", "wb") as file:
        file.write(texts.read_bytes())
    return tmp_path


def cut_down(argv: list[str]) -> list[str]:
    """Return the arguments of a training run with its sizes replaced by small ones."""
    retained, remaining = [], list(argv)
    while remaining:
        argument = remaining.pop(0)
        option = (
            [argument]
            if "=" in argument or not remaining or remaining[0].startswith("--")
            else [argument, remaining.pop(0)]
        )
        if argument.partition("=")[0].removeprefix("--") not in (*SMALL, "training.steps"):
            retained += option
    steps = min(manager.load(argv).training.steps, MOST_STEPS)
    return [*retained, f"--training.steps={steps}", *(f"--{name}={value}" for name, value in SMALL.items())]


def planned(argv: list[str]) -> list[str]:
    """Return the arguments of `torchtitan plan` for two layers and 1e9 tokens on at most four GPUs.

    tests/planner/test_search.py searches plans of whole models on thousands of GPUs.
    """
    gpus = min(4, int(argv[argv.index("--gpus") + 1]))
    sizes = ["--model.overrides={n_layers = 2}", f"--training.global_batch_size={gpus}"]
    return [*argv, f"--gpus={gpus}", "--tokens=1e9", *sizes]


def as_tested(argv: list[str]) -> list[str]:
    if argv[0] == "train":
        return [argv[0], *cut_down(argv[1:])]
    if argv[0] == "plan":
        return planned(argv)
    # the page means a new run, not a resume of the cut-down one; the memory estimate has its own tests
    plain = argv[0] == "check" and "--upgrade" not in argv
    return [*argv, "--job.dump_folder=unused", "--no-memory"] if plain else argv


OPTIONAL = ("aim", "lm_eval", "mlflow", "peft", "plotly", "torchao", "transformers", "wandb")
"""Packages of extras, which the environment of `./run_llama_train.sh` does not have. The datasets of the hub that jobs
of PyTorch's torchtitan name need `data`, which their translation says."""
BASE_PAGES = ("README.md", "getting_started.md")
"""Pages whose commands need no extra."""


def run_all(folder: str, lines: list[list[str]], missing: tuple[str, ...] = ()) -> list[tuple[int, str, str]]:
    """Run command lines of `torchtitan` one after another in this process; return codes, output, errors.

    `missing`: packages that cannot be imported.
    """
    os.chdir(folder)
    sys.modules.update(dict.fromkeys(missing))
    multiprocessing.set_start_method(
        None, force=True
    )  # the platform's default, as for a user; the test pool's is inherited
    fork_ranks()
    answers = []
    for argv in lines:
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(as_tested(argv))
            except SystemExit as stop:
                code = stop.code
        answers.append((code, *(stream.buffer.getvalue().decode() for stream in (out, err))))
    return answers


@pytest.mark.parametrize("page", sorted({command.page for command in commands() if command.argv}))
def test_the_commands_of_a_page_run(page, workplace):
    page_commands = [command for command in commands() if command.page == page and command.argv]
    missing = OPTIONAL if page in BASE_PAGES else ()
    answers = run_alone(run_all, str(workplace), [command.argv for command in page_commands], missing)
    for command, (code, out, err) in zip(page_commands, answers, strict=True):
        assert code == 0, f"{command.line}\n{out}\n{err}"
        assert "Traceback" not in err
        if command.output:
            tomli.loads(out)


def test_the_first_check_of_the_readme_passes_in_a_fresh_clone(tmp_path):
    """It passes without any download: no licensed tokenizer, no data, no earlier run."""
    shutil.copytree(ROOT / "train_configs", tmp_path / "train_configs")
    first = next(command for command in commands() if command.page == "README.md" and command.argv[:1] == ["check"])
    ((code, out, err),) = run_alone(run_all, str(tmp_path), [first.argv])
    assert code == 0 and ": OK" in out, err


def test_the_first_page_lists_the_files_of_the_debug_run(workplace):
    train = ["train", "--job.config_file", "train_configs/debug_model.toml"]
    ((code, _, err),) = run_alone(run_all, str(workplace), [train])
    assert code == 0, err
    folder = workplace / "outputs/debug"
    written_files = {path.name for path in folder.iterdir()}
    page = (ROOT / "docs/getting_started.md").read_text()
    documented = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert written_files - {"checkpoint"} <= set(documented) and {"metrics.jsonl", "config.toml"} <= written_files
    (keys,) = re.findall(r"one object a logged step: (.*?) where the device", page, re.DOTALL)
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert set(re.findall(r"`(\w+)`", keys)) - {"mfu"} == record.keys() - {"mfu", "mfu_full", "marked"}


def test_the_first_page_names_the_steps_of_the_debug_job():
    job = tomli.loads((ROOT / "train_configs/debug_model.toml").read_text())
    assert f"checkpoint/step-{job['training']['steps']:08d}" in (ROOT / "docs/getting_started.md").read_text()


def test_the_first_screen_says_what_this_is_and_what_has_run():
    screen = " ".join((ROOT / "README.md").read_text().split("```")[0].split())
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "This is not [PyTorch's torchtitan]" in screen and f"installed as `{project['name']}`" in screen
    gpus = (ROOT / "docs/gpus.md").read_text()
    assert "**several GPUs** | **not tried yet**" in screen and "several GPUs have not yet" in gpus
    best = max(float(share) for share in re.findall(r"\| ([\d.]+) % \|", gpus.split("## Measured on one H100")[1]))
    assert f"at {best:.0f} % MFU" in screen
    assert f"on up to {max(row.ranks for row in feature_matrix.ROWS)} ranks" in screen
    licensed = bool(list(ROOT.glob("LICENSE*"))) or "license" in project
    assert ("which one is pending" in screen) != licensed


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_index_links_every_page():
    index = (ROOT / "docs/README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"]({page.name})" not in index] == ["README.md"]


# Checks of commands that do not run


ENVIRONMENT = {"NGPU", "CONFIG_FILE", "LOG_RANK", "NNODES", "NODE_RANK", "HEAD_ADDR"}


def argument_of(arguments: list[str], name: str) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else None


def check_without_running(command: Command) -> None:
    """Fail unless the program, its files and its options exist."""
    arguments, program = command.arguments, command.program
    if program == "torchtitan":
        assert arguments[1] in cli.COMMANDS
    elif program == "run_llama_train.sh":
        assert command.environment.keys() <= ENVIRONMENT and os.access(ROOT / program, os.X_OK)
        manager.load(command.argv[1:])
    elif program == "torchrun":
        module = argument_of(arguments, "-m")
        assert module == "torchtitan.train"
        manager.load(arguments[arguments.index(module) + 1 :])
    elif program == "sbatch":
        script = next(argument for argument in arguments[1:] if not argument.startswith("-"))
        assert os.access(ROOT / script, os.X_OK)
        manager.load(arguments[arguments.index(script) + 1 :])
    elif program == "pip":
        assert argument_of(arguments, "-c") == "constraints.txt"
        if "-e" not in arguments:
            assert arguments[1] in ("install", "download") and arguments[-1] == "."
            return
        (extras,) = re.findall(r"^\.(?:\[(\w+)\])?$", argument_of(arguments, "-e"))
        defined_extras = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert not extras or extras in defined_extras
    elif program == "docker":
        assert arguments[1] in ("build", "run")
        declared = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        given = [argument.partition("=")[0] for argument in arguments if re.match(r"[A-Z]+=", argument)]
        assert set(given) <= set(declared)
        if arguments[1] == "run":
            command, *argv = arguments[arguments.index("torchtitan-toml") + 1 :]
            assert command in cli.COMMANDS
            manager.load([argument for argument in argv if not argument.startswith("/data/job")])
    elif program == "run_tests.sh" or program.startswith("python"):
        assert program != "run_tests.sh" or os.access(ROOT / program, os.X_OK)
        assert all((ROOT / argument).exists() for argument in arguments[1:] if argument.endswith((".py", ".sh")))
    else:
        known = ("ruff", "mypy", "ollama", "sha256sum")
        assert program in known, f"a command that this test does not know: {command.line}"


@pytest.mark.parametrize("command", commands(), ids=lambda command: f"{command.page}: {command.line}"[:70])
def test_commands_name_existing_files_and_options(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    check_without_running(command)


@pytest.mark.parametrize(
    "line",
    [
        "torchtitan trian",
        "./run_llama_train.sh --training.step 3",
        "CONFIG_FILE=train_configs/none.toml ./run_llama_train.sh",
        "GPUS=2 ./run_llama_train.sh",
        "torchrun -m torchtitan.training",
        "pip install -c constraints.txt -e '.[nothing]'",
        "./run_tests.sh tests/test_nothing.py",
        "sbatch --nodes=2 scripts/none.slurm",
        "docker build --build-arg TROCH=cpu .",
        "docker run torchtitan-toml trian",
        "make all",
    ],
)
def test_a_wrong_command_would_be_noticed(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((AssertionError, ValueError)):
        check_without_running(parse("page", line))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_jobs_on_the_page_load(page, workplace):
    of_packages = "[project"  # tables for another package's pyproject.toml
    for number, text in enumerate(text for text in blocks(page, "toml") if not text.startswith(of_packages)):
        job = workplace / f"job{number}.toml"
        job.write_text(text)
        manager.load(["--job.config_file", str(job)])


def named_options(text: str) -> Iterator[str]:
    """Yield options in back quotes: `training.steps`, `training.steps = 3`, `--training.steps 3`."""
    section_names = {section.split(".")[0] for section in sections()}
    for name in re.findall(r"`(?:--)?([a-z_]+(?:\.[a-z_0-9]+)+)(?=[` =])", text):
        section, _, option = name.partition(".")
        if section in section_names and option.split(".")[0] not in NO_OPTIONS:
            yield name


def named_files(text: str) -> Iterator[str]:
    yield from re.findall(r"`((?:torchtitan|tests|scripts|docs|train_configs)/[\w./-]*)`", text)


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if re.match(r"https?://", target):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_links(page):
    text = page.read_text()
    valid_names = options().keys() | sections()
    assert [name for name in named_options(text) if name not in valid_names and not free_table(name)] == []
    assert [name for name in named_files(text) if not (ROOT / name).exists()] == []
    assert broken_links(page) == []


def test_wrong_names_and_links_would_be_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n`training.step = 3` `tests/none.py` [a](none.md) [b](#a-page) [c](#another) `x.steps`\n")
    assert list(named_options(page.read_text())) == ["training.step"]
    assert list(named_files(page.read_text())) == ["tests/none.py"]
    assert broken_links(page) == ["none.md", "#another"]


def test_exit_codes():
    codes = {
        int(code)
        for row in re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
        for code in row.split(",")
    }
    unexplained = {exit.CRASH_LOOP, exit.HUNG, exit.OUT_OF_MEMORY, exit.DIFFERING}
    assert codes == {0, 1} | unexplained | exit.EXPLAINED


# The feature matrix


@pytest.mark.parametrize(
    ("page", "render"), [(feature_matrix.PAGE, feature_matrix.matrix), (feature_matrix.FEATURES, feature_matrix.pairs)]
)
def test_the_tables_are_up_to_date(page, render):
    text = page.read_text()
    assert text == feature_matrix.written_into(text, render(feature_matrix.ROWS)), (
        "run scripts/feature_matrix.py --write"
    )


def test_the_matrix_of_a_few_combinations():
    rows = [
        Combination(recompute="2"),
        Combination(ranks=2, dp_shard=2, recompute="full", prefetch=1),
        Combination(ranks=4, dp_shard=4),
        Combination(ranks=4, dp_shard=2, dp_replicate=2, document_mask=True),
        Combination(ranks=2, dp_replicate=2, compile="block"),
    ]
    head, _, *lines = [
        [c.strip() for c in line.strip("|").split("|")] for line in feature_matrix.matrix(rows).splitlines()
    ]
    shown = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    assert list(shown) == ["one rank", "FSDP (2, 4 ranks)", "HSDP (4 ranks)", "DDP (2 ranks)"]
    assert [shown[name]["recompute"] for name in shown] == ["every 2nd", "full, none", "none", "none"]
    assert [shown[name]["prefetch"] for name in shown] == ["", "✓", "", ""]
    assert [shown[name]["document mask"] for name in shown] == ["", "", "✓", ""]
    assert shown["DDP (2 ranks)"]["compile"] == "block"


def test_the_matrix_needs_its_markers():
    assert feature_matrix.written_into("a <!-- matrix -->\nold\n<!-- /matrix -->\nb", "new") == (
        "a <!-- matrix -->\nnew\n<!-- /matrix -->\nb"
    )
    for text in ("a", "<!-- matrix -->", "<!-- /matrix -->"):
        with pytest.raises(ValueError, match="needs the lines"):
            feature_matrix.written_into(text, "new")


def test_the_changelog_has_no_repeated_entry():
    """Find repeated entries also if they are wrapped differently, as a merge may leave both."""
    entries = [" ".join(entry.split()) for entry in re.split(r"^\* ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)]
    assert sorted(entries) == sorted(set(entries))
