#!/usr/bin/env bash
# The first hour on a machine with GPUs: what to run, in order, with what each line should show, on 1 GPU and then on 8.
#
#   scripts/gpu_hour.sh [--list] [1 | 8] [FOLDER]
#
# --list prints the steps and runs nothing. Everything goes to FOLDER (outputs/gpu_hour): a log a step, what the steps
# wrote, the machine's facts. A step that fails or hangs (15 minutes) is said and the next one begins. Send back
# FOLDER.tar.gz; the models are left out of it. Nothing here changes a setting of the device.
set -uo pipefail
cd "$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" || exit 2
list=false
[ "${1:-}" = --list ] && list=true && shift
gpus=${1:-1}
out=${2:-outputs/gpu_hour}
case $gpus in 1 | 8) ;; *) sed -n '2,9s/^# \{0,1\}//p' "$0" && exit 2 ;; esac

step() { # NAME "what it should show" COMMAND...
  local name=$1 expected=$2
  shift 2
  if $list; then
    printf '%s\t%s\t%s\n' "$name" "$expected" "$(printf '%q ' "$@")"
    return
  fi
  echo "== $name: $expected"
  if timeout -k 60 900 "$@" >"$out/$name.log" 2>&1; then
    echo "   ran; $(grep -aE 'tok/s|equal|passed|differ|result:' "$out/$name.log" | tail -1)"
  else
    echo "   FAILED (exit code $?): see $out/$name.log"
  fi
}

job() { # NAME "what it should show" RANKS JOB OPTIONS... : a training job in a folder of its own
  local name=$1 expected=$2 ranks=$3 file=$4
  shift 4
  step "$name" "$expected" env "NGPU=$ranks" "CONFIG_FILE=train_configs/$file.toml" ./run_llama_train.sh \
    "--job.dump_folder=$out/$name" --metrics.plot=false --checkpoint.enable=false --validation.enable=false "$@"
}

data=(--training.dataset=python_stdlib --model.tokenizer_path=bytes)
one=(--model.name=llama3.2 --model.flavor=1B --training.seq_len=4096 --training.global_batch_size=-1)
one+=("${data[@]}" --training.local_batch_size=4 --metrics.log_freq=10 --optimizer.lr=1e-4)
for_60=(--training.steps=60 --activation_checkpoint.mode=none)
traced=(--profiling.enable_profiling --profiling.profile_freq=10 --training.steps=10)
moe=(--training.seq_len=4096 --training.local_batch_size=4 --training.global_batch_size=-1)
moe+=("${data[@]}" --metrics.log_freq=10 --optimizer.lr=1e-4)
routed=(--model.name=qwen3_moe "--model.overrides={dim = 2048, n_layers = 4, n_heads = 32, n_kv_heads = 4, head_dim = 128, expert_dim = 768, n_experts = 64, top_k = 8}")
dense=(--model.name=qwen3 "--model.overrides={dim = 2048, n_layers = 4, n_heads = 32, n_kv_heads = 4, head_dim = 128, ffn_dim = 6144}")
pairs=(--model.name=deepseek --training.global_batch_size=-1 --training.local_batch_size=16)
pairs+=("${data[@]}" --parallelism.pipeline_parallel_degree=2 --parallelism.expert_parallel_degree=4)
pairs+=(--parallelism.pipeline_parallel_schedule=DualPipeV --activation_checkpoint.mode=full)
eight=("${data[@]}" --lr_scheduler.warmup_steps=2)
overlap=(--parallelism.pipeline_parallel_expert_parallel_overlap=true)

if ! $list; then
  mkdir -p "$out"
  nvidia-smi -q >"$out/nvidia-smi.txt" 2>&1
  nvidia-smi topo -m >"$out/topology.txt" 2>&1
  git log -1 --format=%H >"$out/commit.txt" 2>&1
fi

if [ "$gpus" = 1 ]; then
  step suite "as on a CPU: all pass, none is skipped but what says it needs something" ./run_tests.sh quick
  job debug "the loss falls as on a CPU, exit code 0, no warning" 1 debug_model
  job float32 "losses within 1e-4 of the next line's" 1 debug_model --training.mixed_precision_param=float32 --training.steps=10
  step float32_cpu "the same losses, from a CPU" env CUDA_VISIBLE_DEVICES= NGPU=1 ./run_llama_train.sh \
    "--job.dump_folder=$out/float32_cpu" --metrics.plot=false --checkpoint.enable=false --validation.enable=false \
    --training.mixed_precision_param=float32 --training.steps=10
  job llama_1b "MFU (causal) 33 to 40 % on an H100" 1 debug_model "${one[@]}" "${for_60[@]}"
  job llama_1b_compiled "10 to 16 % more than the line before" 1 debug_model "${one[@]}" "${for_60[@]}" --compile.enable
  job llama_1b_pieces "1 % more than llama_1b, a GiB more: tells whether pieces of the loss are to be larger" 1 debug_model "${one[@]}" "${for_60[@]}" --training.loss_chunks=8
  job llama_1b_full "memory far lower, 20 % slower than llama_1b" 1 debug_model "${one[@]}" --training.steps=60 --activation_checkpoint.mode=full
  job trace "a trace in which copies and kernels overlap and the host is ahead" 1 debug_model "${one[@]}" --activation_checkpoint.mode=none "${traced[@]}"
  job experts "half to three quarters of the next line's MFU" 1 debug_model "${moe[@]}" "${routed[@]}" --training.steps=40
  job dense "as many weights a token as the line before" 1 debug_model "${moe[@]}" "${dense[@]}" --training.steps=40
  job experts_trace "grouped_mm: one kernel a product, and no host wait in between" 1 debug_model "${moe[@]}" "${routed[@]}" "${traced[@]}"
else
  step plans "every plan's losses equal one GPU's within 1e-5; none hangs" .venv/bin/python scripts/compare_plans.py
  step plans_experts "the same with experts" .venv/bin/python scripts/compare_plans.py -- --model.name deepseek
  job llama_8b "5,700 to 6,700 tok/s a GPU and under 60 GiB (H100)" 8 llama3_8b "${eight[@]}" --training.steps=40
  job llama_8b_tp "slower than llama_8b, a third of its memory for activations" 8 llama3_8b "${eight[@]}" --training.steps=20 --training.global_batch_size=-1 --parallelism.tensor_parallel_degree=8
  job llama_8b_pp "slower than llama_8b by a bubble of about 6 %" 8 llama3_8b "${eight[@]}" --training.steps=20 --training.local_batch_size=8 \
    --training.global_batch_size=-1 --parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule=Interleaved1F1B
  job pairs_plain "DualPipeV with experts, nothing hidden" 8 deepseek_debug "${pairs[@]}" --training.steps=20
  job pairs "the same losses, not slower; on small models little is won" 8 deepseek_debug "${pairs[@]}" "${overlap[@]}" --training.steps=20
  job experts_ep "each rank an eighth of the experts; one host wait a layer" 8 debug_model "${moe[@]}" "${routed[@]}" --training.steps=40 --parallelism.expert_parallel_degree=8
  job experts_ep_compiled "the same losses, 10 to 15 % more tok/s" 8 debug_model "${moe[@]}" "${routed[@]}" --training.steps=40 --parallelism.expert_parallel_degree=8 --compile.enable
  export CUDA_DEVICE_MAX_CONNECTIONS=32
  job pairs_connections "as pairs, faster or not: tells whether this becomes a default" 8 deepseek_debug "${pairs[@]}" "${overlap[@]}" --training.steps=20
  export TORCH_NCCL_HIGH_PRIORITY=1
  job pairs_priority "as pairs_connections, faster or not: tells whether all-to-alls get streams of high priority" 8 deepseek_debug "${pairs[@]}" "${overlap[@]}" --training.steps=20
  job pairs_trace "all-to-all kernels beside products of the other direction" 8 deepseek_debug "${pairs[@]}" "${overlap[@]}" "${traced[@]}"
fi

$list || { tar --exclude='*.distcp' -czf "$out.tar.gz" "$out" && echo "== send back $out.tar.gz"; }
