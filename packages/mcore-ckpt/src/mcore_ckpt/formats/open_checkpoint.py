"""An open checkpoint of any format: the description of its model, and its tensors as rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.conversion.options import DTYPE_WORDS, ConvertOptions
from mcore_ckpt.families import find_family
from mcore_ckpt.families.common.shapes import check_counts, check_shapes
from mcore_ckpt.formats.json_files import read_json_object
from mcore_ckpt.mapping.row_streams import Rows, compare_copy
from mcore_ckpt.mapping.rules import Link, Table, expand, match_theirs
from mcore_ckpt.mapping.views import Cast, RenamedRows, ResizedTensors

if TYPE_CHECKING:
    from mcore_ckpt.mapping.optimizer_state import OptimizerState

PREFIX = "model."
"""Prefix of logical names of weights in an mcore checkpoint."""

EXTRA = "mcore"
"""Name of the JSON with the model's description in checkpoints of other formats."""

PADDED = ("embedding.weight", "head.weight", "lm_head.bias")
"""Tensors with a row for each id of the vocabulary."""

STATE = ("optimizer", "lr_scheduler", "dataloader", "train_state", "rng_state", "chained_")
"""Prefixes of the names of entries that are not weights."""

_MOST_LAYERS = 10_000
"""Bound for models that are described without their tensors."""


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint whose tensors can be read."""

    description: dict[str, Any]
    """Description of the model; see ``families``."""
    links: Sequence[Link]
    """Mapping of the checkpoint's tensors to logical tensors."""
    theirs: Rows
    """Tensors under the checkpoint's names."""
    ours: Rows
    """Tensors under logical names, resized to ``vocab_size``."""
    hf: dict[str, Any] = field(default_factory=dict)
    """``model_type`` and carried fields of the Hugging Face model that the weights came
    from."""
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the tokenizer."""
    generation: Mapping[str, bytes] = field(default_factory=dict)
    """generation_config.json, if there is one."""
    left_behind: int = 0
    """Number of entries that are not weights (optimizer, random state); not converted."""
    not_carried: tuple[str, ...] = ()
    """Other files of the folder that are not copied."""
    state: "OptimizerState | None" = None
    """The optimizer's state, if requested."""
    quantization: str = ""
    """Quantization of the folder, whose matrices are dequantized; empty: not quantized."""
    took_config: bool = False
    """Whether the description comes from ``--config``, as the checkpoint has no description."""


def description_in(config: str) -> dict[str, Any]:
    """Return the description in the file of ``--config``; empty without the option."""
    if not config:
        return {}
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = read_json_object(path)
    except FileNotFoundError:
        raise ValueError(f"--config {config}: there is no {path}.") from None
    # Bound the sizes now; they are compared with the tensors later.
    check_counts(fields, [(_MOST_LAYERS, 1, 1)], str(path))
    if "model_type" in fields:
        return find_family(fields["model_type"]).to_ours(fields)
    if "family" in fields and "config" in fields:
        return fields
    raise ValueError(
        f"--config {config} has neither model_type nor family: give the config.json of a model."
    )


def link_tensors(
    table: Table,
    theirs: Rows,
    description: dict[str, Any],
    options: ConvertOptions,
    **more: Any,
) -> OpenCheckpoint:
    """Match a checkpoint's tensors with a table of rules; check names, copies and shapes.

    Raises:
        ValueError: if a tensor is missing, unknown or used twice, or its shape is not that of
            the description.
    """
    links = expand(table)
    for name in match_theirs(table, links, theirs.entries):
        compare_copy(theirs, name, table.copies[name])
    return open_rows(description, links, cast_rows(theirs, options), options, **more)


def open_rows(
    description: dict[str, Any],
    links: Sequence[Link],
    theirs: Rows,
    options: ConvertOptions,
    **more: Any,
) -> OpenCheckpoint:
    """Return an ``OpenCheckpoint`` whose rows have logical names; resizes the vocabulary.

    Args:
        description: of the model.
        links: from the checkpoint's tensors to logical tensors.
        theirs: tensors under the checkpoint's names, already cast.
        options: with the size of the vocabulary.
        more: other fields of the ``OpenCheckpoint``.

    Raises:
        ValueError: if a tensor's shape is not that of the description.
    """
    ours: Rows = RenamedRows(links, theirs)
    check_shapes(description, ours.entries)
    if options.vocab_size and options.vocab_size != description["vocab_size"]:
        ours = ResizedTensors(ours, dict.fromkeys(PADDED, options.vocab_size))
        description = {**description, "vocab_size": options.vocab_size}
    return OpenCheckpoint(description, links, theirs, ours, **more)


def cast_rows(theirs: Rows, options: ConvertOptions) -> Rows:
    """Return rows in the dtype of ``--dtype``; unchanged if the option is empty."""
    return Cast(theirs, DTYPE_WORDS[options.dtype]) if options.dtype else theirs


def with_state(
    checkpoint: OpenCheckpoint, state: "OptimizerState", options: ConvertOptions
) -> OpenCheckpoint:
    """Return a checkpoint with an optimizer state, whose vocabulary is resized likewise."""
    sizes = dict.fromkeys(PADDED, options.vocab_size) if options.vocab_size else {}
    parts = {
        kind: replace(part, ours=ResizedTensors(part.ours, sizes))
        for kind, part in state.parts.items()
    }
    left_behind = checkpoint.left_behind - state.num_entries
    return replace(checkpoint, state=replace(state, parts=parts), left_behind=left_behind)
