"""Kind of a logical tensor (embedding, norm, matrix), by its name, for optimizers.

The standard library only.
"""

from collections.abc import Iterable
from typing import Literal, get_args

from mcore_models.mup import TABLES

Kind = Literal["embedding", "head", "norm", "bias", "router", "vector", "matrix"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_HEADS = ("head.weight", "binary_head.weight")
_ROUTERS = (".router.weight", ".token_gate.weight")


def tensor_kind(name: str, shape: tuple[int, ...]) -> Kind:
    """Return the kind of a logical tensor.

    Tables whose rows are looked up are embeddings; a router scores experts or tokens. A tensor
    of no other kind is a matrix if it has two dimensions, else a vector (also a convolution).
    """
    owner, _, last = name.rpartition(".")
    if last == "bias" or last.endswith("_bias"):
        return "bias"
    if name in TABLES or name.endswith(".relative_position_bias.weight"):
        return "embedding"
    if name in _HEADS:
        return "head"
    if name.endswith(_ROUTERS):
        return "router"
    if owner.rpartition(".")[2].endswith("norm"):
        return "norm"
    return "matrix" if len(shape) == 2 else "vector"


def parameter_kind(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> Kind:
    """Return the kind of a parameter from names and shapes of its logical tensors.

    A parameter with tensors of several kinds is a vector.
    """
    kinds = {tensor_kind(name, shape) for name, shape in tensors}
    return kinds.pop() if len(kinds) == 1 else "vector"
