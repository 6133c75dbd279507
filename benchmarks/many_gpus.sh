#!/usr/bin/env bash
# Runs benchmarks that need four or eight H200s of one host, the most important first, and writes
# one JSON line each under benchmarks/results.
#
#   benchmarks/many_gpus.sh [--world 8|4|2] [--minutes 10] [--output DIR] [--only PATTERN] [--list]
#
# --world 2 rehearses the same flags with fewer layers. lines.sh describes how a line is run. If
# megatron-core is not installed, its lines are left out.
set -u
world=4
. "$(dirname "$0")/lines.sh"

step() {  # NAME LIMIT_S FLAGS...: a training step
  local name=$1 limit=$2; shift 2
  launch "$name" "$limit" "${ranks:-$world}" benchmarks/bench_train_step.py --name "$name" --warmup "${warmup:-$usual_warmup}" \
    --steps "${steps:-$usual_steps}" --profiled-steps "${profiled:-1}" --output "$out" --commit "$COMMIT" -- $common "$@"
}
ways() {  # NAME LIMIT_S WORDS...: steps of one model with several sets of flags, in one process
  local name=$1 limit=$2; shift 2
  launch "$name" "$limit" "${ranks:-$world}" benchmarks/bench_ways.py --name "$name" --warmup "${warmup:-$usual_warmup}" \
    --steps "${steps:-$usual_steps}" --profiled-steps "${profiled:-1}" --output "$out" --commit "$COMMIT" "$@"
}
peer() {  # NAME LIMIT_S WORDS...: megatron-core, where it is installed
  local name=$1 limit=$2; shift 2
  [[ $name =~ $only ]] || return
  "$PY" -c "import megatron.core, transformer_engine" 2>/dev/null || { echo "$name: no megatron-core here"; return; }
  # Transformer Engine would load the host's cuDNN: torch's comes first.
  local cudnn; cudnn=$("$PY" -c "import nvidia.cudnn; print(nvidia.cudnn.__path__[0])")
  CUDNN_HOME=$cudnn LD_LIBRARY_PATH=$cudnn/lib:${LD_LIBRARY_PATH:-} launch "$name" "$limit" "$world" benchmarks/peer_megatron_core.py "$@"
}

common="--bf16 --mock-data --train-iters 60 --lr 1e-4"
zero="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
narrow="--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
llama="--recipe recipes/model/llama-3-8b.toml"
llama70="--recipe recipes/model/llama-3-70b.toml"
qwen="--recipe recipes/model/qwen3-30b-a3b.toml --moe-router-load-balancing-type aux_loss"
wide30="--num-layers 60 --hidden-size 6656 --num-attention-heads 52 --ffn-hidden-size 17920 --max-position-embeddings 4096 --vocab-size 32000 --seq-length 4096 --micro-batch-size 1 --untie-embeddings-and-output-weights"
delayed="--fp8-format hybrid --fp8-recipe delayed"
at="h200-x$world" peer_layers=32 limit=4 usual_warmup=5 usual_steps=10 small= large=
case $world in
  8) qwen_layers= mixtral_layers= few=32 offline=1024 saved=12 ;;
  4) qwen_layers="--num-layers 20" mixtral_layers="--num-layers 12" few=16 offline=1024 saved=6 ;;
  *)  # a rehearsal: the same flags on fewer layers
    small="--num-layers 4" large="--num-layers 4" peer_layers=4 limit=2 usual_warmup=2 usual_steps=3
    qwen_layers="--num-layers 4" mixtral_layers="--num-layers 2" few=8 offline=64 saved=2 ;;
esac
static="--moe-expert-rows-limit $limit --cuda-graph-impl full_iteration --cuda-graph-warmup-steps"
experts="--use-distributed-optimizer --expert-model-parallel-size $world"

# Llama-3-8B compared with megatron-core, bf16 and fp8.
peer_steps="--accumulate 4 --num-layers $peer_layers --warmup $usual_warmup --steps $usual_steps"
step "llama-3-8b-$at-dp" 150 $llama $small $zero --global-batch-size $((4 * world))
peer "megatron-core-llama-3-8b-$at-dp" 150 $peer_steps
step "llama-3-8b-$at-dp-fp8" 150 $llama $small $zero --global-batch-size $((4 * world)) $delayed
peer "megatron-core-llama-3-8b-$at-dp-fp8" 150 $peer_steps --fp8-recipe delayed
# Experts: weight gradients one micro-batch at a time or several together, two dispatchers, fp8.
warmup=14 ways "qwen3-30b-$at-ep-ways" 280 --way "allgather, one by one: --moe-wgrad-micro-batches 1" --way allgather \
  --way "symmetric: --moe-token-dispatcher-type symmetric" \
  --way "allgather, four sequences: --micro-batch-size 4" \
  --way "allgather, fp8: --fp8-format hybrid --moe-experts-dtype fp8" \
  -- $common $qwen $qwen_layers $experts --global-batch-size $((8 * world)) --moe-token-dispatcher-type allgather $static 8
warmup=8 ways "mixtral-8x7b-$at-ep" 240 --way alltoall --way "allgather: --moe-token-dispatcher-type allgather $static 4" \
  --way "symmetric: --moe-token-dispatcher-type symmetric $static 4" \
  -- $common --recipe recipes/model/mixtral-8x7b.toml $mixtral_layers --seq-length 4096 $experts \
  --global-batch-size $((4 * world)) --moe-router-force-load-balancing  # an even choice, as the peer's
[ "$world" -eq 8 ] && step "deepseek-v2-lite-$at-ep" 150 --model deepseek-v2-lite --seq-length 4096 $experts --global-batch-size 64
# Steps of Muon and AdamW, on all layers of Llama-3-8B.
launch "optimizers-llama-3-8b-$at" 150 "$world" benchmarks/bench_optimizers.py time --name "optimizers-llama-3-8b-$at" \
  --cases adam muon --warmup 2 --steps 6 --train-steps 3 --output "$out" --commit "$COMMIT" -- ${small:---num-layers 32} --global-batch-size $((4 * world))
# 30B and 70B; the layout of 70B over eight is the planner's first one without offloading.
warmup=2 steps=5 profiled=0
step "llama-30b-$at-zero3" 180 $wide30 $large --use-torch-fsdp2 --global-batch-size $((2 * world)) $narrow --recompute-granularity full
warmup=1 steps=4
bf16_states="--main-params-dtype bf16 --main-grads-dtype bf16 $narrow --use-distributed-optimizer"
if [ "$world" -eq 8 ]; then
  step "llama-70b-$at-tp2-pp4" 280 $llama70 --seq-length 8192 $bf16_states --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 --pipeline-schedule zb-v --recompute-granularity selective --global-batch-size 32
  step "llama-70b-$at-tp4-pp2-fp8" 280 $llama70 --seq-length 8192 $bf16_states --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 --pipeline-schedule zb-v --fp8-format hybrid --global-batch-size 32
else
  step "llama-70b-$at-tp-bf16-states" 150 $llama70 $large --tensor-model-parallel-size "$world" --sequence-parallel --main-params-dtype bf16 --grad-reduce-in-bf16 $narrow --recompute-granularity full --use-distributed-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.4 --global-batch-size 2
  step "llama-70b-$at-zero3-bf16-states" 180 $llama70 $large --use-torch-fsdp2 --main-params-dtype bf16 --main-grads-dtype bf16 $narrow --recompute-granularity full --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --global-batch-size "$world"
fi
unset warmup steps profiled
# Pipeline schedules, measured over predicted.
schedules() {  # NAME LIMIT_S "SCHEDULES" WARMUP STEPS FLAGS...
  launch "$1" "$2" "$world" benchmarks/bench_schedules.py --name "$1" --schedules $3 --warmup "$4" --steps "$5" \
    --output "$out" --commit "$COMMIT" -- $common "${@:6}"
}
stages="--pipeline-model-parallel-size $world --global-batch-size $few"
schedules "llama-3-8b-pp-schedules-$at" 280 "interleaved zb-v dualpipev" 1 4 $llama $small $narrow $stages
schedules "llama-3-8b-zb-v-$at" 300 zb-v 2 8 $llama $small $narrow $stages
schedules "qwen3-30b-ep-beside-$at" 200 "1f1b 1f1b-beside" 2 5 $qwen $qwen_layers $experts --global-batch-size $((8 * world))
# Weak and strong scaling: the sequences of a rank, then those of the step, stay the same.
for ranks in 1 2 4 8; do
  [ "$ranks" -gt "$world" ] && continue
  ways "llama-3-8b-8-layers-x$ranks-of-$world" 120 --way "weak: --global-batch-size $((4 * ranks))" --way "strong: --global-batch-size $((4 * world))" \
    -- $common $llama ${small:---num-layers 8} $zero
  warmup=8 step "qwen3-30b-4-layers-weak-x$ranks-of-$world" 100 $qwen --num-layers 4 --use-distributed-optimizer --expert-model-parallel-size "$ranks" --global-batch-size $((4 * ranks)) --moe-token-dispatcher-type allgather $static 4
done
unset ranks
# Decoding over tensor ranks in fp8, and a server under load.
for size in 8b 70b; do
  launch "decode-llama-3-$size-fp8-$at-tp" 180 "$world" benchmarks/bench_decode.py --name "decode-llama-3-$size-fp8-$at-tp" \
    --geometry llama-3-$size --method fp8 --kv-cache-dtype fp8 --batches 1 32 --offline 256 --offline-tokens $offline --output "$out" --commit "$COMMIT"
done
launch "server-$at-tp" 150 0 benchmarks/bench_server.py --name "server-$at-tp" --ranks 1 "$world" --hidden-size $((512 * world)) --output "$out" --commit "$COMMIT"
# Multi-token prediction in a layout, the longest sequences, determinism.
step "llama-3-8b-mtp-$at-tp2" 150 $llama ${small:---num-layers 16} $zero --tensor-model-parallel-size 2 --sequence-parallel --mtp-num-layers 1 --global-batch-size "$world"
warmup=1 steps=2 profiled=0
lengths=$((65536 * world))  # about as many tokens a rank as fit
[ "$world" -eq 8 ] && lengths="262144 1048576"
for length in $lengths; do
  step "llama-3-8b-$length-tokens-$at-cp" 280 $llama $small --seq-length "$length" --max-position-embeddings "$length" --context-parallel-size "$world" --use-torch-fsdp2 --recompute-granularity full $narrow --global-batch-size 1
done
if [ "$world" -eq 2 ]; then  # no rehearsal: the longest sequence of the whole 8B on two, planned with 100 GiB
  warmup=1 steps=1 profiled=0 step "llama-3-8b-262k-$at-cp" 280 $llama --seq-length 262144 --max-position-embeddings 262144 --context-parallel-size 2 --use-torch-fsdp2 --recompute-granularity full $narrow --global-batch-size 1
fi
unset warmup steps profiled
if [ "$world" -eq 4 ]; then  # compared with llama-3-8b-8-layers-131k-cp4-{p2p,all_gather,a2a}
  step "llama-3-8b-8-layers-131k-$at-cp2x2" 150 $llama --num-layers 8 --seq-length 131072 --max-position-embeddings 131072 --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 --use-distributed-optimizer --global-batch-size 1
fi
for case in "zero dp2" "tp2 sp" "experts ep2"; do  # three trainings each, on two GPUs
  launch "determinism-$at-${case// /-}" 180 0 benchmarks/bench_determinism.py --name "determinism-$at-${case// /-}" --cases "$case" --output "$out" --commit "$COMMIT"
done
# Saves of experts; time from a fault of a rank to the next step.
launch "checkpoint-qwen3-30b-$saved-layers-$at-ep" 280 "$world" benchmarks/bench_checkpoint.py --name "checkpoint-qwen3-30b-$saved-layers-$at-ep" \
  --folder "${TMPDIR:-/tmp}/many-gpus-checkpoint" --reshard-gib 0 --rounds 1 --output "$out" --commit "$COMMIT" -- $common \
  $qwen --num-layers "$saved" $experts --global-batch-size "$world"
if [[ "restart-$at" =~ $only ]]; then
  [ -n "$list" ] && echo "restart-$at: benchmarks/bench_restart.sh" || LIMIT_S=200 bash benchmarks/bench_restart.sh "$out" $((4 * world)) kill standby in_process hang
fi
