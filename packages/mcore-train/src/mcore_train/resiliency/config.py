"""Options of nvidia-resiliency-ext, by Megatron's names. Standard library and options only."""

from dataclasses import dataclass
from typing import Literal

from mcore_base.options import ON, Because, Options, Rule, option


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultToleranceConfig(Options):
    """Reports of ranks to the monitors of ``ft_launcher``."""

    enable_ft_package: bool = option(
        False,
        needs={"save": ON},
        excludes={"inprocess_restart": Because("as both were not tried together here")},
    )
    """Report begin and end of setup, steps and saves to ft_launcher, which must start the ranks
    and ends ranks that take too long. Needs nvidia-resiliency-ext."""
    calc_ft_timeouts: bool = option(False, part_of={"enable_ft_package": ON})
    """Compute the timeouts of sections from measured times, and store them in ft_state.json in
    the --save folder for the next start."""
    ft_num_warmup_iters: int = option(5, minimum=0, part_of={"enable_ft_package": ON})
    """First steps and validations after a start, which load kernels and count as setup."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InProcessConfig(Options):
    """Restarts within the processes of the ranks."""

    inprocess_restart: bool = option(False, needs={"save": ON, "auto_resume": ON})
    """After an exception or a hang of any rank, all ranks destroy their groups, build them
    again and continue from the newest step in --save, in the same processes. A killed process
    ends the job, unless there are spare ranks. Needs nvidia-resiliency-ext and, on GPUs,
    NCCL_NVLS_ENABLE=0."""
    inprocess_max_iterations: int = option(10, minimum=1, part_of={"inprocess_restart": ON})
    """Largest number of starts; a further fault ends the job. Megatron's default: no limit."""
    inprocess_active_world_size: int = option(0, minimum=0, part_of={"inprocess_restart": ON})
    """Number of ranks that train; the others are spare ranks, which replace lost ranks. 0: all
    ranks train. Megatron's default: 1."""
    inprocess_granularity: Literal["node", "rank"] = option(
        "node", part_of={"inprocess_restart": ON}
    )
    """Ranks replaced when a rank is lost: all ranks of its host, or only the lost rank."""
    inprocess_monitor_thread_interval: float = option(
        1.0, above=0, part_of={"inprocess_restart": ON}
    )
    """Seconds between checks of the other ranks by each rank's monitor thread."""
    inprocess_monitor_process_interval: float = option(
        1.0, above=0, part_of={"inprocess_restart": ON}
    )
    """Seconds between checks of a rank by its monitor process."""
    inprocess_progress_watchdog_interval: float = option(
        1.0, above=0, part_of={"inprocess_restart": ON}
    )
    """Seconds between the progress marks of a rank's interpreter."""
    inprocess_heartbeat_interval: float = option(
        30.0, above=0, part_of={"inprocess_restart": ON}
    )
    """Seconds between the heartbeats of monitor processes."""
    inprocess_heartbeat_timeout: float = option(
        60.0, above=0, part_of={"inprocess_restart": ON}
    )
    """Seconds without a heartbeat after which a rank counts as lost."""
    inprocess_soft_timeout: float = option(60.0, above=0, part_of={"inprocess_restart": ON})
    """Seconds without progress after which ranks are restarted."""
    inprocess_hard_timeout: float = option(90.0, above=0, part_of={"inprocess_restart": ON})
    """Seconds without progress after which a rank's process is ended."""
    inprocess_barrier_timeout: float = option(120.0, above=0, part_of={"inprocess_restart": ON})
    """Seconds to wait for all ranks after a fault."""
    inprocess_completion_timeout: float = option(
        120.0, above=0, part_of={"inprocess_restart": ON}
    )
    """Seconds to wait for all ranks at the end of the run."""
    inprocess_last_call_wait: float = option(1.0, minimum=0, part_of={"inprocess_restart": ON})
    """Seconds in which other ranks may report faults of the same cause."""
    inprocess_termination_grace_time: float = option(
        1.0, minimum=0, part_of={"inprocess_restart": ON}
    )
    """Seconds between SIGTERM and SIGKILL for a rank that passed the hard timeout."""
    inprocess_empty_cuda_cache: bool = option(False, part_of={"inprocess_restart": ON})
    """Free cached GPU memory before a restart."""

    rules = (
        Rule(
            (
                "inprocess_restart",
                "inprocess_soft_timeout",
                "inprocess_hard_timeout",
                "inprocess_barrier_timeout",
            ),
            lambda v: (
                v.inprocess_restart
                and not v.inprocess_soft_timeout
                < v.inprocess_hard_timeout
                < v.inprocess_barrier_timeout
            ),
            "--inprocess-soft-timeout {inprocess_soft_timeout}, --inprocess-hard-timeout "
            "{inprocess_hard_timeout} and --inprocess-barrier-timeout "
            "{inprocess_barrier_timeout} must grow in this order.",
        ),
        Rule(
            (
                "inprocess_restart",
                "inprocess_heartbeat_interval",
                "inprocess_heartbeat_timeout",
                "inprocess_barrier_timeout",
            ),
            lambda v: (
                v.inprocess_restart
                and not v.inprocess_heartbeat_interval
                < v.inprocess_heartbeat_timeout
                < v.inprocess_barrier_timeout
            ),
            "--inprocess-heartbeat-interval {inprocess_heartbeat_interval}, "
            "--inprocess-heartbeat-timeout {inprocess_heartbeat_timeout} and "
            "--inprocess-barrier-timeout {inprocess_barrier_timeout} must grow in this order.",
        ),
        Rule(
            ("inprocess_restart", "overwrite"),
            lambda v: v.inprocess_restart and v.overwrite,
            "--overwrite would delete the run at each --inprocess-restart: delete the folder "
            "yourself, or give another --save.",
        ),
    )
