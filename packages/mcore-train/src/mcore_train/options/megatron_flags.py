"""Spellings of Megatron's command line that are not, letter for letter, a field of ours.

One table says what each becomes, one says what is refused and what to use in its place.
Everything else on a command line must be a known flag; an unknown one is answered with the
nearest known one, before anything is started.
"""

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class Spelling:
    """What one foreign flag becomes."""

    becomes: tuple[str, ...] = ()
    """Our flags, in its place."""
    num_values: int = 0
    """Values that follow the foreign flag and go with it."""
    note: str = ""
    """Why it has no counterpart; told once when it is used."""


SPELLINGS: dict[str, Spelling] = {
    "--disable-bias-linear": Spelling(("--no-add-bias-linear",)),
    "--use-rotary-position-embeddings": Spelling(("--position-embedding-type", "rope")),
    "--no-position-embedding": Spelling(("--position-embedding-type", "none")),
    "--group-query-attention": Spelling(note="--num-query-groups alone turns it on"),
    "--use-mcore-models": Spelling(note="there is one set of models"),
    "--use-flash-attn": Spelling(note="the fastest attention present is used anyway"),
    "--manual-gc": Spelling(note="on anyway, every --manual-gc-interval steps"),
    "--use-precision-aware-optimizer": Spelling(note="--exp-avg-dtype alone turns it on"),
    "--transformer-impl": Spelling(num_values=1, note="there is one implementation"),
    "--enable-cuda-graph": Spelling(("--cuda-graph-impl", "full_iteration")),
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
    "--tp-comm-overlap-cfg": Spelling(num_values=1, note="pieces follow from the layout"),
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
    "--tensorboard-dir": Spelling(
        ("--tensorboard",), num_values=1, note="scalars go to tensorboard/ below --save"
    ),
}
"""Flags that are taken and translated."""

REFUSED: dict[str, str] = {
    "--non-persistent-global-ckpt-dir": "use --save-interval and --save-retain-last.",
    "--no-ckpt-fully-parallel-save": "all ranks always write together; use mcore-ckpt reshard "
    "to put their files together.",
    "--fp8-hybrid": "FP8 training is not built yet; use --bf16.",
    "--fp8-format": "FP8 training is not built yet; use --bf16.",
    "--fp8-amax-history-len": "FP8 training is not built yet; use --bf16.",
    "--fp8-amax-compute-algo": "FP8 training is not built yet; use --bf16.",
    "--delay-wgrad-compute": "use --pipeline-schedule zb-h1, which makes weight gradients "
    "where a stage would be idle.",
    "--ddp-num-buckets": "use --ddp-bucket-size, in elements.",
    "--standalone-embedding-stage": "use --pipeline-model-parallel-layout, such as "
    "'E|tt|tt|L'.",
    "--pipeline-model-parallel-split-rank": "there are no encoders yet; use "
    "--pipeline-model-parallel-layout to place a decoder's layers.",
    "--hierarchical-context-parallel-sizes": "use --cp-comm-type p2p, all_gather or a2a over "
    "all of --context-parallel-size.",
    "--distributed-timeout-seconds-after-init": "use --distributed-timeout-minutes.",
    "--high-priority-stream-groups": "use --nccl-communicator-config-path, which bounds what "
    "the collectives of an axis take.",
    "--nccl-ub": "buffers are not registered with nccl; use --nccl-communicator-config-path to "
    "bound what collectives take.",
    "--use-sharp": "switches are not asked for an axis alone; use nccl's own "
    "NCCL_COLLNET_ENABLE=1.",
    "--fake-process-group": "use mcore-train verify, which runs the layout on this host's "
    "processors.",
    "--data-parallel-random-init": "weights are the same under every layout; use --seed for "
    "others.",
    "--main-grads-dtype": "use --grad-reduce-in-bf16 for gradients kept in 16 bits.",
    "--main-params-dtype": "main weights are float32; use --exp-avg-dtype bf16 and "
    "--exp-avg-sq-dtype bf16 to save memory.",
    **dict.fromkeys(
        ("--optimizer-cpu-offload", "--cpu-optimizer", "--cpu-optimizer-type"),
        "the optimizer's state stays on the GPU in this version; use "
        "--use-distributed-optimizer, or --exp-avg-dtype bf16.",
    ),
    **dict.fromkeys(
        ("--cpu-offloading-num-layers", "--fine-grained-activation-offloading"),
        "activations stay on the GPU in this version; use --recompute-granularity.",
    ),
    "--mtp-num-layers": "multi-token prediction is not built into training yet; use the model "
    "without it.",
    "--checkpoint-activations": "use --recompute-granularity selective or full.",
    "--step-batch-size-schedule": "use --rampup-batch-size START INCREMENT SAMPLES.",
    **dict.fromkeys(
        ("--use-torch-fsdp2", "--use-megatron-fsdp", "--data-parallel-sharding-strategy"),
        "fully sharded data parallelism is not built yet; use --use-distributed-optimizer.",
    ),
}
"""Flags whose meaning this version does not have."""


def translate(argv: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Rewrite a command line in our own flags and check every one of them.

    Args:
        argv: the words after the command's name.
        known: every flag that the command has, ``--no-`` forms included.

    Returns:
        The rewritten words, and notes on flags that did nothing.

    Raises:
        ValueError: for a refused or an unknown flag, and for flags of different names that
            set one option differently. Of one flag given twice, the last one wins.
    """
    words, notes = [], []
    setters = _Setters(known)
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = _canonical(name)
        if not _is_flag(word):
            words.append(word)
        elif name in known:
            words += [name, value] if equals else [name]
            setters.add(name, name, [value] if equals else _values_before_a_flag(rest))
        elif name in SPELLINGS:
            spelling = SPELLINGS[name]
            if spelling.num_values and not equals:
                del rest[: spelling.num_values]
            words += spelling.becomes
            if spelling.becomes:
                setters.add(name, spelling.becomes[0], list(spelling.becomes[1:]))
            if spelling.note:
                notes.append(f"{name}: {spelling.note}.")
        elif name in REFUSED:
            raise ValueError(f"{name}: {REFUSED[name]}")
        else:
            raise ValueError(unknown(name, known))
    setters.check()
    return words, notes


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
        """Refuse two flags of different names that set one option differently.

        Raises:
            ValueError: with both flags and what they mean.
        """
        for setters in self.found.values():
            if len({meaning for meaning, _ in setters.values()}) > 1:
                both = " and ".join(shown for _, shown in setters.values())
                raise ValueError(f"{both} contradict: leave one of them out.")


def unknown(name: str, known: Collection[str], kind: str = "") -> str:
    """Say that a flag, a field or another ``kind`` of name is unknown, and the nearest one."""
    pool = {*known, *SPELLINGS} if name.startswith("--") else known
    near = difflib.get_close_matches(name, sorted(pool), n=1, cutoff=0.5)
    what = f"unknown {kind} {name}" if kind else f"unknown {name}"
    return what + (f": did you mean {near[0]}?" if near else ".")


def _canonical(name: str) -> str:
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name


def _values_before_a_flag(words: Sequence[str]) -> list[str]:
    return list(takewhile(lambda word: not _is_flag(word), words))


def _is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2
