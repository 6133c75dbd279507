"""A gated MLP with quantized weights that computes and rounds its activation in one kernel.

The kernel reads gates and up-projections and writes the codes that the second GEMM multiplies.
Separate kernels would write the product in 16 bits and read it again. The codes are equal to
the last bit.
"""

from jaxtyping import Float
from torch import Tensor, nn

from mcore_infer.quantization.gemms import QuantizedGemm
from mcore_models.layers.mlp import MLP
from mcore_moe.experts.network import ExpertNetwork
from mcore_parallel.collectives import reduce_from
from mcore_parallel.precision.gemm import Gemm
from mcore_parallel.tensor_parallel.linear import RowParallelLinear


class RoundedGatedMLP(MLP):
    """Gated MLP without gradients, whose fc2 has a quantized weight."""

    def __init__(self, mlp: MLP) -> None:
        """Use the linears of ``mlp``, which this module replaces."""
        nn.Module.__init__(self)
        self.network, self.fc1, self.fc2 = mlp.network, mlp.fc1, mlp.fc2
        self.train(mlp.training)

    def forward(self, x: Float[Tensor, "s B D"]) -> Float[Tensor, "s B D"]:
        """Transform every token; communicates as the two linears do."""
        fc2, hidden, activation = self.fc2, self.fc1(x), self.network.activation
        # Adapters replace fc2, and observers of its inputs add hooks: both need its forward.
        is_plain = type(fc2) is RowParallelLinear
        if not is_plain or fc2._forward_hooks or fc2._forward_pre_hooks:
            return fc2(self._activate(hidden))
        gemm = fc2.gemm
        if not (isinstance(gemm, QuantizedGemm) and gemm.takes_gated(hidden, activation)):
            return fc2(self._activate(hidden))
        return reduce_from(gemm.gated_forward(hidden, activation), fc2.axis)


def round_gates_(model: nn.Module) -> None:
    """Replace MLPs by ``RoundedGatedMLP`` where the kernel supports them, in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is MLP and _rounds_gates(child):
                setattr(module, name, RoundedGatedMLP(child))


def _rounds_gates(mlp: MLP) -> bool:
    fc2: RowParallelLinear = mlp.fc2
    gemm: Gemm = fc2.gemm
    network: ExpertNetwork = mlp.network
    is_plain = network.gated and not (network.clamp or network.offset)
    is_whole = fc2.bias is None and not fc2.sequence_parallel
    return bool(is_plain and is_whole and isinstance(gemm, QuantizedGemm) and gemm.rounds)
