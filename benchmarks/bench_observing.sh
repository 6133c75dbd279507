#!/usr/bin/env bash
# What observing a run costs on one GPU, and whether the waterfall adds up, also with CUDA graphs;
# one process, under 150 seconds on an H200.
#
#   benchmarks/bench_observing.sh [OUTPUT]
#
# With SMALL=1 it rehearses the same on a CPU with tiny models, without the graphs.
set -eu
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
if [ -n "${SMALL:-}" ]; then
  common="--mock-data --vocab-size 64 --num-workers 0 --device cpu"
  llama="--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32"
  gpt2=$llama
else
  common="--mock-data --bf16"
  llama="--recipe recipes/model/llama-3-8b.toml --num-layers 8 --seq-length 4096"
  gpt2="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50304"
fi
llama="$llama $common --micro-batch-size 1 --global-batch-size 2"
gpt2="$gpt2 $common --micro-batch-size 8 --global-batch-size 16"
graphs=""
if [ -z "${SMALL:-}" ]; then
  graphs="-- observing-gpt2-345m-full-iteration-graph $gpt2 --cuda-graph-impl full_iteration"
  graphs="$graphs -- observing-gpt2-345m-layer-graphs $gpt2 --cuda-graph-impl local"
fi
# shellcheck disable=SC2086
python benchmarks/bench_observing.py --output "$out" \
  -- observing-llama-3-8b-8-layers $llama -- observing-gpt2-345m $gpt2 $graphs < /dev/null
