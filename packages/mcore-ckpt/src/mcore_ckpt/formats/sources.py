"""Checkpoints of every format, opened: which model it is, and its tensors under our names.

Nothing is read but what says where things are; tensors are read by rows, when they are used.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_base.stores import as_path
from mcore_ckpt.conversion.options import DTYPE_WORDS, ConvertOptions
from mcore_ckpt.families import find_family, own_fields, stored_model, table_for, unknown_fields
from mcore_ckpt.families.common.fields import CARRIED
from mcore_ckpt.families.common.shape_check import check_counts, check_description, check_shapes
from mcore_ckpt.families.recurrent.mamba2 import released
from mcore_ckpt.formats.dcp import METADATA, DcpFolder, read_dcp_folder
from mcore_ckpt.formats.hf_folder import not_carried, read_hf_folder, small_files
from mcore_ckpt.formats.megatron import names as megatron_names
from mcore_ckpt.formats.megatron.legacy import is_legacy, read_legacy_folder
from mcore_ckpt.formats.megatron.optimizer import read_megatron
from mcore_ckpt.formats.model_heads import take_head_off, with_tensors
from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint, description_in
from mcore_ckpt.formats.peft_folder import base_folder, read_adapters
from mcore_ckpt.formats.quantization import quantization_name, take_quantization
from mcore_ckpt.formats.safe_pickle import Record
from mcore_ckpt.formats.text_towers import text_tower
from mcore_ckpt.formats.torch_files import read_torch_file
from mcore_ckpt.mapping.adapters import MergedTensors, find_base
from mcore_ckpt.mapping.optimizer_state import OptimizerState, read_native
from mcore_ckpt.mapping.row_streams import Rows, Source, compare_copy
from mcore_ckpt.mapping.rules import (
    Link,
    Table,
    expand,
    match_theirs,
    native_table,
    split_index,
    unstacked,
)
from mcore_ckpt.mapping.views import Cast, RenamedRows, ResizedTensors
from mcore_ckpt.storage.checksums import check_files
from mcore_ckpt.storage.files import Reader
from mcore_ckpt.storage.index import ADAPTER, Index, check_whole, read_index
from mcore_ckpt.storage.paths import (
    is_hf_folder,
    is_peft_folder,
    latest_step,
    resolve_folder,
    step_folder,
)

FORMATS = ("hf", "mcore", "megatron", "dcp")
"""Words for what a conversion reads and writes."""

PREFIX = "model."
"""What weights are called by in a checkpoint of ours, before their logical names."""

EXTRA = "mcore"
"""Entry of foreign checkpoints that we wrote: JSON that says which model it is."""

_COMMON = "common_state/shard_0_1"
_WORDS = "embedding.word_embeddings.weight"
_PADDED = ("embedding.weight", "head.weight", "lm_head.bias")
_TRIED = 3
_STATE = ("optimizer", "lr_scheduler", "dataloader", "train_state", "rng_state", "chained_")


@contextmanager
def opened(
    form: str, path: str | Path, options: ConvertOptions | None = None
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint of a format; its files are closed at the end.

    Args:
        form: one of ``FORMATS``.
        path: its folder, or a run folder with a pointer to it.
        options: what the user says about it.

    Raises:
        ValueError: if it cannot be represented, or does not say which model it is.
        CheckpointError: if files are damaged, or hold a pickle of classes that are not allowed.
    """
    read = {"hf": _open_hf, "mcore": _open_mcore, "dcp": _open_dcp, "megatron": _open_megatron}
    open_it = _open_peft if form == "hf" and is_peft_folder(path) else read[form]
    with open_it(as_path(path), options or ConvertOptions()) as found:
        yield found


@contextmanager
def _open_hf(path: Path, options: ConvertOptions) -> Iterator[OpenCheckpoint]:
    folder = read_hf_folder(path)
    config, tensors = text_tower(released(folder.config), folder.tensors)
    check_counts(config, (entry.shape for entry in tensors.values()), "config.json")
    quantization = quantization_name(config, folder.path)
    dequantized = take_quantization(config, folder.path)
    model_type = config.get("model_type", "")
    bare = take_head_off(config, tensors)
    kept = unknown_fields(bare.config) if options.keep_unknown_config_fields else {}
    known = {name: value for name, value in bare.config.items() if name not in kept}
    description, tensors = stored_model(known, bare.tensors)
    family = find_family(model_type)
    table = family.table(description)
    tensors = unstacked(tensors, expand(table))
    tokenizer, generation = small_files(folder.path)
    words = (*CARRIED, *own_fields(family))
    carried = {name: config[name] for name in words if name in config}
    hf: dict[str, Any] = {"model_type": model_type, "config": carried | kept}
    with Reader(folder.path) as reader:
        if bare.said:
            hf["head"] = with_tensors(bare.said, Source(reader, bare.head))
        theirs = dequantized(Source(reader, tensors))
        small: dict[str, Any] = {"tokenizer": tokenizer, "generation": generation}
        small["not_carried"] = not_carried(folder)
        small["quantization"] = quantization
        yield _link(table, theirs, description, options, hf=hf, **small)


@contextmanager
def _open_peft(path: Path, options: ConvertOptions) -> Iterator[OpenCheckpoint]:
    """Open the model that a folder of PEFT makes with its base."""
    with _open_hf(base_folder(path), ConvertOptions()) as base:
        adapters = read_adapters(path, base.links)
        theirs = _cast(MergedTensors(base.ours, adapters.rows, adapters.config), options)
        links = [Link((name,), name) for name in theirs.entries]
        tokenizer, _ = small_files(path)
        described = _described(base.description, links, theirs, options)
        small = {"tokenizer": tokenizer or base.tokenizer, "generation": base.generation}
        yield OpenCheckpoint(*described, hf=base.hf, not_carried=base.not_carried, **small)


@contextmanager
def _open_mcore(path: Path, options: ConvertOptions) -> Iterator[OpenCheckpoint]:
    step = resolve_folder(path)
    index = read_index(step)
    check_whole(step, index)
    check_files(step, index)
    description = describe_native(step, index)
    tensors = {
        name.removeprefix(PREFIX): entry
        for name, entry in index.tensors.items()
        if name.startswith(PREFIX)
    }
    tokenizer, _ = small_files(step / "tokenizer")
    _, generation = small_files(step)
    with ExitStack() as stack:
        reader = stack.enter_context(Reader(step))
        stored: Rows = Source(reader, tensors)
        hf = dict(index.extra.get("hf", {}))
        if adapter := index.extra.get(ADAPTER):
            stored, hf = stack.enter_context(_merged(step, stored, adapter))
        links = [Link((name,), name) for name in stored.entries]
        theirs = _cast(stored, options)
        found = OpenCheckpoint(
            *_described(description, links, theirs, options),
            hf=hf,
            tokenizer=tokenizer,
            generation=generation,
            left_behind=len(index.tensors) - len(tensors),
        )
        if options.optimizer:
            found = _with_state(found, read_native(index, reader, theirs, str(step)), options)
        yield found


@contextmanager
def _merged(
    step: Path, stored: Rows, adapter: Mapping[str, Any]
) -> Iterator[tuple[Rows, dict[str, Any]]]:
    """Open the model beside which a step's adapters stand, with these added, and its ``hf``."""
    if not adapter["base"]:  # the step holds both
        yield MergedTensors(stored, stored, adapter), {}
        return
    base = as_path(find_base(step, adapter))
    with opened("hf" if is_hf_folder(base) else "mcore", base) as found:
        yield MergedTensors(found.ours, stored, adapter), found.hf


@contextmanager
def _open_dcp(path: Path, options: ConvertOptions) -> Iterator[OpenCheckpoint]:
    folder = read_dcp_folder(path)
    extra = _our_extra(folder)
    if extra is None and not options.config:
        raise ValueError(
            f"{path} does not say which model it holds: give --config with the config.json of "
            "the model, or a folder that has one."
        )
    description = extra["model"] if extra else description_in(options.config)
    check_description(description, (one.shape for one in folder.tensors.values()), str(path))
    table, prefix = _dialect(folder, description)
    links = expand(table)
    listed = {
        name.removeprefix(prefix): name for name in folder.tensors if name.startswith(prefix)
    }
    weights = {mine: name for mine, name in listed.items() if not mine.startswith(_STATE)}
    found = folder.locate(weights.values())
    entries = unstacked({mine: found[name] for mine, name in weights.items()}, links)
    tokenizer, _ = small_files(path / "tokenizer")
    _, generation = small_files(path)
    behind = len(folder.tensors) - len(weights) + len(folder.objects.keys() - {EXTRA})
    with Reader(path) as reader:
        yield _link(
            table,
            Source(reader, entries),
            description,
            options,
            hf=dict((extra or {}).get("hf", {})),
            tokenizer=tokenizer,
            generation=generation,
            left_behind=behind,
            took_config=extra is None,
        )


@contextmanager
def _open_megatron(path: Path, options: ConvertOptions) -> Iterator[OpenCheckpoint]:
    step = _megatron_step(path)
    tokenizer, _ = small_files(step / "tokenizer")
    _, generation = small_files(step)
    small = {"tokenizer": tokenizer, "generation": generation}
    if is_legacy(step):
        if options.optimizer:
            raise ValueError(
                f"{step} is in Megatron's old form, whose optimizer state has no names: leave "
                "--optimizer out to convert the weights."
            )
        legacy = read_legacy_folder(step, options.vocab_size, description_in(options.config))
        with Reader(step) as reader:
            theirs = Source(reader, legacy.tensors)
            more = {"took_config": bool(options.config)}
            yield _link(legacy.table, theirs, legacy.description, options, **more, **small)
        return
    folder = read_dcp_folder(step)
    if _WORDS not in folder.tensors:
        raise ValueError(f"{step} holds no {_WORDS}: it is no GPT that Megatron saved.")
    padded = folder.tensors[_WORDS].shape[0]
    common, common_file = _common_state(step, folder)
    extra = json.loads(common[EXTRA]) if EXTRA in common else {}
    shapes = [one.shape for one in folder.tensors.values()]
    arguments = common.get("args")
    if isinstance(arguments, Record):
        check_counts(arguments.fields(), shapes, str(step))
    description = extra.get("model") or _megatron_description(step, common, padded, options)
    check_description(description, shapes, str(step))
    weights = [name for name in folder.tensors if not name.startswith(_STATE)]
    has_own_norm = any(".pre_mlp_layernorm." in name for name in weights)
    impl = "transformer_engine" if has_own_norm else "local"
    table = megatron_names.table(description, padded, transformer_impl=impl)
    entries = unstacked(folder.locate(weights), expand(table))
    more = {
        "hf": dict(extra.get("hf", {})),
        "left_behind": len(folder.tensors) - len(weights),
        "took_config": bool(options.config) and not extra,
    }
    with Reader(step) as reader:
        found = _link(table, Source(reader, entries), description, options, **more, **small)
        if options.optimizer:
            both = (found.theirs, RenamedRows(found.links, found.theirs))
            state = read_megatron(folder, reader, table, both, common, common_file)
            found = _with_state(found, state, options)
        yield found


def _with_state(
    found: OpenCheckpoint, state: OptimizerState, options: ConvertOptions
) -> OpenCheckpoint:
    """Add an optimizer's state, its rows of vocabulary resized like the weights'."""
    sizes = dict.fromkeys(_PADDED, options.vocab_size) if options.vocab_size else {}
    parts = {
        kind: replace(part, ours=ResizedTensors(part.ours, sizes))
        for kind, part in state.parts.items()
    }
    behind = found.left_behind - state.num_entries
    return replace(found, state=replace(state, parts=parts), left_behind=behind)


def _megatron_description(
    step: Path, common: Mapping[str, Any], padded: int, options: ConvertOptions
) -> dict[str, Any]:
    if options.config:
        return description_in(options.config)
    arguments = common.get("args")
    if not isinstance(arguments, Record):
        raise ValueError(
            f"{step} holds no arguments of Megatron's: give --config with the config.json of "
            "the model."
        )
    values = {"padded_vocab_size": padded, **arguments.fields()}
    return megatron_names.from_arguments(values, options.vocab_size)


def describe_native(step: Path, index: Index) -> dict[str, Any]:
    """Return which model a checkpoint of ours says that it holds."""
    description = index.extra.get("model")
    if not isinstance(description, dict) or "family" not in description:
        raise ValueError(
            f"{step} does not say which model it holds (extra.model in its index): it was "
            "not saved by mcore-train or mcore-ckpt convert."
        )
    check_description(description, (one.shape for one in index.tensors.values()), str(step))
    return description


def _link(
    table: Table,
    theirs: Rows,
    description: dict[str, Any],
    options: ConvertOptions,
    **more: Any,
) -> OpenCheckpoint:
    """Match tensors with a table; every tensor must be used, and once."""
    links = expand(table)
    for name in match_theirs(table, links, theirs.entries):
        compare_copy(theirs, name, table.copies[name])
    return OpenCheckpoint(
        *_described(description, links, _cast(theirs, options), options), **more
    )


def _described(
    description: dict[str, Any], links: Sequence[Link], theirs: Rows, options: ConvertOptions
) -> tuple[dict[str, Any], Sequence[Link], Rows, Rows]:
    ours: Rows = RenamedRows(links, theirs)
    check_shapes(description, ours.entries)
    if options.vocab_size and options.vocab_size != description["vocab_size"]:
        ours = ResizedTensors(ours, dict.fromkeys(_PADDED, options.vocab_size))
        description = {**description, "vocab_size": options.vocab_size}
    return description, links, theirs, ours


def _cast(theirs: Rows, options: ConvertOptions) -> Rows:
    return Cast(theirs, DTYPE_WORDS[options.dtype]) if options.dtype else theirs


def _our_extra(folder: DcpFolder) -> dict[str, Any] | None:
    if EXTRA not in folder.objects:
        return None
    text = folder.read_object(EXTRA)
    return json.loads(text) if isinstance(text, str) else None


def _common_state(step: Path, folder: DcpFolder) -> tuple[dict[str, Any], Path]:
    """Read what Megatron stores once: arguments, iteration. Its file, else its object.

    Returns:
        It, and the file that holds its tensors.
    """
    file = step / "common.pt"
    if file.is_file():
        found = read_torch_file(file)
    elif _COMMON in folder.objects:
        file = step / folder.objects[_COMMON].file
        found = folder.read_object(_COMMON)
        found = found[0] if isinstance(found, list) and found else found
    else:
        found = {}
    return (found if isinstance(found, dict) else {}), file


def _megatron_step(path: Path) -> Path:
    """Find the step that a run folder of Megatron's points to."""
    if (path / METADATA).is_file() or is_legacy(path):
        return path
    step = latest_step(path)
    found = path if step is None else step_folder(path, step)
    if step is None or not ((found / METADATA).is_file() or is_legacy(found)):
        raise ValueError(
            f"{found} holds neither {METADATA} nor mp_rank_00: it is no complete checkpoint "
            "of Megatron's."
        )
    return found


def _dialect(folder: DcpFolder, description: dict[str, Any]) -> tuple[Table, str]:
    """Find whose names a directory has, and what stands before them all."""
    names = set(folder.tensors)
    if any(name.startswith(f"{PREFIX}embedding.") for name in names):
        logical = sorted(n.removeprefix(PREFIX) for n in names if n.startswith(PREFIX))
        return native_table(logical), PREFIX
    table = table_for(description)
    wanted = {split_index(link.theirs)[0] for link in expand(table)}
    # More than one, for the one may be what is missing.
    for some in sorted(wanted, key=len)[:_TRIED]:
        for full in sorted(name for name in names if name.endswith(some)):
            prefix = full.removesuffix(some)
            if sum(prefix + name in names for name in wanted) * 2 > len(wanted):
                return table, prefix
    shown = ", ".join(sorted(names)[:5])
    raise ValueError(
        f"{folder.path} holds tensors of names that no table has for this model ({shown}, "
        "...): Hugging Face's and ours are known."
    )
