"""Time a Mamba-2 mixer, and its state-space part alone, also in plain torch.

    python benchmarks/bench_mamba.py --hidden-size 2560 --seq-length 2048

Forward and backward of one layer of the geometry of Mamba-2 2.7B. The bound is the layer's two
linears as bfloat16 GEMMs at the GPU's peak. --chunk-size is that of plain torch: kernels have
their own.
"""

import argparse
import statistics

import torch
from reporting import add_options, keep, quantiles, time_steps, versions

from mcore_models.config import TransformerConfig
from mcore_models.layers.recurrent.mamba import Mamba
from mcore_models.layers.recurrent.ssd import ssd, ssd_plain
from mcore_parallel.mesh import ParallelContext

PEAK_TFLOPS = 989.0


def main() -> None:
    """Run the benchmark by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=2560)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--chunk-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--name", default="mamba")
    add_options(parser)
    options = parser.parse_args()
    config = TransformerConfig(
        num_layers=1,
        hybrid_override_pattern="M",
        hidden_size=options.hidden_size,
        num_attention_heads=1,
        mamba_num_groups=1,
        mamba_chunk_size=options.chunk_size,
    )
    placed = {"device": "cuda", "dtype": torch.bfloat16}
    mixer = Mamba(config, ParallelContext.single(), 0, **placed)
    with torch.no_grad():
        for linear in (mixer.in_proj, mixer.out_proj):
            linear.weight.normal_(std=0.02)
        mixer.conv1d.weight.normal_(std=0.3)
    x = torch.randn(options.seq_length, 1, options.hidden_size, **placed).requires_grad_()
    heads, channels = mixer.num_heads, config.mamba_head_dim
    shape = (options.seq_length, 1, heads)
    inputs = [
        torch.randn(*shape, channels, **placed),
        torch.rand(*shape, device="cuda") * 0.1,
        -torch.rand(heads, device="cuda") * 16,
        torch.randn(options.seq_length, 1, 1, config.mamba_state_dim, **placed),
        torch.randn(options.seq_length, 1, 1, config.mamba_state_dim, **placed),
        torch.ones(heads, device="cuda"),
    ]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    layer_ms = time_steps(lambda _: mixer(x).sum().backward(), 3, options.repeats)
    grad = torch.randn_like(inputs[0])
    ssd_ms, forward_ms, plain_ms = (
        time_steps(step, 3, options.repeats)
        for step in (
            lambda _: ssd(*inputs)[0].backward(grad),
            lambda _: ssd(*inputs),
            lambda _: ssd_plain(*inputs, chunk_size=options.chunk_size)[0].backward(grad),
        )
    )
    weights = mixer.in_proj.weight.numel() + mixer.out_proj.weight.numel()
    bound_ms = 6 * weights * options.seq_length / PEAK_TFLOPS / 1e9
    keep(
        options,
        {
            "name": options.name,
            **versions(options),
            "hidden_size": options.hidden_size,
            "seq_length": options.seq_length,
            "chunk_size": options.chunk_size,
            "dtype": "bfloat16",
            "repeats": options.repeats,
            **quantiles(layer_ms, "layer_ms"),
            **quantiles(ssd_ms, "ssd_ms"),
            **quantiles(forward_ms, "ssd_forward_ms"),
            **quantiles(plain_ms, "ssd_plain_ms"),
            "linears_at_peak_ms": round(bound_ms, 4),
            "ssd_share": round(statistics.median(ssd_ms) / statistics.median(layer_ms), 3),
        },
    )


if __name__ == "__main__":
    main()
