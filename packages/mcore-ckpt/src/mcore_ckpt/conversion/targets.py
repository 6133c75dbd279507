"""Writes an open checkpoint in each format."""

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_base.atomic_files import write_durably
from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.families import family_for, find_family, inference_fields
from mcore_ckpt.formats.hf_folder import write_hf_folder
from mcore_ckpt.formats.megatron import names as megatron_names
from mcore_ckpt.formats.megatron.optimizer import state_items, to_common
from mcore_ckpt.formats.model_heads import put_head_on
from mcore_ckpt.formats.open_checkpoint import EXTRA, PREFIX, OpenCheckpoint
from mcore_ckpt.mapping.optimizer_state import native_name
from mcore_ckpt.mapping.rules import Table, expand, match_ours, native_table
from mcore_ckpt.mapping.views import stacked_items, their_items
from mcore_ckpt.storage.files import Item
from mcore_ckpt.storage.paths import RELEASE, TRACKER, step_folder

Watch = Callable[[Sequence[Item]], list[Item]]
"""Wraps the items to write, to check their size and report progress."""

_TORCH_WORDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


_TAKEN_BY = {
    "max_shard_size": ("hf", "dcp", "megatron"),
    "model_type": ("hf",),
    "dcp_names": ("dcp",),
    "make_vocab_size_divisible_by": ("megatron",),
    "transformer_impl": ("megatron",),
    "experts_apart": ("megatron",),
}
"""Options of an output, and the formats that they apply to."""

_DEFAULTS = ConvertOptions()


def check_target(options: ConvertOptions, target: str) -> None:
    """Raise ValueError for options without effect on an output of this format."""
    for name, formats in _TAKEN_BY.items():
        takes = {*formats}
        if name == "model_type" and options.dcp_names == "hf":
            takes.add("dcp")
        if target not in takes and getattr(options, name) != getattr(_DEFAULTS, name):
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag} has no effect on an output in the format {target}, only on "
                f"{' and '.join(sorted(takes))}: leave it out."
            )


def our_items(source: OpenCheckpoint) -> list[Item]:
    """Return a checkpoint's tensors, with logical names, as items to write."""
    items = [
        replace(item, name=PREFIX + item.name)
        for item in their_items(expand(native_table(source.ours.entries)), source.ours)
    ]
    for kind, part in source.state.parts.items() if source.state else ():
        items += [
            replace(item, name=native_name(kind, item.name))
            for item in their_items(expand(native_table(part.ours.entries)), part.ours)
        ]
    return items


def target_model_type(source: OpenCheckpoint, wanted: str = "") -> str:
    """Return the Hugging Face family to write.

    Raises:
        ValueError: if no family can express the model.
    """
    return wanted or source.hf.get("model_type") or family_for(source.description)


def write_hf(
    folder: Path, source: OpenCheckpoint, options: ConvertOptions, watch: Watch
) -> str:
    """Write a Hugging Face folder; return its ``model_type``."""
    model_type = target_model_type(source, options.model_type)
    family = find_family(model_type)
    origin = source.hf.get("model_type", model_type)
    # Fields that only the source's family has are dropped.
    origin_fields = () if origin == model_type else inference_fields(find_family(origin))
    carried = {
        n: value for n, value in source.hf.get("config", {}).items() if n not in origin_fields
    }
    # Carried fields first, so that those of the family override them. A null pad_token_id of
    # the family does not: it only replaces transformers' default, outside of the vocabulary.
    try:
        config = {**carried, **family.to_theirs(source.description)}
    except ValueError as error:
        raise ValueError(
            f"{model_type} cannot express this model: {error}. Leave --model-type out to write "
            "a family that can."
        ) from None
    if config.get("pad_token_id", 0) is None:
        config["pad_token_id"] = carried.get("pad_token_id")
    items = watch(stacked_items(_items(family.table(source.description), source)))
    config |= _dtype_fields(items)
    if head := source.hf.get("head"):
        if model_type != source.hf["model_type"]:
            raise ValueError(
                f"--model-type {model_type} cannot carry the head of "
                f"{head['architecture']}: leave it out."
            )
        config, items = put_head_on(head, config, items)
    write_hf_folder(folder, config, items, options.max_shard_bytes)
    for name, content in hf_small_files(source).items():
        _write_small(folder / name, content)
    return model_type


def hf_small_files(source: OpenCheckpoint) -> dict[str, bytes]:
    """Return the tokenizer's files and the generation config of a Hugging Face folder."""
    tokenizer = dict(source.tokenizer)
    if "tokenizer.json" in tokenizer and "tokenizer_config.json" not in tokenizer:
        # The least that AutoTokenizer needs to open a tokenizer that was trained here.
        plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
        tokenizer["tokenizer_config.json"] = json.dumps(plain, indent=2).encode() + b"\n"
    return {**tokenizer, **source.generation}


def write_dcp(
    folder: Path, source: OpenCheckpoint, options: ConvertOptions, watch: Watch
) -> str:
    """Write a torch.distributed.checkpoint directory; return ``--dcp-names``."""
    if options.dcp_names == "mcore":
        items = our_items(source)
    elif options.dcp_names == "hf":
        model_type = target_model_type(source, options.model_type)
        items = _items(find_family(model_type).table(source.description), source)
    else:
        raise ValueError(f"--dcp-names {options.dcp_names} is not known: use mcore or hf.")
    from mcore_ckpt.formats.dcp_writing import write_dcp_folder

    write_dcp_folder(
        folder, watch(items), {EXTRA: _extra(source)}, max_file_bytes=options.max_shard_bytes
    )
    write_small_files(folder, source)
    return options.dcp_names


def write_megatron(
    folder: Path, source: OpenCheckpoint, options: ConvertOptions, watch: Watch
) -> str:
    """Write a run folder that megatron-core loads; return ``torch_dist``.

    Without an optimizer's state the run folder gets a release, else the step of the state.

    Raises:
        ValueError: if Megatron cannot express the model, or an option is out of range.
    """
    multiple = options.make_vocab_size_divisible_by
    if multiple < 1:
        raise ValueError(f"--make-vocab-size-divisible-by {multiple} must be 1 or more.")
    if options.transformer_impl not in ("transformer_engine", "local"):
        raise ValueError(
            f"--transformer-impl {options.transformer_impl} is not known: use "
            "transformer_engine or local."
        )
    padded = -(-source.description["vocab_size"] // multiple) * multiple
    table = megatron_names.table(
        source.description, padded, transformer_impl=options.transformer_impl
    )
    if options.experts_apart and not (table.num_experts and source.state is not None):
        raise ValueError(
            "--experts-apart applies to the optimizer's state of experts: leave it out, or "
            "give --optimizer with a model that has experts."
        )
    items = _items(table, source)
    step = RELEASE
    progress: dict[str, Any] = {"iteration": 0}
    arguments = megatron_names.to_arguments(source.description, padded)
    arguments["make_vocab_size_divisible_by"] = multiple
    if source.state is not None:
        items += state_items(table, source.state, source.ours)
        apart = options.experts_apart
        progress = to_common(source.state.progress, arguments, experts_apart=apart)
        step = progress["iteration"]
    common = {
        "args": Namespace(**arguments),
        "checkpoint_version": megatron_names.CHECKPOINT_VERSION,
        **progress,
        EXTRA: _extra(source),
    }
    from mcore_ckpt.formats.dcp_writing import write_dcp_folder

    target = step_folder(folder, step)
    target.mkdir()
    objects: dict[str, Any] = {name: [None] for name in megatron_names.extra_states(table)}
    objects["common_state/shard_0_1"] = [common]
    write_dcp_folder(target, watch(items), objects, max_file_bytes=options.max_shard_bytes)
    write_small_files(target, source)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    write_durably(target / "metadata.json", json.dumps(backend).encode())
    write_durably(folder / TRACKER, str(step).encode())
    return "torch_dist"


def write_small_files(folder: Path, source: OpenCheckpoint) -> None:
    """Write the tokenizer and the generation config."""
    for name, content in source.tokenizer.items():
        _write_small(folder / "tokenizer" / name, content)
    for name, content in source.generation.items():
        write_durably(folder / name, content)


def _write_small(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, content)


WRITERS: Mapping[str, Callable[[Path, OpenCheckpoint, ConvertOptions, Watch], str]] = {
    "hf": write_hf,
    "dcp": write_dcp,
    "megatron": write_megatron,
}
"""Writers by format; mcore steps are written by ``conversion``."""


def _items(table: Table, source: OpenCheckpoint) -> list[Item]:
    links = expand(table)
    match_ours(links, source.ours.entries)
    return their_items(links, source.ours)


def _extra(source: OpenCheckpoint) -> str:
    return json.dumps({"model": source.description, "hf": source.hf})


def _dtype_fields(items: Sequence[Item]) -> dict[str, Any]:
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.dtype] = sizes.get(item.dtype, 0) + item.num_bytes
    dtype_name = _TORCH_WORDS.get(max(sizes, key=lambda name: sizes[name]), "float32")
    return {"torch_dtype": dtype_name, "dtype": dtype_name}
