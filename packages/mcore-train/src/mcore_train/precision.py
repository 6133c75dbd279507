"""The number formats of a run, by name, and what they mean for weights.

16-bit parameters have float32 main weights, kept by the optimizer, and float32 main
gradients, kept by the data-parallel buckets. float32 and float64 parameters are their own
main weights.
"""

import torch

from mcore_train.resolution import Dtype

_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def torch_dtype(name: Dtype) -> torch.dtype:
    """Return torch's dtype of a plan's format."""
    return _DTYPES[name]
