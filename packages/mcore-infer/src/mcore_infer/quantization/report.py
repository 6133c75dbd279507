"""Writes the report of a quantization: ``receipt.md``, and ``receipt.json`` for programs."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_base.atomic_files import write_durably

NAME = "receipt"
"""Name of both files in the folder, without the suffix."""

BANDS: Mapping[str, float] = {
    "FP8": 0.1,
    "FP8_PER_CHANNEL_PER_TOKEN": 0.1,
    "fp8_pb_wo": 0.1,
    "W8A16": 0.2,
    "W8A8_SQ_PER_CHANNEL": 0.2,
    "W4A16_AWQ": 2.0,
    "W4A16_GPTQ": 2.0,
}
"""Usual change of perplexity in percent, by algorithm, for models of a billion weights."""


@dataclass(frozen=True)
class MatrixReport:
    """Errors of one fused matrix."""

    modules: tuple[str, ...]
    """Modules of the folder that form the matrix."""
    weight_error: float
    """Norm of the error divided by the norm of the weight."""
    output_error: float
    """Relative error of the output, from second moments of the inputs; nan: no inputs."""
    algo: str
    """Algorithm of the stored codes."""


@dataclass(frozen=True, kw_only=True)
class QuantizationReport:
    """Method, perplexity, sizes and errors of a quantized folder."""

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
    """Hash of the text."""
    calibration_tokens: int
    scored_tokens: int
    """Tokens of the same text, after the tokens for calibration."""
    perplexity_before: float
    """Perplexity of the source, per token."""
    perplexity_after: float
    """Perplexity of the folder, read back."""
    token_loss_change: float
    """Root mean square of the change of a token's loss, in nats. Rounding makes this number
    positive even if gains and losses of tokens cancel in the perplexity."""
    perplexity_with_cache: float
    """Perplexity of the folder with an fp8 cache; 0: the cache has the model's dtype."""
    tokens_per_s: tuple[float, ...]
    """Speed of one text before and after, on the device; empty: not measured."""
    bytes_before: int
    """Size of the source's tensors."""
    bytes_after: int
    """Size of the folder's tensors."""
    kv_cache: str
    """Format of keys and values; empty: the model's."""
    matrices: tuple[MatrixReport, ...]
    left: Mapping[str, str]
    """Modules that stay in bfloat16, and why."""
    fallbacks: tuple[str, ...]
    """Notes on matrices that could not be calibrated."""
    has_experts: bool = False
    """Whether the model has experts."""

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines that load the folder."""
        return engines_of(self.form, self.method, has_experts=self.has_experts)

    @property
    def perplexity_change(self) -> float:
        """Change of the perplexity in percent; above 0: worse."""
        return 100 * (self.perplexity_after / self.perplexity_before - 1)

    @property
    def perplexity_change_error(self) -> float:
        """Standard error of the change in percent, if tokens were independent."""
        return 100 * self.token_loss_change / math.sqrt(self.scored_tokens)

    @property
    def change_with_cache(self) -> float:
        """Change of the perplexity with an fp8 cache, in percent."""
        after = self.perplexity_with_cache or self.perplexity_after
        return 100 * (after / self.perplexity_before - 1)


def engines_of(form: str, method: str, *, has_experts: bool) -> tuple[str, ...]:
    """Return the engines that load a folder of a form and method.

    Source: tests of the exports with vLLM 0.25.1 and transformers, and the documentation of
    TensorRT-LLM. vLLM has no int8 experts with a calibrated input scale.
    """
    if form == "compressed-tensors":
        vllm = () if has_experts and method == "w8a8" else ("vLLM",)
        return (*vllm, "transformers with compressed-tensors", "mcore-infer")
    vllm = ("vLLM",) if method in ("fp8", "fp8-channel", "nvfp4") else ()
    return (*vllm, "TensorRT-LLM", "mcore-infer")


def write_report(folder: Path, report: QuantizationReport) -> None:
    """Write the report to a folder, as JSON and as Markdown."""
    values: dict[str, Any] = asdict(report) | {
        "engines": report.engines,
        "perplexity_change_percent": report.perplexity_change,
        "perplexity_change_error_percent": report.perplexity_change_error,
        "perplexity_change_with_cache_percent": report.change_with_cache,
    }
    values["matrices"] = [_without_nan(asdict(matrix)) for matrix in report.matrices]
    text = json.dumps(values, indent=2).encode() + b"\n"
    write_durably(folder / f"{NAME}.json", text)
    write_durably(folder / f"{NAME}.md", as_markdown(report).encode())


def _without_nan(report: dict[str, Any]) -> dict[str, Any]:
    is_missing = math.isnan(report["output_error"])
    return report | {"output_error": None if is_missing else report["output_error"]}


def as_markdown(report: QuantizationReport) -> str:
    """Return the report as Markdown."""
    ranked = sorted(report.matrices, key=lambda matrix: -matrix.weight_error)
    size = 100 * (report.bytes_after / report.bytes_before - 1)
    text = f"""# Receipt: {report.method} ({report.algo})

Loads in: {", ".join(report.engines)} (form: {report.form}).

Made from `{report.source}`. Text of SHA-256 `{report.data_sha256[:16]}`:
{report.calibration_tokens} tokens for calibration, the next {report.scored_tokens} for the
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
        before, after = report.tokens_per_s
        text += f"| tokens/s of one text | {before:.1f} | {after:.1f} | "
        text += f"{100 * (after / before - 1):+.1f} % |\n"
    band = BANDS.get(report.algo)
    if band is not None and report.perplexity_change > band:
        worst = ranked[0]
        text += f"""
This exceeds {band} %, the usual change of {report.algo} for models of a billion weights.
Smaller models, and models with few channels a group, lose more. The worst matrix is
{", ".join(worst.modules)} ({100 * worst.weight_error:.2f} % of its weight):
`--exclude-modules` leaves it in bfloat16.
"""
    if report.fallbacks:
        text += "\n## Without calibration\n\n" + "".join(f"- {f}\n" for f in report.fallbacks)
    text += "\n## Errors, worst first\n\n| modules | stored as | weight | output |\n"
    text += "| --- | --- | --- | --- |\n"
    for matrix in ranked:
        error = matrix.output_error
        output = "-" if math.isnan(error) else f"{100 * error:.3f} %"
        names, weight = ", ".join(matrix.modules), f"{100 * matrix.weight_error:.3f} %"
        text += f"| {names} | {matrix.algo} | {weight} | {output} |\n"
    text += "\n## Left in bfloat16\n\n| module | why |\n| --- | --- |\n"
    return text + "".join(f"| {name} | {why} |\n" for name, why in report.left.items())
