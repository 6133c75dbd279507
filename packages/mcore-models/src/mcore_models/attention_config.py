"""Options of attention beyond heads and windows: YaRN's positions.

``AttentionConfig`` is the base of ``TransformerConfig`` and never used alone. The standard
library only.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """How rotary wavelengths are stretched."""

    rope_type: Literal["rope", "yarn"] = "rope"
    """How rotary wavelengths are stretched for longer contexts: not, or as YaRN does."""

    rotary_scaling_factor: float = 40.0
    """By how much YaRN stretches the longest wavelengths."""

    original_max_position_embeddings: int = 4096
    """Context, in tokens, that the model knew before YaRN."""

    beta_fast: float = 32.0
    """Channels that turn more often than this within the original context stay."""

    beta_slow: float = 1.0
    """Channels that turn less often than this are stretched fully."""

    mscale: float = 1.0
    """YaRN multiplies cosines and sines by m(this) / m(--mscale-all-dim), where m(x) is
    0.1 x ln(--rotary-scaling-factor) + 1."""

    mscale_all_dim: float = 0.0
    """See --mscale."""

    def check_attention(self) -> None:
        """Check the fields above, for ``TransformerConfig``.

        Raises:
            ValueError: with the flag and what it may be.
        """
        for name in (
            *("rotary_scaling_factor", "original_max_position_embeddings", "beta_slow"),
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{_flag(name)} {getattr(self, name)} must be above 0.")
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} {getattr(self, name)} must be 0 or more.")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"--beta-fast {self.beta_fast} must be --beta-slow {self.beta_slow} or more."
            )


def yarn_magnitude(factor: float, scale: float) -> float:
    """How YaRN scales attention for positions stretched by ``factor``; 1 without stretching.

    Reference:
        Peng et al. 2023, YaRN, arXiv:2309.00071, equation 22.
    """
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
