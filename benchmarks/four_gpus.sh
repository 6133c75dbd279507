#!/usr/bin/env bash
# What wants four H200s of one host, most valuable first; one JSON line each under benchmarks/results.
#
#   benchmarks/four_gpus.sh [--world 4|2] [--minutes 10] [--output DIR] [--only PATTERN] [--list]
#
# --world 2 rehearses the same flags with fewer layers; lines.sh says how a line is run. A peer
# that is not installed is left out.
set -u
world=4
. "$(dirname "$0")/lines.sh"

step() {  # NAME LIMIT_S FLAGS...: a training step
  local name=$1 limit=$2; shift 2
  launch "$name" "$limit" "${ranks:-$world}" benchmarks/bench_train_step.py --name "$name" --warmup "${warmup:-$usual_warmup}" \
    --steps "${steps:-$usual_steps}" --profiled-steps "${profiled:-1}" --output "$out" --commit "$COMMIT" -- $common "$@"
}
ways() {  # NAME LIMIT_S WORDS...: steps of one model in several ways, by one start
  local name=$1 limit=$2; shift 2
  launch "$name" "$limit" "${ranks:-$world}" benchmarks/bench_ways.py --name "$name" --warmup "${warmup:-$usual_warmup}" \
    --steps "${steps:-$usual_steps}" --profiled-steps "${profiled:-1}" --output "$out" --commit "$COMMIT" "$@"
}
peer() {  # NAME LIMIT_S WORDS...: megatron-core, where it is installed
  local name=$1 limit=$2; shift 2
  [[ $name =~ $only ]] || return
  "$PY" -c "import megatron.core, transformer_engine" 2>/dev/null || { echo "$name: no megatron-core here"; return; }
  # torch's cuDNN before another one of the host, which Transformer Engine would take.
  local cudnn; cudnn=$("$PY" -c "import nvidia.cudnn; print(nvidia.cudnn.__path__[0])")
  LD_LIBRARY_PATH=$cudnn/lib:${LD_LIBRARY_PATH:-} launch "$name" "$limit" "$world" benchmarks/peer_megatron_core.py "$@"
}

common="--bf16 --mock-data --train-iters 60 --lr 1e-4"
zero="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
narrow="--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
llama="--recipe recipes/model/llama-3-8b.toml"
wide30="--num-layers 60 --hidden-size 6656 --num-attention-heads 52 --ffn-hidden-size 17920 --max-position-embeddings 4096 --vocab-size 32000 --seq-length 4096 --micro-batch-size 1 --untie-embeddings-and-output-weights"
at="h200-x$world"
if [ "$world" -eq 4 ]; then
  layers= peer_layers=32 qwen="--num-layers 20" mixtral="--num-layers 12" large= few=16 offline=1024 saved=6
  usual_warmup=5 usual_steps=10
else  # a rehearsal: the same flags on fewer layers
  layers="--num-layers 4" peer_layers=4 qwen="--num-layers 4" mixtral="--num-layers 2" few=8 offline=64 saved=2
  usual_warmup=2 usual_steps=3
  large="--num-layers 4"
fi

# 1 and 2: the 8B beside megatron-core, bf16 and fp8.
step "llama-3-8b-$at-dp" 150 $llama $layers $zero --global-batch-size $((4 * world))
peer "megatron-core-llama-3-8b-$at-dp" 170 --num-layers $peer_layers --accumulate 4 --output "$out"
step "llama-3-8b-$at-dp-fp8" 150 $llama $layers $zero --global-batch-size $((4 * world)) --fp8-format hybrid --fp8-recipe delayed
step "llama-3-8b-$at-dp-fp8-gather" 150 $llama $layers $zero --global-batch-size $((4 * world)) --fp8-format hybrid --fp8-param-gather
# 3: experts.
for way in allgather symmetric; do
  warmup=16 step "qwen3-30b-$at-ep-$way" 150 --recipe recipes/model/qwen3-30b-a3b.toml $qwen --use-distributed-optimizer --expert-model-parallel-size "$world" --global-batch-size $((8 * world)) --moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type "$way" --moe-expert-rows-limit "$world" --cuda-graph-impl full_iteration
done
static="--moe-expert-rows-limit $world --cuda-graph-impl full_iteration --cuda-graph-warmup-steps 4"
warmup=8 ways "mixtral-8x7b-$at-ep" 240 --way alltoall --way "alltoall beside: --overlap-moe-expert-parallel-comm" \
  --way "allgather: --moe-token-dispatcher-type allgather $static" --way "symmetric: --moe-token-dispatcher-type symmetric $static" \
  -- $common --recipe recipes/model/mixtral-8x7b.toml $mixtral --seq-length 4096 --use-distributed-optimizer --expert-model-parallel-size "$world" \
  --global-batch-size $((4 * world)) --moe-router-force-load-balancing  # an even choice, as the peer's
# 4: 30B and 70B.
warmup=2 steps=5 profiled=0
step "llama-30b-$at-zero3" 180 $wide30 $large --use-torch-fsdp2 --global-batch-size $((2 * world)) $narrow --recompute-granularity full
warmup=1 steps=4
step "llama-70b-$at-tp-bf16-states" 150 --recipe recipes/model/llama-3-70b.toml $large --tensor-model-parallel-size "$world" --sequence-parallel --main-params-dtype bf16 --grad-reduce-in-bf16 $narrow --recompute-granularity full --use-distributed-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.4 --global-batch-size 2
step "llama-70b-$at-zero3-bf16-states" 180 --recipe recipes/model/llama-3-70b.toml $large --use-torch-fsdp2 --main-params-dtype bf16 --main-grads-dtype bf16 $narrow --recompute-granularity full --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --global-batch-size "$world"
unset warmup steps profiled
# 5: pipeline schedules, measured over predicted.
launch "llama-3-8b-pp-schedules-$at" 280 "$world" benchmarks/bench_schedules.py --name "llama-3-8b-pp-schedules-$at" \
  --schedules interleaved zb-v dualpipev --warmup 1 --steps 4 --output "$out" --commit "$COMMIT" -- $common $llama $layers $narrow \
  --pipeline-model-parallel-size "$world" --global-batch-size "$few"
launch "qwen3-30b-ep-beside-$at" 200 "$world" benchmarks/bench_schedules.py --name "qwen3-30b-ep-beside-$at" \
  --schedules 1f1b 1f1b-beside --warmup 2 --steps 5 --output "$out" --commit "$COMMIT" -- $common \
  --recipe recipes/model/qwen3-30b-a3b.toml $qwen --use-distributed-optimizer --expert-model-parallel-size "$world" \
  --global-batch-size $((8 * world)) --moe-router-load-balancing-type aux_loss
# 6: weak and strong scaling; sequences of a rank, then of the step, stay the same.
for ranks in 1 2 4; do
  [ "$ranks" -gt "$world" ] && continue
  ways "llama-3-8b-8-layers-x$ranks-of-$world" 120 --way "weak: --global-batch-size $((4 * ranks))" --way "strong: --global-batch-size 16" \
    -- $common $llama ${layers:---num-layers 8} $zero
  warmup=8 step "qwen3-30b-4-layers-weak-x$ranks-of-$world" 100 --recipe recipes/model/qwen3-30b-a3b.toml --num-layers 4 --use-distributed-optimizer --expert-model-parallel-size "$ranks" --global-batch-size $((4 * ranks)) --moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type allgather $static
done
unset ranks
# 7: writing text over tensor ranks, in fp8.
for size in 8b 70b; do
  launch "decode-llama-3-$size-fp8-$at-tp" 180 "$world" benchmarks/bench_decode.py --name "decode-llama-3-$size-fp8-$at-tp" \
    --geometry llama-3-$size --method fp8 --kv-cache-dtype fp8 --batches 1 32 --offline 256 --offline-tokens $offline --output "$out" --commit "$COMMIT"
done
launch "server-$at-tp" 150 0 benchmarks/bench_server.py --name "server-$at-tp" --ranks 1 "$world" --hidden-size $((512 * world)) --output "$out" --commit "$COMMIT"
# 8: multi-token prediction in a layout, the longest sequences, determinism, saving experts.
step "llama-3-8b-mtp-$at-tp2" 150 $llama ${layers:---num-layers 16} $zero --tensor-model-parallel-size 2 --sequence-parallel --mtp-num-layers 1 --global-batch-size "$world"
warmup=1 steps=2 profiled=0
step "llama-3-8b-long-$at-cp" 280 $llama $layers --seq-length $((65536 * world)) --max-position-embeddings $((65536 * world)) --context-parallel-size "$world" --use-torch-fsdp2 --recompute-granularity full $narrow --global-batch-size 1
unset warmup steps profiled
if [ "$world" -eq 2 ]; then  # no rehearsal: the longest sequence of the whole 8B on two, planned with 100 GiB
  warmup=1 steps=1 profiled=0 step "llama-3-8b-262k-$at-cp" 280 $llama --seq-length 262144 --max-position-embeddings 262144 --context-parallel-size 2 --use-torch-fsdp2 --recompute-granularity full $narrow --global-batch-size 1
fi
warmup=2 steps=6 profiled=0
for more in "" "--enable-optimizer-post-validation"; do  # what the wait between steps costs
  step "llama-3-8b-zb-v-$at${more:+-validated-afterwards}" 180 $llama ${layers:---num-layers 16} $narrow --pipeline-model-parallel-size "$world" --pipeline-schedule zb-v --global-batch-size $((2 * world)) --log-interval 100 $more
done
unset warmup steps profiled
if [ "$world" -eq 4 ]; then  # beside llama-3-8b-8-layers-131k-cp4-{p2p,all_gather,a2a}
  step "llama-3-8b-8-layers-131k-$at-cp2x2" 150 $llama --num-layers 8 --seq-length 131072 --max-position-embeddings 131072 --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 --use-distributed-optimizer --global-batch-size 1
fi
for case in "zero dp2" "tp2 sp" "experts ep2"; do  # three trainings each, on two GPUs
  launch "determinism-$at-${case// /-}" 180 0 benchmarks/bench_determinism.py --name "determinism-$at-${case// /-}" --cases "$case" --output "$out" --commit "$COMMIT"
done
launch "checkpoint-qwen3-30b-$saved-layers-$at-ep" 280 "$world" benchmarks/bench_checkpoint.py --name "checkpoint-qwen3-30b-$saved-layers-$at-ep" \
  --folder "${TMPDIR:-/tmp}/four-gpus-checkpoint" --reshard-gib 0 --rounds 1 --output "$out" --commit "$COMMIT" -- $common \
  --recipe recipes/model/qwen3-30b-a3b.toml --num-layers "$saved" --use-distributed-optimizer --expert-model-parallel-size "$world" --global-batch-size "$world"
