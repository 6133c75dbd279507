"""What lies between two fp8 linears, computed and cast in one pass.

An activation between two linears is read from the first one's output and cast for the second;
backwards its gradient is computed from the second one's and cast for the first. Without this
each of them would be written in 16 bits and read again by its cast.

Autograd takes no operands in fp8 as a gradient. So the second linear's backward leaves them
here and returns NaN, which takes no memory, and the first one's backward finds them here: what
else read that gradient would be seen at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mcore_parallel.precision.fp8 import Fp8Gemm
from mcore_parallel.precision.fp8_cast import Uncast
from mcore_parallel.precision.gemm import Gemm, Operands


@dataclass(kw_only=True, slots=True)
class CastBetween:
    """One pass of two linears without biases, and what is between them."""

    first: Fp8Gemm
    """Of the linear whose output is read."""
    second: Fp8Gemm
    """Of the linear that multiplies what is computed."""
    output: Callable[[Float[Tensor, "S *B F"]], Uncast]
    """From the first linear's output to the second one's input."""
    grad: Callable[[Float[Tensor, "S *B F"], Float[Tensor, "S *B D"]], Uncast]
    """From the first linear's output, and the gradient of the second one's input, to its
    own."""
    forgets: bool = False
    """Compute the second linear's input again for its weight's gradient."""
    _operands: Operands | None = None

    def put(self, hidden: Float[Tensor, "S *B F"], grad: Tensor) -> Float[Tensor, "S *B F"]:
        """Cast the gradient for the first linear; return one of NaN for autograd."""
        self._operands = self.first.prepare(self.grad(hidden, grad))
        return hidden.new_full((1,), float("nan")).expand_as(hidden)

    def take(self) -> Operands:
        """Return what ``put`` has left; once."""
        operands, self._operands = self._operands, None
        assert operands is not None, "the second linear's backward has not run"
        return operands


def cast_between(
    first: Gemm,
    second: Gemm,
    x: Float[Tensor, "S *B D"],
    output: Callable[[Tensor], Uncast],
    grad: Callable[[Tensor, Tensor], Uncast],
    *,
    forgets: bool = False,
) -> CastBetween | None:
    """Connect two linears for one pass over x; None: their GEMMs or x do not fit.

    Args:
        first: GEMM of the linear that reads x.
        second: GEMM of the other.
        x: whole, not cut over tensor ranks.
        output: see ``CastBetween``, as are the next two.
        grad: see there.
        forgets: see there.
    """
    if not isinstance(first, Fp8Gemm) or not isinstance(second, Fp8Gemm):
        return None
    if not (first.takes_uncast(x) and second.takes_uncast(x)):
        return None
    return CastBetween(first=first, second=second, output=output, grad=grad, forgets=forgets)
