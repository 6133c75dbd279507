"""What is kept in host memory. Standard library only."""

from dataclasses import dataclass

from mcore_base.options import ON, Because, Options, Rule, option

PIECE_BYTES = 48 << 20
"""Optimizer state that travels at one time, about a millisecond of PCIe."""
NUM_PIECES_ON_GPU = 3
"""One that comes, one that is updated and one that goes back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig(Options):
    """Optimizer state and activations that leave the GPU while it does not need them."""

    optimizer_cpu_offload: bool = False
    """Keep main weights and moments in host memory: they come to the GPU piece by piece to be
    updated, and go back."""

    optimizer_offload_fraction: float = option(
        1.0, above=0, maximum=1, needs={"optimizer_cpu_offload": ON}
    )
    """Share of this rank's optimizer state that --optimizer-cpu-offload takes, 0 to 1."""

    optimizer_offload_dir: str = option("", needs={"optimizer_cpu_offload": ON})
    """Folder on an NVMe drive of each host: what --optimizer-cpu-offload takes is in a file
    there, and memory holds a part of it. Empty: it is in memory."""

    cpu_offloading: bool = option(
        False,
        excludes={
            "recompute_granularity": Because(
                "which makes again what is kept",
                instead="offload where copies hide under computation, recompute elsewhere",
            ),
        },
    )
    """Keep what backward needs of the first layers in host memory."""

    cpu_offloading_num_layers: int = option(0, minimum=0)
    """Layers of each pipeline stage that --cpu-offloading takes, from the first one on."""

    rules = (
        Rule(
            ("cpu_offloading", "cpu_offloading_num_layers"),
            lambda v: v.cpu_offloading != (v.cpu_offloading_num_layers > 0),
            "--cpu-offloading needs --cpu-offloading-num-layers of 1 or more, and that has no "
            "effect without it.",
        ),
    )
