"""From a model to a folder of quantized weights: calibrate, round, write, read back, judge.

The output is a Hugging Face folder in the unified layout (``mcore_ckpt.formats.
quantized_layouts``), which appears whole, with a receipt of what was done and what it cost.
One process; the model must fit on its device.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mcore_ckpt.formats.quantization import WidenedRows
from mcore_ckpt.formats.quantized_layouts import METHODS, QuantLayout, layout_of
from mcore_ckpt.formats.sources import OpenCheckpoint, opened
from mcore_ckpt.storage.outputs import appearing, check_place
from mcore_ckpt.storage.paths import is_hf_folder, resolve_folder
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.evaluation.scoring import TextScore, score_documents
from mcore_infer.loading import LoadedModel, load_model
from mcore_infer.quantization.awq import scale_and_round
from mcore_infer.quantization.gptq import compensate_and_round
from mcore_infer.quantization.matrices import FusedMatrix, Selection, select
from mcore_infer.quantization.observing import (
    InputStatistics,
    largest_keys_and_values,
    observe,
)
from mcore_infer.quantization.receipt import MatrixReport, Receipt, write_receipt
from mcore_infer.quantization.rounding import (
    Rounded,
    input_scale,
    round_to_nearest,
    smooth_and_round,
)
from mcore_infer.quantization.writing import Quantized, links_of, write_folder
from mcore_parallel.mesh import ParallelContext

log = logging.getLogger(__name__)

_PAIRWISE = ("awq", "gptq")
"""Methods that need products of all pairs of inputs, so that they go block by block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeConfig:
    """How a model is quantized."""

    method: str
    """A word of ``METHODS``."""
    group_size: int = 0
    """Inputs that share a scale, of awq and gptq; 0: 128."""
    kv_cache: bool = False
    """Whether to add scales of an fp8 key/value cache."""
    calibration_tokens: int = 65536
    """Tokens of the text that are read for calibration, at most half of them."""
    scored_tokens: int = 65536
    """Tokens after these, that perplexity is measured on before and after."""
    seq_length: int = 0
    """Tokens of a window; 0: the model's positions, at most 2048."""
    micro_batch_size: int = 4
    """Windows in one forward pass."""
    exclude_modules: tuple[str, ...] = ()
    """Patterns of modules of the folder that stay as they are."""


@dataclass
class _Work:
    """What has been rounded so far."""

    done: dict[str, Quantized] = field(default_factory=dict)
    reports: list[MatrixReport] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)


def quantize(
    load: str | Path,
    output: str | Path,
    text: str,
    config: QuantizeConfig,
    *,
    device: str = "cpu",
    tokenizer: Tokenizer | None = None,
    step: int = 0,
) -> Receipt:
    """Quantize a model, write it as a Hugging Face folder, and judge what was written.

    Args:
        load: run, step or Hugging Face folder.
        output: new folder.
        text: for calibration, and behind that for perplexity.
        config: how.
        device: where to compute.
        tokenizer: None: the checkpoint's.
        step: of a run folder; 0: the latest.

    Raises:
        ValueError: if the model, the text or the output do not do.
    """
    output, folder = Path(output), resolve_folder(load, step)
    check_place(output, folder)
    layout = layout_of(METHODS[config.method], config.group_size)
    ctx = ParallelContext.single(device)
    loaded = load_model(folder, ctx, keep_codes=False)
    tokenizer = tokenizer or loaded.tokenizer
    if tokenizer is None:
        raise ValueError(f"{folder} holds no tokenizer: give its folder with --tokenizer.")
    windows, scored = _cut(loaded, tokenizer, text, config)
    begin_token = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    length = windows[0].shape[1]

    def judged(model: LoadedModel) -> TextScore:
        return score_documents(
            model.model,
            [scored],
            begin_token=begin_token or 0,
            context_tokens=length,
            batch=config.micro_batch_size,
        )

    with (
        opened("hf" if is_hf_folder(folder) else "mcore", folder) as source,
        appearing(output) as fresh,
    ):
        if isinstance(source.theirs, WidenedRows):
            raise ValueError(f"{folder} is quantized already: give the model it was made of.")
        links = links_of(source)
        log.info("perplexity of %s on %d tokens", folder, len(scored))
        before = judged(loaded)
        selection = select(loaded.model, links, layout, config.exclude_modules)
        if not selection.matrices:
            reasons = "; ".join(sorted(set(selection.left.values())))
            raise ValueError(f"nothing of {folder} can be quantized so: {reasons}.")
        tops = largest_keys_and_values(loaded.model, windows) if config.kv_cache else {}
        work = _rounded(loaded, selection, layout, config.method, windows)
        left = dict(selection.left)
        num_bytes = write_folder(
            fresh, source, loaded.model, layout, work.done, tuple(left), tops
        )
        log.info("reading %s back", output)
        after = judged(load_model(fresh, ctx))
        receipt = Receipt(
            method=config.method,
            algo=layout.algo,
            group=layout.group,
            source=str(load),
            data_sha256=hashlib.sha256(text.encode()).hexdigest(),
            calibration_tokens=sum(window.numel() for window in windows),
            scored_tokens=before.num_tokens,
            perplexity_before=before.perplexity,
            perplexity_after=after.perplexity,
            bytes_before=_num_bytes(source),
            bytes_after=num_bytes,
            matrices=tuple(work.reports),
            left=left,
            fallbacks=tuple(work.fallbacks),
        )
        write_receipt(fresh, receipt)
    return receipt


def _cut(
    loaded: LoadedModel, tokenizer: Tokenizer, text: str, config: QuantizeConfig
) -> tuple[list[Tensor], list[int]]:
    """Cut a text into windows of calibration and the tokens behind them."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    limit = loaded.description.config.max_position_embeddings or 2048
    length = config.seq_length or min(limit, 2048)
    used = min(config.calibration_tokens, len(ids) // 2)
    length = min(length, used)
    if length < 2:
        raise ValueError(
            f"--calibration-data has {len(ids)} tokens: it needs some hundreds at least, half "
            "to calibrate on and half to measure perplexity on."
        )
    rows = torch.tensor(ids[: used // length * length]).view(-1, length)
    scored = ids[used : used + config.scored_tokens]
    return list(rows.split(config.micro_batch_size)), scored


def _rounded(
    loaded: LoadedModel,
    selection: Selection,
    layout: QuantLayout,
    method: str,
    windows: Sequence[Tensor],
) -> _Work:
    """Round all matrices, in the model too; block by block where a method needs it."""
    work = _Work()
    layers = sorted({matrix.layer for matrix in selection.matrices})
    groups = [[layer] for layer in layers] if method in _PAIRWISE else [layers]
    for number, group in enumerate(groups, 1):
        chosen = [one for one in selection.matrices if one.layer in group]
        widths = {one.path: one.weight.shape[1] for one in chosen}
        part = f" block {number} of {len(groups)}" if len(groups) > 1 else ""
        has_pairs = method in _PAIRWISE
        seen = observe(loaded.model, windows, widths, has_pairs=has_pairs, what=part)
        amaxes = _input_amaxes(chosen, seen, work)
        for matrix in chosen:
            found = _METHODS[method](matrix, layout, seen[matrix.path])
            _finish(matrix, layout, found, seen[matrix.path], amaxes[matrix.path], work)
    return work


def _input_amaxes(
    chosen: Sequence[FusedMatrix], seen: Mapping[str, InputStatistics], work: _Work
) -> dict[str, Tensor]:
    """Return the largest input of each matrix; one that saw none takes its block's largest."""
    found = {}
    for matrix in chosen:
        own = seen[matrix.path]
        top = own.amax.amax()
        if not own.num_rows:
            top = torch.stack(
                [
                    seen[other.path].amax.amax()
                    for other in chosen
                    if other.layer == matrix.layer
                ]
            ).amax()
            work.fallbacks.append(
                f"{matrix.path} read no token of the calibration text: its weights are rounded "
                "to the nearest, its input scale is the largest of its block."
            )
        found[matrix.path] = top
    return found


def _finish(
    matrix: FusedMatrix,
    layout: QuantLayout,
    found: Rounded,
    seen: InputStatistics,
    amax: Tensor,
    work: _Work,
) -> None:
    """Put a rounded matrix into the model, note its error and what is to be written."""
    pre, original = found.pre_quant_scale, matrix.weight.float()
    effective = found.wide if pre is None else found.wide * pre
    # The norm before divides by what was folded: compare in the terms of the input as it was.
    comparable = effective if found.folded is None else effective / found.folded
    error = comparable - original
    scale = None
    if layout.input_scale:
        scale = input_scale(layout, amax if found.input_amax is None else found.input_amax)
    for member, packed, scales in zip(matrix.members, found.packed, found.scales, strict=True):
        work.done[member.module] = Quantized(packed, scales, scale, pre)
    relative = (error.norm() / original.norm().clamp(min=1e-30)).item()
    work.reports.append(
        MatrixReport(
            tuple(member.module for member in matrix.members),
            relative,
            seen.output_error(original, error) if seen.num_rows else float("nan"),
        )
    )
    with torch.no_grad():
        matrix.weight.copy_(effective)


def _num_bytes(source: OpenCheckpoint) -> int:
    return sum(
        source.ours.entries[name].num_bytes for link in source.links for name in link.ours
    )


_Method = Callable[[FusedMatrix, QuantLayout, InputStatistics], Rounded]


def _nearest(matrix: FusedMatrix, layout: QuantLayout, seen: InputStatistics) -> Rounded:
    del seen
    return round_to_nearest(matrix, layout)


_METHODS: Mapping[str, _Method] = {
    **dict.fromkeys(METHODS, _nearest),
    "w8a8": smooth_and_round,
    "awq": scale_and_round,
    "gptq": compensate_and_round,
}
