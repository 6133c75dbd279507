#!/bin/bash
# Llama 3 8B in fp8 on hosts of eight GPUs: arrays, defaults, tests and a check of files.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export NCCL_IB_TIMEOUT=22

SAVE_DIR=${1:-"runs/llama3-8b"}
TOKENIZER=${2:-MOCK}
DATA=${3:-MOCK}

GPUS=8
HOSTS=${NUM_HOSTS:-2}
RANKS=$((GPUS * HOSTS))
TP=2
CP=1
MICRO_BATCH=1
GLOBAL_BATCH=$(( RANKS / TP * MICRO_BATCH * 16 ))

if [ ! -f pretrain_gpt.py ]; then
    echo "start this in a checkout" >&2
    exit 1
fi

LAUNCH_ARGS=(
    --nproc_per_node $GPUS
    --nnodes $HOSTS
    --node_rank ${SLURM_NODEID:-0}
    --master_addr ${MASTER:-localhost}
    --master_port ${PORT:-6000}
)

SHAPE=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --rotary-percent 1.0
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.0134
    --untie-embeddings-and-output-weights
    --attention-backend fused
    --apply-layernorm-1p
)

TRAINING=(
    --micro-batch-size $MICRO_BATCH
    --global-batch-size $GLOBAL_BATCH
    --train-samples 1953125
    --lr-decay-samples 1949218
    --lr-warmup-samples 3906   # of the whole budget
    --lr 0.00015
    --min-lr 0.00001
    --decoupled-lr 5.0e-4
    --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine
    --clip-grad 1.0
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --manual-gc
    --empty-unused-memory-level 1
)

DTYPE_ARGS=()
FP8=${FP8:-on}
if [[ "$FP8" == "on" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
else
    DTYPE_ARGS+=("--accumulate-allreduce-grads-in-fp32")
fi

LAYOUT=(
    --tensor-model-parallel-size $TP
    --context-parallel-size $CP
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

if [[ $DATA == MOCK ]]; then
    FILES=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128256
        --tiktoken-pattern v2 --split '99,1,0' --no-create-attention-mask-in-dataloader
        --no-mmap-bin-files --num-workers 1)
else
    FILES=(--data-path "$DATA" --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "$TOKENIZER" --split '99,1,0' --num-workers 1)
fi

LOGS=(
    --log-interval 1
    --eval-iters 32
    --eval-interval 100
    --save-interval 1000
    --log-throughput
    --profile
    --profile-step-start 4
    --profile-step-end 6
    --ckpt-format torch_dist
    --distributed-timeout-minutes 60
    --save "$SAVE_DIR"
    --load "$SAVE_DIR"
    --tensorboard-dir "$SAVE_DIR/tensorboard"
)

torchrun ${LAUNCH_ARGS[@]} \
    pretrain_gpt.py \
    ${SHAPE[@]} ${TRAINING[@]} ${DTYPE_ARGS[@]} \
    ${LAYOUT[@]} "${FILES[@]}" "${LOGS[@]}" 2>&1 | tee train.log
