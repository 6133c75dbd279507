#!/usr/bin/env bash
# From a fault to the next step, and from a hang to its detection, on the GPUs of this host.
#
#   benchmarks/bench_restart.sh [OUTPUT] [LAYERS]
#
# At most 4 minutes on two GPUs. LAYERS as wide as those of llama-3-8b (default 4), with 32 000
# tokens: each checkpoint has 14 bytes a parameter, in /dev/shm where it has 60 GB free. Without a
# GPU a tiny model is taken. nvidia-resiliency-ext, where it is installed, adds in-process
# restarts and local checkpoints.
set -eu
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
layers=${2:-4}
gpus=$(python -c "import torch; print(torch.cuda.device_count())")
if [ "$gpus" -gt 1 ]; then
  flags="--num-layers $layers --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 --vocab-size 32000 --seq-length 4096 --max-position-embeddings 4096 --bf16 --use-distributed-optimizer --micro-batch-size 1 --global-batch-size $((4 * gpus))"
else
  gpus=2
  flags="--device cpu --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 64 --seq-length 64 --micro-batch-size 1 --global-batch-size 8"
fi
if [ "$(df --output=avail /dev/shm | tail -n 1)" -gt 60000000 ]; then
  export BENCH_TMP=/dev/shm
fi
# shellcheck disable=SC2086
timeout "${LIMIT_S:-240}" python benchmarks/bench_restart.py --nproc "$gpus" --output "$out" \
  --cases kill hang in_process rerun -- $flags --mock-data --num-workers 0 --lr 1e-4
