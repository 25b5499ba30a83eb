#!/usr/bin/env bash
# The test command. Arguments go to pytest: ./run_tests.sh tests/test_llama.py -k gradients
# Without any, two workers share the whole suite: what one rank alone computes goes on beside what many ranks wait for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh
ensure_environment test
[ $# -gt 0 ] || set -- -n 2 --dist worksteal
exec "$PYTHON" -m pytest "$@"
