"""What a quantization did and what it cost: ``receipt.md`` for people, ``receipt.json``."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_base.atomic_files import write_durably

NAME = "receipt"
"""Name of both files in the folder, without ending."""

BANDS: Mapping[str, float] = {
    "FP8": 0.1,
    "FP8_PER_CHANNEL_PER_TOKEN": 0.1,
    "fp8_pb_wo": 0.1,
    "W8A16": 0.2,
    "W8A8_SQ_PER_CHANNEL": 0.2,
    "W4A16_AWQ": 2.0,
    "W4A16_GPTQ": 2.0,
}
"""Change of perplexity in percent that is usual for a method on models of a billion weights."""


@dataclass(frozen=True)
class MatrixReport:
    """How well one fused matrix was rounded."""

    modules: tuple[str, ...]
    """Of the folder, which share scales."""
    weight_error: float
    """Norm of the error over that of the weight."""
    output_error: float
    """The same of the output, by the second moments of the inputs; nan: none was seen."""
    algo: str
    """How it is stored."""


@dataclass(frozen=True, kw_only=True)
class QuantizationReport:
    """All that is said of a quantized folder."""

    method: str
    algo: str
    """``quant_algo`` of the unified layout."""
    form: str
    """``compressed-tensors`` or ``hf-quant``, the unified layout."""
    group: tuple[int, int]
    """Outputs and inputs that share a scale; 0: all."""
    source: str
    """Folder that was quantized."""
    data_sha256: str
    """Of the text."""
    calibration_tokens: int
    scored_tokens: int
    """Of the same text, behind those of the calibration."""
    perplexity_before: float
    """Of the source, per token."""
    perplexity_after: float
    """Of the folder, read back."""
    token_loss_change: float
    """Root mean square of the change of a token's loss, nats. Above 0 wherever weights were
    rounded, while gains and losses of tokens may cancel in the perplexity."""
    perplexity_with_cache: float
    """The same with keys and values as ``kv_cache`` says; 0: they are the model's."""
    tokens_per_s: tuple[float, ...]
    """Of one text that is written, before and after, on the device; empty: not timed."""
    bytes_before: int
    """Of the source's tensors."""
    bytes_after: int
    """Of the folder's tensors."""
    kv_cache: str
    """Format of keys and values; empty: the model's."""
    matrices: tuple[MatrixReport, ...]
    left: Mapping[str, str]
    """Modules that stay in bfloat16, and why."""
    fallbacks: tuple[str, ...]
    """What could not be calibrated, and what was done instead."""
    has_experts: bool = False
    """Whether the model is a mixture."""

    @property
    def engines(self) -> tuple[str, ...]:
        """What loads the folder."""
        return engines_of(self.form, self.method, has_experts=self.has_experts)

    @property
    def perplexity_change(self) -> float:
        """In percent; above 0: worse."""
        return 100 * (self.perplexity_after / self.perplexity_before - 1)

    @property
    def perplexity_change_error(self) -> float:
        """Its standard error in percent, were tokens independent."""
        return 100 * self.token_loss_change / math.sqrt(self.scored_tokens)

    @property
    def change_with_cache(self) -> float:
        """The same with keys and values as ``kv_cache`` says."""
        after = self.perplexity_with_cache or self.perplexity_after
        return 100 * (after / self.perplexity_before - 1)


def engines_of(form: str, method: str, *, has_experts: bool) -> tuple[str, ...]:
    """Return what loads a folder of a form and method.

    vLLM 0.25.1 and transformers by the tests of the exports, TensorRT-LLM by its documentation.
    vLLM has no experts of int8 whose inputs have a calibrated scale.
    """
    if form == "compressed-tensors":
        vllm = () if has_experts and method == "w8a8" else ("vLLM",)
        return (*vllm, "transformers with compressed-tensors", "mcore-infer")
    vllm = ("vLLM",) if method in ("fp8", "fp8-channel", "nvfp4") else ()
    return (*vllm, "TensorRT-LLM", "mcore-infer")


def write_report(folder: Path, report: QuantizationReport) -> None:
    """Write both forms."""
    said: dict[str, Any] = asdict(report) | {
        "engines": report.engines,
        "perplexity_change_percent": report.perplexity_change,
        "perplexity_change_error_percent": report.perplexity_change_error,
        "perplexity_change_with_cache_percent": report.change_with_cache,
    }
    said["matrices"] = [_without_nan(asdict(matrix)) for matrix in report.matrices]
    text = json.dumps(said, indent=2).encode() + b"\n"
    write_durably(folder / f"{NAME}.json", text)
    write_durably(folder / f"{NAME}.md", as_markdown(report).encode())


def _without_nan(report: dict[str, Any]) -> dict[str, Any]:
    has_none = math.isnan(report["output_error"])
    return report | {"output_error": None if has_none else report["output_error"]}


def as_markdown(report: QuantizationReport) -> str:
    """Return the report as Markdown."""
    ranked = sorted(report.matrices, key=lambda one: -one.weight_error)
    size = 100 * (report.bytes_after / report.bytes_before - 1)
    text = f"""# Receipt: {report.method} ({report.algo})

Loads in: {", ".join(report.engines)} (form: {report.form}).

Made of `{report.source}`. Text of SHA-256 `{report.data_sha256[:16]}`:
{report.calibration_tokens} tokens for calibration, the {report.scored_tokens} behind them for
perplexity, before and after (this folder, read back).

| | before | after | change |
| --- | --- | --- | --- |
| perplexity per token | {report.perplexity_before:.4f} | {report.perplexity_after:.4f} | """
    text += f"{report.perplexity_change:+.3f} % (+- {report.perplexity_change_error:.3f}) |\n"
    text += (
        f"| loss of a token, nats | | | {report.token_loss_change:.4f} (root mean square) |\n"
    )
    if report.kv_cache:
        text += f"| with keys and values in {report.kv_cache} | {report.perplexity_before:.4f} "
        text += f"| {report.perplexity_with_cache:.4f} | {report.change_with_cache:+.3f} % |\n"
    text += f"| bytes of tensors | {report.bytes_before} | {report.bytes_after} | "
    text += f"{size:+.1f} % |\n"
    if report.tokens_per_s:
        slow, fast = report.tokens_per_s
        text += f"| tokens/s of one text | {slow:.1f} | {fast:.1f} | "
        text += f"{100 * (fast / slow - 1):+.1f} % |\n"
    band = BANDS.get(report.algo)
    if band is not None and report.perplexity_change > band:
        worst = ranked[0]
        text += f"""
That is more than the {band} % that is usual for {report.algo} on models of a billion weights:
smaller models, and those with few channels a group, lose more. The worst matrix is
{", ".join(worst.modules)} ({100 * worst.weight_error:.2f} % of its weight):
`--exclude-modules` leaves it in bfloat16.
"""
    if report.fallbacks:
        text += "\n## Without calibration\n\n" + "".join(f"- {f}\n" for f in report.fallbacks)
    text += "\n## Errors, worst first\n\n| modules | stored as | weight | output |\n"
    text += "| --- | --- | --- | --- |\n"
    for one in ranked:
        output = "-" if math.isnan(one.output_error) else f"{100 * one.output_error:.3f} %"
        names = ", ".join(one.modules)
        text += f"| {names} | {one.algo} | {100 * one.weight_error:.3f} % | {output} |\n"
    text += "\n## Left in bfloat16\n\n| module | why |\n| --- | --- |\n"
    return text + "".join(f"| {name} | {why} |\n" for name, why in report.left.items())
