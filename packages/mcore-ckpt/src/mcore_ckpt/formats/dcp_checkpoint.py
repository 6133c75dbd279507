"""Opens directories of torch.distributed.checkpoint with logical names or other programs'."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.families import table_for
from mcore_ckpt.families.common.shapes import check_description
from mcore_ckpt.formats.dcp import DcpFolder, read_dcp_folder
from mcore_ckpt.formats.hf_folder import small_files
from mcore_ckpt.formats.open_checkpoint import (
    EXTRA,
    PREFIX,
    STATE,
    OpenCheckpoint,
    description_in,
    link_tensors,
)
from mcore_ckpt.formats.recognition import FUSED_EXPERTS, TITAN_EMBEDDING
from mcore_ckpt.mapping.row_streams import Source
from mcore_ckpt.mapping.rules import Table, expand, native_table, split_index, unstacked
from mcore_ckpt.storage.files import Reader

_TRIED = 3


@contextmanager
def open_dcp(path: Path, options: ConvertOptions) -> Iterator[OpenCheckpoint]:
    """Open a directory of torch.distributed.checkpoint; see ``sources.opened``."""
    folder = read_dcp_folder(path)
    extra = _our_extra(folder)
    if extra is None and not options.config:
        raise ValueError(
            f"{path} does not name its model: give --config with the config.json of the "
            "model, or a folder that has one."
        )
    description = extra["model"] if extra else description_in(options.config)
    check_description(description, (one.shape for one in folder.tensors.values()), str(path))
    table, prefix = _dialect(folder, description)
    links = expand(table)
    listed = {
        name.removeprefix(prefix): name for name in folder.tensors if name.startswith(prefix)
    }
    weights = {
        short_name: name
        for short_name, name in listed.items()
        if not short_name.startswith(STATE)
    }
    located = folder.locate(weights.values())
    entries = unstacked(
        {short_name: located[name] for short_name, name in weights.items()}, links
    )
    tokenizer, _ = small_files(path / "tokenizer")
    _, generation = small_files(path)
    left_behind = len(folder.tensors) - len(weights) + len(folder.objects.keys() - {EXTRA})
    with Reader(path) as reader:
        yield link_tensors(
            table,
            Source(reader, entries),
            description,
            options,
            hf=dict((extra or {}).get("hf", {})),
            tokenizer=tokenizer,
            generation=generation,
            left_behind=left_behind,
            took_config=extra is None,
        )


def _our_extra(folder: DcpFolder) -> dict[str, Any] | None:
    if EXTRA not in folder.objects:
        return None
    text = folder.read_object(EXTRA)
    return json.loads(text) if isinstance(text, str) else None


def _dialect(folder: DcpFolder, description: dict[str, Any]) -> tuple[Table, str]:
    """Return the table of rules and the prefix that match a directory's names."""
    names = set(folder.tensors)
    if any(name.startswith(f"{PREFIX}embedding.") for name in names):
        logical = sorted(n.removeprefix(PREFIX) for n in names if n.startswith(PREFIX))
        return native_table(logical), PREFIX
    if any(name.endswith(TITAN_EMBEDDING) for name in names):
        from mcore_ckpt.formats.state_dicts import titan_table

        prefix = next(n for n in sorted(names) if n.endswith(TITAN_EMBEDDING))
        return titan_table(description), prefix.removesuffix(TITAN_EMBEDDING)
    table = table_for(description)
    if any(name.endswith(FUSED_EXPERTS) for name in names):
        from mcore_ckpt.formats.state_dicts import with_fused_experts

        table = with_fused_experts(table)
    wanted = {split_index(link.theirs)[0] for link in expand(table)}
    # The prefix is that of most names. Try several names, as one of them may be missing.
    for suffix in sorted(wanted, key=len)[:_TRIED]:
        for name_with_prefix in sorted(name for name in names if name.endswith(suffix)):
            prefix = name_with_prefix.removesuffix(suffix)
            if sum(prefix + name in names for name in wanted) * 2 > len(wanted):
                return table, prefix
    shown = ", ".join(sorted(names)[:5])
    raise ValueError(
        f"{folder.path} holds tensors with unknown names for this model ({shown}, ...): use "
        "the names of Hugging Face, torchtitan's Llama or mcore."
    )
