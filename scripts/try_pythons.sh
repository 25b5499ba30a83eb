#!/usr/bin/env bash
# The unit tests that start no ranks, under every Python from 3.10 to 3.13 that this machine has (on PATH or in pyenv).
# Each gets an environment in a temporary folder, by pip's index; with TRY_PYTHONS_ENV=FOLDER those that are there already
# (FOLDER/3.12 and so on) are taken and left.
#   scripts/try_pythons.sh [pytest's arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d "${TMPDIR:-/tmp}/torchtitan-pythons.XXXXXX")
trap 'rm -rf "$work"' EXIT

# tests that start ranks or other processes, or are about them, say so by what they import
mapfile -t tests < <(grep -rLE --include='test_*.py' 'support\.(pool|shared_meshes|overlap_runs)|fake_cuda|run_ranks|subprocess|bench_' tests)
failed=()
for version in 3.10 3.11 3.12 3.13; do
  python=$(command -v "python$version" || ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python 2>/dev/null | tail -n 1 || true)
  environment=${TRY_PYTHONS_ENV:-$work}/$version
  if [ ! -x "$environment/bin/python" ]; then
    if [ -z "$python" ] || ! "$python" --version >/dev/null 2>&1; then
      echo "== Python $version: not on this machine"
      continue
    fi
    "$python" -m venv "$environment"
    "$environment/bin/pip" install -q -c constraints.txt '.[test]'
  fi
  echo "== $("$environment/bin/python" --version)"
  PYTHONPATH=$PWD PYTHONDONTWRITEBYTECODE=1 "$environment/bin/python" -m pytest -q -p no:cacheprovider "$@" "${tests[@]}" ||
    failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed under ${failed[*]}"; exit 1; }
