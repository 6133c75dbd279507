"""Products of a gated layer by quack-kernels: an extra, never imported unless used.

The package's products reach cuBLAS's rate on Hopper and make the activation in their
epilogue, so the kernels between them are saved. On an H200, 8192 tokens, 4096 channels and an
inner width of 14336, in milliseconds beside cuBLAS and a fused activation: forward 2.72 and
2.86, the second product's backward 1.42 and 1.66. The package compiles at the first call of a
kind of product, some two seconds each. No product splits a sum, so bits repeat.

The twin is ``mcore_parallel.gated_products.twin_kernels``.
"""

from functools import cache, partial
from importlib import import_module
from typing import Any

from torch import Tensor

from mcore_models import kernel_packages
from mcore_models.config import MlpBackend
from mcore_models.kernel_packages import without_compiler_noise
from mcore_parallel.gated_products import GatedKernels
from mcore_parallel.tensor_products import GradientProducts

_PACKAGE = "quack-kernels"
EXTRA = 'quack-kernels is not installed: pip install "mcore-models[quack]"'
_NAMES = {"silu": "swiglu", "gelu_tanh": "geglu"}
_FEWEST_TOKENS = 1024
_LEAST_WIDTH = 2048
"""Below these the products are short and cuBLAS's choice of tiles matters more."""


def is_installed() -> bool:
    """Whether the package is there; imports nothing."""
    return kernel_packages.is_installed(_PACKAGE)


def check_backend(backend: MlpBackend) -> None:
    """Raise if a backend cannot be used whatever the tensors.

    Raises:
        ValueError: naming the package that is missing.
    """
    if backend == "quack" and not is_installed():
        raise ValueError(f"--mlp-backend quack: {EXTRA}, or use auto.")


def refusal(x: Tensor, first: Tensor, activation: str) -> str:
    """Say why these tensors need another backend; empty: they do not.

    Args:
        x: ``[..., D]``, the layer's input.
        first: ``[2F, D]``, its first weight.
        activation: of the gate.
    """
    particular = (
        (first.dtype != x.dtype, f"weights are {first.dtype}, the input {x.dtype}"),
        (activation not in _NAMES, f"the activation is {activation}, not silu or gelu_tanh"),
        (
            first.shape[0] % 16 > 0 or first.shape[1] % 8 > 0,
            f"{first.shape[1]} channels or {first.shape[0] // 2} inside are no multiple of 8",
        ),
    )
    return kernel_packages.refusal(x, particular, _PACKAGE, EXTRA)


def is_faster(x: Tensor, first: Tensor, num_ranks: int = 1) -> bool:
    """Whether measurements put it before cuBLAS for these tensors.

    Args:
        x: ``[..., D]``, the layer's input, or a cut of it.
        first: ``[2F, D]``.
        num_ranks: that cut the tokens of x.
    """
    num_tokens = x.numel() // x.shape[-1] * num_ranks
    return num_tokens >= _FEWEST_TOKENS and min(first.shape) >= _LEAST_WIDTH


@cache
def gated_kernels(activation: str) -> GatedKernels:
    """Return the package's products for an activation that ``refusal`` takes."""
    name = _NAMES[activation]
    return GatedKernels(
        partial(_widen, name),
        partial(_narrow_backward, name),
        GradientProducts(_input_gradient, _add_weight_gradient),
    )


def _widen(name: str, x: Tensor, weight: Tensor, keep: bool) -> tuple[Tensor | None, Tensor]:
    return _call(
        "gemm_gated",
        x,
        weight.t(),
        activation=name,
        store_preact=keep,
        concat_layout=("B",),
    )


def _narrow_backward(
    name: str, grad: Tensor, weight: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    return _call("gemm_dgated", grad, weight, hidden, activation=name, dynamic_scheduler=False)


def _input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    rows = grad.reshape(-1, grad.shape[-1])
    product = _call("gemm", rows, weight, concat_layout=("B",))
    return product.view(*grad.shape[:-1], weight.shape[1])


def _add_weight_gradient(
    total: Tensor, grad: Tensor, x: Tensor, *, overwrite: bool = False
) -> None:
    if overwrite:
        _call("gemm", grad, x, out=total, concat_layout=("out",))
    else:
        _call("gemm_add_inplace", grad, x, total, concat_layout=("C", "out"))


def _call(function: str, *factors: Tensor, **options: Any) -> Any:
    """Call a product with the tiles that it takes by default, which measured fastest."""
    with without_compiler_noise():
        package = import_module("quack.gemm_interface")
        return getattr(package, function)(*factors, **options, tuned=False)
