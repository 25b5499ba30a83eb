#!/usr/bin/env bash
# The test command. Arguments go to pytest: ./run_tests.sh tests/test_llama.py -k gradients
# Without any, two workers share the whole suite: what one rank alone computes goes on beside what many ranks wait for.
# `./run_tests.sh quick` leaves out what takes long, and answers in under three minutes. `./run_tests.sh slurm` tests on
# a real cluster of two nodes that it starts on this machine, in about two minutes; it needs slurm-wlm and munge (apt)
# and root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh
ensure_environment test
if [ "${1:-}" = quick ]; then
  set -- --quick -n 2 --dist worksteal "${@:2}"
elif [ "${1:-}" = slurm ]; then
  set -- --slurm tests/test_slurm_cluster.py "${@:2}"
elif [ $# -eq 0 ]; then
  set -- -n 2 --dist worksteal
fi
exec "$PYTHON" -m pytest "$@"
