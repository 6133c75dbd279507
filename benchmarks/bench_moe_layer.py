"""Time one mixture-of-experts layer, forward and backward, over a table of shapes.

    python benchmarks/bench_moe_layer.py --name moe-layer-h200 --output benchmarks/results
    torchrun --nproc-per-node 2 benchmarks/bench_moe_layer.py --name moe-layer-h200-x2 \\
        --shapes qwen3-30b --on-few 0 0.5 1 --exchanges alltoall+split alltoall:1.25 allgather:2

Prints one JSON line: for every shape the median with p10 and p90, the TFLOP/s of the experts'
GEMMs over the whole layer's time, peak memory, and the split of a profiled step. With
``--main-grads`` the experts' gradients are added to float32 main gradients, as in training.
``--on-few SHARE...`` sends these shares of the tokens to the same few experts, others evenly.
Over several GPUs the experts are spread, each rank has the shape's tokens, and ``--exchanges``
names ways to exchange them, ``alltoall``, ``alltoall+split`` for halves that overlap, or
``allgather``, with a limit on rows after a colon; kept is what the first rank saw, which has
the few experts. ``--experts-dtype`` and ``--dispatch-dtype`` are the layer's options; weights
are cast once a step.
"""

import argparse
import itertools
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from reporting import add_options, keep, quantiles, time_steps, versions

from mcore_moe import ExpertNetwork, MoEConfig, MoELayer, MoERuntime, moe_axes, replay_routing
from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.config import ParallelConfig
from mcore_parallel.launch import launcher
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.fp8 import WeightCasts
from mcore_train.reporting.kernel_split import Kernel, device_kernels, heaviest, union_us


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer and the tokens that it gets."""

    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    topk: int
    tokens: int = 16384


SHAPES = {
    "d4096-n512-e128-k8": Shape(4096, 512, 128, 8),
    "d4096-n256-e256-k16": Shape(4096, 256, 256, 16),
    "qwen3-30b": Shape(2048, 768, 128, 8),
    "d4096-n2048-e64-k4": Shape(4096, 2048, 64, 4),
    "deepseek-v3-share": Shape(7168, 2048, 32, 8, 4096),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2, 8192),
}

KINDS = (
    ("communication", re.compile(r"nccl")),
    ("permute", re.compile(r"_copy_rows|_sum_rows|index_?select|gather|indexSelect|Reduce")),
    (
        "sort",
        re.compile(r"sort|radix|_count_block|_place_block|_top|[sS]can|histogram|scatter"),
    ),
    ("activation", re.compile(r"^_forward|^_backward|silu|SiLU")),
    ("cast", re.compile(r"^_cast|^_largest")),
    ("gemm", re.compile(r"gemm|nvjet|cutlass|xmma|cublas|wgmma|matmul|_accumulate|Gemm")),
    ("add", re.compile(r"add|Add")),
)
"""Kernels by name, tried in order; anything else is ``other``."""


def main() -> None:
    """Run the benchmark by the command line."""
    options = _options()
    world_size = launcher.read_environment().world_size
    if world_size == 1:
        _tabulate(ParallelContext.single("cuda"), options)
        return
    config = ParallelConfig(expert_model_parallel_size=world_size)
    ctx = ParallelContext.build(config, launcher.initialize("cuda"))
    try:
        _tabulate(ctx, options)
    finally:
        ctx.destroy()
        launcher.shut_down()


def _tabulate(ctx: ParallelContext, options: argparse.Namespace) -> None:
    table = {}
    cases = itertools.product(options.shapes, options.on_few or [None], options.exchanges)
    for name, share, exchange in cases:
        key = name if share is None else f"{name}, {share:g} on few"
        key = key if ctx.ep.size == 1 else f"{key}, {exchange}"
        table[key] = _measure(key, ctx, options, SHAPES[name], share, exchange)
    if ctx.global_rank:
        return
    row = {
        "name": options.name,
        "num_gpus": ctx.ep.size,
        **versions(options),
        "main_grads": options.main_grads,
        "experts_dtype": options.experts_dtype,
        "dispatch_dtype": options.dispatch_dtype,
        "compiled": options.compile,
        "warmup": options.warmup,
        "steps": options.steps,
        "shapes": table,
    }
    keep(options, row)


def _measure(
    name: str,
    ctx: ParallelContext,
    options: argparse.Namespace,
    shape: Shape,
    share: float | None,
    exchange: str,
) -> dict[str, object]:
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    way, _, limit = exchange.partition(":")
    casts = WeightCasts()
    config = MoEConfig(
        moe_token_dispatcher_type=way.removesuffix("+split"),
        moe_split_batch_overlap=way.endswith("+split"),
        moe_expert_rows_limit=float(limit or 0),
        moe_experts_dtype=options.experts_dtype,
        moe_dispatch_dtype=options.dispatch_dtype,
        num_experts=shape.num_experts,
        moe_router_topk=shape.topk,
        moe_aux_loss_coeff=1e-2,
        moe_router_dtype="fp32",
        moe_grouped_gemm=not options.sequential,
    )
    layer = MoELayer(
        shape.hidden_size,
        shape.ffn_hidden_size,
        config,
        ExpertNetwork(init_std=0.0),
        axes=moe_axes(ctx),
        runtime=MoERuntime(fp8_casts=casts, equal_tokens=True),
        device="cuda",
        dtype=torch.bfloat16,
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if options.main_grads:
        _own_gradients(layer.experts)
    size = (shape.tokens, shape.hidden_size)
    inputs = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    run = torch.compile(layer) if options.compile else layer

    def step(i: int) -> None:
        for parameter in layer.parameters():
            parameter.grad = None
        x = inputs[i % 4].detach().requires_grad_()
        with casts.keeping():
            y, aux = run(x)
            grads = inputs[(i + 1) % 4].detach(), torch.ones_like(aux)
            torch.autograd.backward((y, aux), grads)

    total = options.warmup + options.steps + 1
    routing = nullcontext()
    if share is not None:
        routing = replay_routing(layer, {"router": [_choices(shape, share)] * total})
    with routing:
        times = time_steps(step, options.warmup, options.steps)
        kernels, wall_us = _profile(step)
    median = statistics.median(times)
    # Three matrices an expert, two operations a weight, backward twice forward.
    flops = 18 * shape.tokens * shape.topk * shape.hidden_size * shape.ffn_hidden_size
    if ctx.global_rank == 0:
        print(name, *heaviest(kernels, 1), sep="\n", file=sys.stderr)
    return {
        **{field: getattr(shape, field) for field in Shape.__slots__},
        **quantiles(times),
        "tflops": round(flops / median / 1e9, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "split_ms": _split(kernels, wall_us),
    }


def _choices(shape: Shape, share: float) -> torch.Tensor:
    """Return choices of which a share of the tokens go to the first k experts."""
    even = torch.arange(shape.tokens * shape.topk, device="cuda").view(-1, shape.topk)
    ids = even % shape.num_experts
    ids[: round(share * shape.tokens)] = torch.arange(shape.topk, device="cuda")
    return ids


def _own_gradients(module: torch.nn.Module) -> None:
    """Give the parameters float32 main gradients, as ``DataParallel`` does."""

    def add(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            grad_slot(parameter).add(parameter.grad)
            parameter.grad = None

    for parameter in module.parameters():
        grad_slot(parameter).main = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.register_post_accumulate_grad_hook(add)


def _profile(step: Callable[[int], None]) -> tuple[list[Kernel], float]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.profiler.profile(activities=activities) as profile:
        begin.record()
        step(0)
        end.record()
        torch.cuda.synchronize()
    return device_kernels(profile), 1e3 * begin.elapsed_time(end)


def _split(kernels: list[Kernel], wall_us: float) -> dict[str, float]:
    """Return milliseconds by kind of kernel; ``gap`` is when the device does nothing."""
    by_kind: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        kind = next((kind for kind, names in KINDS if names.search(kernel.name)), "other")
        by_kind[kind] += kernel.end - kernel.begin
    by_kind["gap"] = wall_us - union_us(kernel.interval for kernel in kernels)
    by_kind["step"] = wall_us
    return {kind: round(us / 1e3, 3) for kind, us in by_kind.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--main-grads", action="store_true")
    parser.add_argument("--on-few", nargs="+", type=float, metavar="SHARE")
    parser.add_argument("--exchanges", nargs="+", default=["alltoall"], metavar="WAY")
    parser.add_argument("--sequential", action="store_true", help="one expert after the other")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--experts-dtype", choices=["", "fp8"], default="")
    parser.add_argument("--dispatch-dtype", choices=["", "fp8"], default="")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
