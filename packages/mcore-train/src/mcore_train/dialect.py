"""Spellings of Megatron's command line that are not, letter for letter, a field of ours.

One table says what each becomes, one says what is refused and what to use in its place.
Everything else on a command line must be a known flag; an unknown one is answered with the
nearest known one, before anything is started.
"""

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass


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
    "--no-bias-gelu-fusion": Spelling(note="the compiler decides"),
    "--no-bias-swiglu-fusion": Spelling(note="the compiler decides"),
    "--no-bias-dropout-fusion": Spelling(note="the compiler decides"),
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
    "--checkpoint-activations": "use --recompute-granularity selective or full.",
    "--step-batch-size-schedule": "use --rampup-batch-size START INCREMENT SAMPLES.",
    "--use-torch-fsdp2": "fully sharded data parallelism is not built yet; use "
    "--use-distributed-optimizer.",
    "--use-megatron-fsdp": "fully sharded data parallelism is not built yet; use "
    "--use-distributed-optimizer.",
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
        ValueError: for a refused or an unknown flag.
    """
    words, notes = [], []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = _canonical(name)
        if not _is_flag(word):
            words.append(word)
        elif name in known:
            words += [name, value] if equals else [name]
        elif name in SPELLINGS:
            spelling = SPELLINGS[name]
            if spelling.num_values and not equals:
                del rest[: spelling.num_values]
            words += spelling.becomes
            if spelling.note:
                notes.append(f"{name}: {spelling.note}.")
        elif name in REFUSED:
            raise ValueError(f"{name}: {REFUSED[name]}")
        else:
            raise ValueError(unknown(name, known))
    return words, notes


def unknown(name: str, known: Collection[str], kind: str = "") -> str:
    """Say that a flag, a field or another ``kind`` of name is unknown, and the nearest one."""
    pool = {*known, *SPELLINGS} if name.startswith("--") else known
    near = difflib.get_close_matches(name, sorted(pool), n=1, cutoff=0.5)
    what = f"unknown {kind} {name}" if kind else f"unknown {name}"
    return what + (f": did you mean {near[0]}?" if near else ".")


def _canonical(name: str) -> str:
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name


def _is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > 2
