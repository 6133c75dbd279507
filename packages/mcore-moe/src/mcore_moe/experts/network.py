"""``ExpertNetwork``: activation, gate, biases and initialisation of a feed-forward network."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mcore_moe.activations import LEARNED, activation_function
from mcore_moe.kernels.gate import gated


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNetwork:
    """Options of the feed-forward network of experts, and of dense layers of mcore-models."""

    gated: bool = True
    """Whether fc1 computes a gate and an up-projection."""
    activation: str = "silu"
    """A key of ``activations.ACTIVATIONS``; in dense layers also one of ``LEARNED``."""
    bias: bool = False
    """Whether both GEMMs have a bias; a shared expert never has biases."""
    clamp: float = 0.0
    """Bound of gates and up-projections, see ``kernels.gate.gated``; 0: no bound."""
    offset: float = 0.0
    """Number added to up-projections."""
    init_std: float = 0.02
    """Standard deviation of initial weights of fc1, router and latent projections; 0.0 leaves
    zeros and draws no random numbers."""
    output_std: float | None = None
    """Standard deviation of initial weights of fc2; None: ``init_std``."""
    recompute_activation: bool = False
    """Whether backward recomputes the input of fc2; not in a shared expert."""

    def __post_init__(self) -> None:
        if self.activation not in LEARNED:
            activation_function(self.activation)  # raises ValueError for an unknown name

    @property
    def fc2_std(self) -> float:
        """Standard deviation of fc2's weights."""
        return self.init_std if self.output_std is None else self.output_std

    def activate(self, hidden: Float[Tensor, "*B G"]) -> Float[Tensor, "*B F"]:
        """Return the input of fc2 from the output of fc1, which is 2F wide with a gate."""
        if self.gated:
            return gated(hidden, self.activation, self.clamp, self.offset)
        return activation_function(self.activation)(hidden)


DEFAULT_NETWORK = ExpertNetwork()
"""SwiGLU without biases."""
