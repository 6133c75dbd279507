"""Which mixers the layers of a hybrid have, and the sizes of its recurrent layers.

``HybridConfig`` is a base of ``TransformerConfig`` and never used alone. The standard library
only.
"""

from dataclasses import dataclass
from typing import Any, Literal

from mcore_base.field_checks import check_at_least
from mcore_parallel.layer_patterns import further_letters, pattern_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridConfig:
    """What hybrid stacks have beyond a transformer's."""

    hybrid_override_pattern: str = ""
    """One letter a layer instead of attention and feed-forward in each: M Mamba-2, G gated
    delta net, * attention, - feed-forward, E experts; letters in brackets are one layer of
    several, [G-]; | between pipeline stages, a layout of this run that its checkpoints do not
    keep; / before the letters of each layer of multi-token prediction, /*-. Empty: a
    transformer."""

    mamba_state_dim: int = 128
    """Numbers of state for each channel of a Mamba head."""

    mamba_head_dim: int = 64
    """Channels of a Mamba head."""

    mamba_num_heads: int = 0
    """Mamba heads of a layer; 0: 2 x --hidden-size / --mamba-head-dim."""

    mamba_num_groups: int = 8
    """Groups of Mamba heads that enter and read their state alike."""

    mamba_conv_kernel: int = 4
    """Tokens, its own among them, that the convolution of a Mamba layer mixes."""

    mamba_conv_bias: bool = True
    """Bias of that convolution."""

    mamba_proj_bias: bool = False
    """Biases of a Mamba layer's two linears."""

    mamba_norm: Literal["gated", "before_gate", "none"] = "gated"
    """Norm a Mamba layer's output after it is gated (gated), before, or not at all."""

    mamba_chunk_size: int = 128
    """Tokens that a Mamba layer computes together; changes time and memory, not results."""

    mamba_dt_limit: tuple[float, float] = (0.0, 0.0)
    """Smallest and largest step size of a Mamba head; 0 as the second: no limit."""

    mamba_dt_min: float = 0.001
    """Smallest step size that a Mamba head may begin with."""

    mamba_dt_max: float = 0.1
    """Largest step size that a Mamba head may begin with."""

    mamba_dt_init_floor: float = 1e-4
    """Step sizes below it are raised to it at the beginning."""

    linear_num_key_heads: int = 16
    """Key heads of a gated delta net."""

    linear_num_value_heads: int = 32
    """Value heads of a gated delta net; several share a key head."""

    linear_key_head_dim: int = 128
    """Channels of a gated delta net's queries and keys."""

    linear_value_head_dim: int = 128
    """Channels of a gated delta net's values."""

    linear_conv_kernel_dim: int = 4
    """Tokens, its own among them, that the convolution of a gated delta net mixes."""

    def check_hybrid(self) -> None:
        """Check the pattern and the sizes of recurrent layers against each other."""
        config: Any = self
        layers = pattern_layers(self.hybrid_override_pattern)
        if layers and len(layers) != config.num_layers:
            raise ValueError(
                f"--hybrid-override-pattern {self.hybrid_override_pattern} has {len(layers)} "
                f"layers, --num-layers says {config.num_layers}: leave --num-layers out."
            )
        further = self.hybrid_override_pattern.count("/")
        if layers and further != config.mtp_num_layers:
            raise ValueError(
                f"--hybrid-override-pattern {self.hybrid_override_pattern} has {further} "
                "layers of multi-token prediction, each behind a /, --mtp-num-layers says "
                f"{config.mtp_num_layers}: leave --mtp-num-layers out."
            )
        letters = set("".join(layers) + further_letters(self.hybrid_override_pattern))
        if "M" in letters:
            _check_mamba(config)
        if "G" in letters:
            _check_delta(self)


def sizes_of_pattern(pattern: str) -> dict[str, int]:
    """Return the fields of a model that follow from its hybrid pattern, if it has one."""
    layers = pattern_layers(pattern)
    if not layers:
        return {}
    sizes = {"num_layers": len(layers), "mtp_num_layers": pattern.count("/")}
    if "*" not in pattern:
        # Without effect, and checked all the same.
        sizes |= {"num_attention_heads": 1, "num_query_groups": 0}
    return sizes


def stages_of_pattern(pattern: str) -> dict[str, str]:
    """Return the pipeline layout that the | of a hybrid pattern spell, if it has any."""
    stages = pattern.partition("/")[0].split("|")
    if len(stages) == 1:
        return {}
    layers = "|".join("t" * len(pattern_layers(stage)) for stage in stages)
    return {"pipeline_model_parallel_layout": f"E{layers}L"}


def _check_delta(config: HybridConfig) -> None:
    check_at_least(
        config,
        1,
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
        *("linear_value_head_dim", "linear_conv_kernel_dim"),
    )
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise ValueError(
            f"--linear-num-value-heads {values} cannot share --linear-num-key-heads {keys}: "
            f"use a multiple of {keys}."
        )


def _check_mamba(config: Any) -> None:
    check_at_least(
        config,
        1,
        *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_conv_kernel"),
        "mamba_chunk_size",
    )
    inner = 2 * config.hidden_size
    if not config.mamba_num_heads and inner % config.mamba_head_dim:
        raise ValueError(
            f"2 x --hidden-size {config.hidden_size} cannot be split into heads of "
            f"--mamba-head-dim {config.mamba_head_dim}: use a divisor of {inner}, or set "
            "--mamba-num-heads."
        )
    heads = config.mamba_num_heads or inner // config.mamba_head_dim
    if heads < 1 or heads % config.mamba_num_groups:
        raise ValueError(
            f"{heads} Mamba heads (--mamba-num-heads) cannot share --mamba-num-groups "
            f"{config.mamba_num_groups}: groups must divide heads."
        )
    low, high = config.mamba_dt_limit
    if low < 0 or (high and high <= low):
        raise ValueError(
            f"--mamba-dt-limit {low} {high}: the first must be 0 or more, the second above it, "
            "or 0 for no limit."
        )
    if not 0 < config.mamba_dt_min <= config.mamba_dt_max:
        raise ValueError(
            f"--mamba-dt-min {config.mamba_dt_min} must be above 0 and at most --mamba-dt-max "
            f"{config.mamba_dt_max}."
        )
