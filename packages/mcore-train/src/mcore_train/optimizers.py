"""Which update rule ``--optimizer`` names: one entry and one file each."""

from collections.abc import Callable, Mapping

from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.sgd import SGD
from mcore_parallel.optimizers.update_rule import UpdateRule
from mcore_train.composition import TrainConfig

OPTIMIZERS: Mapping[str, Callable[[TrainConfig], UpdateRule]] = {
    "adam": lambda config: AdamW(config.adam),
    "sgd": lambda config: SGD(config.sgd),
}
"""By the name of ``--optimizer``."""
