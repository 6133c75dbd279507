#!/usr/bin/env bash
# From a fault to the next step, and from a hang to its detection, on the GPUs of this host.
#
#   benchmarks/bench_restart.sh [OUTPUT] [LAYERS] [CASE ...]
#
# At most LIMIT_S seconds (150). CASE: kill, standby, in_process, hang or peers, all by default,
# in that order while there is time. LAYERS as wide as those of llama-3-8b (default 8), with 32 000
# tokens. With 8 layers a GPU saves and loads 28 GB, as much as each of 8 GPUs does of the whole
# 8B with the distributed optimizer: 16 GB of weights and 12 GB of optimizer state. Checkpoints
# go to /dev/shm where it has 40 GB free. Without a GPU a tiny model is taken.
# nvidia-resiliency-ext, on PYTHONPATH or installed, adds in-process restarts and local checkpoints.
set -eu
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
layers=${2:-8}
cases=("${@:3}")
ranks=$(python3 -c "import torch; print(torch.cuda.device_count())")
if [ "$ranks" -gt 0 ]; then
  flags="--num-layers $layers --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 --vocab-size 32000 --seq-length 4096 --max-position-embeddings 4096 --bf16 --use-distributed-optimizer --micro-batch-size 1 --global-batch-size $((4 * ranks))"
else
  ranks=${RANKS:-1}
  flags="--device cpu --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 64 --seq-length 64 --micro-batch-size 1 --global-batch-size 4"
fi
if [ "$(df --output=avail /dev/shm | tail -n 1)" -gt 40000000 ]; then
  export BENCH_TMP=/dev/shm
fi
# shellcheck disable=SC2086
timeout "$((${LIMIT_S:-150} + 30))" python3 benchmarks/bench_restart.py --nproc "$ranks" \
  --limit-s "${LIMIT_S:-150}" --output "$out" ${cases[0]:+--cases "${cases[@]}"} \
  -- $flags --mock-data --num-workers 0 --lr 1e-4
