"""The commands ``mcore-infer quantize`` and ``export``, which write folders in one process."""

import sys
from pathlib import Path
from typing import Literal

from mcore_base.command_line import file_text
from mcore_base.terminal import ended_by_sigterm, progress_line
from mcore_infer.commands.opening import refuse_ranks
from mcore_infer.quantization.options import QuantizeConfig


def quantize(
    load: str,
    output: Path,
    calibration_data: tuple[Path, ...],
    how: QuantizeConfig,
    ckpt_step: int = 0,
    tokenizer: str = "",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> int:
    """Quantize a model into a Hugging Face folder; --format chooses the engines that load it.

    Args:
        load: Run, step, Hugging Face or Megatron folder.
        output: New folder; its receipt.md lists the errors and the change of perplexity.
        calibration_data: Text files in UTF-8, similar to the model's future input.
        how: method, format and calibration.
        ckpt_step: Step of a run folder; 0: the latest.
        tokenizer: Folder or file of the tokenizer; empty: the one in the checkpoint.
        device: Device; auto: cuda if the machine has it.
    """
    import torch

    from mcore_data.tokenizers.building import load_tokenizer
    from mcore_infer.quantization import quantizing

    refuse_ranks("quantize")
    text = "\n".join(file_text("--calibration-data", file) for file in calibration_data)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    report = quantizing.quantize(
        load,
        output,
        text,
        how,
        device=device,
        tokenizer=load_tokenizer(tokenizer) if tokenizer else None,
        step=ckpt_step,
    )
    print(
        f"{output}: {report.algo} for {', '.join(report.engines)} | perplexity "
        f"{report.perplexity_before:.4f} -> {report.perplexity_after:.4f} "
        f"({report.perplexity_change:+.3f} %) | "
        f"{report.bytes_before} -> {report.bytes_after} bytes | "
        f"{len(report.left)} module(s) left in bf16 | {output / 'receipt.md'}"
    )
    return 0


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
        load: Run folder (its latest step), step folder, Hugging Face folder, or a folder of
            quantize.
        output: New folder.
        format: trtllm: the checkpoint that TensorRT-LLM 1.0 to 1.2 build engines from;
            hf-quant, compressed-tensors: a Hugging Face folder of quantized weights.
        tensor_parallel_size: Ranks of the engine that split each matrix, of trtllm.
        pipeline_parallel_size: Pipeline stages of the engine, of trtllm.
        dtype: Cast weights that are not quantized, for trtllm; empty: keep their dtype.
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
