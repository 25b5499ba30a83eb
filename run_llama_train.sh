#!/usr/bin/env bash
# Train from a TOML job file. Further arguments override the file: ./run_llama_train.sh --training.steps 20
#   NGPU         ranks to start (default: the GPUs there are, or 2 gloo ranks without one)
#   CONFIG_FILE  the job (default: train_configs/debug_model.toml)
#   LOG_RANK     local ranks that print, separated by commas (default: 0)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
config=${CONFIG_FILE:-"$here/train_configs/debug_model.toml"}
config=$(cd "$(dirname "$config")" 2>/dev/null && pwd)/$(basename "$config")
cd "$here"
source scripts/environment.sh
ensure_environment

if [ -z "${NGPU:-}" ]; then
  NGPU=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
  [ "$NGPU" -gt 0 ] || NGPU=2
fi
export LOG_RANK=${LOG_RANK:-0}
exec "$PYTHON" -m torchtitan.launch "$NGPU" --job.config_file "$config" "$@"
