"""Quantizes a model into a folder: calibrates, rounds, writes, reads back, evaluates.

The output is a Hugging Face folder of compressed-tensors or in the unified layout, with a
report of errors, perplexity and speed. The folder appears under its name once it is complete.
For compressed-tensors the unified folder is written first, inside the output, and removed. All
work runs in one process, and the model must fit on its device.
"""

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.formats.quantization import WidenedRows
from mcore_ckpt.formats.quantized_layouts import (
    METHODS,
    WEIGHT_SCALE,
    QuantLayout,
    find_layout,
)
from mcore_ckpt.formats.quantized_plans import QuantPlan
from mcore_ckpt.formats.recognition import folder_format
from mcore_ckpt.formats.sources import OpenCheckpoint, opened
from mcore_ckpt.mapping.rules import Link
from mcore_ckpt.storage.files import Item
from mcore_ckpt.storage.outputs import atomic_dir, check_place
from mcore_ckpt.storage.paths import resolve_folder
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.config import SamplingConfig
from mcore_infer.engine.engine import Engine
from mcore_infer.engine.fp8_cache import rounded_cache
from mcore_infer.engine.limits import EngineConfig, Fp8Cache
from mcore_infer.evaluation.scoring import TextScore, counted_losses, plan_windows
from mcore_infer.loading import LoadedModel, load_model
from mcore_infer.quantization.budget import Candidate, check_budget, choose_candidates
from mcore_infer.quantization.compressed_tensors import layer_before, write_compressed_tensors
from mcore_infer.quantization.matrices import FusedMatrix, Selection, select
from mcore_infer.quantization.methods import (
    RoundedMatrix,
    compensate_and_round,
    input_scale,
    round_to_nearest,
    scale_and_round,
    smooth_and_round,
)
from mcore_infer.quantization.observing import InputStatistics, largest_keys_and_values, observe
from mcore_infer.quantization.options import QuantizeConfig
from mcore_infer.quantization.report import MatrixReport, QuantizationReport, write_report
from mcore_infer.quantization.unified_folder import (
    MAX_FILE_BYTES,
    QuantizedTensor,
    excluded,
    find_links,
    write_folder,
)
from mcore_models.protocol import LanguageModel
from mcore_parallel.mesh import ParallelContext

log = logging.getLogger(__name__)
_FEWEST_TOKENS = 256
"""Fewest tokens of a calibration text: enough to run, too few to measure a perplexity."""

MIXED_METHOD = "mixed"
"""The ``--method`` of ``budget.choose_candidates``."""
_NEAREST = "int8"
"""Method that rounds to the nearest, for any layout."""
_SCALES_INPUTS = ("awq", "w8a8")
"""Methods that scale inputs, and weights by the inverse."""
_PAIRWISE = ("awq", "gptq")
"""Methods that need products of all pairs of inputs; they run block by block."""


@dataclass
class _Rounded:
    """Tensors, reports and notes of the matrices that have been rounded so far."""

    done: dict[str, QuantizedTensor] = field(default_factory=dict)
    reports: list[MatrixReport] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _ScalePlacement:
    """Decides for which matrices the written format can represent scales of inputs."""

    is_free: bool
    """Whether the format stores scales of inputs; else the previous layer absorbs them."""
    names: frozenset[str]
    """Tensors of the folder, including scales."""
    description: Mapping[str, Any]
    kv_cache: bool

    @classmethod
    def of(
        cls, source: OpenCheckpoint, selection: Selection, config: QuantizeConfig
    ) -> "_ScalePlacement":
        """Collect the names of the folder's tensors, without reading the tensors."""
        modules = [m.module for matrix in selection.matrices for m in matrix.members]
        names = {link.theirs for link in find_links(source)}
        names |= {f"{module}.{WEIGHT_SCALE}" for module in modules}
        is_free = config.form == "hf-quant"
        return cls(is_free, frozenset(names), source.description, config.has_fp8_cache)

    def takes(self, matrix: FusedMatrix, method: str) -> bool:
        """Whether the written format can represent the input scales of a method."""
        # AWQ itself folds the scales into a norm that only this matrix reads.
        is_in_norm = method == "awq" and matrix.norm is not None
        if self.is_free or is_in_norm or method not in _SCALES_INPUTS:
            return True
        return all(
            layer_before(member.module, self.names, self.description, kv_cache=self.kv_cache)[0]
            for member in matrix.members
        )


def quantize(
    load: str | Path,
    output: str | Path,
    text: str,
    config: QuantizeConfig,
    *,
    device: str = "cpu",
    tokenizer: Tokenizer | None = None,
    step: int = 0,
) -> QuantizationReport:
    """Quantize a model, write it as a Hugging Face folder, read it back and evaluate it.

    Args:
        load: run, step or Hugging Face folder.
        output: new folder.
        text: text whose first tokens are for calibration, and the following for perplexity.
        config: method, format and calibration.
        device: device of the model.
        tokenizer: tokenizer of the model; None: the checkpoint's tokenizer.
        step: step of a run folder; 0: the latest.

    Raises:
        ValueError: if the model cannot be quantized, the text is too short, or the output
            exists.
    """
    output, folder = Path(output), resolve_folder(load, step, takes_any=True)
    check_place(output, folder)
    ctx = ParallelContext.single(device)
    loaded = load_model(folder, ctx, keep_codes=False)
    tokenizer = tokenizer or loaded.tokenizer
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer: give its folder with --tokenizer.")
    windows, scored = _cut(loaded, tokenizer, text, config)
    batch = (config.micro_batch_size, windows[0].shape[1])
    token_losses = partial(_losses, tokenizer, scored, batch)
    with opened(folder_format(folder), folder) as source, atomic_dir(output) as fresh:
        if isinstance(source.theirs, WidenedRows):
            raise ValueError(
                f"{folder} is already quantized: give the model from which it was made."
            )
        selection, candidates = _chosen(loaded, find_links(source), config, windows)
        log.info("perplexity of %s on %d tokens", folder, len(scored))
        before, speeds = token_losses(loaded.model), _timed(loaded, config)
        tops = largest_keys_and_values(loaded.model, windows) if config.has_fp8_cache else {}
        work = _rounded(
            loaded,
            selection,
            candidates,
            windows,
            _ScalePlacement.of(source, selection, config),
        )
        left, plan = dict(selection.left), _plan(selection, candidates, config)
        num_bytes = _write(fresh, source, loaded.model, plan, work, tops, config.form)
        log.info("reading %s back", output)
        written = load_model(fresh, ctx)
        after, speeds = token_losses(written.model), speeds + _timed(written, config)
        with_cache = _perplexity_with_cache(written, token_losses, len(scored))
        report = QuantizationReport(
            method=config.method,
            algo=plan.algo,
            form=config.form,
            group=plan.layout.group,
            source=str(load),
            data_sha256=hashlib.sha256(text.encode()).hexdigest(),
            calibration_tokens=sum(window.numel() for window in windows),
            scored_tokens=len(scored),
            perplexity_before=_perplexity(before, len(scored)),
            perplexity_after=_perplexity(after, len(scored)),
            token_loss_change=((after - before).square().sum() / len(scored)).sqrt().item(),
            perplexity_with_cache=with_cache,
            tokens_per_s=speeds,
            bytes_before=_num_bytes(source),
            bytes_after=num_bytes,
            kv_cache="fp8" if config.has_fp8_cache else "",
            matrices=tuple(work.reports),
            left=left,
            fallbacks=tuple(work.fallbacks),
            has_experts=bool(loaded.description.moe.num_experts),
        )
        write_report(fresh, report)
    return report


def _write(
    folder: Path,
    source: OpenCheckpoint,
    model: LanguageModel,
    plan: QuantPlan,
    work: _Rounded,
    tops: Mapping[int, Mapping[str, Tensor]],
    form: str,
) -> int:
    """Write the quantized model in the requested form; return the bytes of its tensors."""
    if form == "hf-quant":
        return write_folder(folder, source, model, plan, work.done, tops)
    unified, num_bytes = folder / "unified", 0

    def count(items: Sequence[Item]) -> list[Item]:
        nonlocal num_bytes
        num_bytes = sum(item.num_bytes for item in items)
        return list(items)

    unified.mkdir()
    write_folder(unified, source, model, plan, work.done, tops)
    with opened("hf", unified) as written:
        write_compressed_tensors(folder, written, MAX_FILE_BYTES, count)
    shutil.rmtree(unified)
    return num_bytes


def _losses(
    tokenizer: Tokenizer, scored: Sequence[int], shape: tuple[int, int], model: LanguageModel
) -> Tensor:
    """Return the loss of every scored token, in windows of ``shape``; padding has loss 0."""
    begin_token = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    batch, length = shape
    windows = plan_windows([len(scored)], length, max(1, length // 2))
    begin_token = begin_token or 0
    parts = counted_losses(model, [scored], windows, begin_token=begin_token, batch=batch)
    return torch.cat([losses.flatten() for losses in parts])


def _perplexity(losses: Tensor, num_tokens: int) -> float:
    return TextScore(losses.sum().item(), num_tokens).perplexity


def _perplexity_with_cache(
    written: LoadedModel, token_losses: Callable[[LanguageModel], Tensor], num_tokens: int
) -> float:
    """Return the perplexity with an fp8 cache; 0: the folder has no scales of a cache."""
    if not written.kv_scales:
        return 0.0
    with rounded_cache(written.model, Fp8Cache(written.kv_scales)):
        return _perplexity(token_losses(written.model), num_tokens)


def _timed(loaded: LoadedModel, config: QuantizeConfig) -> tuple[float, ...]:
    """Measure the tokens that a model generates per second; empty if ``speed_tokens`` is 0."""
    if not config.speed_tokens:
        return ()
    cache = Fp8Cache(loaded.kv_scales) if loaded.kv_scales else None
    return (tokens_per_second(loaded.model, config.speed_tokens, cache),)


def _cut(
    loaded: LoadedModel, tokenizer: Tokenizer, text: str, config: QuantizeConfig
) -> tuple[list[Tensor], list[int]]:
    """Split a text into windows for calibration, and the tokens to score after the windows."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    limit = loaded.description.config.max_position_embeddings or 2048
    length = config.seq_length or min(limit, 2048)
    num_used = min(config.calibration_tokens, len(ids) // 2)
    length = min(length, num_used)
    if len(ids) < _FEWEST_TOKENS:
        raise ValueError(
            f"--calibration-data has {len(ids)} tokens: give at least {_FEWEST_TOKENS}, and "
            "preferably many thousands. Half of them are for calibration, half for perplexity."
        )
    rows = torch.tensor(ids[: num_used // length * length]).view(-1, length)
    scored = ids[num_used : num_used + config.scored_tokens]
    return list(rows.split(config.micro_batch_size)), scored


def _chosen(
    loaded: LoadedModel,
    links: Sequence[Link],
    config: QuantizeConfig,
    windows: Sequence[Tensor],
) -> tuple[Selection, dict[str, Candidate]]:
    """Choose the matrices to quantize, and the method of each."""
    method = "fp8" if config.method == MIXED_METHOD else config.method
    layout = find_layout(METHODS[method], config.group_size if method == config.method else 0)
    selection = select(
        loaded.model,
        links,
        layout,
        config.exclude_modules,
        whole_blocks=config.form == "compressed-tensors",
    )
    if not selection.matrices:
        reasons = "; ".join(sorted(set(selection.left.values())))
        raise ValueError(
            f"no matrix of {loaded.folder} can be quantized with these options: {reasons}."
        )
    if method == config.method:
        return selection, {m.path: Candidate(method, layout) for m in selection.matrices}
    check_budget(selection.matrices, config.budget, config.group_size)
    widths = {matrix.path: matrix.weight.shape[1] for matrix in selection.matrices}
    statistics = observe(loaded.model, windows, widths, has_pairs=False, what=" the budget")
    candidates = choose_candidates(
        selection.matrices, statistics, config.budget, config.group_size
    )
    if not candidates:
        raise ValueError(
            f"--budget {config.budget:g} leaves every matrix in 16 bits: give fewer bits, such "
            "as 6."
        )
    quantized = tuple(matrix for matrix in selection.matrices if matrix.path in candidates)
    names = (
        member.module
        for matrix in selection.matrices
        if matrix.path not in candidates
        for member in matrix.members
    )
    left = dict(selection.left) | dict.fromkeys(names, "loses most: the budget leaves it out")
    return Selection(quantized, left), candidates


def _plan(
    selection: Selection, candidates: Mapping[str, Candidate], config: QuantizeConfig
) -> QuantPlan:
    """Return the plan of layouts that the folder's configs describe."""
    layers = {
        member.module: candidates[matrix.path].layout
        for matrix in selection.matrices
        for member in matrix.members
    }
    return QuantPlan(
        layout=next(iter(layers.values())),
        layers=layers if config.method == MIXED_METHOD else {},
        exclude_modules=excluded(tuple(selection.left)),
        kv_cache=config.has_fp8_cache,
    )


def _rounded(
    loaded: LoadedModel,
    selection: Selection,
    candidates: Mapping[str, Candidate],
    windows: Sequence[Tensor],
    placement: _ScalePlacement,
) -> _Rounded:
    """Round all matrices, and write the rounded weights into the model.

    With a method that needs products of pairs of inputs, proceeds block by block: each block is
    calibrated with the rounded blocks before it, and the products take memory for one block.
    """
    work = _Rounded()
    layers = sorted({matrix.layer for matrix in selection.matrices})
    has_pairs = any(candidate.method in _PAIRWISE for candidate in candidates.values())
    groups = [[layer] for layer in layers] if has_pairs else [layers]
    for number, group in enumerate(groups, 1):
        chosen = [matrix for matrix in selection.matrices if matrix.layer in group]
        widths = {matrix.path: matrix.weight.shape[1] for matrix in chosen}
        part = f" block {number} of {len(groups)}" if len(groups) > 1 else ""
        statistics = observe(loaded.model, windows, widths, has_pairs=has_pairs, what=part)
        amaxes = _input_amaxes(chosen, statistics, work)
        for matrix in chosen:
            method, layout = candidates[matrix.path]
            if not placement.takes(matrix, method):
                method = _NEAREST
                work.fallbacks.append(
                    f"{matrix.path}: no previous layer can scale its inputs, which --format "
                    "compressed-tensors needs: its weights are rounded to the nearest."
                )
            seen = statistics[matrix.path]
            rounded = _METHODS[method](matrix, layout, seen)
            _finish(matrix, layout, rounded, seen, amaxes[matrix.path], work)
    return work


def _input_amaxes(
    chosen: Sequence[FusedMatrix], statistics: Mapping[str, InputStatistics], work: _Rounded
) -> dict[str, Tensor]:
    """Return the largest input of each matrix.

    A matrix without inputs (an expert without tokens) gets the largest input of its block.
    """
    largest = {}
    for matrix in chosen:
        seen = statistics[matrix.path]
        top = seen.amax.amax()
        if not seen.num_rows:
            top = torch.stack(
                [
                    statistics[other.path].amax.amax()
                    for other in chosen
                    if other.layer == matrix.layer
                ]
            ).amax()
            work.fallbacks.append(
                f"{matrix.path} had no token of the calibration text: its weights are rounded "
                "to the nearest, its input scale is the largest of its block."
            )
        largest[matrix.path] = top
    return largest


def _finish(
    matrix: FusedMatrix,
    layout: QuantLayout,
    rounded: RoundedMatrix,
    seen: InputStatistics,
    amax: Tensor,
    work: _Rounded,
) -> None:
    """Write a rounded matrix into the model; record its error, codes and scales."""
    pre, original = rounded.pre_quant_scale, matrix.weight.float()
    effective = rounded.wide if pre is None else rounded.wide * pre
    # If the previous norm divides its output by the folded factor, divide the weight by the
    # same factor to compare it with the original weight.
    comparable = effective if rounded.folded is None else effective / rounded.folded
    error = comparable - original
    scale = None
    if layout.input_scale:
        scale = input_scale(layout, amax if rounded.input_amax is None else rounded.input_amax)
    if pre is None and layout.pre_quant_scale == "all":
        pre = torch.ones(matrix.weight.shape[1], device=matrix.weight.device)
    for member, packed, scales in zip(
        matrix.members, rounded.packed, rounded.scales, strict=True
    ):
        work.done[member.module] = QuantizedTensor(packed, scales, scale, pre)
    relative = (error.norm() / original.norm().clamp(min=1e-30)).item()
    work.reports.append(
        MatrixReport(
            tuple(member.module for member in matrix.members),
            relative,
            seen.output_error(original, error) if seen.num_rows else float("nan"),
            layout.algo,
        )
    )
    with torch.no_grad():
        matrix.weight.copy_(effective)


def _num_bytes(source: OpenCheckpoint) -> int:
    return sum(
        source.ours.entries[name].num_bytes for link in source.links for name in link.ours
    )


_Method = Callable[[FusedMatrix, QuantLayout, InputStatistics], RoundedMatrix]


def _nearest(matrix: FusedMatrix, layout: QuantLayout, seen: InputStatistics) -> RoundedMatrix:
    del seen
    return round_to_nearest(matrix, layout)


_METHODS: Mapping[str, _Method] = {
    **dict.fromkeys(METHODS, _nearest),
    "w8a8": smooth_and_round,
    "awq": scale_and_round,
    "gptq": compensate_and_round,
}


_FIRST = 8
"""Number of tokens before timing starts, in which kernels are tried and steps recorded."""


def tokens_per_second(
    model: LanguageModel, num_tokens: int, fp8_cache: Fp8Cache | None = None
) -> float:
    """Measure the tokens that an engine generates per second for one text."""
    length = 1 + _FIRST + num_tokens
    engine = Engine(
        model,
        EngineConfig(
            max_requests=1,
            max_sequence_tokens=length,
            num_pages=-(-length // 64),
            fp8_cache=fp8_cache,
        ),
    )
    engine.add([0], SamplingConfig(num_tokens=length - 1, top_k=1))
    for _ in range(_FIRST):
        engine.step()
    _wait(engine.device)
    begin, num_written = time.perf_counter(), 0
    for event in engine.run():
        num_written += not isinstance(event, tuple)
    _wait(engine.device)
    return num_written / (time.perf_counter() - begin)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
