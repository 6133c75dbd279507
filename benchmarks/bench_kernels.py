"""Time the kernels of a dense step on one GPU, each against the limit of the hardware.

    python benchmarks/bench_kernels.py --output benchmarks/results

Shapes are those of Llama-3-8B with 8192 tokens. Prints a table and one JSON line: for each
kernel the median with p10 and p90 in milliseconds, and TB/s or TFLOP/s with the share of
the limit, which is a copy's bandwidth or a large GEMM's rate, measured in the same run.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from reporting import add_options, keep, quantiles, time_steps, versions

from mcore_models.kernels import flash4_attention, gated_fp8
from mcore_models.kernels.attention_backends import attend
from mcore_models.kernels.rope import rotary_split
from mcore_models.layers.norm import RMSNorm
from mcore_moe.kernels.gate import gated as gate_and_multiply
from mcore_parallel.autograd.grad_slot import accumulate_matmul, grad_slot
from mcore_parallel.kernels.adam import adamw_update
from mcore_parallel.kernels.embedding import add_rows_
from mcore_parallel.kernels.fp8_cast import cast_by, largest_magnitude
from mcore_parallel.kernels.loss import row_stats, softmax_gradient_
from mcore_parallel.tensor_parallel.linear_cross_entropy import (
    CHUNK_TOKENS,
    linear_cross_entropy,
)

T, D, F, V, N, G, H = 8192, 4096, 14336, 128256, 32, 8, 128
BF16 = torch.bfloat16
MAX_REPEATS = 1000
CYCLES_PER_MS = 2_000_000
"""Of the device's clock, at most."""


@dataclass(frozen=True)
class Case:
    """One thing to time: ``amount`` bytes (``unit`` TB/s) or operations (TFLOP/s)."""

    name: str
    run: Callable[[], object]
    amount: float
    unit: str


def main() -> None:
    """Run the benchmark by the command line."""
    options = _options()
    torch.manual_seed(0)
    limits, rows = {}, {}
    for case in cases():
        is_limit = case.name in ("copy", "gemm 8192x28672x4096")
        if options.only and options.only not in case.name and not is_limit:
            continue
        times = time_ms(case.run, options)
        rate = case.amount / statistics.median(times) / 1e9
        if is_limit:
            limits[case.unit] = rate
        rows[case.name] = {
            **quantiles(times, digits=4),
            case.unit: round(rate, 2),
            "share_of_limit": round(rate / limits[case.unit], 3),
        }
        show(case.name, rows[case.name])
        del case
        torch.cuda.empty_cache()
    report(options, rows)


def show(name: str, row: dict) -> None:
    """Print a row of the table at once: the run may be cut short."""
    rate = " ".join(f"{row[u]:8.2f} {u}" for u in ("TB/s", "TFLOP/s") if u in row)
    print(f"{name:40s} {row['ms']:9.4f} ms {rate:18s} {row['share_of_limit']:6.1%}", flush=True)


def time_ms(run: Callable[[], object], options: argparse.Namespace) -> list[float]:
    """Return the milliseconds of each call by device events, after a warm-up.

    Goes on long enough for the device to reach its limit of power. Where the host takes longer
    to launch a call than the device to do it, the device sleeps before each, so that launches
    are not what is timed.
    """
    estimate = statistics.median(time_steps(lambda _: run(), options.warmup, 5))
    host_ms = _launch_ms(run)
    is_short = estimate < 2 * host_ms
    repeats = int(min(max(options.repeats, 1e3 * options.seconds / estimate), MAX_REPEATS))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda._sleep(50_000_000)
    for begin, end in events:
        if is_short:
            torch.cuda._sleep(int(2 * host_ms * CYCLES_PER_MS))
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _launch_ms(run: Callable[[], object], calls: int = 5) -> float:
    """Return how long the host takes to launch one call while the device is busy."""
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    begin_s = time.perf_counter()
    for _ in range(calls):
        run()
    host_ms = 1e3 * (time.perf_counter() - begin_s) / calls
    torch.cuda.synchronize()
    return host_ms


def cases() -> Iterator[Case]:
    """Make the cases one after the other, so that one's tensors are freed before the next."""
    yield from limits()
    yield from weight_gradient()
    yield from norms()
    yield from rotary()
    yield from gated()
    yield from fp8_casts()
    yield from attention()
    yield from embedding()
    yield from head()
    yield from optimizer()


def draw(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return random numbers that require a gradient."""
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def both_ways(
    name: str,
    run: Callable[[], tuple],
    inputs: list,
    forward: float,
    backward: float,
    unit: str,
) -> Iterator[Case]:
    """Time forward, then backward alone on a kept graph."""
    with torch.no_grad():
        yield Case(f"{name} forward", run, forward, unit)
    outputs = run()
    grads = [torch.randn_like(output) for output in outputs]

    def backwards() -> tuple:
        return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

    yield Case(f"{name} backward", backwards, backward, unit)


def limits() -> Iterator[Case]:
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    yield Case("copy", lambda: target.copy_(source), 2 * source.numel(), "TB/s")
    del source, target
    a, b = draw(T, D).detach(), draw(2 * F, D).detach()
    yield Case("gemm 8192x28672x4096", lambda: a @ b.t(), 2 * T * 2 * F * D, "TFLOP/s")


def weight_gradient() -> Iterator[Case]:
    dy, x = draw(T, 2 * F).detach(), draw(T, D).detach()
    main = torch.zeros(2 * F, D, device="cuda")
    yield Case(
        "weight gradient into float32",
        lambda: accumulate_matmul(main, dy.t(), x),
        2 * T * 2 * F * D,
        "TFLOP/s",
    )


def norms() -> Iterator[Case]:
    norm = RMSNorm(D, device="cuda", dtype=BF16)
    grad_slot(norm.weight).main = torch.zeros(D, device="cuda")
    x, branch = draw(T, 1, D), draw(T, 1, D)
    size = 2 * T * D
    yield from both_ways(
        "add and norm", lambda: norm.add_and_norm(x, branch), [x], 4 * size, 4 * size, "TB/s"
    )
    yield from both_ways("norm", lambda: (norm(x),), [x], 2 * size, 3 * size, "TB/s")


def rotary() -> Iterator[Case]:
    qkv = draw(T, 1, (N + 2 * G) * H)
    angle = torch.randn(T, H // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    size = 4 * qkv.numel()
    yield from both_ways(
        "rotary split",
        lambda: rotary_split(qkv, cos, sin, N, G),
        [qkv],
        size,
        size,
        "TB/s",
    )


def gated() -> Iterator[Case]:
    x = draw(T, 1, 2 * F)
    yield from both_ways(
        "swiglu", lambda: (gate_and_multiply(x, "silu"),), [x], 6 * T * F, 10 * T * F, "TB/s"
    )


def fp8_casts() -> Iterator[Case]:
    """Cast by a scale of the tensor itself (two passes), and by an earlier one."""
    x, hidden, dy = draw(T, D).detach(), draw(T, 2 * F).detach(), draw(T, F).detach()
    amax, seen = torch.full((1,), 4.0, device="cuda"), torch.zeros(1, device="cuda")
    narrow = torch.float8_e4m3fn
    yield Case("fp8 largest magnitude", lambda: largest_magnitude(x), 2 * T * D, "TB/s")
    for name, noted in (("fp8 cast", None), ("fp8 cast, noting", seen)):
        yield Case(
            name, lambda noted=noted: cast_by(x, amax, narrow, seen=noted), 4 * T * D, "TB/s"
        )
    for name, grad, size in (("swiglu", None, 4 * T * F), ("swiglu gradient", dy, 6 * T * F)):
        yield Case(
            f"fp8 {name}, largest magnitude",
            lambda grad=grad: gated_fp8.largest_gated(hidden, grad, "silu"),
            size,
            "TB/s",
        )
        written = 2 * T * F if grad is None else 4 * T * F
        for suffix, noted in (("", None), (", noting", seen)):
            yield Case(
                f"fp8 {name}{suffix}",
                partial(gated_fp8.cast_gated, hidden, grad, "silu", amax, narrow, seen=noted),
                size + written,
                "TB/s",
            )


def attention() -> Iterator[Case]:
    for heads, groups, size, length, batch in (
        (N, G, H, T, 1),
        (N, G, H, 4096, 2),
        (16, 16, 64, 2048, 4),
    ):
        q, k, v = (draw(length, batch, n, size) for n in (heads, groups, groups))
        flops = 2 * batch * length * length * heads * size  # causal: half of the square
        yield from both_ways(
            f"attention {heads}/{groups}x{size} S{length} B{batch}",
            lambda q=q, k=k, v=v: (attend(q, k, v),),
            [q, k, v],
            flops,
            2.5 * flops,
            "TFLOP/s",
        )


def embedding() -> Iterator[Case]:
    total = torch.zeros(V, D, device="cuda")
    ids = torch.randint(0, V, (T,), device="cuda")
    rows = draw(T, D).detach()
    yield Case(
        "embedding gradient into float32",
        lambda: add_rows_(total, ids, rows),
        T * D * 10,
        "TB/s",
    )


def head() -> Iterator[Case]:
    logits = draw(4096, V).detach()
    labels = torch.randint(0, V, (4096,), device="cuda")
    log_sum, weights = torch.full((4096,), 12.0, device="cuda"), torch.ones(4096, device="cuda")
    size = 2 * logits.numel()
    yield Case("statistics of logits", lambda: row_stats(logits, labels, V, 0), size, "TB/s")
    yield Case(
        "gradient of logits",
        lambda: softmax_gradient_(logits, labels, log_sum, weights, V, 0, 0.0, V),
        2 * size,
        "TB/s",
    )
    del logits
    x, weight = draw(T, 1, D), draw(V, D)
    with torch.no_grad():
        weight.mul_(0.02)
    grad_slot(weight).main = torch.zeros(V, D, device="cuda")
    labels, weights = torch.randint(0, V, (1, T), device="cuda"), torch.full((1, T), 1 / T)
    weights = weights.cuda()

    def both(chunk_tokens: int) -> None:
        grad_slot(weight).is_stale = True  # as after zero_grad
        options = {"vocab_size": V, "chunk_tokens": chunk_tokens}
        total, _ = linear_cross_entropy(x, weight, labels, weights, **options)
        total.backward()
        x.grad = None

    name, flops = "head and cross-entropy by", 6 * T * D * V
    for chunk_tokens in (2048, CHUNK_TOKENS):
        yield Case(f"{name} {chunk_tokens}", partial(both, chunk_tokens), flops, "TFLOP/s")


def optimizer() -> Iterator[Case]:
    size = 500_000_000
    main, grad, mean, square = (torch.zeros(size, device="cuda") for _ in range(4))
    parameter = torch.zeros(size, device="cuda", dtype=BF16)
    scale = torch.ones((), device="cuda", dtype=torch.float64)

    def update() -> None:
        adamw_update(
            main,
            grad,
            mean,
            square,
            parameter,
            num_steps=3,
            lr=1e-4,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            epsilon=1e-8,
            grad_scale=scale,
        )

    yield Case("adamw", update, 30 * size, "TB/s")
    yield Case("gradient norm", lambda: torch._foreach_norm([grad], 2.0), 4 * size, "TB/s")


def report(options: argparse.Namespace, rows: dict) -> None:
    """Print the result as one JSON line and keep it if a folder is given."""
    row = {
        "name": options.name,
        **versions(options),
        "flash_attn_4": flash4_attention.is_installed(),
        "dtype": "bfloat16",
        "shapes": f"T{T} D{D} F{F} V{V} heads {N}/{G}x{H}",
        "warmup": options.warmup,
        "seconds": options.seconds,
        "kernels": rows,
    }
    keep(options, row)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", default="kernels-h200")
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=30, help="at least")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each kernel")
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
