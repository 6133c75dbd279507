#!/usr/bin/env bash
# GPT-3 of 175 billion parameters: 1 024 GPUs, tensor 8 x pipeline 16 x data 8.
#
#   MASTER_ADDR=host0 bash examples/gpt3/train_gpt3_175b_distributed.sh    on each of 128 hosts
#   LAUNCH=echo ...                                                        shows the command
#
# The model is Megatron's of these flags (--megatron-defaults): LayerNorm, learned positions,
# biases, GELU, dropout of 0.1. Trains on mock data unless DATA_PATH (a .bin/.idx prefix),
# VOCAB_FILE and MERGE_FILE are given.
set -euo pipefail

DEFAULT_NNODES=128
# sbatch runs a copy of this script in a spool folder; Slurm knows where the script itself is.
SCRIPT=$0
[ -f "$(dirname "$SCRIPT")/../torchrun_args.sh" ] || SCRIPT=$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
source "$(dirname "$SCRIPT")/../torchrun_args.sh"

GPT_MODEL_ARGS=(
    --megatron-defaults
    --num-layers "${NUM_LAYERS:-96}"
    --hidden-size "${HIDDEN_SIZE:-12288}"
    --num-attention-heads "${NUM_HEADS:-96}"
    --seq-length 2048
    --max-position-embeddings 2048
)
TRAINING_ARGS=(
    --micro-batch-size "${MICRO_BATCH:-1}"
    --global-batch-size "${GLOBAL_BATCH:-1536}"
    --rampup-batch-size 16 16 5859375
    --train-samples "${TRAIN_SAMPLES:-146484375}"
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --bf16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP:-8}"
    --pipeline-model-parallel-size "${PP:-16}"
    --sequence-parallel
    --use-distributed-optimizer
)
if [ -n "${DATA_PATH:-}" ]; then
    DATA_ARGS=(
        --data-path "$DATA_PATH"
        --vocab-file "$VOCAB_FILE"
        --merge-file "$MERGE_FILE"
        --split 949,50,1
    )
else
    DATA_ARGS=(--mock-data --vocab-size 50257)
fi
EVAL_AND_LOGGING_ARGS=(--log-interval 100 --eval-interval 1000 --eval-iters 10)
if [ -n "${CHECKPOINT_PATH:-}" ]; then
    EVAL_AND_LOGGING_ARGS+=(
        --save "$CHECKPOINT_PATH"
        --auto-resume
        --save-interval 10000
        --tensorboard
    )
fi

"$LAUNCH" "${DISTRIBUTED_ARGS[@]}" -m mcore_train gpt \
    "${GPT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${EVAL_AND_LOGGING_ARGS[@]}" "$@"
