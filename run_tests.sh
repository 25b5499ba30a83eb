#!/usr/bin/env bash
# The test command. Arguments go to pytest: ./run_tests.sh tests/test_llama.py -k gradients
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/environment.sh
ensure_environment test
exec "$PYTHON" -m pytest "$@"
