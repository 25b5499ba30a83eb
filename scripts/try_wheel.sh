#!/usr/bin/env bash
# The package as its user gets it: a wheel, built and installed by pip into an empty environment, far from this folder,
# checks, trains, resumes, generates, exports and converts. Takes pip's index (or its --find-links) for what the wheel
# depends on, and some minutes. All of it is in a temporary folder that is deleted at the end.
#   scripts/try_wheel.sh [PYTHON]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:-python3}
work=$(mktemp -d "${TMPDIR:-/tmp}/torchtitan-wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/env"
export PIP_QUIET=2
"$work/env/bin/pip" wheel --no-deps -w "$work" "$here"
"$work/env/bin/pip" install -c "$here/constraints.txt" "$work"/*.whl
mkdir "$work/elsewhere"
cd "$work/elsewhere"
unset PYTHONPATH
titan=$work/env/bin/torchtitan
small=(--training.seq_len=64 --training.local_batch_size=1)

step() { printf '== %s\n' "$*"; }
step version; "$titan" --version
"$work/env/bin/python" -c "import torchtitan; assert torchtitan.__path__[0].startswith('$work'), torchtitan.__path__"
step init and check; "$titan" init first.toml; "$titan" check first.toml
step list; "$titan" list jobs tokenizers
step train; "$titan" train first.toml "${small[@]}" --training.steps=2 --checkpoint.last_save_model_only --checkpoint.last_save_in_hf
step resume; "$titan" train first.toml "${small[@]}" --training.steps=3
step generate; "$titan" generate outputs/first --prompt "def " --max_new_tokens 4
step export; "$titan" export outputs/first --merge --dtype float32 --to exported
step convert; "$titan" convert exported ours; "$titan" generate ours --prompt "def " --max_new_tokens 4
step checkpoints; "$titan" checkpoints outputs/first --verify
test -f outputs/first/training.png -a -f outputs/first/model_hf/tokenizer.json -a -f exported/model.safetensors.index.json
step "all of it works"
