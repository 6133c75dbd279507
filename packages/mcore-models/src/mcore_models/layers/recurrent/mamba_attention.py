"""Mamba-2 and attention side by side: both read one normed stream, and are added together.

Reference:
    Zuo et al. 2025, Falcon-H1, arXiv:2507.22448, section 2.
"""

from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_models.layers.attention import Attention
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.recurrent.mamba import Mamba


class MambaAttention(nn.Module):
    """Both mixers of one layer.

    Attributes:
        mamba, attention: each remembers its own in the state of the layer.
    """

    def __init__(self, config: TransformerConfig, mamba: Mamba, attention: Attention) -> None:
        super().__init__()
        self.mamba, self.attention = mamba, attention
        self.multipliers = config.mamba_output_multiplier, config.attention_output_multiplier

    def forward(self, x: Float[Tensor, "s B D"], inputs: BlockInputs) -> Float[Tensor, "s B D"]:
        """Add up what the two say; communicates as they do."""
        first, second = self.multipliers
        return self.mamba(x, inputs) * first + self.attention(x, inputs) * second
