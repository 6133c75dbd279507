"""Time one mixture-of-experts layer on one GPU, forward and backward.

    python benchmarks/bench_moe_layer.py --name mixtral-8x7b --hidden-size 4096 \
        --ffn-hidden-size 14336 --num-experts 8 --topk 2 --tokens 8192

Prints one JSON line: median with p10 and p90, the TFLOP/s of the experts' products, and the
split of a profiled step by kind of kernel; with ``--output`` it is kept too.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from reporting import add_options, keep, quantiles, time_steps, versions
from step_profile import device_kernels, heaviest

from mcore_moe import MoEConfig, MoELayer


def main() -> None:
    """Run the benchmark that the command line asks for."""
    options = _options()
    torch.manual_seed(0)
    config = MoEConfig(
        num_experts=options.num_experts,
        moe_router_topk=options.topk,
        moe_aux_loss_coeff=1e-2,
        moe_router_dtype="fp32",
        moe_grouped_gemm=not options.sequential,
    )
    layer = MoELayer(
        options.hidden_size,
        options.ffn_hidden_size,
        config,
        device="cuda",
        dtype=torch.bfloat16,
        init_std=0.0,
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    shape = (options.tokens, options.hidden_size)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    run = torch.compile(layer) if options.compile else layer

    def step(i: int) -> None:
        for parameter in layer.parameters():
            parameter.grad = None
        x = inputs[i % 4].detach().requires_grad_()
        y, aux = run(x)
        torch.autograd.backward((y, aux), (inputs[(i + 1) % 4].detach(), torch.ones_like(aux)))

    times = time_steps(step, options.warmup, options.steps)
    median = statistics.median(times)
    # Three matrices an expert, two operations a weight, backward twice forward.
    flops = 18 * options.tokens * options.topk * options.hidden_size * options.ffn_hidden_size
    row = {
        "name": options.name,
        **versions(options),
        "tokens": options.tokens,
        "hidden_size": options.hidden_size,
        "ffn_hidden_size": options.ffn_hidden_size,
        "num_experts": options.num_experts,
        "topk": options.topk,
        "grouped": not options.sequential,
        "compiled": options.compile,
        "warmup": options.warmup,
        "steps": options.steps,
        **quantiles(times),
        "tflops": round(flops / median / 1e9, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }
    keep(options, row)
    print("\n".join(_kernels(step)), file=sys.stderr)


def _kernels(step: Callable[[int], None]) -> list[str]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step(0)
        torch.cuda.synchronize()
    return heaviest(device_kernels(profile), 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--ffn-hidden-size", type=int, default=14336)
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequential", action="store_true", help="one expert after the other")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
