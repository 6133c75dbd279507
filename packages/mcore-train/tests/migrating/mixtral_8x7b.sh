#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
# Mixtral 8x7B under Slurm: text variables, a command in a string, arguments without defaults.
set -euo pipefail

CHECKPOINTS=$1
VOCABULARY=$2
CORPUS=$3
HERE=$(dirname "$0")

export CUDA_DEVICE_MAX_CONNECTIONS=1

MODEL="--use-mcore-models --disable-bias-linear --seq-length 4096 \
  --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096 \
  --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 \
  --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm \
  --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights \
  --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion \
  --no-position-embedding --rotary-base 1000000"

EXPERTS="--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss \
  --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
EXPERTS+=" --overlap-param-gather --overlap-grad-reduce --moe-permute-fusion"

DATA_FLAGS="--tokenizer-type Llama2Tokenizer --tokenizer-model ${VOCABULARY} \
  --data-path $CORPUS --split 99990,8,2"

TRAIN="--micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 \
  --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 \
  --lr-warmup-iters 500 --clip-grad 1.0 --bf16"

SPLITS="--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 \
  --num-layers-per-virtual-pipeline-stage 4 --expert-model-parallel-size 8 \
  --use-distributed-optimizer --sequence-parallel"

REPORTS="--log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 \
  --save $CHECKPOINTS --load ${CHECKPOINTS%/} --tensorboard-dir ${CHECKPOINTS}/tensorboard \
  --no-load-optim --no-load-rng"

if [ -n "${WANDB_API_KEY:-}" ]; then
  REPORTS+=" --wandb-project mixtral --wandb-exp-name mixtral-8x7b"
fi

cat > run.env <<END
torchrun pretrain_gpt.py --num-layers 1
END

START="torchrun --nproc_per_node 8 --nnodes ${SLURM_JOB_NUM_NODES:-4} --rdzv_backend c10d \
  ${HERE}/pretrain_gpt.py $MODEL $EXPERTS $DATA_FLAGS $TRAIN $SPLITS $REPORTS"
srun -l bash -c "${START}"
