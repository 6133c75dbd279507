"""Convert checkpoints between Hugging Face, mcore, Megatron and torch.distributed.checkpoint.

Every format is read as logical tensors and written from them, rows at a time, so that memory
does not grow with the model; only transposed matrices are held in memory, one at a time. At the
end of a conversion the output is opened like an input, mapped back to the source's tensors, and
compared with them bit by bit.
"""

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mcore_base.stores import as_path, is_store
from mcore_ckpt.conversion.inspection import native_step
from mcore_ckpt.conversion.logit_check import (
    CAST_ROUNDING,
    ROUNDING,
    compare_logits,
    require_model,
)
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.conversion.resharding import write_whole
from mcore_ckpt.conversion.round_trip import verify_native, verify_written
from mcore_ckpt.conversion.targets import (
    WRITERS,
    Watch,
    check_target,
    our_items,
    write_small_files,
)
from mcore_ckpt.formats.hf_folder import TOKENIZER_FILES, num_tokens, read_hf_folder
from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint
from mcore_ckpt.formats.sources import FORMATS, opened
from mcore_ckpt.mapping.row_streams import Progress, Rows, read_ahead, with_progress
from mcore_ckpt.storage.checksums import finalize_index
from mcore_ckpt.storage.files import Item
from mcore_ckpt.storage.index import Index
from mcore_ckpt.storage.outputs import (
    atomic_dir,
    check_place,
    check_room,
    check_run_folder,
    fresh_step,
)
from mcore_ckpt.storage.paths import RELEASE, commit, is_peft_folder

STATE_FORMATS = ("mcore", "megatron")
"""Formats whose optimizer state carries the names of the weights."""


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """Result of a conversion, for the command to print."""

    output: Path
    """Folder that was written: a run folder, or a folder of the target format."""
    family: str
    """``model_type`` of a Hugging Face model, else the format's own name for the model."""
    num_tensors: int
    """Logical tensors, each used exactly once."""
    num_bytes: int
    """Bytes of weights written."""
    is_proven: bool
    """Whether the result was read back and compared with the source."""
    fingerprint: str = ""
    """Hash of all logical tensors as read back, equal in all formats; empty: not read back."""
    left_behind: int = 0
    """Entries of the source that are not converted because they are not weights."""
    has_tokenizer: bool = True
    """Whether a tokenizer was copied."""
    logits_differ_by: float | None = None
    """Largest difference between logits of mcore-models and of transformers, relative to the
    largest logit; None: not compared."""
    quantization: str = ""
    """How the source stores its quantized matrices, which were dequantized; empty: not
    quantized."""
    not_carried: tuple[str, ...] = ()
    """Other files of the source that were not copied."""


def convert(
    source_format: str,
    source: str | Path,
    target_format: str,
    output: str | Path,
    options: ConvertOptions | None = None,
    *,
    on_progress: Progress | None = None,
) -> ConversionReport:
    """Convert a checkpoint to another format, or to its own (cast, reshard).

    Args:
        source_format: ``hf``, ``mcore``, ``megatron`` or ``dcp``.
        source: folder of the checkpoint.
        target_format: one of the same.
        output: folder to create; an mcore run folder may exist and gets a release.
        options: casts, vocabulary and checks.
        on_progress: called for each slab written; then, counted from 0 again, for each tensor
            read back.

    Raises:
        ValueError: if a format is unknown, the target cannot express the model, or its logits
            cannot be compared.
        CheckpointError: if files are damaged, the output exists already, or the proof fails.
    """
    options = options or ConvertOptions()
    _check_formats(source_format, source, target_format, output, options)
    output = as_path(output)
    check_place(output, as_path(source))
    if target_format == "mcore":
        check_run_folder(output)
    if source_format == "mcore":
        native_step(source)  # raises an error with the format of another program's folder
    written_items: list[Item] = []

    def watch(items: Sequence[Item]) -> list[Item]:
        written_items.extend(items)
        check_room(output, sum(item.num_bytes for item in items))
        return with_progress([read_ahead(item, reading) for item in items], on_progress)

    with opened(source_format, source, options) as checkpoint, ThreadPoolExecutor(1) as reading:
        _check_config(checkpoint, source, options.config)
        _check_tokens(checkpoint, options.vocab_size)
        if options.check:
            require_model(checkpoint.description)
        logit_errors: list[float] = []

        def judge(written: Rows, folder: Path) -> None:
            if not options.check:
                return
            # transformers runs the side that is a Hugging Face folder, mcore-models the other.
            is_export = source_format != "hf" and target_format == "hf"
            weights = checkpoint.ours if is_export else written
            embedding = "embedding.weight"
            rows = min(side.entries[embedding].shape[0] for side in (checkpoint.ours, written))
            bound = CAST_ROUNDING if options.dtype else ROUNDING
            with ExitStack() as stack:
                if not is_export:
                    folder = _as_hf(stack, source_format, as_path(source), options)
                logit_errors.append(compare_logits(checkpoint, weights, rows, folder, bound))

        fingerprint = ""
        if target_format == "mcore":
            verify = None
            if options.verify or options.check:
                verify = partial(verify_native, judge=judge, on_progress=on_progress)
            model_name, fingerprint = write_release(checkpoint, output, watch, verify)
        else:
            with atomic_dir(output) as folder:
                model_name = WRITERS[target_format](folder, checkpoint, options, watch)
                if options.verify or options.check:
                    fingerprint = verify_written(
                        checkpoint, target_format, folder, judge, on_progress
                    )
        return ConversionReport(
            output,
            model_name,
            len(checkpoint.ours.entries),
            sum(item.num_bytes for item in written_items),
            options.verify or options.check,
            fingerprint,
            checkpoint.left_behind,
            any(name in TOKENIZER_FILES for name in checkpoint.tokenizer),
            logit_errors[0] if logit_errors else None,
            checkpoint.quantization,
            checkpoint.not_carried,
        )


def _as_hf(stack: ExitStack, source_format: str, source: Path, options: ConvertOptions) -> Path:
    """Return the source if it is a Hugging Face folder, else a copy that ``stack`` removes."""
    is_model = source_format == "hf" and not is_peft_folder(source)
    if is_model and "model_type" in read_hf_folder(source).config:
        return source
    copy = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "hf"
    convert(source_format, source, "hf", copy, ConvertOptions(config=options.config))
    return copy


def hf_to_mcore(
    source: str | Path,
    output: str | Path,
    options: ConvertOptions | None = None,
    *,
    on_progress: Progress | None = None,
) -> ConversionReport:
    """Convert a Hugging Face folder to a run folder with a ``release``, as ``convert`` does."""
    return convert("hf", source, "mcore", output, options, on_progress=on_progress)


def mcore_to_hf(
    source: str | Path,
    output: str | Path,
    options: ConvertOptions | None = None,
    *,
    on_progress: Progress | None = None,
) -> ConversionReport:
    """Convert a step of mcore to a Hugging Face folder, as ``convert`` does."""
    return convert("mcore", source, "hf", output, options, on_progress=on_progress)


def write_release(
    source: OpenCheckpoint,
    output: Path,
    watch: Watch,
    verify: Callable[[OpenCheckpoint, Path, Index], str] | None,
) -> tuple[str, str]:
    """Write a checkpoint into a run folder: a release, or the step of its optimizer's state.

    Args:
        source: checkpoint to write.
        output: run folder.
        watch: wraps the items to write.
        verify: compares the written step with the source and returns a fingerprint; None:
            nothing is read back.

    Returns:
        ``model_type`` and the fingerprint.
    """
    extra: dict[str, Any] = {"model": source.description, "hf": source.hf}
    step: int | str = RELEASE
    if source.state is not None:
        # An empty layout, so that a run that resumes does not restore random streams.
        extra |= {"schedule": {}, **source.state.progress, "parallel": {}}
        step = extra["iteration"]
    with fresh_step(output, step) as target:
        index = write_whole(target, watch(our_items(source)), extra)
        write_small_files(target, source)
        fingerprint = verify(source, target, index) if verify else ""
        commit(target, output, step, finalize_index(index, target))
    return source.hf.get("model_type") or source.description["family"], fingerprint


def _check_formats(
    source_format: str,
    source: str | Path,
    target_format: str,
    output: str | Path,
    options: ConvertOptions,
) -> None:
    """Raise ValueError for unknown formats and for options without effect on these formats."""
    for format_name in (source_format, target_format):
        if format_name not in FORMATS:
            raise ValueError(f"format {format_name!r} is not known: use {', '.join(FORMATS)}.")
        if options.optimizer and format_name not in STATE_FORMATS:
            raise ValueError(
                f"--optimizer converts between {' and '.join(STATE_FORMATS)} only: leave it "
                f"out to convert the weights with {format_name}."
            )
    if options.keep_unknown_config_fields and source_format != "hf":
        raise ValueError(
            "--keep-unknown-config-fields has no effect on an input in the format "
            f"{source_format}: leave it out."
        )
    folders = ((source_format, as_path(source)), (target_format, as_path(output)))
    for format_name, folder in folders:
        if format_name != "mcore" and is_store(folder):
            raise ValueError(
                f"{folder} lies in an object store, where only checkpoints of mcore are read "
                f"and written: copy the {format_name} side to or from a disk."
            )
    check_target(options, target_format)


def _check_config(source: OpenCheckpoint, folder: str | Path, config: str) -> None:
    """Raise ValueError for ``--config`` if the input itself names its model."""
    if config and not source.took_config:
        raise ValueError(
            f"--config {config} has no effect: {folder} itself names its model. Leave it out."
        )


def _check_tokens(source: OpenCheckpoint, vocab_size: int) -> None:
    """Raise ValueError if ``--vocab-size`` removes rows that the tokenizer has ids for."""
    needed = num_tokens(source.tokenizer)
    if 0 < vocab_size < needed:
        raise ValueError(
            f"--vocab-size {vocab_size} removes ids of the copied tokenizer, which has "
            f"{needed}: give {needed} or more."
        )
