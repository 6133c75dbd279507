"""What fp8 costs the GEMMs of each linear in accuracy, by recipe, beside Transformer Engine.

    python benchmarks/bench_fp8_errors.py --name fp8-errors-h200 --output benchmarks/results \
        -- --recipe recipes/model/llama-3-8b.toml --num-layers 4 --bf16 --mock-data ...

After ``--`` come flags of ``mcore-train gpt``. Two steps of that run in bf16 give every linear
the inputs and gradients of outputs that a newly drawn model has on random tokens. From those
of the second step, and histories of the first where a recipe keeps them, each linear is
multiplied by every recipe: the error of its output, of the gradient of its input and of that
of its weight, as |x - exact| / |exact| against float32 of the same bf16 operands. A row of the
table is a kind of linear: the mean over layers, and the worst. Transformer Engine is left out
where it is not installed.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable

import torch
from bench_train_step import random_batches
from reporting import add_options, keep, versions
from torch import Tensor, nn

from mcore_parallel.launch.launcher import read_environment
from mcore_parallel.precision.delayed_scaling import DelayedScales
from mcore_parallel.precision.fp8 import Fp8Gemm
from mcore_parallel.precision.fp8_recipes import Blockwise, Delayed, Rowwise, Tensorwise
from mcore_parallel.precision.gemm import PLAIN_GEMM, Gemm
from mcore_parallel.precision.transformer_engine import by_transformer_engine, refusal
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from mcore_train.assembly import assemble
from mcore_train.composition import FAMILY_COMMANDS
from mcore_train.options.parsing import parse
from mcore_train.resolution import resolve
from mcore_train.running import joined_world
from mcore_train.step import train_step

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = {
    "tensorwise": (Tensorwise, E5M2),
    "delayed": (None, E5M2),
    "rowwise": (Rowwise, E4M3),
    "blockwise": (Blockwise, E4M3),
}
"""With the format of gradients that each is used with: hybrid or e4m3."""
RESULTS = ("output", "input_grad", "weight_grad")

Operands = tuple[Tensor, Tensor]
"""A linear's input and the gradient of its output."""


def main() -> None:
    """Run the benchmark by the command line."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--name", required=True)
    add_options(parser)
    options, flags = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    command = FAMILY_COMMANDS["gpt"]
    config = parse(flags, "mcore-train gpt", command.run, ())
    plan = resolve(config, read_environment().world_size, family=command.family)
    with joined_world(plan) as ctx:
        run = assemble(plan, ctx)
        linears = {
            name: module
            for name, module in run.chunks[0].named_modules()
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
        }
        seen = operands(linears, lambda: train_step(run, random_batches(run), 0.0, 0.0))
        weights = {name: linears[name].weight.detach() for name in seen}
        errors: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
        for name, steps in seen.items():
            exact = products(PLAIN_GEMM, weights[name].float(), [x.float() for x in steps[-1]])
            for way, build in ways().items():
                found = by_gemm(way, build, weights[name], steps)
                errors[name.rsplit(".", 1)[-1]][way].append(
                    [distance(a, b) for a, b in zip(found, exact, strict=True)]
                )
    keep(
        options,
        {
            "name": options.name,
            **versions(options),
            "flags": " ".join(flags),
            "layers": len(seen) // len(errors),
            "transformer_engine": refusal() or "measured",
            "errors": {
                kind: {way: summary(rows) for way, rows in by_way.items()}
                for kind, by_way in errors.items()
            },
        },
    )


def operands(
    linears: dict[str, nn.Module], step: Callable[[], object]
) -> dict[str, list[Operands]]:
    """Run two steps; return what each linear multiplied in them, by name."""
    seen: dict[str, list[Operands]] = defaultdict(list)

    def hook(name: str) -> Callable[..., None]:
        def note(_: nn.Module, inputs: tuple, output: Tensor) -> None:
            x = inputs[0].detach()
            output.register_hook(lambda grad: seen[name].append((x, grad.detach().clone())))

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in linears.items()]
    for _ in range(2):
        step()
    for handle in handles:
        handle.remove()
    return {name: found for name, found in seen.items() if len(found) == 2}


def ways() -> dict[str, Callable[[Fp8Gemm], Gemm]]:
    """Return every recipe here and, where it has it and is installed, over there."""
    found = {name: lambda gemm: gemm for name in RECIPES}
    if not refusal():
        found |= {
            f"{name}, transformer_engine": by_transformer_engine
            for name in RECIPES
            if name != "rowwise"
        }
    return found


def by_gemm(
    way: str, convert: Callable[[Fp8Gemm], Gemm], weight: Tensor, steps: list[Operands]
) -> list[Tensor]:
    """Multiply one linear's second step in one way."""
    recipe, grad_dtype = RECIPES[way.split(",", maxsplit=1)[0]]
    if recipe is not None:
        gemm = convert(Fp8Gemm(grad_dtype=grad_dtype, recipe=recipe()))
        return products(gemm, weight, steps[-1])
    scales = DelayedScales(2, takes_max=True, device=weight.device)
    claimed = Delayed(scales, "linear").claim(grad_dtype)
    gemm = convert(Fp8Gemm(grad_dtype=grad_dtype, recipe=claimed))
    for pair in steps:
        with scales.noting():
            found = products(gemm, weight, pair)
        scales.move_on()
    return found


def products(gemm: Gemm, weight: Tensor, pair: Operands) -> list[Tensor]:
    """Return the output and both gradients of a linear by its GEMMs."""
    rows, columns = weight.shape
    linear = ColumnParallelLinear(columns, rows, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight)
    linear.gemm = gemm
    x, grad = pair
    x = x.clone().requires_grad_()
    y = linear(x)
    return [y.detach(), *torch.autograd.grad(y, [x, linear.weight], grad)]


def distance(found: Tensor, exact: Tensor) -> float:
    """Return the relative error, as a norm over the whole tensor."""
    return ((found.float() - exact).norm() / exact.norm()).item()


def summary(rows: list[list[float]]) -> dict[str, dict[str, float]]:
    """Return the mean over layers and the worst of each of the three."""
    return {
        result: {
            "mean": round(statistics.mean(values), 5),
            "worst": round(max(values), 5),
        }
        for result, values in zip(RESULTS, zip(*rows, strict=True), strict=True)
    }


if __name__ == "__main__":
    main()
