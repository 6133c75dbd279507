"""Activation functions of feed-forward layers by name; gated ones are in ``kernels.gate``.

Dense layers of mcore-models use them too: a name means the same function in all packages.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def squared_relu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return relu(x) squared. So et al. 2021, Primer, arXiv:2109.08668."""
    return F.relu(x).square()


def gelu_tanh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return GELU by its tanh approximation (GPT-2). Hendrycks and Gimpel, arXiv:1606.08415."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x sigmoid(1.702 x), close to GELU. Hendrycks and Gimpel, arXiv:1606.08415."""
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

LEARNED = ("xielu",)
"""Activations with parameters: modules, which the layer holds."""


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return an elementwise function by name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}: use one of {sorted(ACTIVATIONS)}.")
    return ACTIVATIONS[name]
