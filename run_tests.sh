#!/usr/bin/env bash
# The test command. Arguments go to pytest: ./run_tests.sh tests/test_llama.py -k gradients
#
# ./run_tests.sh        the suite with a pairwise cover of the table of combinations, in less than half an hour on two cores
# ./run_tests.sh quick  without what takes long: an answer in under three minutes
# ./run_tests.sh full   every row of the table, in about half an hour: what CI runs. Writes tests/durations.json, from
#                       which `quick` computes what to leave out
# ./run_tests.sh slurm  on a real cluster of two nodes that it starts on this machine, in about two minutes; needs
#                       slurm-wlm and munge (apt) and root
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh
ensure_environment test
parallel="-n 2 --dist worksteal" # what one rank alone computes goes on next to what many ranks wait for
case "${1:-}" in
  "") set -- $parallel --pairwise ;;
  quick) set -- $parallel --quick "${@:2}" ;;
  full) set -- $parallel --record-durations "${@:2}" ;;
  slurm) set -- --slurm tests/test_slurm_cluster.py "${@:2}" ;;
esac
exec "$PYTHON" -m pytest "$@"
