"""Which quantization a config.json says, and the view of a folder that undoes it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from mcore_ckpt.mapping.mxfp4 import UnpackedMxfp4
from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.mapping.views import Dequantized


def take_quantization(config: dict[str, Any]) -> Callable[[Rows], Rows]:
    """Take a quantization that we read out of a config.json; others are left for refusal.

    Args:
        config: changed in place.

    Returns:
        What makes wide numbers of the folder's tensors.
    """
    how = config.get("quantization_config")
    if not isinstance(how, dict):
        return _as_it_is
    if how.get("quant_method") == "mxfp4":
        del config["quantization_config"]
        return UnpackedMxfp4
    block = how.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and how.get("quant_method") == "fp8":
        del config["quantization_config"]
        return partial(Dequantized, block=(block[0], block[1]))
    return _as_it_is


def _as_it_is(theirs: Rows) -> Rows:
    return theirs
