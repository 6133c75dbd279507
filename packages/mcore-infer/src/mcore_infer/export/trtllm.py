"""Writes the checkpoint of TensorRT-LLM's engine flow: config.json and one file for each rank.

TensorRT-LLM 1.0 to 1.2 build engines from such a checkpoint; later releases, vLLM and SGLang
load Hugging Face folders only.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_base.atomic_files import write_durably
from mcore_ckpt.conversion.targets import target_model_type
from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint
from mcore_ckpt.formats.quantization import WidenedRows
from mcore_ckpt.storage.files import Item, write_file
from mcore_ckpt.storage.index import DTYPE_BYTES
from mcore_infer.export.parts import RecordedRows
from mcore_infer.export.trtllm_model import (
    DTYPE_WORDS,
    RankGrid,
    build_config,
    check_grid,
    check_model,
    notes_on,
    read_sizes,
    shares_vocabulary,
)
from mcore_infer.export.trtllm_quantized import PLAIN, describe_quantization, find_linears
from mcore_infer.export.trtllm_tensors import Linears, PlainLinears, Rank

Watch = Callable[[Sequence[Item]], list[Item]]
"""Called with the items to write; returns items that report progress."""


@dataclass(frozen=True, slots=True)
class TrtllmReport:
    """Result of writing a checkpoint."""

    word: str
    """The engine's class of the model."""
    notes: list[str]
    """Settings that the folder cannot hold and the user must give to the engine."""


def write_trtllm(
    folder: Path, source: OpenCheckpoint, grid: RankGrid, dtype: str, watch: Watch
) -> TrtllmReport:
    """Write a checkpoint for ``grid.tp * grid.pp`` ranks.

    Args:
        folder: an empty folder.
        source: the opened checkpoint.
        grid: ranks that will load the checkpoint.
        dtype: safetensors' name of the dtype of weights that are not quantized; empty: the
            embedding's dtype.
        watch: called once with all tensors of all ranks.

    Raises:
        ValueError: if the format has no layout for the model or its dtype, or the ranks do not
            fit.
    """
    model_type = target_model_type(source)
    check_model(model_type, source.description)
    sizes = read_sizes(source.description)
    check_grid(sizes, grid)
    dtype = dtype or source.ours.entries["embedding.weight"].dtype
    if dtype not in DTYPE_WORDS:
        raise ValueError(
            f"--format trtllm has no weights in {dtype}: give --dtype bf16, fp16 or fp32."
        )
    rows = RecordedRows(source.ours)
    plain = PlainLinears(rows, dtype)
    linears: Linears = plain
    quantization, layers = PLAIN, {}
    if isinstance(source.theirs, WidenedRows):
        linears = find_linears(plain, source.theirs, source.links)
        quantization, layers = describe_quantization(linears, grid, sizes)
    config = build_config(model_type, source.description, dtype, grid, quantization)
    splits = shares_vocabulary(model_type, grid)
    ranks = [
        Rank(sizes, grid, number, rows, dtype, linears, splits).items()
        for number in range(grid.tp * grid.pp)
    ]
    watched = iter(watch([item for items in ranks for item in items]))
    for number, items in enumerate(ranks):
        rank_items = [next(watched) for _ in items]
        # Wide dtypes first, so that every tensor is aligned in the file.
        rank_items.sort(key=lambda item: -DTYPE_BYTES[item.dtype])
        write_file(folder / f"rank{number}.safetensors", rank_items)
    unread = sorted(rows.entries.keys() - rows.read)
    assert not unread, f"{len(unread)} tensors are on no rank: {', '.join(unread[:5])}"
    if layers:
        algorithms = {key: quantization[key] for key in ("quant_algo", "kv_cache_quant_algo")}
        text = json.dumps({**algorithms, "quantized_layers": layers}, indent=2)
        write_durably(folder / "quant_cfg.json", text.encode() + b"\n")
    write_durably(folder / "config.json", json.dumps(config, indent=2).encode() + b"\n")
    return TrtllmReport(config["architecture"], notes_on(source.description))
