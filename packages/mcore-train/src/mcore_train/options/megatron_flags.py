"""Spellings of Megatron's command line that are not, letter for letter, a field of ours.

One table says what each becomes, one says what is refused and what to use in its place.
Everything else on a command line must be a known flag; an unknown one is answered with the
nearest known one, if one is near, before anything is started.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile

from mcore_parallel.command_line import canonical, is_flag, unknown


@dataclass(frozen=True, slots=True)
class Spelling:
    """What one foreign flag becomes."""

    becomes: tuple[str, ...] = ()
    """Our flags, in its place."""
    num_values: int = 0
    """Values that follow the foreign flag and go with it."""
    note: str = ""
    """Why it has no counterpart; logged once when the flag is given."""
    only: str = ""
    """The one value that it may have; empty: any."""
    needs: str = ""
    """A flag without which it has no effect."""


SPELLINGS: dict[str, Spelling] = {
    "--disable-bias-linear": Spelling(("--no-add-bias-linear",)),
    "--use-rotary-position-embeddings": Spelling(("--position-embedding-type", "rope")),
    "--no-position-embedding": Spelling(("--position-embedding-type", "none")),
    "--bert-no-binary-head": Spelling(("--bert-heads", "lm")),
    "--encoder-seq-length": Spelling(("--seq-length",)),
    "--group-query-attention": Spelling(note="--num-query-groups alone turns it on"),
    "--use-mcore-models": Spelling(note="there is one set of models"),
    "--use-flash-attn": Spelling(note="the fastest attention present is used anyway"),
    "--manual-gc": Spelling(note="on anyway, every --manual-gc-interval steps"),
    "--use-precision-aware-optimizer": Spelling(note="--exp-avg-dtype alone turns it on"),
    "--precision-aware-optimizer": Spelling(note="--exp-avg-dtype alone turns it on"),
    "--enable-cuda-graph": Spelling(("--cuda-graph-impl", "full_iteration")),
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
    "--moe-extended-tp": Spelling(note="--expert-tensor-parallel-size says it"),
    "--empty-unused-memory-level": Spelling(num_values=1, note="memory is kept"),
    "--variable-seq-lengths": Spelling(note="every stage reads lengths off its own batch"),
    "--cpu-optimizer": Spelling(("--optimizer-cpu-offload",)),
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
    "--attention-softmax-in-fp32": Spelling(note="attention's softmax is always in float32"),
    "--cross-entropy-loss-fusion": Spelling(note="output layer and loss are always fused"),
    "--cross-entropy-fusion-impl": Spelling(num_values=1, note="there is one implementation"),
    "--exit-signal-handler": Spelling(note="SIGTERM and SIGINT always save and end the run"),
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

INSTEAD: dict[str, str] = {
    "--non-persistent-global-ckpt-dir": "use --save-interval and --save-retain-last.",
    "--no-ckpt-fully-parallel-save": (
        "all ranks always write together; use mcore-ckpt reshard to put their files together."
    ),
    ("--fp8-margin --fp8-interval --fp8-quantizer-factory --fp8-output-proj --no-fp8-wgrad"): (
        "use --fp8-format with a --fp8-recipe: all three GEMMs of a linear, no margin."
    ),
    "--fp8-amax-reduction-group --tp-only-amax-red": (
        "all ranks that share a layer agree, over tensor, context and data: leave it out."
    ),
    "--reuse-grad-buf-for-mxfp8-param-ag --keep-fp8-transpose-cache": (
        "use --fp8-param-gather to gather weights in fp8; they are cast once a step."
    ),
    "--fp4-* --*fp8* --moe-router-padding-for-*": (
        "use --fp8-format e4m3 or hybrid, and --moe-experts-dtype fp8 for experts."
    ),
    "--delay-wgrad-compute": (
        "use --pipeline-schedule zb-h1: weight gradients are computed where a stage is idle."
    ),
    "--ddp-num-buckets": "use --ddp-bucket-size, in elements.",
    "--standalone-embedding-stage": (
        "use --pipeline-model-parallel-layout, such as 'E|tt|tt|L'."
    ),
    "--pipeline-model-parallel-split-rank": (
        "stages share the encoder's layers, then the decoder's; use "
        "--pipeline-model-parallel-layout to place them."
    ),
    "--distributed-timeout-seconds-after-init": "use --distributed-timeout-minutes.",
    "--high-priority-stream-groups": (
        "use --nccl-communicator-config-path, which bounds the collectives of an axis."
    ),
    "--nccl-ub": (
        "buffers are not registered with nccl; use --nccl-communicator-config-path to bound "
        "what collectives take."
    ),
    "--use-sharp": (
        "switches cannot be used for one axis alone; use nccl's own NCCL_COLLNET_ENABLE=1."
    ),
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
    "--step-batch-size-schedule": "use --rampup-batch-size START INCREMENT SAMPLES.",
    "--*fsdp* --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp": (
        "use --data-parallel-sharding-strategy, with --num-distributed-optimizer-instances for "
        "hybrid sharding: torch's fully_shard does the rest."
    ),
    "--encoder-num-layers --decoder-num-layers": "only a t5 has them; use --num-layers.",
    "--decoder-seq-length": "only mcore-train t5 has it; use --seq-length.",
    "--hybrid-attention-ratio --hybrid-mlp-ratio": (
        "use --hybrid-override-pattern, one letter a layer."
    ),
    "--apply-query-key-layer-scaling": "scores are computed in float32; leave it out.",
    "--fp32-residual-connection": (
        "the residual stream has the run's own format; use --bf16 or float32."
    ),
    "--fp16-lm-cross-entropy": "the loss is computed in float32; leave it out.",
    "--init-method-xavier-uniform": "use --init-method-std.",
    "--padded-vocab-size": "use --make-vocab-size-divisible-by.",
    (
        "--use-te-activation-func --use-kitchen-attention --te-* --*-cuda-graph "
        "--cuda-graph-scope --cuda-graph-modules"
    ): ("use --attention-backend and --cuda-graph-impl to choose kernels and launches."),
    "--decoupled-*": "embedding and output layer take the rate of all weights; use --lr.",
    "--apply-wd-to-qk-layernorm": "vectors never decay; leave it out.",
    "--eval-micro-batch-size --eval-global-batch-size": (
        "validation takes the training batch; use --eval-iters for more or fewer of them."
    ),
    "--decrease-batch-size-if-needed": "use a --global-batch-size that the data ranks divide.",
    "--iterations-to-skip": "no step can be skipped yet; leave it out.",
    "--no-ckpt-*": "use --no-save-optim or --no-load-optim; the rest is always done.",
    "--async-ckpt-*": "use --async-save, whose thread needs no tuning.",
    "--wandb-*": "use --tensorboard, or the metrics.jsonl below --save.",
    "--log-params-norm --log-num-zeros-in-grad": (
        "use --tensorboard or metrics.jsonl, which have the gradient norm."
    ),
    (
        "--log-progress --log-straggler --log-world-size-to-tensorboard "
        "--no-log-loss-scale-to-tensorboard --tensorboard-*"
    ): ("use --tensorboard and --log-interval; it is not reported here."),
    "--timing-log-* --profile* --use-pytorch-profiler --record-memory-history": (
        "steps are timed as a whole, at every --log-interval; use nsys or py-spy for more."
    ),
    "--exit-signal": "SIGTERM and SIGINT save and end a run; use one of these.",
    "--rerun-* --check-for-spiky-loss --error-injection-*": (
        "steps are not computed twice; use --check-for-nan-in-loss-and-grad, which is on."
    ),
    "--ft-* --enable-ft-package --calc-ft-timeouts --inprocess-*": (
        "use torchrun --max-restarts with --load, which continues to the last bit."
    ),
    "--straggler-* --disable-straggler-*": "slow ranks are not looked for; leave it out.",
    "--nnodes --nproc*per*node --node-rank --master-* --rdzv-* --max-restarts --standalone": (
        "this belongs to torchrun, before -m mcore_train; use --nproc N on one host."
    ),
    "--moe-permute-fusion --moe-router-fusion": (
        "leave it out: kernels of the experts are chosen by what is installed."
    ),
    "--moe-flex-*": "use --moe-token-dispatcher-type allgather, alltoall, deepep or symmetric.",
    "--moe-use-upcycling --moe-upcycling-*": (
        "use mcore-ckpt upcycle, which makes experts of a dense checkpoint: --load its result."
    ),
    "--tp-comm-* --no-tp-comm-*": "leave it out: exchanges are not cut into pieces.",
    (
        "--use-nccl-ub --disable-symmetric-registration --symmetric-ar-type "
        "--create-all-gather-group --suggested-communication-unit-size"
    ): ("use --nccl-communicator-config-path to bound what collectives take."),
    "--ddp-*-fp32-*": "use --accumulate-allreduce-grads-in-fp32.",
    "--input --output-prefix --json-keys --append-eod --split-sentences --workers": (
        "this belongs to the corpus; use mcore-data preprocess."
    ),
    "--inference-* --*speculative* --port --prompt": (
        "this belongs to a trained model; use mcore-infer."
    ),
    "--task --valid-data --strict-lambada --overlapping-eval": (
        "this belongs to the evaluation of a trained model; use mcore-infer eval."
    ),
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
    "--gpus --num-gpus --world-size": "use --nproc, or torchrun.",
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


def translate(argv: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Rewrite a command line in our own flags and check every one of them.

    Returns:
        The rewritten words, and notes on flags that did nothing.

    Raises:
        ValueError: for a refused or an unknown flag, for a foreign one whose value is missing
            or unknown, and for flags of different names that set one option differently. Of
            one flag given twice, the last one wins.
    """
    words, notes = [], []
    setters = _Setters(known)
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = canonical(name)
        if not is_flag(word):
            words.append(word)
        elif name in known:
            words += [name, value] if equals else [name]
            setters.add(name, name, [value] if equals else _values_before_a_flag(rest))
        elif name in SPELLINGS:
            spelling = SPELLINGS[name]
            values = [value] if equals else _values_before_a_flag(rest[: spelling.num_values])
            if not equals:
                del rest[: len(values)]
            _check_spelling(name, spelling, values, argv)
            words += spelling.becomes
            becomes = list(spelling.becomes)
            while becomes:
                flag = becomes.pop(0)
                values = _values_before_a_flag(becomes)
                del becomes[: len(values)]
                setters.add(name, flag, values)
            if spelling.note:
                notes.append(f"{name}: {spelling.note}.")
        else:
            instead = next(_instead(name), "")
            raise ValueError(
                f"{name}: {instead}" if instead else unknown(name, {*known, *SPELLINGS})
            )
    setters.check()
    return words, notes


def _check_spelling(
    name: str, spelling: Spelling, values: list[str], argv: Sequence[str]
) -> None:
    """Refuse values of a foreign flag that its translation would lose."""
    use = f": use {spelling.only}." if spelling.only else "."
    if len(values) < spelling.num_values:
        raise ValueError(f"{name} needs a value{use}")
    if spelling.only and values != [spelling.only]:
        raise ValueError(f"{name} {values[0]}{use}")
    given = {canonical(word.partition("=")[0]) for word in argv}
    if spelling.needs and spelling.needs not in given:
        raise ValueError(f"{name} has no effect without {spelling.needs}.")


class _Setters:
    """Which flags of a command line set which option, and to what."""

    def __init__(self, known: Collection[str]) -> None:
        self.known = known
        self.found: dict[str, dict[str, tuple[str, str]]] = {}

    def add(self, written: str, flag: str, values: list[str]) -> None:
        """Note that ``written`` stands there, and means ``flag`` with ``values``."""
        option = "--" + flag.removeprefix("--no-")
        option = option if option in self.known else flag
        meaning = " ".join([flag, *values])
        is_own = written == flag
        shown = meaning if is_own else f"{written} ({meaning})"
        self.found.setdefault(option, {})[option if is_own else written] = meaning, shown

    def check(self) -> None:
        """Refuse two flags of different names that set one option differently."""
        for setters in self.found.values():
            if len({meaning for meaning, _ in setters.values()}) > 1:
                both = " and ".join(shown for _, shown in setters.values())
                raise ValueError(f"{both} contradict: leave one of them out.")


def _values_before_a_flag(words: Sequence[str]) -> list[str]:
    return list(takewhile(lambda word: not is_flag(word), words))


def _instead(name: str) -> Iterator[str]:
    return (
        text
        for patterns, text in INSTEAD.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns.split())
    )
