#!/usr/bin/env bash
# The test command. Arguments go to pytest: ./run_tests.sh tests/models/test_llama.py -k gradients
#
# ./run_tests.sh        a pairwise cover of the table of combinations and all but the longest other tests, in about
#                       seventeen minutes on two cores
# ./run_tests.sh quick  without the modules that take longest, in less than three minutes
# ./run_tests.sh full   everything, in about an hour: what CI runs. Writes tests/durations.json, from which the
#                       other two compute what to leave out
# ./run_tests.sh slurm  on a real cluster of two nodes that it starts on this machine, in about two minutes; needs
#                       slurm-wlm and munge (apt) and root
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh
ensure_environment test
unset PYTHONDONTWRITEBYTECODE # where it is set, each of hundreds of processes would compile the package again
parallel="-n 3 --dist worksteal" # on two cores: workers often wait for launchers and other ranks
case "${1:-}" in
  "") set -- $parallel --pairwise ;;
  quick) set -- $parallel --quick "${@:2}" ;;
  full) set -- $parallel --record-durations "${@:2}" ;;
  slurm) set -- --slurm tests/launcher/test_slurm_cluster.py "${@:2}" ;;
esac
exec "$PYTHON" -m pytest "$@"
