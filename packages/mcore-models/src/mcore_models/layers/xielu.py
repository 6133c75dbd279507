"""xIELU: an activation without a gate, with two slopes that each layer learns (Apertus)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import ParamLayout, whole_layout

BETA, EPSILON, SLOPE = 0.5, -1e-6, 0.8
"""Linear slope, bound of the exponent's input, and initial slopes, as published."""


class XIELU(nn.Module):
    """Applies ``p x^2 + b x`` to positive and ``n (e^x - 1 - x) + b x`` to other elements.

    p = softplus(alpha_p) and n = b + softplus(alpha_n); the exponent's input is at most eps.

    Attributes:
        alpha_p, alpha_n: ``[1]``, trained.
        beta, eps: b and eps; parameters that are not trained, so that checkpoints store them.

    Reference:
        Huang and Schlag 2024, arXiv:2411.13010, equation 8; eps: Apertus 2025,
        arXiv:2509.14233.
    """

    def __init__(self, axis: Axis, **factory_kwargs: Any) -> None:
        """Allocate the four numbers with their initial values.

        Args:
            axis: ranks that split the channels; each rank holds all four numbers.
            factory_kwargs: device and dtype.
        """
        super().__init__()
        self.axis = axis
        trained = {"alpha_p": (SLOPE,), "alpha_n": (SLOPE - BETA,)}
        for name, values in trained.items():
            # Stored before softplus, whose inverse is ln(e^y - 1).
            inverse = [math.log(math.expm1(value)) for value in values]
            setattr(self, name, nn.Parameter(torch.tensor(inverse, **factory_kwargs)))
        for name, value in {"beta": BETA, "eps": EPSILON}.items():
            number = torch.tensor(value, **factory_kwargs)
            setattr(self, name, nn.Parameter(number, requires_grad=False))

    def forward(self, x: Float[Tensor, "*B F"]) -> Float[Tensor, "*B F"]:
        """Return the activation of every element; saves only x and the numbers for backward."""
        numbers = (self.alpha_p, self.alpha_n, self.beta, self.eps)
        return _XIELU.apply(x, *(number.to(x.dtype) for number in numbers))  # pyrefly: ignore

    def layouts(self) -> dict[str, ParamLayout]:
        """Describe the numbers: each rank's gradient is the sum over its channels."""
        return {
            name: whole_layout("", tuple(parameter.shape), self.axis, self.axis)
            for name, parameter in self.named_parameters()
        }


class _XIELU(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *numbers: Tensor) -> Tensor:
        ctx.save_for_backward(x, *numbers)
        alpha_p, alpha_n, beta, eps = numbers
        positive = F.softplus(alpha_p) * x * x
        negative = (beta + F.softplus(alpha_n)) * (torch.expm1(torch.minimum(x, eps)) - x)
        return torch.where(x > 0, positive, negative) + beta * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, alpha_p, alpha_n, beta, eps = ctx.saved_tensors
        (grad,) = grads
        is_positive, exponent = x > 0, torch.minimum(x, eps)
        # The derivative of e^min(x, eps) is 0 between eps and 0.
        curved = torch.where(x < eps, exponent.exp(), torch.zeros_like(x))
        slope_n = (beta + F.softplus(alpha_n)) * (curved - 1)
        slope = torch.where(is_positive, 2 * F.softplus(alpha_p) * x, slope_n) + beta
        # Sums over all elements are float32 or wider.
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = (is_positive, x * x), (~is_positive, torch.expm1(exponent) - x)
        grad_p, grad_n = (
            (grad * torch.where(mask, part, torch.zeros_like(x))).sum(dtype=wide)
            for mask, part in parts
        )
        grad_p, grad_n = grad_p * alpha_p.sigmoid(), grad_n * alpha_n.sigmoid()
        numbers = grad_p.to(alpha_p.dtype), grad_n.to(alpha_n.dtype)
        return grad * slope, *numbers, None, None
