"""The unified Hugging Face folder of quantized weights, which TensorRT-LLM and vLLM load.

``mcore-infer quantize`` writes one; this writes it again from one: in shards of another size,
with both of its configs, after every tensor was found to be what they say.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.conversion.targets import Watch, target_model_type
from mcore_ckpt.families import find_family
from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint
from mcore_ckpt.formats.quantization import WidenedRows
from mcore_ckpt.mapping.row_streams import slabs
from mcore_ckpt.storage.files import Item
from mcore_infer.quantization.writing import write_unified

_DTYPE_WORDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def quantized(source: OpenCheckpoint, form: str) -> WidenedRows:
    """Return the tensors of a quantized source."""
    if not isinstance(source.theirs, WidenedRows):
        raise ValueError(
            f"--format {form} needs quantized weights: mcore-infer quantize makes them. Others "
            "go as they are: mcore-ckpt convert mcore-to-hf writes their folder."
        )
    return source.theirs


def write_hf_quant(
    folder: Path, source: OpenCheckpoint, max_shard_bytes: int, watch: Watch
) -> str:
    """Write the unified folder; return its algorithm.

    Args:
        folder: an empty folder.
        source: a quantized folder, opened.
        max_shard_bytes: most bytes of tensors in one file.
        watch: called once with all tensors.

    Raises:
        ValueError: if the source is not quantized.
    """
    widened = quantized(source, "hf-quant")
    stored, plan = widened.stored, widened.plan
    items = [
        Item(name, stored.entries[name].dtype, entry.shape, partial(slabs, stored, name))
        for name, entry in stored.entries.items()
    ]
    write_unified(folder, source, plan, hf_config(source), watch(items), max_shard_bytes)
    return plan.algo


def hf_config(source: OpenCheckpoint) -> dict[str, Any]:
    """Return the config.json of a model, without its quantization."""
    family = find_family(target_model_type(source))
    carried: Mapping[str, Any] = source.hf.get("config", {})
    word = _DTYPE_WORDS.get(source.ours.entries["embedding.weight"].dtype, "float32")
    return {
        **carried,
        **family.to_theirs(source.description),
        "dtype": word,
        "torch_dtype": word,
    }
