"""Options of ``mcore-train plan``: a cluster, what to search, and what to print or write."""

from dataclasses import dataclass

from mcore_base.options import Options, Rule, option


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(Options):
    """The cluster that a run is planned for, and what the plan prints and writes."""

    gpus: int = option(8, minimum=1)
    """GPUs of the cluster."""
    gpu: str = "h200"
    """Kind of GPU whose shipped constants count: h100, h200, a100 or b200."""
    nodes_of: int = option(0, minimum=0, zero="those of the constants")
    """GPUs of a host, which NVLink joins; 0: as many as the constants say, 8."""
    interconnect: str = ""
    """Network between hosts, one port a GPU: ib-100, ib-200, ib-400, ib-800, roce-400, or GB/s;
    empty: that of the constants, ib-400."""
    system: str = ""
    """TOML file of constants, as plan --calibrate writes it, in the place of --gpu."""
    train_tokens: float = option(0.0, minimum=0)
    """Tokens of the whole training, such as 15e12: the plan then prints its days."""
    top: int = option(10, minimum=1)
    """Layouts to print."""
    explain: int = option(0, minimum=0, zero="none")
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

    rules = (
        Rule(
            ("plot",),
            lambda v: v.plot and not v.plot.endswith(".svg"),
            "--plot {plot} must end in .svg.",
        ),
        Rule(
            ("output",),
            lambda v: v.output and not v.output.endswith(".toml"),
            "--output {output} must end in .toml.",
        ),
    )
