"""``QKClipConfig``: above which score queries and keys are scaled. Standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class QKClipConfig:
    """How queries and keys are scaled after a step whose attention scores grew too large."""

    qk_clip: bool = False
    """After each step, scale queries and keys of heads whose largest attention score was above
    --qk-clip-threshold, so that it comes down to it."""
    qk_clip_alpha: float = 0.5
    """Share of the scaling's power that queries take, 0 to 1; keys take the rest."""
    qk_clip_threshold: float = 100.0
    """Largest attention score that stays as it is, above 0."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.qk_clip_alpha <= 1.0:
            raise ValueError(f"--qk-clip-alpha {self.qk_clip_alpha} must be from 0 to 1.")
        if not self.qk_clip_threshold > 0:
            raise ValueError(f"--qk-clip-threshold {self.qk_clip_threshold} must be above 0.")
        for name, default in (("qk_clip_alpha", 0.5), ("qk_clip_threshold", 100.0)):
            if not self.qk_clip and getattr(self, name) != default:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} has no effect without --qk-clip: leave it out.")
