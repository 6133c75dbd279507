"""Activation functions of feed-forward layers by name; gated ones are in ``kernels.gate``.

Dense layers of mcore-models use them too: a name means the same function in all packages.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


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

LEARNED = ("xielu",)
"""Activations with parameters, which are modules of the layer that has them."""


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return an elementwise function by name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {sorted(ACTIVATIONS)}.")
    return ACTIVATIONS[name]
