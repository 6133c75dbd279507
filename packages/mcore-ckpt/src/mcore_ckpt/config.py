"""Options of saving and loading: plain frozen data, one field a flag."""

from dataclasses import dataclass
from typing import Literal

from mcore_base.options import ON, Because, Options, Rule, option

StrictnessLevel = Literal[
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "ignore_all",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionConfig(Options):
    """Which older steps are deleted once a newer one is durable; by default none."""

    save_retain_last: int = option(0, minimum=0, part_of={"save": ON})
    """Newest steps to keep; 0: all."""

    save_retain_interval: int = option(
        0, minimum=0, needs={"save_retain_last": Because("as all steps are kept")}
    )
    """Steps that are multiples of this number are never deleted; 0: no step is exempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrictnessConfig:
    """How a load treats tensors that differ between checkpoint and model."""

    dist_ckpt_strictness: StrictnessLevel = "raise_all"
    """Names on one side only. raise_all: an error; log_all: logged, and tensors that the
    checkpoint lacks keep their values; ignore_all: ignored without a message. raise_unexpected,
    log_unexpected: the same for tensors that the checkpoint lacks; tensors that no model holds
    are ignored; assume_ok_unexpected is raise_unexpected. Megatron's default:
    assume_ok_unexpected."""

    dist_ckpt_shape_mismatch: Literal["raise", "skip"] = "raise"
    """Tensors of another shape. raise: an error; skip: logged, and their values kept."""

    dist_ckpt_dtype_mismatch: Literal["raise", "cast"] = "raise"
    """Tensors of another dtype. raise: an error; cast: logged and cast."""

    @property
    def on_missing(self) -> Literal["raise", "log", "ignore"]:
        """Action for tensors of the model that the checkpoint lacks."""
        kind = self.dist_ckpt_strictness.partition("_")[0]
        if kind == "log":
            return "log"
        return "ignore" if kind == "ignore" else "raise"

    @property
    def on_unexpected(self) -> Literal["raise", "log", "ignore"]:
        """Action for tensors of the checkpoint that are not loaded."""
        if self.dist_ckpt_strictness == "raise_all":
            return "raise"
        return "log" if self.dist_ckpt_strictness == "log_all" else "ignore"

    @property
    def may_leave_tensors(self) -> bool:
        """Whether a load may leave tensors as they were before."""
        return self.on_missing != "raise" or self.dist_ckpt_shape_mismatch == "skip"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalConfig(Options):
    """Checkpoints on each host's disk, in addition to the durable ones; none by default."""

    non_persistent_local_ckpt_dir: str = ""
    """Folder on a disk of each host; empty: no local checkpoints. Needs nvidia-resiliency-ext.
    Local checkpoints load only under the layout that saved them; only the newest is kept."""

    non_persistent_save_interval: int = option(0, minimum=0)
    """Steps between local checkpoints, which leave out the steps of --save-interval."""

    non_persistent_ckpt_type: Literal["local"] = "local"
    """Kind of the checkpoints between the durable ones: on each host's disk."""

    replication: bool = option(False, needs={"non_persistent_local_ckpt_dir": ON})
    """Keep copies of each rank's local checkpoint on other hosts."""

    replication_factor: int = option(2, needs={"replication": ON})
    """Number of ranks that keep each local checkpoint, including its owner."""

    replication_jump: int = option(0, needs={"replication": ON})
    """Distance between ranks that keep each other's copies: the ranks of one host."""

    rules = (
        Rule(
            ("non_persistent_local_ckpt_dir", "non_persistent_save_interval"),
            lambda v: (
                bool(v.non_persistent_local_ckpt_dir) != bool(v.non_persistent_save_interval)
            ),
            "--non-persistent-local-ckpt-dir and --non-persistent-save-interval go together: "
            "give both or none.",
        ),
        Rule(
            ("replication", "replication_jump", "replication_factor"),
            lambda v: v.replication and (v.replication_jump < 1 or v.replication_factor < 2),
            "--replication needs --replication-jump, the number of ranks of one host, and a "
            "--replication-factor from 2; not {replication_jump} and {replication_factor}.",
        ),
    )
