"""Spellings of Megatron's command line that are not, letter for letter, a field of ours.

``SPELLINGS`` translates a flag, ``NOTES`` lists flags that change no result here, ``INSTEAD``
refuses the others and names what to use. docs/megatron-flags.md lists what happens to every
option of megatron-core's parser, and is generated from these tables.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile

from mcore_base.command_line import FaultCollector, canonical, flags_in, is_flag, nearest
from mcore_base.command_line import unknown as unknown_option
from mcore_train.composition import TrainConfig


@dataclass(frozen=True, slots=True)
class Spelling:
    """What one foreign flag becomes."""

    becomes: tuple[str, ...] = ()
    """Our flags, in its place; the values that follow the foreign flag follow the last one."""
    num_values: int = 0
    """Values of the foreign flag that are dropped with it."""
    note: str = ""
    """Why it has no counterpart; logged once when the flag is given."""
    only: str = ""
    """The one value that it may have; empty: any."""
    needs: str = ""
    """A flag without which it has no effect."""
    is_default: bool = False
    """Whether recipes, presets, checkpoints and all other flags win over what it becomes."""


_GROUPED = "--group-query-attention"
"""Without which Megatron's parser takes --num-query-groups and leaves it unused."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A command line in our own flags."""

    words: tuple[str, ...]
    """The flags that can be read, with their values."""
    defaults: tuple[str, ...] = ()
    """Flags that every other source of options wins over."""
    notes: tuple[str, ...] = ()
    """One line for each foreign flag that changed nothing."""
    foreign: frozenset[str] = field(default_factory=frozenset)
    """The foreign flags that were given and are taken."""


SPELLINGS: dict[str, Spelling] = {
    "--disable-bias-linear": Spelling(("--no-add-bias-linear",)),
    "--use-rotary-position-embeddings": Spelling(("--position-embedding-type", "rope")),
    "--no-position-embedding": Spelling(
        note="it turns a learned table of positions off, and rope has none"
    ),
    "--bert-no-binary-head": Spelling(("--bert-heads", "lm")),
    "--encoder-seq-length": Spelling(("--seq-length",)),
    "--group-query-attention": Spelling(
        ("--num-query-groups", "1"),
        note="--num-query-groups alone turns it on",
        is_default=True,
    ),
    "--use-mcore-models": Spelling(note="there is one set of models"),
    "--use-flash-attn": Spelling(note="the fastest attention present is used anyway"),
    "--manual-gc": Spelling(note="on anyway, every --manual-gc-interval steps"),
    "--use-precision-aware-optimizer": Spelling(note="--exp-avg-dtype alone turns it on"),
    "--precision-aware-optimizer": Spelling(note="--exp-avg-dtype alone turns it on"),
    "--enable-cuda-graph": Spelling(("--cuda-graph-impl", "local")),
    "--external-cuda-graph": Spelling(
        ("--cuda-graph-impl", "local"), note="graphs of layers are recorded without NVIDIA's TE"
    ),
    "--lora-rank": Spelling(("--lora-dim",)),
    "--hybrid-layer-pattern": Spelling(("--hybrid-override-pattern",)),
    "--is-hybrid-model": Spelling(note="--hybrid-override-pattern alone turns it on"),
    "--fp8-hybrid": Spelling(("--fp8-format", "hybrid")),
    "--recompute-activations": Spelling(("--recompute-granularity", "selective")),
    "--distributed-backend": Spelling(num_values=1, note="nccl on GPUs, gloo on CPUs"),
    "--log-throughput": Spelling(note="throughput is always reported"),
    "--no-gradient-accumulation-fusion": Spelling(note="no extension is needed for it"),
    "--no-async-tensor-model-parallel-allreduce": Spelling(note="it is not overlapped"),
    "--no-masked-softmax-fusion": Spelling(note="attention is one fused kernel"),
    "--no-rope-fusion": Spelling(note="there is one rotary kernel"),
    "--no-bias-gelu-fusion": Spelling(
        note="GELU is exact here anyway; what the fused one computes is --openai-gelu"
    ),
    "--no-bias-swiglu-fusion": Spelling(note="the compiler decides"),
    "--no-bias-dropout-fusion": Spelling(note="the compiler decides"),
    "--calculate-per-token-loss": Spelling(note="losses are always divided by all tokens"),
    "--ddp-average-in-collective": Spelling(note="losses are divided, so gradients are summed"),
    "--use-cpu-initialization": Spelling(note="weights are always drawn on the CPU, by blocks"),
    "--init-model-with-meta-device": Spelling(note="no rank ever holds more than its share"),
    "--tp-comm-overlap": Spelling(
        note="exchanges cut into pieces under their GEMMs gained nothing on tp2 and tp4"
    ),
    "--tp-comm-overlap-cfg": Spelling(num_values=1, note="exchanges are not cut into pieces"),
    "--tp-comm-bootstrap-backend": Spelling(num_values=1, note="no second backend is used"),
    "--overlap-param-gather-with-optimizer-step": Spelling(
        note="--overlap-param-gather alone does it"
    ),
    "--overlap-p2p-communication-warmup-flush": Spelling(
        note="messages travel under computation in all phases"
    ),
    "--defer-embedding-wgrad-compute": Spelling(note="the head's is made with its loss"),
    "--use-ring-exchange-p2p": Spelling(note="messages that stand together are posted as one"),
    "--align-param-gather": Spelling(note="every stage gathers when its weights are new"),
    "--moe-extended-tp": Spelling(
        note="give --expert-tensor-parallel-size: that of --tensor-model-parallel-size times "
        "--expert-model-parallel-size, with --expert-model-parallel-size 1"
    ),
    "--empty-unused-memory-level": Spelling(num_values=1, note="memory is kept"),
    "--variable-seq-lengths": Spelling(note="every stage reads lengths off its own batch"),
    "--muon-use-nesterov": Spelling(("--muon-nesterov",)),
    "--muon-no-split-qkv": Spelling(("--no-muon-split-qkv",)),
    "--muon-scalar-optimizer": Spelling(
        num_values=1, only="adam", note="AdamW updates what matrices leave"
    ),
    "--muon-fp32-matmul-prec": Spelling(
        num_values=1, note="products of the iteration are of bfloat16, which is medium"
    ),
    "--cpu-optimizer": Spelling(("--optimizer-cpu-offload",)),
    "--cpu-optimizer-type": Spelling(
        ("--optimizer", "adam"), num_values=1, only="ADAM", needs="--cpu-optimizer"
    ),
    "--overlap-cpu-optimizer-d2h-h2d": Spelling(note="copies always run under the update"),
    "--use-torch-optimizer-for-cpu-offload": Spelling(note="the GPU updates the state"),
    "--no-pin-cpu-grads": Spelling(note="gradients stay on the GPU"),
    "--no-pin-cpu-params": Spelling(note="state is pinned, and no more than its size"),
    "--cpu-offloading-activations": Spelling(note="it is what --cpu-offloading does"),
    "--use-megatron-fsdp": Spelling(("--use-torch-fsdp2",)),
    "--ckpt-format": Spelling(num_values=1, note="one native format loads under any layout"),
    "--verify-integrity": Spelling(("--load-checksums",)),
    "--ckpt-fully-parallel-save": Spelling(note="every rank writes its share"),
    "--ckpt-fully-parallel-load": Spelling(note="every rank reads what it needs"),
    "--ckpt-assume-constant-structure": Spelling(note="plans are kept while they fit"),
    "--dist-ckpt-optim-fully-reshardable": Spelling(note="every checkpoint is"),
    "--use-persistent-ckpt-worker": Spelling(note="--async-save writes in a thread"),
    "--async-strategy": Spelling(num_values=1, note="--async-save writes in a thread"),
    "--non-persistent-local-ckpt-algo": Spelling(
        num_values=1, note="each rank keeps what it holds"
    ),
    "--use-checkpoint-args": Spelling(note="--load brings the model's shape with it"),
    "--use-mp-args-from-checkpoint-args": Spelling(note="any layout loads any checkpoint"),
    "--auto-detect-ckpt-format": Spelling(note="one native format loads under any layout"),
    "--no-pad-vocab-size": Spelling(("--make-vocab-size-divisible-by", "1")),
    "--disable-pad-vocab-size": Spelling(("--make-vocab-size-divisible-by", "1")),
    "--persistent-save-interval": Spelling(("--save-interval",)),
    "--moe-enable-deepep": Spelling(("--moe-token-dispatcher-type", "deepep")),
    "--moe-flex-dispatcher-backend": Spelling(
        num_values=1, only="deepep", note="--moe-token-dispatcher-type deepep names it"
    ),
    "--moe-layer-recompute": Spelling(
        ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "moe")
    ),
    "--no-rope-freq": Spelling(("--rope-skip-freq",)),
    "--yarn-original-max-position-embeddings": Spelling(
        ("--original-max-position-embeddings",)
    ),
    "--yarn-beta-fast": Spelling(("--beta-fast",)),
    "--yarn-beta-slow": Spelling(("--beta-slow",)),
    "--fp8-margin": Spelling(num_values=1, only="0", note="scales have no margin"),
    "--rerun-mode": Spelling(
        num_values=1, only="disabled", note="--rerun-on-mismatch computes steps twice"
    ),
    "--sample-rate": Spelling(num_values=1, only="1.0", note="all samples are read"),
    "--attention-softmax-in-fp32": Spelling(note="attention's softmax is always in float32"),
    "--cross-entropy-loss-fusion": Spelling(note="output layer and loss are always fused"),
    "--cross-entropy-fusion-impl": Spelling(num_values=1, note="there is one implementation"),
    "--exit-signal-handler": Spelling(
        note="SIGTERM, SIGINT and --exit-signal save and end the run"
    ),
    **dict.fromkeys(
        ("--log-params-norm", "--log-num-zeros-in-grad", "--log-max-attention-logit"),
        Spelling(("--layer-statistics-interval", "100"), note="for each layer and the whole"),
    ),
    "--skip-train": Spelling(("--eval-only",)),
    "--use-pytorch-profiler": Spelling(note="--profile uses it, and ranges alone under nsys"),
    "--nvtx-ranges": Spelling(note="--profile marks all phases under nsys"),
    "--log-timers-to-tensorboard": Spelling(note="--tensorboard writes every reported number"),
    "--log-memory-to-tensorboard": Spelling(note="--tensorboard writes every reported number"),
    "--log-validation-ppl-to-tensorboard": Spelling(
        note="--tensorboard writes every reported number"
    ),
    "--tensorboard-dir": Spelling(
        ("--tensorboard",), num_values=1, note="scalars go to tensorboard/ below --save"
    ),
}
"""Flags that are taken and translated."""

VALUES: dict[tuple[str, str], tuple[str, ...]] = {
    ("--cp-comm-type", "allgather"): ("--cp-comm-type", "all_gather"),
    ("--cuda-graph-impl", "transformer_engine"): ("--cuda-graph-impl", "local"),
    ("--optimizer", "dist_muon"): ("--optimizer", "muon"),
    ("--moe-token-dispatcher-type", "flex"): ("--moe-token-dispatcher-type", "deepep"),
    ("--position-embedding-type", "yarn"): (
        *("--position-embedding-type", "rope", "--rope-type", "yarn"),
    ),
}
"""Megatron's values of flags that we have too, where ours are spelled otherwise."""

NOTES: dict[str, str] = {
    "--one-logger-* --no-one-logger --app-tag-*": "no run is reported to a service",
    "--timing-log-* --no-barrier-with-level-1-timing": (
        "--waterfall-interval divides a step's time without barriers, on average over ranks"
    ),
    "--moe-per-layer-logging": "metrics.jsonl and --tensorboard have each layer of experts",
    "--tensorboard-log-interval": (
        "--tensorboard writes every reported number, at every --log-interval"
    ),
    (
        "--log-progress --log-energy --no-log-loss-scale-to-tensorboard "
        "--disable-log-loss-scale-to-tensorboard --log-memory-interval "
        "--log-device-memory-used "
        "--moe-routing-trace-* --validation-set-names "
        "--dump-param-to-param-group-map --config-logger-dir --result-rejected-*"
    ): "it is not reported here",
    "--logging-level": "the first rank logs at INFO, the others at WARNING",
    "--disable-gloo-process-groups": "groups are made for the collectives that a run has",
    (
        "--pytorch-profiler-* --record-shapes "
        "--run-workload-inspector-server --gpu-sniff-test-interval --onnx-safe"
    ): "--profile writes one trace a rank, with phases as ranges",
    "--log-world-size-to-tensorboard": "the description of the run has it",
    "--straggler-ctrlr-port --straggler-minmax-count --disable-straggler-on-startup": (
        "--log-straggler scores every rank at each --straggler-interval"
    ),
    "--flight-recorder-* --no-flight-recorder-* --disable-flight-recorder-*": (
        "torch's own variables TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_FR_DUMP_TEMP_FILE set it"
    ),
    (
        "--moe-permute-fusion --moe-router-fusion --moe-single-grouped-* "
        "--use-grouped-gemm-for-* --no-persist-layer-norm --fused-residual-rmsnorm "
        "--use-fused-weighted-squared-relu --use-transformer-engine-op-fuser "
        "--use-te-activation-func --disable-jit-fuser --mla-down-proj-fusion "
        "--disable-mamba-mem-eff-path --flash-attention-version --optimizer-cuda-graph "
        "--moe-router-padding-for-*"
    ): "kernels are chosen by what is installed",
    (
        "--moe-permute-fusion-into-hybridep --moe-deepep-num-sms --moe-hybridep-* "
        "--moe-ncclep-* --moe-flex-dispatcher-num-sms"
    ): "the dispatcher needs no tuning",
    "--tp-comm-* --no-tp-comm-* --disable-tp-comm-*": "exchanges are not cut into pieces",
    (
        "--delay-wgrad-compute --wgrad-deferral-limit --ep-overlap-early-attn-memory-release "
        "--overlap-dispatch-backward-with-experts-wgrad --high-priority-a2a-comm-stream"
    ): "--pipeline-schedule zb-h1 is what delays weight gradients",
    (
        "--nccl-ub --use-nccl-ub --disable-symmetric-registration --symmetric-ar-type "
        "--create-all-gather-group --suggested-communication-unit-size "
        "--high-priority-stream-groups --use-sharp --sharp-enabled-group "
        "--pipeline-model-parallel-comm-backend"
    ): "--nccl-communicator-config-path sets what collectives of an axis take",
    (
        "--ddp-num-buckets --no-align-grad-reduce --disable-align-grad-reduce "
        "--no-align-param-gather --no-gradient-reduce-div-fusion "
        "--no-use-layer-wise-param-layout"
    ): "buckets are sized by --ddp-bucket-size, and each stage sends its own when it is full",
    (
        "--fsdp-double-buffer --fsdp-manual-registration --fsdp-db-* "
        "--megatron-fsdp-enable-fine-grained-param-gather "
        "--megatron-fsdp-max-pool-double-buffer --keep-fp8-transpose-cache "
        "--reuse-grad-buf-for-mxfp8-param-ag"
    ): "buffers of gathered weights need no tuning",
    (
        "--no-ckpt-fully-parallel-save --ckpt-fully-parallel-* --async-ckpt-* "
        "--no-ckpt-load-validate-sharding-integrity "
        "--disable-ckpt-load-validate-sharding-integrity --dist-ckpt-save-pre-mcore-014 "
        "--dist-ckpt-format --dist-ckpt-workers --use-dist-ckpt --no-stream-ckpt-dequant "
        "--disable-stream-ckpt-dequant --distrib-optim-fully-reshardable-mem-efficient "
        "--ckpt-convert-update-legacy-dist-opt-format --enable-msc --disable-msc"
    ): "one native format, which all ranks write and read together",
    "--no-save-rng": "random states are small and always saved; see --no-load-rng",
    (
        "--no-use-tokenizer-model-from-checkpoint-args "
        "--disable-use-tokenizer-model-from-checkpoint-args"
    ): "a --tokenizer-model that is given always wins",
    "--apply-query-key-layer-scaling": "scores are computed in float32",
    "--cpu-offloading-retain-pinned-cpu-buffers": "pinned buffers are kept anyway",
    "--mlp-chunks-for-*": "the feed-forward layer is computed in one piece",
    "--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding": (
        "memory of the embedding is freed anyway"
    ),
    "--no-initialization --lazy-mpu-init --local-rank --enable-experimental": (
        "it has no counterpart and changes no result"
    ),
    "--te-rng-tracker --inference-rng-tracker": "one random state serves graphs as well",
    "--fp8-interval": "scales are computed at every step",
    "--train-sync-interval": "the host waits for the device at every --log-interval",
    "--no-manual-gc-eval --disable-manual-gc-eval": "--manual-gc-interval alone sets it",
    "--exit-signal-handler-*": "SIGTERM, SIGINT and --exit-signal save and end the run",
    "--dataloader-fast-cache-load --dataloader-defer-* --per-dataset-sequences-path": (
        "indices of data are mapped and built once anyway"
    ),
    "--tokenizer-hf-no-use-fast --trust-remote-code": (
        "tokenizer.json is read, and no code of a checkpoint is run"
    ),
}
"""Flags, or patterns of flags, of logging and speed: taken with all their values, and noted."""

INSTEAD: dict[str, str] = {
    "--non-persistent-global-ckpt-dir": "use --save-interval and --save-retain-last.",
    "--fp8-quantizer-factory --fp8-output-proj --no-fp8-wgrad --disable-fp8-wgrad": (
        "use --fp8-format with a --fp8-recipe: all three GEMMs of a linear, no margin."
    ),
    "--fp8-amax-reduction-group --tp-only-amax-red": (
        "all ranks that share a layer agree, over tensor, context and data: leave it out."
    ),
    "--fp4-* --*fp8*": (
        "use --fp8-format e4m3 or hybrid, and --moe-experts-dtype fp8 for experts."
    ),
    "--enable-optimizer-post-validation": (
        "leave it out. Every step waits for the norm of its gradients; under "
        "--pipeline-schedule zb-v ranks have no other idle time."
    ),
    "--standalone-embedding-stage": (
        "use --pipeline-model-parallel-layout, such as 'E|tt|tt|L'."
    ),
    "--pipeline-model-parallel-split-rank": (
        "stages share the encoder's layers, then the decoder's; use "
        "--pipeline-model-parallel-layout to place them."
    ),
    "--distributed-timeout-seconds-after-init": "use --distributed-timeout-minutes.",
    "--fake-process-group": (
        "use mcore-train verify, which runs the layout on this host's processors."
    ),
    "--data-parallel-random-init": (
        "weights are the same under every layout; use --seed for others."
    ),
    "--cpu-offloading-weights": "use --use-torch-fsdp2: weights are gathered layer by layer.",
    "--fine-grained-* --*offload*": (
        "use --cpu-offloading with --cpu-offloading-num-layers, or --optimizer-cpu-offload."
    ),
    "--checkpoint-activations": "use --recompute-granularity selective or full.",
    "--*fsdp* --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp": (
        "use --data-parallel-sharding-strategy, with --num-distributed-optimizer-instances for "
        "hybrid sharding: torch's fully_shard does the rest."
    ),
    "--encoder-num-layers --decoder-num-layers": "only a t5 has them; use --num-layers.",
    "--decoder-seq-length": "only mcore-train t5 has it; use --seq-length.",
    "--hybrid-attention-ratio --hybrid-mlp-ratio": (
        "use --hybrid-override-pattern, one letter a layer."
    ),
    "--fp32-residual-connection": (
        "the residual stream has the run's own format; use --bf16 or float32."
    ),
    "--fp16-lm-cross-entropy": "the loss is computed in float32; leave it out.",
    "--init-method-xavier-uniform": "use --init-method-std.",
    "--padded-vocab-size": "use --make-vocab-size-divisible-by.",
    "--use-kitchen-attention --kitchen-* --te-*": (
        "use --attention-backend and --transformer-impl to choose kernels."
    ),
    "--cuda-graph-scope --cuda-graph-modules": (
        "use --cuda-graph-impl full_iteration for a graph of the step, local for one a layer."
    ),
    "--eval-global-batch-size": (
        "validation takes the training batch; use --eval-iters for more or fewer of them."
    ),
    "--decrease-batch-size-if-needed": "use a --global-batch-size that the data ranks divide.",
    (
        "--rerun-* --check-for-spiky-loss --check-for-large-grads --error-injection-* "
        "--fault-injector-*"
    ): "use --rerun-on-mismatch, which computes a suspicious step again, or --spike-policy.",
    "--nnodes --nproc*per*node --node-rank --master-* --rdzv-* --max-restarts --standalone": (
        "this belongs to torchrun, before -m mcore_train; use --nproc N on one host."
    ),
    "--moe-use-upcycling --moe-upcycling-*": (
        "use mcore-ckpt upcycle, which makes experts of a dense checkpoint: --load its result."
    ),
    "--ddp-*-fp32-*": "use --accumulate-allreduce-grads-in-fp32.",
    "--input --output-prefix --json-keys --append-eod --split-sentences --workers": (
        "this belongs to the corpus; use mcore-data preprocess."
    ),
    (
        "--inference-* --no-inference-* --*speculative* --port --prompt --flash-decode "
        "--cache-mla-latents --nccl-all-reduce-for-prefill --decode-only-cuda-graphs "
        "--enable-chunked-prefill --use-same-sampling-seed-across-dp-ranks "
        "--mamba-inference-* --max-tokens-to-oom --use-legacy-static-engine "
        "--moe-pad-experts-for-cuda-graph-inference"
    ): "this belongs to a trained model; use mcore-infer.",
    "--task --valid-data --strict-lambada --overlapping-eval": (
        "this belongs to the evaluation of a trained model; use mcore-infer eval."
    ),
    "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards": (
        "use --data-parallel-sharding-strategy to shard weights further."
    ),
    "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank": (
        "all sequences are cut alike; use --context-parallel-size."
    ),
    "--mtp-*": (
        "use --mtp-num-layers, and m in --pipeline-model-parallel-layout to place these layers."
    ),
    "--apply-residual-connection-post-layernorm": (
        "the residual is what enters the norm; leave it out, or use --post-layer-norm for BERT."
    ),
    "--experimental-attention-variant --linear-attention-freq --heterogeneous-layers-*": (
        "use --hybrid-override-pattern, one letter a layer: G is a gated delta net."
    ),
    "--dsa-* --no-dsa-* --disable-dsa-*": (
        "the indexer of --dsa-indexer-topk is not trained and has one form; leave it out."
    ),
    "--mup-width-mult": "it follows from --mup-base-hidden-size; leave it out.",
    "--disable-bf16-reduced-precision-matmul": (
        "GEMMs add up as torch does by default; leave it out."
    ),
    "--moe-shared-expert-glu-interleave-size --moe-mlp-glu-interleave-size": (
        "gates and up-projections are stored one after the other; leave it out."
    ),
    "--moe-enable-routing-replay --moe-router-force-biased": (
        "routing is always the router's; leave it out."
    ),
    "--moe-router-quantile-balancing-ema": "use --moe-router-load-balancing-type aux_loss.",
    "--moe-expert-rank-capacity-factor": (
        "use --moe-expert-capacity-factor, or --moe-expert-rows-limit to bound memory."
    ),
    "--moe-paged-stash*": "use --cpu-offloading to keep activations in host memory.",
    "--muon-*": "use the options of --optimizer muon.",
    "--no-weight-decay-cond-type": "vectors never decay; leave it out.",
    "--mamba-training-ssm-states-dtype": "states are kept in float32; leave it out.",
    "--perform-rl-step --rl-* --no-rl-* --grpo-* --langrl-* --refit-method": (
        "use --objective grpo with --prompts and --reward; other reinforcement learning is not "
        "here."
    ),
    "--warmup": "use --lr-warmup-fraction or --lr-warmup-iters.",
    "--freeze-all-layers": "use --peft lora, which trains adapters alone.",
    "--save-*-interval": (
        "tensors of single steps are not written; use --save-interval for checkpoints."
    ),
    "--load-main-params-from-ckpt": (
        "use --load, which takes main weights, or --finetune, which takes the weights alone."
    ),
    "--ckpt-convert-*": "use mcore-ckpt convert.",
    "--override-ckpt-iteration": "use --ckpt-step to begin from an earlier step.",
    "--model-parallel-size": "use --tensor-model-parallel-size.",
    "--start-eval-at-iter": "use --eval-interval.",
    "--test-mode": "use mcore-infer eval for the loss of a checkpoint.",
    "--phase-transition-iterations": "use --data-mixture-path, whose phases begin at a step.",
    "--allow-ambiguous-pad-tokens --fim-eod-token": (
        "tokens that end and pad are the tokenizer's own; leave it out."
    ),
    "--tokenizer-metadata --tokenizer-sentencepiece-* --no-tokenizer-* --disable-tokenizer-*": (
        "a tokenizer's files alone set what it does; leave it out."
    ),
    "--tokenizer-hf-no-include-special-tokens": "no special token is added; leave it out.",
    "--null-tokenizer-*": "use --vocab-size; documents end with that id.",
    "--chat-template --sft-tokenizer-prompt-format": (
        "use --tokenizer-type SFTTokenizer, with the template of the tokenizer's folder."
    ),
    "--adlr-autoresume*": "use --auto-resume, and --exit-duration-in-mins to end in time.",
    (
        "--ict-* --biencoder-* --bert-load --titles-data-path --query-in-block-prob "
        "--use-one-sent-docs --evidence-data-path --retriever-* --block-data-path "
        "--embedding-path --indexer-* --output-bert-embeddings --bert-embedder-type"
    ): "retrieval is not trained here; leave it out.",
    (
        "--num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction "
        "--data-per-class-fraction --no-data-sharding --head-lr-mult --vision-* --swin-* "
        "--mask-type --mask-factor --iter-per-epoch --dino-* --mrope-section"
    ): "images are not trained on here; leave it out.",
    "--logits-*": "training on another model's logits is not here; leave it out.",
    "--spec": "a model of your own is a Family, given to run_training; leave it out.",
    "--yaml-cfg": "use --recipe FILE, in TOML.",
    "--learning-rate --max-lr": "use --lr.",
    "--batch-size": (
        "use --micro-batch-size for one rank's and --global-batch-size for a step's."
    ),
    "--gradient-accumulation-steps": (
        "use --global-batch-size: what --micro-batch-size and the data ranks do not make up is "
        "accumulated."
    ),
    "--*epochs": "use --train-samples, in sequences, or --train-iters, in steps.",
    "--max-steps --steps --max-iters": "use --train-iters.",
    "--warmup-steps --warmup-iters": "use --lr-warmup-iters.",
    "--output --output-dir --out-dir": "use --save.",
    "--resume* --checkpoint": "use --load.",
    "--n-layer --layers": "use --num-layers.",
    "--n-head --heads": "use --num-attention-heads.",
    "--n-embd --d-model --dim": "use --hidden-size.",
    "--block-size --context-length --max-length": "use --seq-length.",
    "--grad-clip --max-grad-norm": "use --clip-grad.",
    "--config --preset --model-size --model-name": (
        "use --model NAME, such as llama-3-8b, or --recipe FILE."
    ),
    "--gpus --num-gpus": "use --nproc, or torchrun.",
    "--tp": "use --tensor-model-parallel-size.",
    "--pp": "use --pipeline-model-parallel-size.",
    "--cp": "use --context-parallel-size.",
    "--ep": "use --expert-model-parallel-size.",
    "--dp --data-parallel-size": (
        "data ranks are what the other degrees leave of the world; use --nproc, or torchrun."
    ),
}
"""Flags, or patterns of flags, that this version does not have, and what stands instead of them
or why nothing does. The first row that matches answers."""


def translate(
    argv: Sequence[str], known: Collection[str], faults: FaultCollector
) -> Translation:
    """Rewrite a command line in our own flags; add all that cannot be to ``faults``.

    Faults are refused and unknown flags, foreign ones whose value is missing or not taken, and
    flags of different names that set one option differently. Of one flag given twice, the last
    one wins.
    """
    words: list[str] = []
    defaults: list[str] = []
    notes: list[str] = []
    foreign: set[str] = set()
    setters = _Setters(known)
    given = {canonical(word.partition("=")[0]) for word in argv if is_flag(word)}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not is_flag(word):
            words.append(word)
            continue
        name, equals, value = word.partition("=")
        name = canonical(name)
        values = [value] if equals else _values_before_a_flag(rest)
        if name in known:
            ours = VALUES.get((name, values[0] if values else ""))
            if ours is not None:
                foreign.add(name)
                rest = rest if equals else rest[1:]
                words += ours
                setters.add_all(" ".join([name, *values[:1]]), ours)
                continue
            if name == "--window-size" and len(values) == 1 and "," in values[0]:
                values = [part.strip() for part in values[0].strip("()").split(",")]
                rest = rest if equals else rest[1:]
                words += [name, *values]
            else:
                words += [name, value] if equals else [name]
            setters.add(name, name, values)
            continue
        spelling = SPELLINGS.get(name)
        if spelling or matching(name, NOTES):
            foreign.add(name)
        if spelling is None:
            rest = rest if equals else rest[len(values) :]
            _add_without_spelling(name, known, given, notes, faults)
            continue
        dropped = values[: spelling.num_values]
        rest = rest if equals else rest[len(dropped) :]
        problem = _spelling_problem(name, spelling, dropped, given)
        if problem:
            faults.add(problem, *(w for w in spelling.becomes if is_flag(w)))
        elif spelling.is_default:
            defaults += spelling.becomes
        else:
            words += spelling.becomes
            # A bare flag takes over the values of the foreign one.
            words += [value] if equals and not spelling.num_values else []
            setters.add_all(name, spelling.becomes, after=[value] if equals else values)
        if spelling.note and not problem:
            notes.append(f"{name}: {spelling.note}.")
    if foreign and "--num-query-groups" in given and _GROUPED not in given:
        notes.append(f"--num-query-groups: groups of queries count here without {_GROUPED}.")
    setters.check(faults)
    return Translation(tuple(words), tuple(defaults), tuple(notes), frozenset(foreign))


def check_translation(config: TrainConfig, foreign: Collection[str]) -> None:
    """Refuse foreign flags that Megatron refuses beside the options of a config.

    Raises:
        ValueError: with the flag and what it contradicts.
    """
    positions = config.model.position_embedding_type
    if "--no-position-embedding" in foreign and positions == "learned_absolute":
        raise ValueError(
            "--no-position-embedding turns --position-embedding-type learned_absolute off: "
            "leave it out, or choose rope or none."
        )


def matching(name: str, table: dict[str, str]) -> str:
    """Return the text of the first row with a pattern that a flag matches; "" without one."""
    for patterns, text in table.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return text
    return ""


def _add_without_spelling(
    name: str,
    known: Collection[str],
    given: Collection[str],
    notes: list[str],
    faults: FaultCollector,
) -> None:
    """Note, refuse or report as unknown a flag that has no translation."""
    if note := matching(name, NOTES):
        notes.append(f"{name}: {note}.")
    elif instead := matching(name, INSTEAD):
        faults.add(f"{name}: {instead}", *(flags_in(instead) - set(given)))
    else:
        names = {*known, *SPELLINGS}
        faults.add(unknown_option(name, names), *(set(nearest(name, names)) - set(given)))


def _spelling_problem(
    name: str, spelling: Spelling, values: list[str], given: Collection[str]
) -> str:
    """Return what is wrong with the values of a foreign flag; "" if nothing is."""
    use = f": use {spelling.only}." if spelling.only else "."
    if len(values) < spelling.num_values:
        return f"{name} needs a value{use}"
    if spelling.only and values != [spelling.only]:
        return f"{name} {values[0]}{use}"
    if spelling.needs and spelling.needs not in given:
        return f"{name} has no effect without {spelling.needs}."
    return ""


class _Setters:
    """Which flags of a command line set which option, and to what."""

    def __init__(self, known: Collection[str]) -> None:
        self.known = known
        self.found: dict[str, dict[str, tuple[str, str]]] = {}

    def add(self, written: str, flag: str, values: list[str]) -> None:
        """Note that ``written`` is on the command line and means ``flag`` with ``values``."""
        option = "--" + flag.removeprefix("--no-")
        option = option if option in self.known else flag
        meaning = " ".join([flag, *values])
        is_own = written == flag
        shown = meaning if is_own else f"{written} ({meaning})"
        self.found.setdefault(option, {})[option if is_own else written] = meaning, shown

    def add_all(self, written: str, words: Sequence[str], after: Sequence[str] = ()) -> None:
        """Note all flags in ``words``; a last one without a value has those of ``after``."""
        rest = list(words)
        while rest:
            flag = rest.pop(0)
            values = _values_before_a_flag(rest)
            del rest[: len(values)]
            self.add(written, flag, values or ([] if rest else list(after)))

    def check(self, faults: FaultCollector) -> None:
        """Add a fault for flags of different names that set one option differently."""
        for option, setters in self.found.items():
            if len({meaning for meaning, _ in setters.values()}) > 1:
                both = " and ".join(shown for _, shown in setters.values())
                faults.add(f"{both} contradict: leave one of them out.", option)


def _values_before_a_flag(words: Sequence[str]) -> list[str]:
    return list(takewhile(lambda word: not is_flag(word), words))
