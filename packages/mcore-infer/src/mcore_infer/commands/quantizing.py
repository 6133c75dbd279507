"""The command ``mcore-infer quantize``: a folder of quantized weights, with its receipt."""

from pathlib import Path
from typing import Literal


def quantize(
    load: str,
    output: Path,
    method: Literal[
        "fp8",
        "fp8-channel",
        "fp8-block",
        "int8",
        "w8a8",
        "awq",
        "gptq",
        "nvfp4",
        "mxfp4",
        "mixed",
    ],
    calibration_data: tuple[Path, ...],
    budget: float = 0.0,
    group_size: int = 0,
    kv_cache_dtype: Literal["bf16", "fp8"] = "bf16",
    exclude_modules: tuple[str, ...] = (),
    calibration_tokens: int = 65536,
    scored_tokens: int = 65536,
    speed_tokens: int = 0,
    seq_length: int = 0,
    micro_batch_size: int = 4,
    ckpt_step: int = 0,
    tokenizer: str = "",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> int:
    """Quantize a model into a Hugging Face folder that vLLM, TensorRT-LLM and this load.

    Args:
        load: Run, step or Hugging Face folder.
        output: New folder; receipt.md in it says what the quantization cost.
        method: fp8: weights and inputs, one scale each; fp8-channel: a scale for each output
            and token; fp8-block: weights by 128x128; int8: weights alone; w8a8: weights and
            inputs, smoothed; awq, gptq: weights in four bits by groups; nvfp4, mxfp4:
            four-bit floats by 16 and 32; mixed: four bits, fp8 or none for each matrix.
        calibration_data: Text files in UTF-8, like what the model will read.
        budget: Bits of a weight on average, of mixed; between its measured errors the matrices
            share them.
        group_size: Inputs that share a scale, of awq, gptq and mixed; 0: 128.
        kv_cache_dtype: fp8: also write scales for keys and values, which the engine then keeps
            in fp8.
        exclude_modules: Patterns of modules to leave in bfloat16.
        calibration_tokens: Tokens to calibrate on, at most half of the text.
        scored_tokens: Tokens behind them to measure perplexity on.
        speed_tokens: Tokens of one text to write before and after, for the speed in the
            receipt; 0: it is not measured.
        seq_length: Tokens of a window; 0: the model's positions, at most 2048.
        micro_batch_size: Windows in one forward pass.
        ckpt_step: Step of a run folder; 0: the latest.
        tokenizer: Folder or file of the tokenizer; empty: the one in the checkpoint.
        device: Where to compute; auto: cuda where it is present.
    """
    if bool(budget) != (method == "mixed"):
        raise ValueError(
            f"--budget {budget:g} with --method {method}: mixed needs the bits of a weight on "
            "average (6, say), and others have no budget."
        )
    if group_size and method not in ("awq", "gptq", "mixed"):
        raise ValueError(f"--group-size has no effect on --method {method}: leave it out.")
    import torch

    from mcore_data.tokenizers.building import load_tokenizer
    from mcore_infer.commands.evaluating import read_text
    from mcore_infer.quantization import quantizing

    text = "\n".join(read_text(file, "--calibration-data") for file in calibration_data)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    receipt = quantizing.quantize(
        load,
        output,
        text,
        quantizing.QuantizeConfig(
            method=method,
            budget=budget,
            group_size=group_size,
            kv_cache=kv_cache_dtype == "fp8",
            calibration_tokens=calibration_tokens,
            scored_tokens=scored_tokens,
            speed_tokens=speed_tokens,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            exclude_modules=exclude_modules,
        ),
        device=device,
        tokenizer=load_tokenizer(tokenizer) if tokenizer else None,
        step=ckpt_step,
    )
    print(
        f"{output}: {receipt.algo} | perplexity {receipt.perplexity_before:.4f} -> "
        f"{receipt.perplexity_after:.4f} ({receipt.perplexity_change:+.3f} %) | "
        f"{receipt.bytes_before} -> {receipt.bytes_after} bytes | "
        f"{len(receipt.left)} modules left in bf16 | {output / 'receipt.md'}"
    )
    return 0
