#!/usr/bin/env bash
# What observing a run costs on one GPU, and whether the waterfall adds up; under four minutes.
#
#   benchmarks/bench_observing.sh [OUTPUT]
#
# With SMALL=1 it rehearses the same on a CPU with tiny models.
set -eu
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
common="--mock-data"
if [ -n "${SMALL:-}" ]; then
  common="$common --vocab-size 64 --num-workers 0 --device cpu"
  llama="--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32"
  gpt2="--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32"
else
  common="$common --bf16"
  llama="--recipe recipes/model/llama-3-8b.toml --num-layers 8 --seq-length 4096"
  gpt2="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50304"
fi
# shellcheck disable=SC2086
python benchmarks/bench_observing.py --name observing-llama-3-8b-8-layers --output "$out" \
  -- $llama $common --micro-batch-size 1 --global-batch-size 2 < /dev/null
# shellcheck disable=SC2086
python benchmarks/bench_observing.py --name observing-gpt2-345m --output "$out" \
  -- $gpt2 $common --micro-batch-size 8 --global-batch-size 16 < /dev/null
