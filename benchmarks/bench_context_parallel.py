"""Time attention over context ranks, forward and backward, for every ``--cp-comm-type``.

    torchrun --nproc-per-node 4 benchmarks/bench_context_parallel.py --name cp4 \
        --seq-lengths 8192 32768 131072

Rank 0 prints one JSON line for each length and kind, packed and not: milliseconds of the
slowest rank and TFLOP/s a GPU of causal attention (half the square; packed rows count what
their documents see). The bound is the fastest kernel on one GPU.
"""

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from reporting import add_options, keep, time_steps, versions

from mcore_models.kernels.attention_backends import attend
from mcore_models.kernels.fused_blocks import blocks_for
from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import ParallelConfig
from mcore_parallel.context_parallel.all_gather_attention import all_gather_attention
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.ring_attention import ring_attention
from mcore_parallel.context_parallel.zigzag import ulysses_attention
from mcore_parallel.launch import launcher
from mcore_parallel.mesh import Axis, ParallelContext

HEADS, KV_HEADS, CHANNELS = 32, 8, 128
"""Llama-3-8B's."""


def main() -> None:
    """Run the benchmark by the command line."""
    options = _options()
    size = launcher.read_environment().world_size
    device = launcher.initialize("cuda")
    ctx = ParallelContext.build(ParallelConfig(context_parallel_size=size), device)
    rows = []
    for length, is_packed in itertools.product(options.seq_lengths, (False, True)):
        documents = _documents(length) if is_packed else None
        for kind in ("p2p", "all_gather", "a2a"):
            row = measure(kind, length, documents, ctx.cp, options.repeats)
            rows.append(row)
            if ctx.global_rank == 0:
                print(json.dumps(row), flush=True)
    if ctx.global_rank == 0:
        keep(
            options, {"name": options.name, **versions(options), "num_gpus": size, "rows": rows}
        )
    ctx.destroy()
    launcher.shut_down()


def measure(
    kind: str, length: int, documents: Documents | None, axis: Axis, repeats: int
) -> dict[str, object]:
    """Time one kind at one length; the row of the table."""
    shape = (length // axis.size, 1)
    q, k, v = (
        torch.randn(*shape, heads, CHANNELS, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    grad = torch.randn_like(q)
    tensors = [t.requires_grad_() for t in (q, k, v)]

    def step(_i: int) -> None:
        out = _attention(kind, axis, documents)(*tensors)
        torch.autograd.grad(out, tensors, grad)

    torch.cuda.reset_peak_memory_stats()
    times = time_steps(step, 3, repeats)
    slowest = all_reduce(torch.tensor(statistics.median(times), device="cuda"), axis, "max")
    borders = (0, length) if documents is None else documents.rows[0].borders
    seen = sum((b - a) ** 2 / 2 for a, b in pairwise(borders))
    flops = 3.5 * 4 * seen * HEADS * CHANNELS / axis.size  # backward is 2.5 forwards
    return {
        "kind": kind,
        "seq_length": length,
        "packed": documents is not None,
        "ms": round(slowest.item(), 3),
        "tflops_per_gpu": round(flops / slowest.item() / 1e9, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def _attention(
    kind: str, axis: Axis, documents: Documents | None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    on_rank = partial(attend, documents=documents)
    if axis.size == 1:
        return on_rank
    if kind == "a2a":
        return partial(ulysses_attention, axis=axis, attention=on_rank)
    by_blocks = ring_attention if kind == "p2p" else all_gather_attention

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return by_blocks(q, k, v, axis, blocks_for(q, v), documents)

    return attention


def _documents(length: int) -> Documents:
    """Draw documents of 2048 tokens on average, the same on all ranks."""
    draw = random.Random(length)
    borders = [0]
    while borders[-1] < length:
        borders.append(min(length, borders[-1] + draw.randint(1, 4096)))
    return Documents([borders])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--repeats", type=int, default=10)
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
