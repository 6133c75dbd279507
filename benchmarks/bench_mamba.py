"""Time a mixer with a state, and its recurrence alone, also by plain torch and by others.

    python benchmarks/bench_mamba.py --hidden-size 2560 --seq-length 2048
    python benchmarks/bench_mamba.py --kind delta_net --hidden-size 2048 --seq-length 8192

Forward and backward of one layer of the geometry of Mamba-2 2.7B, or of Qwen3-Next's gated
delta nets. The bound is the layer's two linears as bfloat16 GEMMs at the GPU's peak.
--chunk-size is that of plain torch: kernels have their own. The kernels of
flash-linear-attention and mamba-ssm are timed where they can be imported, by turns with ours;
errors are those of the outputs and of all gradients against plain torch in float32, over 1024
tokens, relative to the largest element of each. Of a library that refuses its backward here
(fla-core 0.6.0 on Hopper under Triton 3.4 to 3.7.0) the forward alone is timed and checked.
"""

import argparse
import statistics
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
import torch.nn.functional as F
from peer_recurrences import Recurrence, compiled_ahead, peers
from reporting import add_options, keep, quantiles, time_steps, versions

from mcore_models.config import TransformerConfig
from mcore_models.kernels.delta import delta_rule_plain, gated_delta_rule
from mcore_models.kernels.ssd import ssd, ssd_plain
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.recurrent.delta_net import DeltaNet
from mcore_models.layers.recurrent.mamba import Mamba
from mcore_models.logical_tensors import delta_sizes, mamba_sizes
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optional_kernels import package_versions
from mcore_parallel.rng import RngStreams

PEAK_TFLOPS = 989.0


def main() -> None:
    """Run the benchmark by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("mamba", "delta_net"), default="mamba")
    parser.add_argument("--hidden-size", type=int, default=2560)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--chunk-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--name", default="mamba")
    add_options(parser)
    options = parser.parse_args()
    is_mamba = options.kind == "mamba"
    config = TransformerConfig(
        num_layers=1,
        hybrid_override_pattern="M" if is_mamba else "G",
        hidden_size=options.hidden_size,
        num_attention_heads=1,
        mamba_num_groups=1,
        mamba_chunk_size=options.chunk_size,
    )
    placed: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    ctx = ParallelContext.single()
    streams = RngStreams(1234, ctx)
    setup = LayerSetup(config=config, ctx=ctx, layer=0, streams=streams, **placed)
    mixer = (Mamba if is_mamba else DeltaNet)(setup)
    with torch.no_grad():
        for linear in (mixer.in_proj, mixer.out_proj):
            linear.weight.normal_(std=0.02)
        mixer.conv1d.weight.normal_(std=0.3)
    x = torch.randn(options.seq_length, 1, options.hidden_size, **placed).requires_grad_()
    tensors = (mamba_inputs if is_mamba else delta_inputs)(config, options.seq_length)
    inputs = [tensor.requires_grad_() for tensor in tensors]
    fast, plain = (ssd, ssd_plain) if is_mamba else (gated_delta_rule, delta_rule_plain)
    layer_ms = time_steps(lambda _: mixer(x).sum().backward(), 3, options.repeats)
    others = peers(options.kind)
    forms = {"recurrence": fast, **others}
    short = [x.detach()[:1024] if x.dim() > 1 else x.detach() for x in inputs]
    with compiled_ahead():
        refusals = {name: refusal(form, short) for name, form in others.items()}
    times: dict[str, list[float]] = {}
    for _ in range(3):  # by turns: a GPU's clock drifts
        for name, form in forms.items():
            forward, both = timed(form, inputs, options.repeats, not refusals.get(name))
            times.setdefault(f"{name}_forward_ms", []).extend(forward)
            if both:
                times.setdefault(f"{name}_ms", []).extend(both)
    plain_form = partial(plain, chunk_size=options.chunk_size)
    times["recurrence_plain_ms"] = timed(plain_form, inputs, min(options.repeats, 3))[1]
    errors = {
        f"{name}_error": error(form, plain, short, not refusals.get(name))
        for name, form in forms.items()
    }
    weights = mixer.in_proj.weight.numel() + mixer.out_proj.weight.numel()
    bound_ms = 6 * weights * options.seq_length / PEAK_TFLOPS / 1e9
    keep(
        options,
        {
            "name": options.name,
            **versions(options),
            "kind": options.kind,
            "hidden_size": options.hidden_size,
            "seq_length": options.seq_length,
            "chunk_size": options.chunk_size,
            "dtype": "bfloat16",
            "repeats": options.repeats,
            **quantiles(layer_ms, "layer_ms"),
            **reduce(or_, (quantiles(found, name) for name, found in times.items())),
            **errors,
            **{f"{name}_refuses_backward": why for name, why in refusals.items() if why},
            "peer_packages": package_versions(("fla-core", "mamba-ssm")),
            "linears_at_peak_ms": round(bound_ms, 4),
            "recurrence_share": round(
                statistics.median(times["recurrence_ms"]) / statistics.median(layer_ms), 3
            ),
        },
    )


def refusal(form: Recurrence, inputs: list[torch.Tensor]) -> str:
    """Run both passes once; say why another library refuses its backward on this device."""
    leaves = [x.requires_grad_() for x in inputs]
    y = form(*leaves)[0]
    try:
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return str(error)
    return ""


def timed(
    form: Recurrence, inputs: list[torch.Tensor], repeats: int, has_backward: bool = True
) -> tuple[list[float], list[float]]:
    """Return the milliseconds of forward, and of forward and backward."""
    grad = torch.ones_like(form(*inputs)[0])
    if not has_backward:
        return time_steps(lambda _: form(*inputs), 3, repeats), []

    def both(_: int) -> None:
        torch.autograd.grad(form(*inputs)[0], inputs, grad)

    return time_steps(lambda _: form(*inputs), 3, repeats), time_steps(both, 3, repeats)


def error(
    form: Recurrence, plain: Recurrence, inputs: list[torch.Tensor], has_backward: bool
) -> float:
    """Return the largest error of the outputs and gradients against plain torch in float32."""
    results = []
    for function, cast in ((form, torch.Tensor.detach), (plain, torch.Tensor.float)):
        leaves = [cast(x).requires_grad_() for x in inputs]
        y = function(*leaves)[0]
        torch.manual_seed(1)
        grad = torch.randn(y.shape, device=y.device, dtype=torch.bfloat16)
        grads = torch.autograd.grad(y, leaves, grad.to(y.dtype)) if has_backward else ()
        results.append([y, *grads])
    return max(
        ((got.float() - want).abs().max() / want.abs().max()).item()
        for got, want in zip(*results, strict=True)
    )


def mamba_inputs(config: TransformerConfig, length: int) -> list[torch.Tensor]:
    """Draw what the state-space form reads."""
    there, heads = {"device": "cuda", "dtype": torch.bfloat16}, mamba_sizes(config).heads
    return [
        torch.randn(length, 1, heads, config.mamba_head_dim, **there),
        torch.rand(length, 1, heads, device="cuda") * 0.1,
        -torch.rand(heads, device="cuda") * 16,
        *(torch.randn(length, 1, 1, config.mamba_state_dim, **there) for _ in range(2)),
        torch.ones(heads, device="cuda"),
    ]


def delta_inputs(config: TransformerConfig, length: int) -> list[torch.Tensor]:
    """Draw what the gated delta rule reads."""
    there, sizes = {"device": "cuda", "dtype": torch.bfloat16}, delta_sizes(config)
    width, heads = config.linear_key_head_dim, sizes.value_heads
    q, k = (torch.randn(length, 1, sizes.key_heads, width, **there) for _ in range(2))
    return [
        F.normalize(q, dim=-1) * width**-0.5,
        F.normalize(k, dim=-1),
        torch.randn(length, 1, heads, config.linear_value_head_dim, **there),
        -torch.rand(length, 1, heads, device="cuda") * 0.1,
        torch.rand(length, 1, heads, device="cuda"),
    ]


if __name__ == "__main__":
    main()
