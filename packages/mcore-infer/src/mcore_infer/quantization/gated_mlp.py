"""A gated MLP with quantized weights whose activation is computed as its results are rounded.

One kernel reads gates and up-projections and writes the codes that the second GEMM multiplies.
Two would write the product in 16 bits and read it again. The codes are the same bits.
"""

from jaxtyping import Float
from torch import Tensor, nn

from mcore_infer.quantization.gemms import QuantizedGemm
from mcore_models.layers.mlp import MLP
from mcore_parallel.collectives import reduce_from
from mcore_parallel.precision.gemm import Gemm
from mcore_parallel.tensor_parallel.linear import RowParallelLinear


class RoundedGatedMLP(MLP):
    """``MLP`` without gradients, in place of one whose fc2 is quantized."""

    activation: str

    def __init__(self, mlp: MLP) -> None:
        """Share the linears of an MLP that ``rounds_gates`` accepts."""
        nn.Module.__init__(self)
        self.gated, self.activation = True, str(mlp.activation)
        self.clamp = self.offset = 0.0
        self.recompute_activation = False
        self.fc1, self.fc2 = mlp.fc1, mlp.fc2
        self.train(mlp.training)

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "s B D"]:
        """Transform every token; communicates as the two linears do."""
        fc2, hidden = self.fc2, self.fc1(x)
        # Adapters replace fc2, and whoever observes it has hooks.
        if isinstance(fc2, RowParallelLinear) and not (
            fc2._forward_hooks or fc2._forward_pre_hooks
        ):
            gemm = fc2.gemm
            if isinstance(gemm, QuantizedGemm) and gemm.takes_gated(hidden, self.activation):
                return reduce_from(gemm.gated_forward(hidden, self.activation), fc2.axis)
        return fc2(self._activate(hidden))


def round_gates_(model: nn.Module) -> None:
    """Replace the MLPs of a model whose activation can be computed with the rounding."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is MLP and _rounds_gates(child):
                setattr(module, name, RoundedGatedMLP(child))


def _rounds_gates(mlp: MLP) -> bool:
    fc2: RowParallelLinear = mlp.fc2
    gemm: Gemm = fc2.gemm
    is_plain = mlp.gated and not (mlp.clamp or mlp.offset or mlp.recompute_activation)
    is_whole = fc2.bias is None and not fc2.sequence_parallel
    return bool(is_plain and is_whole and isinstance(gemm, QuantizedGemm) and gemm.rounds)
