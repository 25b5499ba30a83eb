"""Prepare the release of the version in pyproject.toml: check, build, install in an empty environment, try, and tag.

    python scripts/release.py            builds wheel and sdist into dist/ and tries both
    python scripts/release.py --tag      and tags the commit (nothing is pushed or uploaded)

The wheel is installed with its dependencies, by pip's index or find-links, into an empty environment. There the
commands of README run in a folder that has only what README names. The sdist is unpacked and builds the wheel again.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import tomli
import yaml

ROOT = Path(__file__).resolve().parent.parent
OLD_JOB = (
    '[model]\nname = "llama3"\nflavor = "debugmodel"\ntokenizer_path = "debug"\n'
    '[training]\ndataset = "python_stdlib"\nbatch_size = 2\n'
)
"""What README calls old.toml: a job of PyTorch's torchtitan of July 2024."""


def version() -> str:
    return str(tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def inconsistencies() -> list[str]:
    """List what contradicts the version, or is not ready for a release."""
    number, changes = version(), (ROOT / "CHANGELOG.md").read_text()
    problems = []
    if f"\n## {number}\n" not in changes:
        problems.append(f"CHANGELOG.md has no heading `## {number}`")
    elif re.search(r"^## .*", changes, re.MULTILINE)[0] != "## Not released yet":  # type: ignore[index]
        problems.append("CHANGELOG.md does not begin with `## Not released yet`")
    if yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] != number:
        problems.append(f"the version of CITATION.cff is not {number}")
    return problems


def unready() -> list[str]:
    """List what keeps this commit from being tagged."""
    problems = []
    changes = (ROOT / "CHANGELOG.md").read_text()
    if changes.split("## Not released yet\n")[1].split("\n## ")[0].strip():
        problems.append("CHANGELOG.md has entries under `## Not released yet`: move them below the version")
    if output("git", "status", "--porcelain"):
        problems.append("the tree has changes: commit them")
    if output("git", "tag", "--list", f"v{version()}"):
        problems.append(f"the tag v{version()} exists")
    return problems


def readme_commands() -> list[list[str]]:
    """Return the commands `torchtitan ...` of README's blocks, in order."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in "".join(blocks).splitlines()]
    return [line for line in lines if line[:1] == ["torchtitan"]]


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def run(*command: str | Path, cwd: Path) -> None:
    print("==", *[Path(word).name if isinstance(word, Path) else word for word in command], flush=True)
    subprocess.run(list(map(str, command)), cwd=cwd, check=True, stdin=subprocess.DEVNULL)


def build(folder: Path) -> tuple[Path, Path]:
    """Build wheel and sdist into a folder and return their paths."""
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    (wheel,), (sdist,) = folder.glob(f"*-{version()}-*.whl"), folder.glob(f"*-{version()}.tar.gz")
    return wheel, sdist


def new_environment(folder: Path, *requirements: str | Path) -> Path:
    """Make an environment with these installed and return its folder of programs."""
    run(sys.executable, "-m", "venv", folder, cwd=ROOT)
    run(folder / "bin/pip", "install", "-q", "-c", ROOT / "constraints.txt", *requirements, cwd=ROOT)
    return folder / "bin"


def try_wheel(wheel: Path, sources: Path, work: Path) -> None:
    """Install the wheel and run README's commands after a run of the debug job."""
    programs, folder = new_environment(work / "env", wheel), work / "elsewhere"
    folder.mkdir()
    shutil.copytree(sources / "train_configs", folder / "train_configs")
    (folder / "old.toml").write_text(OLD_JOB)
    run(programs / "torchtitan", "--version", cwd=folder)
    launch = (programs / "python", "-m", "torchtitan.launch", "auto", "--job.config_file")
    run(*launch, "train_configs/debug_model.toml", cwd=folder)  # as ./run_llama_train.sh
    for command in readme_commands():
        run(programs / command[0], *command[1:], cwd=folder)


def try_sdist(sdist: Path, work: Path) -> Path:
    """Unpack the sdist, build it once more and read its version; return its folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    (sources,) = work.glob("*/pyproject.toml")
    rebuild = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", work / "again", sources.parent)
    run(sys.executable, *rebuild, cwd=work)
    (again,) = (work / "again").glob("*.whl")
    assert version() in again.name
    return sources.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", action="store_true", help="tag the commit if everything works")
    arguments = parser.parse_args()
    if problems := inconsistencies() + (unready() if arguments.tag else []):
        print(*problems, sep="\n", file=sys.stderr)
        return 2
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    try:
        wheel, sdist = build(ROOT / "dist")
        with tempfile.TemporaryDirectory(prefix="torchtitan-release-") as name:
            work = Path(name)
            try_wheel(wheel, try_sdist(sdist, work), work)
    except subprocess.CalledProcessError as error:
        print(f"no release: the last command above ended with exit code {error.returncode}", file=sys.stderr)
        return 1
    if arguments.tag:
        run("git", "tag", "-a", f"v{version()}", "-m", f"torchtitan-toml {version()}", cwd=ROOT)
        print(f"tagged v{version()}; push it with: git push origin v{version()}")
    print(f"{wheel.name} and {sdist.name} in dist/ work")
    return 0


if __name__ == "__main__":
    sys.exit(main())
