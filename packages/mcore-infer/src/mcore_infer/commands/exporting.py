"""The command ``mcore-infer export``: a model as a folder for another engine."""

import sys
from pathlib import Path
from typing import Literal

from mcore_base.terminal import ended_by_sigterm, progress_line
from mcore_infer.commands.opening import refuse_ranks


def export(
    load: Path,
    output: Path,
    format: Literal["trtllm", "hf-quant", "compressed-tensors"],
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    dtype: Literal["", "fp32", "fp16", "bf16"] = "",
    max_shard_size: str = "5GB",
) -> int:
    """Write a trained model as a folder that another engine loads.

    Args:
        load: Run folder (its latest step), step folder, Hugging Face folder, or one that
            quantize wrote.
        output: Folder to make.
        format: trtllm: the checkpoint that TensorRT-LLM 1.0 to 1.2 build engines from;
            hf-quant, compressed-tensors: a Hugging Face folder of quantized weights.
        tensor_parallel_size: Ranks of the engine that split each matrix, of trtllm.
        pipeline_parallel_size: Pipeline stages of the engine, of trtllm.
        dtype: To cast plain weights of trtllm to; empty: as they are.
        max_shard_size: Most bytes of a file of a Hugging Face folder, with MB or GB.
    """
    from mcore_base.terminal import parse_size, size_text
    from mcore_infer.export.exporting import export_model

    refuse_ranks("export")
    with ended_by_sigterm():
        report = export_model(
            load,
            output,
            format=format,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            dtype=dtype,
            max_shard_bytes=parse_size(max_shard_size),
            on_progress=progress_line(),
        )
    size = size_text(report.num_bytes)
    print(f"{report.output}: {report.word}, {report.num_tensors} tensors, {size}.")
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0
