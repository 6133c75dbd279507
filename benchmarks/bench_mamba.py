"""Time a mixer with a state, and its recurrence alone, also in plain torch.

    python benchmarks/bench_mamba.py --hidden-size 2560 --seq-length 2048
    python benchmarks/bench_mamba.py --kind delta_net --hidden-size 2048 --seq-length 8192

Forward and backward of one layer of the geometry of Mamba-2 2.7B, or of Qwen3-Next's gated
delta nets. The bound is the layer's two linears as bfloat16 GEMMs at the GPU's peak.
--chunk-size is that of plain torch: kernels have their own.
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from reporting import add_options, keep, quantiles, time_steps, versions

from mcore_models.config import TransformerConfig
from mcore_models.layers.recurrent.delta_net import DeltaNet
from mcore_models.layers.recurrent.delta_rule import delta_rule_plain, gated_delta_rule
from mcore_models.layers.recurrent.mamba import Mamba
from mcore_models.layers.recurrent.ssd import ssd, ssd_plain
from mcore_parallel.logical_tensors import delta_sizes, mamba_sizes
from mcore_parallel.mesh import ParallelContext

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
    placed = {"device": "cuda", "dtype": torch.bfloat16}
    mixer = (Mamba if is_mamba else DeltaNet)(config, ParallelContext.single(), 0, **placed)
    with torch.no_grad():
        for linear in (mixer.in_proj, mixer.out_proj):
            linear.weight.normal_(std=0.02)
        mixer.conv1d.weight.normal_(std=0.3)
    x = torch.randn(options.seq_length, 1, options.hidden_size, **placed).requires_grad_()
    tensors = (mamba_inputs if is_mamba else delta_inputs)(config, options.seq_length)
    inputs = [tensor.requires_grad_() for tensor in tensors]
    fast, plain = (ssd, ssd_plain) if is_mamba else (gated_delta_rule, delta_rule_plain)
    layer_ms = time_steps(lambda _: mixer(x).sum().backward(), 3, options.repeats)
    grad = torch.randn_like(fast(*inputs)[0])
    ssd_ms, forward_ms, plain_ms = (
        time_steps(step, 3, options.repeats)
        for step in (
            lambda _: fast(*inputs)[0].backward(grad),
            lambda _: fast(*inputs),
            lambda _: plain(*inputs, chunk_size=options.chunk_size)[0].backward(grad),
        )
    )
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
            **quantiles(ssd_ms, "recurrence_ms"),
            **quantiles(forward_ms, "recurrence_forward_ms"),
            **quantiles(plain_ms, "recurrence_plain_ms"),
            "linears_at_peak_ms": round(bound_ms, 4),
            "recurrence_share": round(
                statistics.median(ssd_ms) / statistics.median(layer_ms), 3
            ),
        },
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
