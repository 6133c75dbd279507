"""The command ``mcore-infer quantize``: a folder of quantized weights, with its receipt."""

from pathlib import Path
from typing import Literal

from mcore_base.command_line import file_text
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
        output: New folder; receipt.md in it says what the quantization cost.
        calibration_data: Text files in UTF-8, like what the model will read.
        how: the method, and what it may cost.
        ckpt_step: Step of a run folder; 0: the latest.
        tokenizer: Folder or file of the tokenizer; empty: the one in the checkpoint.
        device: Where to compute; auto: cuda where it is present.
    """
    import torch

    from mcore_data.tokenizers.building import load_tokenizer
    from mcore_infer.quantization import quantizing

    refuse_ranks("quantize")
    text = "\n".join(file_text("--calibration-data", file) for file in calibration_data)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    receipt = quantizing.quantize(
        load,
        output,
        text,
        how,
        device=device,
        tokenizer=load_tokenizer(tokenizer) if tokenizer else None,
        step=ckpt_step,
    )
    print(
        f"{output}: {receipt.algo} for {', '.join(receipt.engines)} | perplexity "
        f"{receipt.perplexity_before:.4f} -> {receipt.perplexity_after:.4f} "
        f"({receipt.perplexity_change:+.3f} %) | "
        f"{receipt.bytes_before} -> {receipt.bytes_after} bytes | "
        f"{len(receipt.left)} module(s) left in bf16 | {output / 'receipt.md'}"
    )
    return 0
