"""The command ``mcore-infer export``: a model as a folder for another engine."""

import sys
from pathlib import Path
from typing import Literal

from mcore_ckpt.terminal import ended_by_sigterm, progress_line


def export(
    load: Path,
    output: Path,
    format: Literal["trtllm"],
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    dtype: Literal["", "fp32", "fp16", "bf16"] = "",
) -> int:
    """Write a trained model as a folder that another engine loads.

    Args:
        load: Run folder (its latest step), step folder, or Hugging Face folder.
        output: Folder to make.
        format: trtllm: the checkpoint that TensorRT-LLM 1.0 to 1.2 build engines from.
        tensor_parallel_size: Ranks of the engine that split each matrix.
        pipeline_parallel_size: Pipeline stages of the engine.
        dtype: To cast weights to; empty: as they are.
    """
    from mcore_ckpt.storage.sizes import size_text
    from mcore_infer.export.exporting import export_model

    with ended_by_sigterm():
        report = export_model(
            load,
            output,
            format=format,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            dtype=dtype,
            on_progress=progress_line(),
        )
    size = size_text(report.num_bytes)
    print(f"{report.output}: {report.word}, {report.num_tensors} tensors, {size}.")
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0
