#!/usr/bin/env bash
# Llama 70B on 64 GPUs, in the form of the field's scripts: variables, then arrays of flags.
#
#   MASTER_ADDR=host0 bash examples/llama/train_llama_70b.sh    on each of NNODES hosts
#   sbatch --nodes 8 --gpus-per-node 8 examples/llama/train_llama_70b.sh    on a cluster with Slurm
#   LAUNCH=echo ...                                             shows the command
#
# Trains on mock data unless DATA_PATH (a .bin/.idx prefix) and TOKENIZER_MODEL are given.
set -euo pipefail

DEFAULT_NNODES=8
# sbatch runs a copy of this script in a spool folder; Slurm knows where the script itself is.
SCRIPT=$0
[ -f "$(dirname "$SCRIPT")/../torchrun_args.sh" ] || SCRIPT=$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
source "$(dirname "$SCRIPT")/../torchrun_args.sh"

TP=${TP:-4}
PP=${PP:-4}
CP=${CP:-1}
HIDDEN_SIZE=${HIDDEN_SIZE:-8192}
NUM_LAYERS=${NUM_LAYERS:-80}
NUM_HEADS=${NUM_HEADS:-64}
SEQ_LENGTH=${SEQ_LENGTH:-4096}
MICRO_BATCH=${MICRO_BATCH:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-1024}
LR=${LR:-3e-4}
TRAIN_ITERS=${TRAIN_ITERS:-1000}

MODEL_ARGS=(
    --num-layers "$NUM_LAYERS"
    --hidden-size "$HIDDEN_SIZE"
    --num-attention-heads "$NUM_HEADS"
    --group-query-attention
    --num-query-groups 8
    --ffn-hidden-size 28672
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
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    --lr "$LR"
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
    --init-method-std 0.006
    --bf16
)
if [ -n "${DATA_PATH:-}" ]; then
    DATA_ARGS=(--data-path "$DATA_PATH" --tokenizer-model "$TOKENIZER_MODEL" --split 969,30,1)
else
    DATA_ARGS=(--mock-data --vocab-size 128256)
fi
LOGGING_ARGS=(--log-interval 10)
if [ -n "${CHECKPOINT_PATH:-}" ]; then
    LOGGING_ARGS+=(--save "$CHECKPOINT_PATH" --auto-resume --save-interval 500 --tensorboard)
fi

"$LAUNCH" "${DISTRIBUTED_ARGS[@]}" -m mcore_train gpt \
    "${MODEL_ARGS[@]}" "${MODEL_PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
