"""Training rates that others published, and the planner's prediction for the same layouts.

Each is predicted for this program and for theirs: in theirs tensor messages pass under GEMMs
(Megatron-LM's --tp-comm-overlap), shards are gathered without copies (Megatron-FSDP), and in
2021 attention wrote its scores to memory. The constants are the same.

Sources: Megatron Bridge's performance summary (25.11 container, DGX H100); NeMo AutoModel's
performance summary (H100); Narayanan et al. 2021, arXiv:2104.04473, table 1 (A100, weak
scaling, with recomputation counted as work); the README of Megatron-LM of 2024 (H100, strong
scaling of a GPT-3 with 4 096 tokens and a vocabulary of 131 072, batches of 1 152).
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.options.parsing import parse
from mcore_train.planning.search import parameters
from mcore_train.planning.step_time import FSDP_BYTES, predict_step
from mcore_train.planning.system import SYSTEMS, System

_BRIDGE = "Megatron Bridge 25.11"
_BY_TOKENS = (
    # model, GPUs, flags, tokens/s/GPU, source
    (
        "Llama-3-8B fp8",
        8,
        (
            "--model llama-3-8b --seq-length 8192 --global-batch-size 128 --use-torch-fsdp2 "
            "--fp8-format hybrid --fp8-recipe tensorwise"
        ),
        14451,
        _BRIDGE,
    ),
    (
        "Llama-3-70B fp8",
        64,
        (
            "--model llama-3-70b --seq-length 8192 --global-batch-size 128 "
            "--tensor-model-parallel-size 4 --sequence-parallel "
            "--pipeline-model-parallel-size 8 "
            "--num-virtual-stages-per-pipeline-rank 5 --fp8-format hybrid "
            "--fp8-recipe tensorwise"
        ),
        1602,
        _BRIDGE,
    ),
    (
        "Qwen3-30B-A3B fp8",
        16,
        (
            "--model qwen3-30b-a3b --seq-length 4096 --global-batch-size 512 "
            "--micro-batch-size 2 "
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 24 "
            "--expert-model-parallel-size 8 --fp8-format hybrid --fp8-recipe tensorwise"
        ),
        5275,
        _BRIDGE,
    ),
    (
        "Qwen3-30B-A3B bf16",
        8,
        (
            "--model qwen3-30b-a3b --seq-length 4096 --global-batch-size 512 "
            "--micro-batch-size 4 "
            "--expert-model-parallel-size 8 --moe-token-dispatcher-type deepep "
            "--recompute-granularity full"
        ),
        12040,
        "NeMo AutoModel 26",
    ),
    (
        "Llama-3-8B bf16",
        8,
        (
            "--model llama-3-8b --seq-length 8192 --global-batch-size 128 "
            "--context-parallel-size 2"
        ),
        10253,
        "Megatron Bridge, bf16 recipe",
    ),
)
_NARAYANAN = (
    # billions, heads, hidden, layers, tp, pp, GPUs, batch, TFLOP/s
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
SCORE_BYTES = 52
"""Moved for each attention score by a program without flash attention: forward writes the
scores, reads and writes them for softmax and for dropout with its mask, and reads them for the
values, 13 bytes in 16 bits; backward twice as many, recomputation once more."""
_USUAL = (
    "--seq-length 4096 --max-position-embeddings 4096 --vocab-size 131072 --no-swiglu "
    "--untie-embeddings-and-output-weights --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather"
)
_GPT3 = (
    f"--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --ffn-hidden-size 49152 "
    f"--global-batch-size 1152 {_USUAL} --tensor-model-parallel-size 8 --sequence-parallel "
    "--pipeline-model-parallel-size 12 --num-virtual-stages-per-pipeline-rank 4"
)
_GPT2B = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 8192 "
    f"--global-batch-size 128 --micro-batch-size 2 {_USUAL}"
)
_GPT462B = (
    "--num-layers 112 --hidden-size 18432 --num-attention-heads 144 --ffn-hidden-size 73728 "
    f"--global-batch-size 1536 {_USUAL} --tensor-model-parallel-size 8 --sequence-parallel "
    "--pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 7"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow:
    """A rate that others measured beside ours, predicted."""

    model: str
    gpus: int
    layout: str
    published: float
    ours: float
    """Predicted for this program."""
    theirs: float
    """Predicted for the program that was measured."""
    unit: str
    source: str

    @property
    def difference(self) -> float:
        """Predicted for the program that was measured, over published, less 1."""
        return self.theirs / self.published - 1


def published_rows() -> list[PublishedRow]:
    """Predict every published row."""
    return [*_by_tokens(), *_a100(), *_scaling()]


def _predict(flags: str, gpus: int, system: System) -> tuple[float, float]:
    """Return the seconds of a step of this program, and of Megatron's."""
    command = FAMILY_COMMANDS["gpt"]
    usual = "--bf16 --lr 1e-4 --train-iters 10 --mock-data"
    config = parse(shlex.split(f"{flags} {usual}"), "plan", command.run)
    run = config, command.family, gpus, config.tokenizer.vocab_size
    step = predict_step(*run, system)
    # Messages that are hidden slow the GEMMs above them.
    hidden = (1 - system.contention) * step.parts.get("tp", 0.0)
    if config.data_parallelism.is_fully_sharded:
        weights = parameters(config, command.family, config.tokenizer.vocab_size)
        moved = FSDP_BYTES[config.data_parallelism.sharding] * weights
        hidden += config.batch.global_batch_size / gpus * system.move_s(moved)
    return step.total, step.total - hidden


def _by_tokens() -> Iterator[PublishedRow]:
    for model, gpus, given, rate, source in _BY_TOKENS:
        words, flags = given.split(), given
        if "--use-torch-fsdp2" not in words:
            flags += " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
        tokens = int(words[words.index("--seq-length") + 1])
        tokens *= int(words[words.index("--global-batch-size") + 1])
        ours, theirs = (tokens / s / gpus for s in _predict(flags, gpus, SYSTEMS["h100"]))
        yield PublishedRow(
            model=model,
            gpus=gpus,
            layout=_short(words),
            published=rate,
            ours=ours,
            theirs=theirs,
            unit="tokens/s",
            source=source,
        )


def _short(words: list[str]) -> str:
    names = {
        "--tensor-model-parallel-size": "tp",
        "--pipeline-model-parallel-size": "pp",
        "--num-virtual-stages-per-pipeline-rank": "vpp",
        "--context-parallel-size": "cp",
        "--expert-model-parallel-size": "ep",
    }
    found = [f"{names[a]}{b}" for a, b in pairwise(words) if a in names]
    found += ["fsdp"] * ("--use-torch-fsdp2" in words) + ["deepep"] * ("deepep" in words)
    return " ".join(found) or "dp"


def _a100() -> Iterator[PublishedRow]:
    for billions, heads, hidden, layers, tp, pp, gpus, batch, rate in _NARAYANAN:
        flags = (
            f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
            f"--ffn-hidden-size {4 * hidden} --no-swiglu --seq-length 2048 "
            f"--max-position-embeddings 2048 --vocab-size 51200 --global-batch-size {batch} "
            f"--recompute-granularity full --tensor-model-parallel-size {tp} "
            f"--pipeline-model-parallel-size {pp}"
        )
        system = SYSTEMS["a100"]
        seconds, _ = _predict(flags, gpus, system)
        scores = layers * heads * 2048**2 * batch / gpus
        written = system.move_s(SCORE_BYTES * scores)
        # Equation 3 of the paper: four passes, attention over the whole square.
        share = 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)
        flops = 96 * batch * 2048 * layers * hidden**2 * share
        yield PublishedRow(
            model=f"GPT {billions:g}B, A100",
            gpus=gpus,
            layout=f"tp{tp} pp{pp}",
            published=rate,
            ours=flops / seconds / gpus / 1e12,
            theirs=flops / (seconds + written) / gpus / 1e12,
            unit="TFLOP/s",
            source="arXiv:2104.04473",
        )


def _scaling() -> Iterator[PublishedRow]:
    """Predict the ends of two scaling studies; layouts and batches of the weak one are ours."""
    studies = (
        ("GPT-3 175B, strong", _GPT3, 12288, 96, 1152, ((96, 47.0), (4608, 42.0))),
        ("GPT 2.1B, weak", _GPT2B, 2048, 24, 128, ((64, 41.0),)),
        ("GPT 462B, weak", _GPT462B, 18432, 112, 1536, ((6144, 47.5),)),
    )
    for model, flags, hidden, layers, batch, rows in studies:
        share = 1 + 4096 / (6 * hidden) + 131072 / (12 * layers * hidden)
        flops = 72 * batch * 4096 * layers * hidden**2 * share
        for gpus, mfu in rows:
            ours, theirs = (
                100 * flops / s / gpus / 989e12 for s in _predict(flags, gpus, SYSTEMS["h100"])
            )
            yield PublishedRow(
                model=f"{model} scaling",
                gpus=gpus,
                layout=f"{_short(flags.split())} (assumed)",
                published=mfu,
                ours=ours,
                theirs=theirs,
                unit="% MFU",
                source="Megatron-LM README 2024",
            )
