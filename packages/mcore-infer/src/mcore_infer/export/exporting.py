"""A trained model as a folder for another engine: opened, written, and there as a whole."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mcore_ckpt.conversion.conversion import DTYPE_WORDS
from mcore_ckpt.conversion.inspection import format_of
from mcore_ckpt.formats.sources import ReadOptions, opened
from mcore_ckpt.mapping.row_streams import Progress, read_ahead, with_progress
from mcore_ckpt.storage.files import Item
from mcore_ckpt.storage.outputs import appearing, check_place, check_room
from mcore_infer.export.trtllm import write_trtllm
from mcore_infer.export.trtllm_model import RankGrid

Format = Literal["trtllm"]
"""Words for folders to write."""

FORMATS: tuple[Format, ...] = ("trtllm",)
"""All of them."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export did."""

    output: Path
    """The folder."""
    word: str
    """The engine's class of the model."""
    num_tensors: int
    """Tensors in all files."""
    num_bytes: int
    """Bytes of tensors in all files."""
    notes: list[str] = field(default_factory=list)
    """What a user of the folder has to know."""


def export_model(
    load: str | Path,
    output: str | Path,
    *,
    format: Format,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    dtype: str = "",
    on_progress: Progress | None = None,
) -> ExportReport:
    """Write a model for another engine. No communication; one process does it.

    Tensors stream: memory stays small whatever the model's size. The folder appears under its
    name when it is complete.

    Args:
        load: run folder, step folder, or Hugging Face folder.
        output: folder to make.
        format: ``trtllm``, the checkpoint that TensorRT-LLM 1.0 to 1.2 build engines from.
        tensor_parallel_size: ranks that split each matrix, of ``trtllm``.
        pipeline_parallel_size: pipeline stages, of ``trtllm``.
        dtype: to cast weights to: fp32, fp16, bf16; empty: as they are.
        on_progress: called for each slab written.

    Raises:
        ValueError: if the format cannot say the model or the ranks do not fit it.
        CheckpointError: if files are damaged, the output is in the way, or the disk is full.
    """
    load, output = Path(load), Path(output)
    if dtype and dtype not in DTYPE_WORDS:
        raise ValueError(f"--dtype {dtype} is not known: use {', '.join(DTYPE_WORDS)}.")
    if format not in FORMATS:
        raise ValueError(f"--format {format} is not known: use {', '.join(FORMATS)}.")
    form, folder = format_of(load)
    check_place(output, load)
    grid = RankGrid(tensor_parallel_size, pipeline_parallel_size)
    watched: list[Item] = []

    def watch(items: Sequence[Item]) -> list[Item]:
        watched.extend(items)
        check_room(output, sum(item.num_bytes for item in items))
        return with_progress([read_ahead(item, reading) for item in items], on_progress)

    asked = ReadOptions(DTYPE_WORDS.get(dtype, ""))
    with (
        opened(form, folder, asked) as source,
        ThreadPoolExecutor(1) as reading,
        appearing(output) as unfinished,
    ):
        written = write_trtllm(unfinished, source, grid, watch)
    total = sum(item.num_bytes for item in watched)
    return ExportReport(output, written.word, len(watched), total, written.notes)
