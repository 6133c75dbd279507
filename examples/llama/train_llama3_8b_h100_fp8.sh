#!/usr/bin/env bash
# Llama-3-8B in fp8 on the GPUs of one host, Hopper or later, under the field's name.
#
#   bash examples/llama/train_llama3_8b_h100_fp8.sh
#   LAUNCH=echo ...                                             shows the command
#
# Trains on mock data unless DATA_PATH (a .bin/.idx prefix) and TOKENIZER_MODEL are given.
set -euo pipefail

DEFAULT_NNODES=1
# sbatch runs a copy of this script in a spool folder; Slurm knows where the script itself is.
SCRIPT=$0
[ -f "$(dirname "$SCRIPT")/../torchrun_args.sh" ] || SCRIPT=$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
source "$(dirname "$SCRIPT")/../torchrun_args.sh"

TP=${TP:-1}
CP=${CP:-1}
NUM_LAYERS=${NUM_LAYERS:-32}
SEQ_LENGTH=${SEQ_LENGTH:-8192}
MICRO_BATCH=${MICRO_BATCH:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-128}
LR=${LR:-1.5e-4}
TRAIN_ITERS=${TRAIN_ITERS:-1000}

MODEL_ARGS=(
    --num-layers "$NUM_LAYERS"
    --hidden-size 4096
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --ffn-hidden-size 14336
    --max-position-embeddings "$SEQ_LENGTH"
    --seq-length "$SEQ_LENGTH"
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --untie-embeddings-and-output-weights
)
PRECISION_ARGS=(
    --bf16
    --fp8-format hybrid
    --fp8-recipe "${FP8_RECIPE:-tensorwise}"
)
if [ "${FP8_RECIPE:-tensorwise}" = tensorwise ]; then
    PRECISION_ARGS+=(--fp8-param-gather)
fi
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --context-parallel-size "$CP"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
if [ "$TP" -gt 1 ]; then
    MODEL_PARALLEL_ARGS+=(--sequence-parallel)
fi
TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    --lr "$LR"
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
)
if [ -n "${DATA_PATH:-}" ]; then
    DATA_ARGS=(--data-path "$DATA_PATH" --tokenizer-model "$TOKENIZER_MODEL" --split 99,1,0)
else
    DATA_ARGS=(--mock-data --vocab-size 128256)
fi
LOGGING_ARGS=(--log-interval 10)
if [ -n "${CHECKPOINT_PATH:-}" ]; then
    LOGGING_ARGS+=(--save "$CHECKPOINT_PATH" --auto-resume --save-interval 500 --tensorboard)
fi

"$LAUNCH" "${DISTRIBUTED_ARGS[@]}" -m mcore_train gpt \
    "${MODEL_ARGS[@]}" "${PRECISION_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
