#!/usr/bin/env bash
# BERT of 340 million parameters on the 8 GPUs of one host, or of several.
#
#   bash examples/bert/train_bert_340m_distributed.sh
#   LAUNCH=echo ...                                     shows the command
#
# Trains on mock data unless DATA_PATH (a .bin/.idx prefix made with --split-sentences) and
# VOCAB_FILE are given.
set -euo pipefail

DEFAULT_NNODES=1
# sbatch runs a copy of this script in a spool folder; Slurm knows where the script itself is.
SCRIPT=$0
[ -f "$(dirname "$SCRIPT")/../torchrun_args.sh" ] || SCRIPT=$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
source "$(dirname "$SCRIPT")/../torchrun_args.sh"

MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 512
    --max-position-embeddings 512
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP:-1}"
    --pipeline-model-parallel-size "${PP:-1}"
    --use-distributed-optimizer
)
TRAINING_ARGS=(
    --micro-batch-size "${MICRO_BATCH:-4}"
    --global-batch-size "${GLOBAL_BATCH:-32}"
    --train-iters "${TRAIN_ITERS:-1000000}"
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style linear
    --lr-warmup-fraction 0.01
    --weight-decay 1e-2
    --clip-grad 1.0
    --bf16
)
if [ -n "${DATA_PATH:-}" ]; then
    DATA_ARGS=(
        --data-path "$DATA_PATH"
        --tokenizer-type BertWordPieceLowerCase
        --vocab-file "$VOCAB_FILE"
        --split 949,50,1
    )
else
    DATA_ARGS=(--mock-data --vocab-size 30522)
fi
LOGGING_ARGS=(--log-interval 100 --eval-interval 1000 --eval-iters 10)
if [ -n "${CHECKPOINT_PATH:-}" ]; then
    LOGGING_ARGS+=(--save "$CHECKPOINT_PATH" --auto-resume --save-interval 10000 --tensorboard)
fi

"$LAUNCH" "${DISTRIBUTED_ARGS[@]}" -m mcore_train bert \
    "${MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
