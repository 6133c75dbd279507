#!/usr/bin/env bash
# Mixtral 8x7B on 32 GPUs: one expert a GPU, four pipeline stages.
#
#   MASTER_ADDR=host0 bash examples/mixtral/train_mixtral_8x7b_distributed.sh    on each host
#   LAUNCH=echo ...                                                              shows the command
#
# Trains on mock data unless DATA_PATH (a .bin/.idx prefix) and TOKENIZER_MODEL are given.
set -euo pipefail

DEFAULT_NNODES=4
# sbatch runs a copy of this script in a spool folder; Slurm knows where the script itself is.
SCRIPT=$0
[ -f "$(dirname "$SCRIPT")/../torchrun_args.sh" ] || SCRIPT=$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
source "$(dirname "$SCRIPT")/../torchrun_args.sh"

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --max-position-embeddings 32768
    --seq-length 4096
    --position-embedding-type rope
    --rotary-base 1000000
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --overlap-param-gather
    --overlap-grad-reduce
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --use-distributed-optimizer
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters "${TRAIN_ITERS:-1000}"
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)
if [ -n "${DATA_PATH:-}" ]; then
    DATA_ARGS=(--data-path "$DATA_PATH" --tokenizer-model "$TOKENIZER_MODEL" --split 969,30,1)
else
    DATA_ARGS=(--mock-data --vocab-size 32000)
fi
LOGGING_ARGS=(--log-interval 10)
if [ -n "${CHECKPOINT_PATH:-}" ]; then
    LOGGING_ARGS+=(--save "$CHECKPOINT_PATH" --auto-resume --save-interval 500 --tensorboard)
fi

"$LAUNCH" "${DISTRIBUTED_ARGS[@]}" -m mcore_train gpt \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
