"""Constants of clusters: rates, bandwidths and latencies of GPUs, links and hosts.

Shipped constants are for H100, H200, A100 and B200. Those of the H200 were measured with this
repository's benchmarks (``kernels-h200.json``, ``collectives-h200-x4.json``,
``collectives-beside-gemms-h200-x4.json`` and the splits of training steps in
``benchmarks/results``), those of the H100 by ``plan --calibrate``; the others scale the H200's
by data sheets. ``source`` names the origin of each system. ``mcore-train plan --calibrate``
measures a host and writes the same fields as ``system.toml``.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import ceil, log2
from pathlib import Path
from typing import Literal

CUDNN_ATTENTION = 0.885
"""Rate of cuDNN's attention over flash-attn-4's, as measured on an H200."""
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """Constants of one kind of GPU, its host and its network; rates are sustained ones."""

    name: str
    source: str
    """Origin of the constants."""
    memory_gib: float
    """Device memory that a program can allocate."""
    peak_tflops: float
    """Dense bf16 rate of the data sheet: the denominator of MFU."""
    gemm_tflops: float
    """Rate of large bf16 GEMMs without pause, at the power limit."""
    burst_tflops: float
    """Rate of large bf16 GEMMs with pauses, which allow a higher clock."""
    fp8_tflops: float
    """Rate of large fp8 GEMMs without pause; 0: the GPU has no fp8."""
    power_slope: float = 0.36
    """Growth of a GEMM's rate with the share of a step without GEMM or attention."""
    num_sms: int = 132
    attention_tflops: float
    """Rate of causal attention, forward and backward together, for long sequences and 128
    channels."""
    attention_ramp_tokens: int = 900
    """Sequence length at which attention reaches half of its rate."""
    score_channels: int = 96
    """Number of channels whose products take as long as the exponential of a score."""
    memory_gb_s: float
    """Bandwidth of device memory, read and write together."""
    link_gb_s: float
    """Bus bandwidth of collectives within a host, each way."""
    link_latency_us: float = 27.0
    network_gb_s: float = 45.0
    """Bandwidth of a GPU between hosts, each way."""
    network_latency_us: float = 60.0
    """Latency of a collective for each doubling of hosts."""
    gpus_per_node: int = 8
    host_gb_s: float
    """Bandwidth between device and host memory, each way."""
    contention: float = 0.45
    """Share of a hidden collective's time by which it slows the kernels that hide it."""
    collective_skew: float = 1.4
    """Time of blocking collectives within layers over their time alone: ranks wait for the
    slowest."""
    host_layer_ms: float = 3.2
    """Host time of a dense layer, forward and backward, without graphs: Python and kernel
    launches."""
    expert_sync_ms: float = 1.2
    """Time of one wait in a layer of experts without graphs: the host waits for the rows of
    each expert or the sizes of an exchange, and the device for the host's next launches."""
    kernel_us: float = 2.5
    """Time from the end of one small kernel to the full rate of the next."""
    step_overhead_ms: float = 5.0
    """Host time of a step: launches of the optimizer, and the wait for the norm."""
    workspace_gib: float = 0.33
    """Workspaces of cuBLAS and buffers that live through a step, as measured."""

    def gemm_s(
        self,
        rows: float,
        outputs: float,
        inputs: float,
        dtype: str = "bf16",
        count: float = 1.0,
    ) -> float:
        """Return the seconds of ``count`` GEMMs [rows, inputs] x [inputs, outputs].

        With fewer tiles of 128 x 128 than multiprocessors some of these are idle; operands
        pass through device memory at least once.
        """
        if rows < 1 or outputs < 1 or inputs < 1:
            return 0.0
        tiles = ceil(rows / 128) * ceil(outputs / 128)
        idle = max(1.0, self.num_sms / tiles)  # long sums are split over idle multiprocessors
        rate = self.fp8_tflops if dtype == "fp8" and self.fp8_tflops else self.gemm_tflops
        compute = 2 * rows * outputs * inputs * min(idle, 2.0) / rate / 1e12
        element = 1 if dtype == "fp8" else 2
        moved = element * (rows * inputs + inputs * outputs) + 2 * rows * outputs
        return count * (compute**2 + (moved / self.memory_gb_s / 1e9) ** 2) ** 0.5

    def attention_s(
        self, scores: float, seq_length: float, channels: float, share: float = 1.0
    ) -> float:
        """Return the seconds of attention's core, forward (``share`` 2/7) or backward (5/7).

        Args:
            scores: pairs of query and key over all heads.
            seq_length: of the sequences, whose length fills the pipeline of tiles.
            channels: of queries and values together.
            share: of forward and backward together.
        """
        rate = (
            self.attention_tflops
            * 1e12
            * seq_length
            / (seq_length + self.attention_ramp_tokens)
        )
        rate *= channels / (channels + 2 * self.score_channels)
        rate *= (256 + 2 * self.score_channels) / 256
        return share * 7 * scores * channels / rate

    def move_s(self, num_bytes: float) -> float:
        """Return the seconds of kernels that only move bytes of device memory."""
        return num_bytes / self.memory_gb_s / 1e9

    def collective_s(
        self, kind: Collective, num_bytes: float, ranks: int, stride: int = 1
    ) -> float:
        """Return the seconds of a collective over ``ranks`` that are ``stride`` apart.

        Within hosts it moves at ``link_gb_s``; between hosts each member uses its own port, and
        both parts run at one time.

        Args:
            kind: of the collective.
            num_bytes: bytes of the whole tensor; for all_to_all, of one rank.
            ranks: members.
            stride: distance of neighbours in the order of ranks, which fills host after host.
        """
        if ranks < 2 or not num_bytes:
            return 0.0
        inside = max(1, min(ranks, self.gpus_per_node // stride))
        hosts = ceil(ranks / inside)
        link, port = self.link_gb_s * 1e9, self.network_gb_s * 1e9
        latency = self.link_latency_us + self.network_latency_us * log2(hosts)
        if kind == "send":
            return num_bytes / (link if hosts == 1 else port) + latency * 1e-6
        if kind == "all_to_all":
            local = num_bytes * (inside - 1) / ranks / link
            remote = num_bytes * (ranks - inside) / ranks / port
        else:
            local = num_bytes * (inside - 1) / inside / link
            remote = num_bytes * (hosts - 1) / hosts / port / inside
        turns = 2 if kind == "all_reduce" else 1
        return turns * (max(local, remote) + latency * 1e-6)

    def without_flash_attn_4(self) -> "System":
        """Return the system with the rate of cuDNN's attention."""
        return replace(
            self,
            attention_tflops=CUDNN_ATTENTION * self.attention_tflops,
            name=f"{self.name} without flash-attn-4",
        )


_H200 = System(
    name="h200",
    source="measured: benchmarks/results, H200 SXM 700 W, torch 2.11, NCCL 2.28.9",
    memory_gib=139,
    peak_tflops=989,
    gemm_tflops=668,
    burst_tflops=760,
    fp8_tflops=1215,
    attention_tflops=585,
    memory_gb_s=4200,
    link_gb_s=328,
    host_gb_s=47,
)
SYSTEMS: Mapping[str, System] = {
    "h200": _H200,
    "h100": replace(
        _H200,
        name="h100",
        source="measured by plan --calibrate on an H100 SXM 700 W, torch 2.11: GEMM, copy, "
        "host link, attention by torch's kernel, which has 0.885 of flash-attn-4's rate; links "
        "and fp8 over bf16 are the H200's",
        memory_gib=79,
        gemm_tflops=622,
        burst_tflops=711,
        fp8_tflops=1131,
        attention_tflops=506,
        memory_gb_s=2680,
        host_gb_s=52,
    ),
    "a100": replace(
        _H200,
        name="a100",
        source="NVIDIA's A100 SXM 80 GB data sheet (312 TFLOP/s, 2.04 TB/s, NVLink 300 GB/s "
        "each way), at 0.85 of it for GEMMs and memory and 0.75 for links",
        memory_gib=79,
        peak_tflops=312,
        gemm_tflops=265,
        burst_tflops=280,
        fp8_tflops=0,
        power_slope=0.1,
        num_sms=108,
        attention_tflops=195,
        memory_gb_s=1730,
        link_gb_s=225,
        network_gb_s=22,
        host_gb_s=22,
    ),
    "b200": replace(
        _H200,
        name="b200",
        source="NVIDIA's B200 data sheet (2 250 TFLOP/s, 8 TB/s, NVLink 900 GB/s each way), at "
        "the H200's shares of its own; not measured",
        memory_gib=178,
        peak_tflops=2250,
        gemm_tflops=1520,
        burst_tflops=1730,
        fp8_tflops=2760,
        num_sms=148,
        attention_tflops=1150,
        memory_gb_s=6900,
        link_gb_s=656,
        network_gb_s=45,
    ),
}
"""Shipped constants, by the name that --gpu takes."""

INTERCONNECTS: Mapping[str, float] = {
    "ib-100": 11.5,
    "ib-200": 23.0,
    "ib-400": 45.0,
    "ib-800": 90.0,
    "roce-400": 42.0,
}
"""GB/s of a GPU between hosts, by port: 90 % of the line rate."""


def read_system(file: Path) -> System:
    """Read a ``system.toml`` of ``plan --calibrate``; missing fields are those of its base.

    Raises:
        ValueError: for a field that no system has, or a base that is not known.
    """
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    base = find_system(str(table.pop("base", "h200")))
    known = {field.name for field in fields(System)}
    if unknown := sorted(set(table) - known):
        raise ValueError(f"{file}: no field of a system is called {unknown[0]}.")
    return replace(base, **table)


def write_system(system: System, base: str) -> str:
    """Write the fields in which a system differs from its base, as TOML."""
    usual = asdict(find_system(base))
    lines = [f'base = "{base}"']
    for name, value in asdict(system).items():
        if value != usual[name]:
            lines.append(
                f"{name} = {value!r}" if not isinstance(value, str) else f'{name} = "{value}"'
            )
    return "\n".join(lines) + "\n"


def system_of_device(device_name: str) -> System | None:
    """Return the constants of a GPU by its driver's name for it; None: there are none."""
    return next((s for key, s in SYSTEMS.items() if key in device_name.lower()), None)


def find_system(name: str) -> System:
    """Return the constants of a GPU.

    Raises:
        ValueError: if there are none of that name.
    """
    system = SYSTEMS.get(name.lower().replace("_", "-"))
    if system is None:
        raise ValueError(
            f"--gpu {name} has no constants: use {', '.join(SYSTEMS)}, or --system FILE, as "
            "mcore-train plan --calibrate writes it on a host with that GPU."
        )
    return system
