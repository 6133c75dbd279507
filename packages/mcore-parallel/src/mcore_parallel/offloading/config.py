"""Options of offloading to host memory or a drive."""

from dataclasses import dataclass

from mcore_base.options import ON, Because, Options, Rule, option

PIECE_BYTES = 48 << 20
"""Bytes of optimizer state in one copy, about a millisecond of PCIe."""
NUM_PIECES_ON_GPU = 3
"""Pieces on the GPU: one that is fetched, one that is updated, one that is sent back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig(Options):
    """Which optimizer state and activations are kept outside GPU memory."""

    optimizer_cpu_offload: bool = False
    """Keep main weights and moments in host memory; the GPU fetches, updates and returns them
    piece by piece."""

    optimizer_offload_fraction: float = option(
        1.0, above=0, maximum=1, needs={"optimizer_cpu_offload": ON}
    )
    """Share of a rank's optimizer state that --optimizer-cpu-offload offloads, 0 to 1."""

    optimizer_offload_dir: str = option("", needs={"optimizer_cpu_offload": ON})
    """Folder on an NVMe drive of each host, for a file with the offloaded optimizer state, of
    which memory holds a part. Empty: all offloaded state is in host memory."""

    cpu_offloading: bool = option(
        False,
        excludes={
            "recompute_granularity": Because(
                "which recomputes what is kept",
                instead="offload where copies hide under computation, recompute elsewhere",
            ),
        },
    )
    """Keep the activations of the first layers in host memory between forward and backward."""

    cpu_offloading_num_layers: int = option(0, minimum=0)
    """Number of first layers of each pipeline stage that --cpu-offloading offloads."""

    rules = (
        Rule(
            ("cpu_offloading", "cpu_offloading_num_layers"),
            lambda v: v.cpu_offloading != (v.cpu_offloading_num_layers > 0),
            "--cpu-offloading needs --cpu-offloading-num-layers of 1 or more, and that has no "
            "effect without it.",
        ),
    )
