"""Options of ``mcore-train plan``: the cluster, the search, and the output."""

from dataclasses import dataclass

from mcore_base.options import Options, Rule, option


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(Options):
    """Cluster that a run is planned for, and output of the plan."""

    gpus: int = option(8, minimum=1)
    """GPUs of the cluster."""
    gpu: str = "h200"
    """Kind of GPU whose shipped constants are used: h100, h200, a100 or b200."""
    nodes_of: int = option(0, minimum=0, zero="those of the constants")
    """GPUs of a host, connected by NVLink; 0: the number in the constants, 8."""
    interconnect: str = ""
    """Network between hosts, one port per GPU: ib-100, ib-200, ib-400, ib-800, roce-400, or
    GB/s; empty: the network of the constants, ib-400."""
    system: str = ""
    """TOML file of constants, as plan --calibrate writes it, instead of --gpu."""
    train_tokens: float = option(0.0, minimum=0)
    """Tokens of the whole training, such as 15e12, for which the plan prints the days."""
    top: int = option(10, minimum=1)
    """Layouts to print."""
    explain: int = option(0, minimum=0, zero="none")
    """Print all details of the layout at this place of the table; 0: of none."""
    output: str = ""
    """Recipe file to write for mcore-train gpt --recipe: of the --explain layout, or of the
    best."""
    plot: str = ""
    """SVG file to write: bars of memory and time of the ten best layouts."""
    json: bool = False
    """Print the plan as one JSON object."""
    search_fp8: bool = False
    """Also try --fp8-format hybrid, which changes the numbers that a model computes."""
    reproduce_table: bool = False
    """Print the founding documents' layouts for 7B, 13B, 70B and 405B next to the planner's."""
    calibrate: str = ""
    """Measure this host and write its constants to this file, for --system; under torchrun,
    collectives are measured too."""

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
