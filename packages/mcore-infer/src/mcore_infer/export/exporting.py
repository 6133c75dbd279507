"""Exports a checkpoint as a folder that another engine loads, in one process."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mcore_ckpt.conversion.inspection import find_format
from mcore_ckpt.conversion.options import DTYPE_WORDS
from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint
from mcore_ckpt.formats.quantization import WidenedRows
from mcore_ckpt.formats.sources import opened
from mcore_ckpt.mapping.row_streams import Progress, read_ahead, with_progress
from mcore_ckpt.storage.files import Item
from mcore_ckpt.storage.outputs import atomic_dir, check_place, check_room
from mcore_infer.export.trtllm import write_trtllm
from mcore_infer.export.trtllm_model import RankGrid
from mcore_infer.quantization.compressed_tensors import write_compressed_tensors
from mcore_infer.quantization.unified_folder import write_hf_quant

Format = Literal["trtllm", "hf-quant", "compressed-tensors"]
"""Formats of the folders to write."""

FORMATS: tuple[Format, ...] = ("trtllm", "hf-quant", "compressed-tensors")
"""All formats."""


MAX_SHARD_BYTES = 5_000_000_000
"""Default limit of the bytes of tensors in one file of a Hugging Face folder."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of an export."""

    output: Path
    """The folder."""
    word: str
    """The engine's class of the model, or the quantization of a Hugging Face folder."""
    num_tensors: int
    """Tensors in all files."""
    num_bytes: int
    """Bytes of tensors in all files."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the user of the folder."""


def export_model(
    load: str | Path,
    output: str | Path,
    *,
    format: Format,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    dtype: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: Progress | None = None,
) -> ExportReport:
    """Convert a checkpoint to a folder for another engine, in one process.

    Tensors are streamed, so memory does not grow with the model. The output folder appears
    under its name once it is complete.

    Args:
        load: run folder, step folder, Hugging Face folder, or a folder of ``quantize``.
        output: new folder.
        format: ``trtllm``, the checkpoint that TensorRT-LLM 1.0 to 1.2 build engines from;
            ``hf-quant`` and ``compressed-tensors``, Hugging Face folders of quantized weights.
        tensor_parallel_size: ranks that split each matrix, of ``trtllm``.
        pipeline_parallel_size: pipeline stages, of ``trtllm``.
        dtype: dtype of weights that are not quantized, for ``trtllm``: fp32, fp16 or bf16;
            empty: no cast.
        max_shard_bytes: limit of the bytes of tensors in one file of a Hugging Face folder.
        on_progress: called for each slab written.

    Raises:
        ValueError: if the format cannot hold the model, the ranks do not fit it, or an option
            has no effect on the format.
        CheckpointError: if files are damaged, the output exists, or the disk is full.
    """
    load, output = Path(load), Path(output)
    grid = RankGrid(tensor_parallel_size, pipeline_parallel_size)
    _check(format, grid, dtype, max_shard_bytes)
    form, folder = find_format(load)
    check_place(output, load)
    written_items: list[Item] = []

    def watch(items: Sequence[Item]) -> list[Item]:
        written_items.extend(items)
        check_room(output, sum(item.num_bytes for item in items))
        return with_progress([read_ahead(item, reading) for item in items], on_progress)

    notes: list[str] = []
    with (
        opened(form, folder) as source,
        ThreadPoolExecutor(1) as reading,
        atomic_dir(output) as unfinished,
    ):
        if format == "trtllm":
            report = write_trtllm(unfinished, source, grid, DTYPE_WORDS.get(dtype, ""), watch)
            word, notes = report.word, [*report.notes, *_notes(source)]
        elif format == "hf-quant":
            word = write_hf_quant(unfinished, source, max_shard_bytes, watch)
        else:
            word = write_compressed_tensors(unfinished, source, max_shard_bytes, watch)
    total = sum(item.num_bytes for item in written_items)
    return ExportReport(output, word, len(written_items), total, notes)


def _notes(source: OpenCheckpoint) -> list[str]:
    if not source.quantization or isinstance(source.theirs, WidenedRows):
        return []
    return [f"the source's weights were dequantized on reading: {source.quantization}."]


def _check(format: str, grid: RankGrid, dtype: str, max_shard_bytes: int) -> None:
    """Raise ValueError for unknown words and options without effect."""
    if format not in FORMATS:
        raise ValueError(f"--format {format} is not known: use {', '.join(FORMATS)}.")
    if dtype and dtype not in DTYPE_WORDS:
        raise ValueError(f"--dtype {dtype} is not known: use {', '.join(DTYPE_WORDS)}.")
    if format == "trtllm" and max_shard_bytes != MAX_SHARD_BYTES:
        raise ValueError(
            "--max-shard-size has no effect on --format trtllm, which has one file a rank: "
            "leave it out, or raise --tensor-parallel-size."
        )
    if format != "trtllm" and (grid != RankGrid() or dtype):
        raise ValueError(
            f"--format {format} is split by the engine that loads it and keeps its dtype: "
            "leave out --tensor-parallel-size, --pipeline-parallel-size and --dtype."
        )
