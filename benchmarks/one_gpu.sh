#!/usr/bin/env bash
# What wants one H200; one JSON line each under benchmarks/results.
#
#   benchmarks/one_gpu.sh [--small] [--minutes 10] [--output DIR] [--only PATTERN] [--list]
#
# --small rehearses the same flags with fewer layers; lines.sh says how a line is run. The recurrences
# of other libraries are left out of a line where they are not installed, and ways that need them are
# kept with an error.
set -u
world=1
. "$(dirname "$0")/lines.sh"

bench() {  # SCRIPT NAME LIMIT_S WORDS...
  local script=$1 name=$2 limit=$3; shift 3
  launch "$name" "$limit" 0 "benchmarks/bench_$script.py" --name "$name" --output "$out" --commit "$COMMIT" "$@"
}

common="--bf16 --mock-data --train-iters 60 --lr 1e-4"
at=h200 brief="--warmup 3 --steps 8"
if [ -z "$small" ]; then
  layers=8 qwen_layers=8 mixtral_layers=3 few=4 long=131072 longest=262144
else
  at=h200-small brief="--warmup 1 --steps 2" layers=2 qwen_layers=2 mixtral_layers=1 few=2 long=16384 longest=32768
fi
llama="--recipe recipes/model/llama-3-8b.toml"
te="--transformer-impl transformer_engine"
fp8="--fp8-format hybrid"
full="--recompute-granularity full"
moe="--moe-router-load-balancing-type aux_loss"

# Recurrences beside mamba-ssm and flash-linear-attention.
bench mamba "mamba-2.7b-recurrence-$at" 80 --seq-length 8192
bench mamba "mamba-2.7b-recurrence-2048-$at" 60 --seq-length 2048
bench mamba "qwen3-next-recurrence-$at" 150 --kind delta_net --hidden-size 2048 --seq-length 8192
# Transformer Engine beside this package: steps, then errors of single linears.
bench ways "llama-3-8b-$layers-layers-te-$at" 180 $brief --profiled-steps 1 --way bf16 --way "bf16, te: $te" \
  --way "delayed: $fp8 --fp8-recipe delayed" --way "delayed, te: $fp8 --fp8-recipe delayed $te" \
  --way "tensorwise: $fp8 --fp8-recipe tensorwise" --way "tensorwise, te: $fp8 --fp8-recipe tensorwise $te" \
  --way "blockwise: --fp8-format e4m3 --fp8-recipe blockwise" \
  --way "blockwise, te: --fp8-format e4m3 --fp8-recipe blockwise $te" \
  -- $common $llama --num-layers $layers --global-batch-size 4
bench fp8_errors "fp8-errors-llama-3-8b-$at" 60 -- $common $llama --num-layers $few --global-batch-size 1
# Experts, whole steps.
graph="--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 8"
experts="--moe-experts-dtype fp8"
bench ways "qwen3-30b-$qwen_layers-layers-fp8-$at" 100 --warmup 12 --steps 8 --way "bf16: $graph" \
  --way "fp8 linears: $fp8 $graph" --way "fp8 linears and experts: $fp8 $experts $graph" \
  -- $common --recipe recipes/model/qwen3-30b-a3b.toml --num-layers $qwen_layers --global-batch-size 8 $moe
together="--moe-wgrad-micro-batches"
bench ways "qwen3-30b-$qwen_layers-layers-wgrad-$at" 110 --warmup 12 --steps 8 --way "1: $graph" \
  --way "2: $graph $together 2" --way "4: $graph $together 4" --way "8: $graph $together 8" \
  -- $common --recipe recipes/model/qwen3-30b-a3b.toml --num-layers $qwen_layers --global-batch-size 8 $moe
bench ways "mixtral-8x7b-$mixtral_layers-layers-fp8-$at" 70 $brief --way bf16 --way "fp8 linears: $fp8" \
  --way "fp8 linears and experts: $fp8 $experts" \
  -- $common --recipe recipes/model/mixtral-8x7b.toml --num-layers $mixtral_layers --seq-length 4096 --global-batch-size 4 $moe
# What memory can be given away for, and what for: activations, states, gathered weights.
bench ways "offload-$at" 90 --warmup 2 --steps 3 --way plain --way "plain again" \
  --way "activations: --cpu-offloading --cpu-offloading-num-layers $((few - 1))" --way "recompute: $full" \
  --way "optimizer: --optimizer-cpu-offload" --way "half of the optimizer: --optimizer-cpu-offload --optimizer-offload-fraction 0.5" \
  --way "fp8: $fp8" --way "fp8, param gather: $fp8 --fp8-param-gather" \
  -- $common $llama --num-layers $few --global-batch-size 2 --use-distributed-optimizer
# Graphs of layers, and of the whole step.
gpt2="--recipe recipes/model/gpt2-345m.toml --micro-batch-size 4 --global-batch-size 16"
locally="--cuda-graph-impl local --cuda-graph-warmup-steps 5"
bench ways "gpt2-345m-graphs-$at" 60 --warmup 12 --steps 20 --way none --way "local: $locally" \
  --way "full_iteration: --cuda-graph-impl full_iteration --cuda-graph-warmup-steps 5" -- $common $gpt2
bench ways "gpt2-345m-recomputed-graphs-$at" 45 --warmup 12 --steps 20 --way none --way "local: $locally" \
  -- $common $gpt2 --recompute-granularity selective --recompute-modules layernorm mlp_act
# The longest sequences of some layers.
sequence() { echo "--seq-length $1 --max-position-embeddings $1"; }
bench ways "llama-3-8b-$layers-layers-long-$at" 150 --warmup 1 --steps 1 --way "$long, recompute: $full $(sequence $long)" \
  --way "$long, recompute, fp8: $full $fp8 $(sequence $long)" --way "$longest, recompute: $full $(sequence $longest)" \
  -- $common $llama --num-layers $layers --global-batch-size 1
# A model of 102 M parameters on 200 M tokens of the host's own text, in bf16 and in fp8.
bench fp8_quality "fp8-quality-200m-tokens-$at" 585 --folder "${TMPDIR:-/tmp}/one-gpu-quality" --mtokens 200 --seeds 1 \
  --seconds 540 --vocab-size 24576 --cases bf16 delayed -- --num-layers 4 --untie-embeddings-and-output-weights \
  --micro-batch-size 32 --global-batch-size 32
