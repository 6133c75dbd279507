"""A feed-forward network: activation, gate, biases and initialisation, as frozen data."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mcore_moe.activations import LEARNED, activation_function
from mcore_moe.kernels.gate import gated


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNetwork:
    """The feed-forward network of each expert; the dense layers of mcore-models too."""

    gated: bool = True
    """Whether fc1 gives a gate and an up-projection."""
    activation: str = "silu"
    """A key of ``activations.ACTIVATIONS``; in dense layers also one of ``LEARNED``."""
    bias: bool = False
    """Whether both GEMMs have a bias; a shared expert has none in any case."""
    clamp: float = 0.0
    """Bound of gates and up-projections, see ``kernels.gate.gated``; 0: none."""
    offset: float = 0.0
    """Added to up-projections."""
    init_std: float = 0.02
    """Of fc1, and of router and latent projections; 0.0 leaves zeros and draws no numbers."""
    output_std: float | None = None
    """Of fc2; None: ``init_std``."""
    recompute_activation: bool = False
    """Whether backward computes the input of fc2 again; a shared expert's is kept."""

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
