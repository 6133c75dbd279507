"""Writes adapters of mcore as a folder that Hugging Face PEFT reads."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mcore_base.stores import as_path
from mcore_ckpt.conversion.conversion import ConversionReport
from mcore_ckpt.conversion.inspection import native_step
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.conversion.targets import target_model_type
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.families import find_family
from mcore_ckpt.formats.open_checkpoint import PREFIX
from mcore_ckpt.formats.peft_folder import read_adapters, write_adapters
from mcore_ckpt.formats.sources import opened
from mcore_ckpt.mapping.adapters import A, B, find_base, group_adapters, is_adapter
from mcore_ckpt.mapping.row_streams import Progress, Source
from mcore_ckpt.mapping.rules import Link, expand
from mcore_ckpt.storage.checksums import check_files
from mcore_ckpt.storage.files import Reader
from mcore_ckpt.storage.index import ADAPTER, read_index
from mcore_ckpt.storage.outputs import atomic_dir, check_place
from mcore_ckpt.storage.paths import is_hf_folder


def convert_adapters(
    source_format: str,
    source: str | Path,
    _target_format: str,
    output: str | Path,
    options: ConvertOptions | None = None,
    *,
    on_progress: Progress | None = None,  # noqa: ARG001 - they are small
) -> ConversionReport:
    """Convert adapters without their base, with the signature of ``convert``.

    Raises:
        ValueError: if the source is not of mcore, or an option has no effect; and as
            ``export_adapters``.
    """
    if source_format != "mcore":
        raise ValueError(
            f"adapters are written from checkpoints of mcore, not {source_format}."
        )
    if replace(options or ConvertOptions(), verify=True) != ConvertOptions():
        raise ValueError(
            "mcore-to-peft takes only --input and --output: leave the other options out."
        )
    return export_adapters(source, output)


def export_adapters(source: str | Path, output: str | Path) -> ConversionReport:
    """Write the adapters of a step as a folder that PEFT reads.

    The adapters are held in memory. The folder is read back and compared: A and B must be equal
    bit by bit, or, for a fused module, their products equal up to rounding in float64.

    Args:
        source: run folder (its latest step) or step folder of adapters.
        output: folder to create.

    Raises:
        ValueError: if the step holds no adapters, or PEFT cannot express them.
        CheckpointError: if files are damaged, or the output read back differs.
    """
    step, output = native_step(source), as_path(output)
    check_place(output, as_path(source))
    index = read_index(step)
    check_files(step, index)
    config = index.extra.get(ADAPTER)
    if not config:
        raise ValueError(f"{step} holds a model and no adapters: use mcore-to-hf.")
    entries = {
        name.removeprefix(PREFIX): entry
        for name, entry in index.tensors.items()
        if name.startswith(PREFIX) and (config["base"] or is_adapter(name))
    }
    if config.get("modules_to_save") and not config["base"]:
        raise ValueError(
            f"{step} holds its base, whose tables were trained with the adapters: write the "
            "whole model (mcore-to-hf)."
        )
    with Reader(step) as reader:
        rows = Source(reader, entries)
        adapters = {name: rows.rows(name, 0, entry.shape[0]) for name, entry in entries.items()}
    links, copies, model_type = _links(step)
    with atomic_dir(output) as folder:
        write_adapters(folder, adapters, links, config, copies)
        read_back = read_adapters(folder, links)
        _compare(adapters, read_back.rows.tensors)
        tables = {name: t for name, t in adapters.items() if not is_adapter(name)}
        if any(
            not torch.equal(t, read_back.replaced.tensors[name]) for name, t in tables.items()
        ):
            raise CheckpointError("a table of --modules-to-save differs when read back")
    num_bytes = sum(t.numel() * t.element_size() for t in adapters.values())
    return ConversionReport(output, model_type, len(adapters), num_bytes, is_proven=True)


def _links(step: Path) -> tuple[list[Link], Mapping[str, str], str]:
    """Return links of the base's tensors to Hugging Face names, tied copies, and the family."""
    config = read_index(step).extra[ADAPTER]
    base = as_path(find_base(step, config)) if config["base"] else step
    base_format = "hf" if is_hf_folder(base) else "mcore"
    with opened(base_format, base) as checkpoint:
        model_type = target_model_type(checkpoint, "")
        table = find_family(model_type).table(checkpoint.description)
        links = list(checkpoint.links) if base_format == "hf" else expand(table)
        return links, table.copies, model_type


def _compare(wanted: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    """Compare the weight updates of two sets of adapters; to the bit if no module is fused."""
    theirs = group_adapters(again)
    for weight, kinds in group_adapters(wanted).items():
        other = theirs.get(weight, {})
        if kinds.keys() != other.keys():
            raise CheckpointError(f"the adapter of {weight} is not in the output")
        pairs = [(wanted[kinds[kind]], again[other[kind]]) for kind in kinds]
        if all(torch.equal(*pair) for pair in pairs):
            continue
        products = [
            (each[own[B]].double() @ each[own[A]].double())
            for each, own in ((wanted, kinds), (again, other))
        ]
        if not torch.allclose(*products, rtol=1e-12, atol=1e-12):
            raise CheckpointError(f"the adapter of {weight} differs when read back")
