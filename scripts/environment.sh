# Sourced by the shell commands at the top of the repository: leaves in $PYTHON an interpreter that has the package.
# Usage: ensure_environment [extra]
#
# Uses .venv where there is one, then whatever python3 has the package installed; else makes .venv. A second start
# installs nothing, and an interrupted installation is taken up again.

ensure_environment() {
  local extra=${1:-} wanted stamp done
  wanted=".${extra:+[$extra]}"
  if [ ! -e .venv ] && has_package python3 "$extra"; then
    PYTHON=python3
    return
  fi
  PYTHON=.venv/bin/python
  stamp=.venv/installed-${extra:-base}
  for done in "$stamp" .venv/installed-test; do # the tests' packages include all others
    if [ -e "$done" ] && [ "$(cat "$done")" = "$(cat pyproject.toml constraints.txt | cksum)" ]; then
      return
    fi
  done
  if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "Python 3.10 or newer is needed as python3; found: $(python3 --version 2>&1)" >&2
    exit 2
  fi
  if [ ! -x "$PYTHON" ]; then
    echo "== making a virtual environment in .venv with $(python3 --version)"
    if ! python3 -m venv .venv; then
      rm -rf .venv
      echo "python3 cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2
      exit 2
    fi
  fi
  echo "== installing $wanted into .venv (once; with PyTorch this takes some minutes)"
  if ! "$PYTHON" -m pip install --disable-pip-version-check -c constraints.txt -e "$wanted" |
    sed -u -n -E '/^ *(Collecting|Downloading|Building|Installing|Successfully|ERROR)/p'; then # pipefail is on
    echo "the installation failed; run this again to take it up where it stopped" >&2
    exit 1
  fi
  cat pyproject.toml constraints.txt | cksum > "$stamp"
}

has_package() { # python extra; looks at what is installed without importing it (importing torch takes seconds)
  "$1" - "$2" <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
for name in ["torchtitan-toml", "torch"] + (["pytest", "pytest-xdist", "pytest-rerunfailures", "transformers", "peft", "mypy", "hatchling"] if sys.argv[1] else []):
    version(name)
PY
}
