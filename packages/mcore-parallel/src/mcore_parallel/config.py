"""Degrees of parallelism and the switches that go with them: plain frozen data.

Field names are Megatron's flags with underscores; each field's docstring is its help
text. Nothing here needs the world or the hardware: what does is checked by
``layout.build_grids``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How a world of ranks is factorised: TP x CP x DP x PP, and ETP x EP x EDP x PP."""

    tensor_model_parallel_size: int = 1
    """Ranks that split each weight matrix."""

    pipeline_model_parallel_size: int = 1
    """Ranks that split the layers."""

    context_parallel_size: int = 1
    """Ranks that split each sequence."""

    expert_model_parallel_size: int = 1
    """Ranks that split the experts; folded over data, context and tensor ranks."""

    expert_tensor_parallel_size: int = 0
    """Ranks that split each expert's matrices; 0: the tensor-parallel size."""

    sequence_parallel: bool = False
    """Split norms, dropout and residuals along the sequence over the tensor ranks."""

    use_tp_pp_dp_mapping: bool = False
    """Order ranks tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp."""

    num_distributed_optimizer_instances: int = 1
    """Replicated groups of optimizer shards: each holds a whole optimizer state."""

    distributed_timeout_minutes: float = 10.0
    """Minutes after which a collective that does not finish ends the job."""

    def __post_init__(self) -> None:
        """Check each degree on its own.

        Raises:
            ValueError: if a degree is not a positive integer.
        """
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "num_distributed_optimizer_instances",
        ):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} {getattr(self, name)} must be 1 or more.")
        if self.expert_tensor_parallel_size < 0:
            raise ValueError(
                f"--expert-tensor-parallel-size {self.expert_tensor_parallel_size} must be 0 "
                "(as --tensor-model-parallel-size) or more."
            )
        if self.distributed_timeout_minutes <= 0:
            raise ValueError("--distributed-timeout-minutes must be above 0.")
