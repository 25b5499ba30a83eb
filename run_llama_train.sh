#!/usr/bin/env bash
# Train from a TOML job file. Further arguments override the file: ./run_llama_train.sh --training.steps 20
#   NGPU         ranks to start (default: the GPUs there are, or 2 gloo ranks without one)
#   CONFIG_FILE  the job (default: train_configs/debug_model.toml)
#   NNODES, NODE_RANK, HEAD_ADDR, HEAD_PORT   of several machines: how many, which this is, where the first one is;
#                in an allocation of SLURM all this is found out, and a launcher started on each of its machines
#   LOG_RANK     local ranks that print, separated by commas (default: 0)
# Relative paths in the job and in arguments are relative to this folder.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
config=${CONFIG_FILE:-"$here/train_configs/debug_model.toml"}
if folder=$(cd "$(dirname "$config")" 2>/dev/null && pwd); then config=$folder/$(basename "$config"); fi
cd "$here"
source scripts/environment.sh
ensure_environment

export LOG_RANK=${LOG_RANK:-0}
exec "$PYTHON" -m torchtitan.launch "${NGPU:-auto}" --job.config_file "$config" "$@"
