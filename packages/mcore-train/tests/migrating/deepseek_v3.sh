#!/usr/bin/env bash
# DeepSeek-V3 671B on 1024 GPUs: latent attention, 256 experts, one MTP layer, fp8 by blocks.
set -x
TP=${TP:-1}; PP=${PP:-16}; EP=${EP:-64}; CP=1
NNODES=${NNODES:-128}
MBS=1
GBS=${GBS:-8192}
ROOT=${ROOT:-/data/deepseek}

export CUDA_DEVICE_MAX_CONNECTIONS=1 NVTE_FUSED_ATTN=1
export NVTE_NORM_FWD_USE_CUDNN=1

declare -a ARGS=(
  # optimizer and layout
  --distributed-timeout-minutes 60
  --tensor-model-parallel-size ${TP}
  --pipeline-model-parallel-size ${PP}
  --expert-model-parallel-size ${EP}
  --context-parallel-size ${CP}
  --expert-tensor-parallel-size 1
  --use-distributed-optimizer
  --overlap-grad-reduce
  --overlap-param-gather
  # program
  --use-mcore-models
  --sequence-parallel
  --use-flash-attn
  --disable-bias-linear
  --micro-batch-size ${MBS}
  --global-batch-size ${GBS}
  --train-samples 585937500
  --exit-duration-in-mins 220
  --no-check-for-nan-in-loss-and-grad
  --manual-gc
  --manual-gc-interval 10
  --enable-experimental
  --no-create-attention-mask-in-dataloader
  --transformer-impl transformer_engine
  --attention-backend fused
  --cross-entropy-loss-fusion
  --cross-entropy-fusion-impl te
  # data
  --seq-length 4096
  --data-cache-path ${ROOT}/cache
  --tokenizer-type HuggingFaceTokenizer
  --tokenizer-model ${TOKENIZER:-deepseek-ai/DeepSeek-V3}
  --data-path ${ROOT}/tokens_text_document
  --split 99,1,0
  --no-mmap-bin-files
  --num-workers 6
  --make-vocab-size-divisible-by 3232
  # shape
  --untie-embeddings-and-output-weights
  --position-embedding-type rope
  --no-rope-fusion
  --rotary-percent 1.0
  --rotary-base 10000
  --rotary-scaling-factor 40
  --mscale 1.0
  --mscale-all-dim 1.0
  --num-layers 61
  --hidden-size 7168
  --ffn-hidden-size 18432
  --num-attention-heads 128
  --kv-channels 128
  --max-position-embeddings 4096
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --qk-layernorm
  --multi-latent-attention
  --q-lora-rank 1536
  --kv-lora-rank 512
  --qk-head-dim 128
  --qk-pos-emb-head-dim 64
  --v-head-dim 128
  --init-method-std 0.02
  --mtp-num-layers 1
  --mtp-loss-scaling-factor 0.1
  # rates
  --clip-grad 1.0
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.95
  --adam-eps 1e-8
  --lr-decay-samples 584765624
  --lr-warmup-samples 1536000
  --lr-warmup-init 3.9e-7
  --lr 3.9e-6
  --min-lr 3.9e-7
  --lr-decay-style cosine
  # experts
  --num-experts 256
  --moe-layer-freq "([0]*3+[1]*58)"
  --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048
  --moe-router-load-balancing-type seq_aux_loss
  --moe-router-topk 8
  --moe-router-pre-softmax
  --moe-grouped-gemm
  --moe-aux-loss-coeff 1e-4
  --moe-router-group-topk 4
  --moe-router-num-groups 8
  --moe-router-topk-scaling-factor 2.5
  --moe-router-score-function sigmoid
  --moe-router-enable-expert-bias
  --moe-router-bias-update-rate 1e-3
  --moe-router-dtype fp32
  --moe-permute-fusion
  --moe-router-fusion
  --moe-token-dispatcher-type flex
  --moe-enable-deepep
  --moe-deepep-num-sms 20
  --moe-per-layer-logging
  # numbers
  --bf16
  --fp8-format e4m3
  --fp8-recipe blockwise
  --fp8-param-gather
  --use-precision-aware-optimizer
  --main-grads-dtype fp32
  --main-params-dtype fp32
  --exp-avg-dtype bf16
  --exp-avg-sq-dtype bf16
  # memory
  --recompute-granularity selective
  --recompute-modules mla_up_proj mlp
  --optimizer-cpu-offload
  --overlap-cpu-optimizer-d2h-h2d
  --pipeline-model-parallel-layout "Et*3|(tt|)*29m|L"
  # files and reports
  --eval-iters 32
  --eval-interval 200
  --auto-detect-ckpt-format
  --load ${ROOT}/checkpoints
  --save ${ROOT}/checkpoints
  --save-interval 500
  --save-retain-interval 5000
  --async-save
  --dist-ckpt-strictness log_all
  --ckpt-fully-parallel-load
  --use-persistent-ckpt-worker
  --log-timers-to-tensorboard
  --log-memory-to-tensorboard
  --log-validation-ppl-to-tensorboard
  --log-num-zeros-in-grad
  --log-params-norm
  --log-throughput
  --log-interval 1
  --logging-level 40
  --tensorboard-dir ${ROOT}/tensorboard
  --wandb-project deepseek
  --wandb-exp-name "v3-tp${TP}pp${PP}ep${EP}"
  --rerun-mode disabled
)

python -m torch.distributed.run --nproc-per-node 8 --nnodes ${NNODES} \
  --rdzv-endpoint ${ENDPOINT:-localhost:29500} pretrain_gpt.py "${ARGS[@]}" "$@"
