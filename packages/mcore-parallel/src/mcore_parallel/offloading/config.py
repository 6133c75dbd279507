"""What is kept in host memory. Standard library only."""

from dataclasses import dataclass

PIECE_BYTES = 48 << 20
"""Optimizer state that travels at one time, about a millisecond of PCIe."""
NUM_PIECES_ON_GPU = 3
"""One that comes, one that is updated and one that goes back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Optimizer state and activations that leave the GPU while it does not need them."""

    optimizer_cpu_offload: bool = False
    """Keep main weights and moments in host memory: they come to the GPU piece by piece to be
    updated, and go back."""

    optimizer_offload_fraction: float = 1.0
    """Share of this rank's optimizer state that --optimizer-cpu-offload takes, 0 to 1."""

    optimizer_offload_dir: str = ""
    """Folder on an NVMe drive of each host: what --optimizer-cpu-offload takes is in a file
    there, and memory holds a part of it. Empty: it is in memory."""

    cpu_offloading: bool = False
    """Keep what backward needs of the first layers in host memory."""

    cpu_offloading_num_layers: int = 0
    """Layers of each pipeline stage that --cpu-offloading takes, from the first one on."""

    def __post_init__(self) -> None:
        if not 0.0 < self.optimizer_offload_fraction <= 1.0:
            raise ValueError(
                f"--optimizer-offload-fraction {self.optimizer_offload_fraction} must be above "
                "0 and not above 1."
            )
        if self.optimizer_offload_fraction != 1.0 and not self.optimizer_cpu_offload:
            raise ValueError(
                "--optimizer-offload-fraction has no effect without --optimizer-cpu-offload."
            )
        if self.optimizer_offload_dir and not self.optimizer_cpu_offload:
            raise ValueError(
                "--optimizer-offload-dir has no effect without --optimizer-cpu-offload."
            )
        if self.cpu_offloading != (self.cpu_offloading_num_layers > 0):
            raise ValueError(
                "--cpu-offloading needs --cpu-offloading-num-layers of 1 or more, and that has "
                "no effect without it."
            )
