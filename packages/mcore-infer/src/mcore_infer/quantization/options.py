"""Options of ``mcore-infer quantize``, one field for each flag; no import of torch."""

from dataclasses import dataclass
from typing import Literal

from mcore_base.options import Options, Rule, option


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeConfig(Options):
    """Method, format and calibration of a quantization."""

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
    ]
    """fp8: weights and inputs, one scale each; fp8-channel: a scale for each output and token;
    fp8-block: weights by 128x128; int8: weights only; w8a8: weights and inputs, smoothed;
    awq, gptq: weights in four bits by groups; nvfp4, mxfp4: four-bit floats by 16 and 32;
    mixed: four bits, fp8 or none for each matrix."""

    format: Literal["auto", "compressed-tensors", "hf-quant"] = "auto"
    """Form of the folder. compressed-tensors: vLLM, transformers and mcore-infer load it; hf-
    quant: the unified layout, which TensorRT-LLM and mcore-infer load, and vLLM if the method
    is fp8, fp8-channel or nvfp4; auto: compressed-tensors, but hf-quant for mixed."""

    budget: float = 0.0
    """Bits of a weight on average, for mixed, which divides them by the measured errors of the
    matrices."""

    group_size: int = option(0, minimum=0, needs={"method": ("awq", "gptq", "mixed")})
    """Inputs that share a scale, for awq, gptq and mixed; 0: 128."""

    kv_cache_dtype: Literal["bf16", "fp8"] = "bf16"
    """fp8: also write scales for keys and values; the engine then stores both in fp8."""

    exclude_modules: tuple[str, ...] = ()
    """Patterns of modules that stay in bfloat16."""

    calibration_tokens: int = option(65536, minimum=1)
    """Tokens for calibration, at most half of the text."""

    scored_tokens: int = option(65536, minimum=1)
    """Tokens after those, for the perplexity before and after."""

    speed_tokens: int = option(0, minimum=0)
    """Tokens to generate before and after, for the speed in the receipt; 0: not measured."""

    seq_length: int = option(0, minimum=0)
    """Tokens of a window; 0: the model's positions, at most 2048."""

    micro_batch_size: int = option(4, minimum=1)
    """Windows in one forward pass."""

    @property
    def form(self) -> Literal["compressed-tensors", "hf-quant"]:
        """Form of the folder; chosen by ``method`` if ``format`` is auto."""
        if self.format != "auto":
            return self.format
        return "hf-quant" if self.method == "mixed" else "compressed-tensors"

    @property
    def has_fp8_cache(self) -> bool:
        """Whether scales of an fp8 key/value cache are added."""
        return self.kv_cache_dtype == "fp8"

    rules = (
        Rule(
            ("budget", "method"),
            lambda v: bool(v.budget) != (v.method == "mixed"),
            "--budget {budget:g} with --method {method}: mixed needs the bits of a weight on "
            "average (6, for example); other methods have no budget.",
        ),
        Rule(
            ("format", "method"),
            lambda v: v.method == "mixed" and v.format == "compressed-tensors",
            "--format compressed-tensors has one layout for all modules, and --method mixed "
            "several: use --format hf-quant.",
        ),
    )
