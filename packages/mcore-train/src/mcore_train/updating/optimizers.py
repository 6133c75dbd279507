"""Maps ``--optimizer`` to update rules, and builds the optimizer of a run."""

from collections.abc import Callable, Mapping

from mcore_ckpt.save_load.rank_agreement import raise_on_all_ranks
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.data_parallel.gradient_sync import GradientSync
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adafactor import Adafactor
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.lion import Lion
from mcore_parallel.optimizers.muon import Muon
from mcore_parallel.optimizers.schedule_free import ScheduleFree
from mcore_parallel.optimizers.sgd import SGD
from mcore_parallel.optimizers.soap import Soap
from mcore_parallel.optimizers.update_rule import AnyRule
from mcore_train.composition import TrainConfig
from mcore_train.updating.parameter_groups import ParameterGroups

BuildRule = Callable[[TrainConfig], AnyRule]
"""Builds an update rule from the options of a run."""

OPTIMIZERS: Mapping[str, BuildRule] = {
    "adafactor": lambda config: Adafactor(config.adafactor),
    "adam": lambda config: AdamW(config.adam),
    "lion": lambda config: Lion(config.lion),
    "muon": lambda config: Muon(config.muon),
    "schedule_free": lambda config: ScheduleFree(config.schedule_free),
    "sgd": lambda config: SGD(config.sgd),
    "soap": lambda config: Soap(config.soap),
}
"""Builders by the value of ``--optimizer``."""


def build_optimizer(
    config: TrainConfig,
    ctx: ParallelContext,
    data_parallel: GradientSync,
    rules: Mapping[str, BuildRule] = OPTIMIZERS,
) -> DistributedOptimizer:
    """Build the optimizer of a run on every rank, or raise on every rank; all-gathers.

    Raises:
        ValueError: if memory or a drive cannot hold the state of one of the ranks.
    """
    offload = config.offloading
    rule = rules[config.optimizer.optimizer](config)
    groups = ParameterGroups(config, rule)
    # Each rank checks its own memory and drive, after the exchanges about matrices, so one rank
    # alone may fail here.
    with raise_on_all_ranks(ctx.world):
        return DistributedOptimizer(
            data_parallel,
            rule,
            group_of=groups.group_of,
            host_share=offload.optimizer_cpu_offload * offload.optimizer_offload_fraction,
            host_folder=offload.optimizer_offload_dir,
            has_main=config.main_weights.main_params_dtype == "fp32",
            ema_decay=config.main_weights.ema_decay,
            matrix_tp_mode=config.muon.muon_tp_mode,
        )
