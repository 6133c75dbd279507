"""Time the sums of gradients and the gathers of weights in buckets of several sizes.

    torchrun --nproc-per-node 4 benchmarks/bench_collectives.py --name collectives-h200-x4

Uses ``DataParallel`` as training does, with the sharded optimizer: a model of equal
parameters, its float32 gradients reduce-scattered and its bfloat16 weights all-gathered,
all buckets one after the other with nothing else on the device. Rank 0 prints a table and
one JSON line: for each bucket size the milliseconds and the bus bandwidth in GB/s, that is
bytes of the whole buffers x (n - 1) / n over the time, as nccl-tests counts.
"""

import argparse
from collections.abc import Callable

import torch
from reporting import add_options, keep, quantiles, time_steps, versions
from torch import nn

from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.launch import launcher
from mcore_parallel.mesh import ParallelContext

PARAMETER = 2**20
"""Elements of each parameter."""


def main() -> None:
    """Run the benchmark by the command line."""
    options = _options()
    ctx = ParallelContext.build(ParallelConfig(), launcher.initialize("cuda"))
    try:
        buckets = {
            f"{size} MiB": measure(ctx, options, size * 2**18)
            for size in options.bucket_mib
            if size * 2**18 <= options.elements
        }
        if ctx.global_rank == 0:
            for name, row in buckets.items():
                print(name, row)
            row = {"name": options.name, "num_gpus": ctx.dp.size, **versions(options)}
            counts = {"warmup": options.warmup, "repeats": options.repeats}
            keep(options, {**row, "elements": options.elements, **counts, "buckets": buckets})
    finally:
        ctx.destroy()
        launcher.shut_down()


def measure(ctx: ParallelContext, options: argparse.Namespace, bucket_size: int) -> dict:
    """Time both collectives with buckets of ``bucket_size`` elements.

    A bucket's size is that of its float32 gradients; its weights are half as large.
    """
    model = nn.ParameterList(
        torch.empty(PARAMETER, device=ctx.device, dtype=torch.bfloat16)
        for _ in range(options.elements // PARAMETER)
    )
    config = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=bucket_size)
    data_parallel = DataParallel([model], ctx, config)

    def sum_gradients(_: int) -> None:
        data_parallel.zero_grad()
        data_parallel.finish()

    def zero(_: int) -> None:
        data_parallel.zero_grad()

    def gather(_: int) -> None:
        data_parallel.gather_params()

    size = sum(bucket.size for bucket in data_parallel.buckets)
    run = (options.warmup, options.repeats)
    cleared = quantiles(time_steps(zero, *run))["ms"]
    sums = _with_bandwidth(sum_gradients, run, 4 * size, ctx.dp.size, cleared)
    gathers = _with_bandwidth(gather, run, 2 * size, ctx.dp.size, 0.0)
    return {
        "num_buckets": len(data_parallel.buckets),
        "reduce_scatter": sums,
        "all_gather": gathers,
    }


def _with_bandwidth(
    step: Callable[[int], None],
    run: tuple[int, int],
    num_bytes: int,
    ranks: int,
    apart_ms: float,
) -> dict[str, float]:
    times = [ms - apart_ms for ms in time_steps(step, *run)]
    row = quantiles(times)
    return {**row, "bus_gb_per_s": round(num_bytes * (ranks - 1) / ranks / row["ms"] / 1e6, 1)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", default="collectives")
    parser.add_argument("--elements", type=int, default=2**30, help="of the whole model")
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[8, 32, 128, 512, 2048])
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20)
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
