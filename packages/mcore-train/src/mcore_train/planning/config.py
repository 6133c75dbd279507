"""Options of ``mcore-train plan``: a cluster, what to search, and what to print or write."""

from dataclasses import dataclass

from mcore_base.field_checks import check_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """The cluster that a run is planned for, and what the plan prints and writes."""

    gpus: int = 8
    """GPUs of the cluster."""
    gpu: str = "h200"
    """Kind of GPU whose shipped constants count: h100, h200, a100 or b200."""
    nodes_of: int = 0
    """GPUs of a host, which NVLink joins; 0: as many as the constants say, 8."""
    interconnect: str = ""
    """Network between hosts, one port a GPU: ib-100, ib-200, ib-400, ib-800, roce-400, or GB/s;
    empty: that of the constants, ib-400."""
    system: str = ""
    """TOML file of constants, as plan --calibrate writes it, in the place of --gpu."""
    train_tokens: float = 0.0
    """Tokens of the whole training, such as 15e12: the plan then prints its days."""
    top: int = 10
    """Layouts to print."""
    explain: int = 0
    """Print everything about the layout of this rank in the table; 0: about none."""
    output: str = ""
    """Recipe to write, for mcore-train gpt --recipe: of the --explain layout, or the best."""
    plot: str = ""
    """SVG file to write: bars of memory and time of the best ten."""
    json: bool = False
    """Print one JSON object."""
    search_fp8: bool = False
    """Try --fp8-format hybrid too, which changes the numbers that a model computes."""
    reproduce_table: bool = False
    """Print the founding documents' layouts for 7B, 13B, 70B and 405B beside the planner's."""
    calibrate: str = ""
    """Measure this host and write its constants to this file, for --system; torchrun measures
    collectives too."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "gpus", "top")
        check_at_least(self, 0, "nodes_of", "explain")
        if self.train_tokens < 0:
            raise ValueError(f"--train-tokens {self.train_tokens} must be 0 or more.")
        if self.plot and not self.plot.endswith(".svg"):
            raise ValueError(f"--plot {self.plot} must end in .svg.")
        if self.output and not self.output.endswith(".toml"):
            raise ValueError(f"--output {self.output} must end in .toml.")
