"""Activation functions of feed-forward layers by name, and gated ones, fused on a GPU.

Dense layers of mcore-models use them too: a name means the same function in all packages.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mcore_parallel.optional_kernels import OptionalKernel, both_passes, wave, works


def squared_relu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Square of the positive part. So et al. 2021, Primer, arXiv:2109.08668."""
    return F.relu(x).square()


def gelu_tanh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """GELU by its tanh approximation, as GPT-2. Hendrycks and Gimpel, arXiv:1606.08415."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """GELU by a logistic curve, x sigmoid(1.702 x). Hendrycks and Gimpel, arXiv:1606.08415."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "squared_relu": squared_relu,
}
"""Elementwise functions by name."""

FUSED = ("silu", "gelu_tanh")
"""Activations with a Triton kernel for gated layers."""


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return an elementwise function by name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {sorted(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def gated(
    x: Float[Tensor, "*B F2"], activation: str, clamp: float = 0.0, offset: float = 0.0
) -> Float[Tensor, "*B F"]:
    """Activate the first half of the channels and multiply it with the second.

    One kernel on a GPU for the activations of ``FUSED``; compiled code fuses the operations
    itself.

    Args:
        x: gate and up-projection.
        activation: a key of ``ACTIVATIONS``.
        clamp: bounds gates from above and up-projections on both sides; 0: no bound.
        offset: added to up-projections. Plain torch computes clamp and offset.

    Reference:
        Shazeer 2020, GLU variants improve transformer, arXiv:2002.05202. Clamp and offset are
        those of gpt-oss: OpenAI 2025, arXiv:2508.10925.
    """
    if not (clamp or offset) and _has_kernel(x, activation):
        from mcore_moe.kernels.gate import fused_gated

        return fused_gated(x, activation)
    return _gated_plain(x, activation, clamp, offset)


def _gated_plain(x: Tensor, activation: str, clamp: float, offset: float) -> Tensor:
    gate, up = x.chunk(2, -1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return activation_function(activation)(gate) * (up + offset if offset else up)


def weighted_gated(
    x: Float[Tensor, "R F2"],
    probs: Float[Tensor, " R"],
    end: Int[Tensor, ""],
    activation: str,
    clamp: float = 0.0,
    offset: float = 0.0,
) -> Float[Tensor, "R F"]:
    """Return ``gated`` times a weight for each row, in one kernel where ``gated`` has one.

    Args:
        x: gate and up-projection of each row.
        probs: weight of each row.
        end: number of rows in use, on the device; the results of later rows are undefined.
        activation: a key of ``ACTIVATIONS``.
        clamp: as in ``gated``.
        offset: as in ``gated``.
    """
    if clamp or offset:
        hidden = _gated_plain(x, activation, clamp, offset)
        return (hidden * probs[:, None]).to(x.dtype)
    if _has_kernel(x, activation):
        from mcore_moe.kernels.gate import fused_weighted_gated

        return fused_weighted_gated(x, probs, end, activation)
    return weighted_gated_plain(x, probs, activation)


def weighted_gated_plain(
    x: Float[Tensor, "R F2"], probs: Float[Tensor, " R"], activation: str
) -> Float[Tensor, "R F"]:
    """Reference of ``kernels.fused_weighted_gated`` in plain torch."""
    gate, up = x.chunk(2, dim=-1)
    hidden = activation_function(activation)(gate) * up
    return (hidden * probs[:, None]).to(x.dtype)


def _has_kernel(x: Tensor, activation: str) -> bool:
    return (
        x.is_cuda
        and activation in FUSED
        and x.dtype != torch.float64
        and not torch.compiler.is_compiling()
        and works(GATE_KERNELS, x.device, x.dtype)
    )


def _try_kernels(device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    from mcore_moe.kernels.gate import fused_weighted_gated

    x, probs = (wave(*shape, device=device, dtype=dtype) for shape in ((3, 32), (3,)))
    end = torch.tensor(3, dtype=torch.int32, device=device)
    got, want = (
        both_passes(run, x, probs)
        for run in (
            lambda x, probs: fused_weighted_gated(x, probs, end, "silu"),
            lambda x, probs: weighted_gated_plain(x, probs, "silu"),
        )
    )
    return list(zip(got, want, strict=True))


GATE_KERNELS = OptionalKernel("gated activations in Triton", ("triton",), _try_kernels)
