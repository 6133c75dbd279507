"""Number formats of a run, by name, and checks that the device has them.

16-bit parameters have float32 main weights, kept by the optimizer, and float32 main
gradients, kept by the data-parallel buckets. float32 and float64 parameters are their own
main weights.
"""

import logging
from dataclasses import replace

import torch

from mcore_ckpt.save_load.rank_agreement import raise_on_all_ranks
from mcore_parallel.mesh import Axis
from mcore_parallel.precision.capability import best_format, bf16_problem
from mcore_train.composition import TrainConfig
from mcore_train.resolution import Dtype

log = logging.getLogger(__name__)

_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def torch_dtype(name: Dtype) -> torch.dtype:
    """Return torch's dtype of a plan's format."""
    return _DTYPES[name]


def with_device_precision(config: TrainConfig, local_rank: int) -> TrainConfig:
    """Replace ``--precision auto`` by a format that this rank's device supports.

    Other configs are returned unchanged. All ranks compare their options after they have
    joined, so that GPUs of two kinds end with an error. A rank beyond the number of the host's
    GPUs takes the format of the last GPU; ``launcher.initialize`` reports the missing GPU.

    Raises:
        ValueError: if the options are those of another format.
    """
    precision = config.precision
    if precision.precision != "auto":
        return config
    capability, name = None, "the CPU"
    if config.run.device != "cpu" and torch.cuda.is_available():
        device_index = min(local_rank, torch.cuda.device_count() - 1)
        capability = torch.cuda.get_device_capability(device_index)
        name = torch.cuda.get_device_name(device_index)
    chosen = best_format(capability)
    log.info("--precision auto: %s on %s", chosen, name)
    format_flag = {} if chosen == "fp32" else {chosen: True}
    return replace(config, precision=replace(precision, precision="", **format_flag))


def check_device_format(dtype: torch.dtype, device: torch.device, world: Axis) -> None:
    """Raise if a GPU has no tensor cores for bfloat16; all ranks call it together.

    All-gathers over ``world`` where the dtype is bfloat16 and the device a GPU.

    Raises:
        ValueError: on all ranks, naming the GPU and what to use.
    """
    if dtype != torch.bfloat16 or device.type != "cuda":
        return
    with raise_on_all_ranks(world):
        capability_and_name = (
            torch.cuda.get_device_capability(device),
            torch.cuda.get_device_name(device),
        )
        if problem := bf16_problem(*capability_and_name):
            raise ValueError(problem)
