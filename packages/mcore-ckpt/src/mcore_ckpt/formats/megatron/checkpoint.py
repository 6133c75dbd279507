"""Opens checkpoints of Megatron: torch_dist directories and old ``mp_rank_`` folders."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.families.common.shapes import check_counts, check_description
from mcore_ckpt.formats.dcp import DcpFolder, read_dcp_folder
from mcore_ckpt.formats.hf_folder import small_files
from mcore_ckpt.formats.megatron import names as megatron_names
from mcore_ckpt.formats.megatron.legacy import read_legacy_folder
from mcore_ckpt.formats.megatron.optimizer import read_megatron
from mcore_ckpt.formats.open_checkpoint import (
    EXTRA,
    STATE,
    OpenCheckpoint,
    description_in,
    link_tensors,
    with_state,
)
from mcore_ckpt.formats.recognition import DCP_METADATA, is_legacy
from mcore_ckpt.formats.safe_pickle import Record
from mcore_ckpt.formats.torch_files import read_torch_file
from mcore_ckpt.mapping.row_streams import Source
from mcore_ckpt.mapping.rules import expand, unstacked
from mcore_ckpt.mapping.views import RenamedRows
from mcore_ckpt.storage.files import Reader
from mcore_ckpt.storage.paths import latest_step, step_folder

_COMMON = "common_state/shard_0_1"
_WORDS = "embedding.word_embeddings.weight"


@contextmanager
def open_megatron(path: Path, options: ConvertOptions) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint that Megatron saved; see ``sources.opened``."""
    step = _step(path)
    tokenizer, _ = small_files(step / "tokenizer")
    _, generation = small_files(step)
    fields: dict[str, Any] = {"tokenizer": tokenizer, "generation": generation}
    if is_legacy(step):
        if options.optimizer:
            raise ValueError(
                f"{step} is in Megatron's old format, whose optimizer state has no names: "
                "leave --optimizer out to convert the weights."
            )
        legacy = read_legacy_folder(step, options.vocab_size, description_in(options.config))
        with Reader(step) as reader:
            theirs = Source(reader, legacy.tensors)
            fields["took_config"] = bool(options.config)
            yield link_tensors(legacy.table, theirs, legacy.description, options, **fields)
        return
    folder = read_dcp_folder(step)
    if _WORDS not in folder.tensors:
        raise ValueError(f"{step} holds no {_WORDS}: give a GPT that Megatron saved.")
    padded = folder.tensors[_WORDS].shape[0]
    common, common_file = _common_state(step, folder)
    extra = json.loads(common[EXTRA]) if EXTRA in common else {}
    shapes = [one.shape for one in folder.tensors.values()]
    arguments = common.get("args")
    if isinstance(arguments, Record):
        check_counts(arguments.fields(), shapes, str(step))
    description = extra.get("model") or _description(step, common, padded, options)
    check_description(description, shapes, str(step))
    weights = [name for name in folder.tensors if not name.startswith(STATE)]
    # A name that only layers of Transformer Engine have; another one with latent attention.
    is_latent = any(".linear_kv_down_proj." in name for name in weights)
    norm_name = ".layer_norm_" if is_latent else ".pre_mlp_layernorm."
    is_fused = any(norm_name in name for name in weights)
    impl = "transformer_engine" if is_fused else "local"
    table = megatron_names.table(description, padded, transformer_impl=impl)
    entries = unstacked(folder.locate(weights), expand(table))
    fields |= {
        "hf": dict(extra.get("hf", {})),
        "left_behind": len(folder.tensors) - len(weights),
        "took_config": bool(options.config) and not extra,
    }
    with Reader(step) as reader:
        checkpoint = link_tensors(
            table, Source(reader, entries), description, options, **fields
        )
        if options.optimizer:
            weight_rows = (checkpoint.theirs, RenamedRows(checkpoint.links, checkpoint.theirs))
            state = read_megatron(folder, reader, table, weight_rows, common, common_file)
            checkpoint = with_state(checkpoint, state, options)
        yield checkpoint


def _description(
    step: Path, common: Mapping[str, Any], padded: int, options: ConvertOptions
) -> dict[str, Any]:
    if options.config:
        return description_in(options.config)
    arguments = common.get("args")
    if not isinstance(arguments, Record):
        raise ValueError(
            f"{step} holds no arguments of Megatron: give --config with the config.json of "
            "the model."
        )
    values = {"padded_vocab_size": padded, **arguments.fields()}
    return megatron_names.from_arguments(values, options.vocab_size)


def _common_state(step: Path, folder: DcpFolder) -> tuple[dict[str, Any], Path]:
    """Read the state that Megatron stores once, such as arguments and iteration.

    Returns:
        The values of a file or an object of the directory, and the file with their tensors.
    """
    file = step / "common.pt"
    if file.is_file():
        state = read_torch_file(file)
    elif _COMMON in folder.objects:
        file = step / folder.objects[_COMMON].file
        state = folder.read_object(_COMMON)
        state = state[0] if isinstance(state, list) and state else state
    else:
        state = {}
    return (state if isinstance(state, dict) else {}), file


def _step(path: Path) -> Path:
    """Return the step that a Megatron run folder points to."""
    if (path / DCP_METADATA).is_file() or is_legacy(path):
        return path
    step = latest_step(path)
    folder = path if step is None else step_folder(path, step)
    if step is None or not ((folder / DCP_METADATA).is_file() or is_legacy(folder)):
        raise ValueError(
            f"{folder} holds neither {DCP_METADATA} nor mp_rank_00: it is not a complete "
            "checkpoint of Megatron."
        )
    return folder
