"""Options of nvidia-resiliency-ext, by Megatron's names. Standard library and options only."""

from dataclasses import dataclass
from typing import Literal

from mcore_base.options import ON, Because, Options, Rule, option


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultToleranceConfig(Options):
    """What ranks tell the monitors of ``ft_launcher``."""

    enable_ft_package: bool = option(
        False,
        needs={"save": ON},
        excludes={"inprocess_restart": Because("as both were not tried together here")},
    )
    """Tell ft_launcher, which then must start the ranks, the begin and end of setup, steps and
    saves, so that it ends ranks that take too long. Needs nvidia-resiliency-ext."""
    calc_ft_timeouts: bool = option(False, part_of={"enable_ft_package": ON})
    """Learn the timeouts of sections from their times, and keep them in ft_state.json below
    --save for the next start."""
    ft_num_warmup_iters: int = option(5, minimum=0, part_of={"enable_ft_package": ON})
    """First steps and validations of a start that count as setup: they load kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InProcessConfig(Options):
    """Restarts within the processes of the ranks, without a launcher."""

    inprocess_restart: bool = option(False, needs={"save": ON, "auto_resume": ON})
    """After an exception or a hang of any rank, all ranks leave their groups, meet again and
    continue from the newest step in --save, in the same processes. A process that is killed
    ends the job, unless there are spare ranks. Needs nvidia-resiliency-ext and, on GPUs,
    NCCL_NVLS_ENABLE=0."""
    inprocess_max_iterations: int = option(10, minimum=1, part_of={"inprocess_restart": ON})
    """Starts after which a further fault ends the job. Megatron's default: no limit."""
    inprocess_active_world_size: int = option(0, minimum=0, part_of={"inprocess_restart": ON})
    """Ranks that train; the others wait to take the place of lost ones. 0: all. Megatron's
    default: 1."""
    inprocess_granularity: Literal["node", "rank"] = option(
        "node", part_of={"inprocess_restart": ON}
    )
    """What is replaced when a rank is lost: all ranks of its host, or that rank."""
    inprocess_monitor_thread_interval: float = option(
        1.0, above=0, part_of={"inprocess_restart": ON}
    )
    """Seconds between looks of each rank's monitor thread at the other ranks."""
    inprocess_monitor_process_interval: float = option(
        1.0, above=0, part_of={"inprocess_restart": ON}
    )
    """Seconds between looks of each rank's monitor process at the rank."""
    inprocess_progress_watchdog_interval: float = option(
        1.0, above=0, part_of={"inprocess_restart": ON}
    )
    """Seconds between the marks of progress that a rank's interpreter leaves."""
    inprocess_heartbeat_interval: float = option(
        30.0, above=0, part_of={"inprocess_restart": ON}
    )
    """Seconds between the heartbeats of monitor processes."""
    inprocess_heartbeat_timeout: float = option(
        60.0, above=0, part_of={"inprocess_restart": ON}
    )
    """Seconds without a heartbeat after which a rank is lost."""
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
    """Seconds in which further ranks may report faults of the same moment."""
    inprocess_termination_grace_time: float = option(
        1.0, minimum=0, part_of={"inprocess_restart": ON}
    )
    """Seconds between SIGTERM and SIGKILL for a rank that passed the hard timeout."""
    inprocess_empty_cuda_cache: bool = option(False, part_of={"inprocess_restart": ON})
    """Give cached GPU memory back before a restart."""

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
            "before, or give another --save.",
        ),
    )
