"""Maps ``--optimizer`` to update rules, and builds the optimizer of a run."""

from collections.abc import Callable, Mapping

from mcore_ckpt.save_load.rank_agreement import raise_on_all_ranks
from mcore_models.mup import step_width
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.sgd import SGD
from mcore_parallel.optimizers.update_rule import UpdateRule
from mcore_parallel.sharding import NamedParameter
from mcore_train.composition import TrainConfig

BuildRule = Callable[[TrainConfig], UpdateRule]
"""Builds an update rule by its own options of a run."""

OPTIMIZERS: Mapping[str, BuildRule] = {
    "adam": lambda config: AdamW(config.adam),
    "sgd": lambda config: SGD(config.sgd),
}
"""Builders by the value of ``--optimizer``."""


def build_optimizer(
    config: TrainConfig,
    ctx: ParallelContext,
    data_parallel: GradientSync,
    rules: Mapping[str, BuildRule] = OPTIMIZERS,
) -> DistributedOptimizer:
    """Build the optimizer of a run on every rank, or raise on every rank; an all-gather.

    Raises:
        ValueError: if memory or a drive cannot hold the state of one of the ranks.
    """
    offload = config.offloading

    def width(named: NamedParameter) -> float:
        return step_width(
            [(part.name, part.shape) for part in named.layout.parts], config.model
        )

    with raise_on_all_ranks(ctx.world):  # each looks at its own memory and drive
        return DistributedOptimizer(
            data_parallel,
            rules[config.optimizer.optimizer](config),
            step_width=width,
            host_share=offload.optimizer_cpu_offload * offload.optimizer_offload_fraction,
            host_folder=offload.optimizer_offload_dir,
            has_main=config.main_weights.main_params_dtype == "fp32",
        )
