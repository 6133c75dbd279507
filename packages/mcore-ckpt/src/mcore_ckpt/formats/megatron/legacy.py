"""Reads Megatron's old checkpoints: a folder for each rank, ``mp_rank_00/model_optim_rng.pt``.

Each file is a pickle with a shard of each tensor. The pickles are read as data, their tensors
in place; the shards are joined to complete tensors under the names of the distributed format.
Two generations are supported: models like GPT-345M and BERT-345M with ``language_model`` names,
and later ones with today's names.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.families.common.fields import setting, settings
from mcore_ckpt.families.common.shapes import check_counts
from mcore_ckpt.formats.megatron import names as megatron_names
from mcore_ckpt.formats.safe_pickle import Record
from mcore_ckpt.formats.torch_files import FileTensor, read_torch_file
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_ckpt.storage.boxes import cover_problems
from mcore_ckpt.storage.index import DTYPE_BYTES, StoredBox, TensorEntry
from mcore_models.logical_tensors import is_gated

_FILES = ("model_optim_rng.pt", "model_rng.pt")
_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(?:_(\d\d\d))?")

_RENAMED = (
    (r"^language_model\.", ""),
    (r"^(transformer|encoder)\.", "decoder."),
    (r"\.final_norm\.", ".final_layernorm."),
    (r"\.attention\.", ".self_attention."),
    (r"\.input_(?:layer)?norm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.query_key_value\.", ".linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.(?:post_attention_(?:layer)?norm|pre_mlp_layernorm)\.", ".mlp.linear_fc1.layer_norm_"),
    (r"\.dense_h_to_4h\.", ".linear_fc1."),
    (r"\.dense_4h_to_h\.", ".linear_fc2."),
    (r"\.experts\.local_experts\.(\d+)\.(linear_fc\d\.\w+)$", r".experts.experts.\2[\1]"),
    (r"\.experts\.(linear_fc\d\.(?:weight|bias))(\d+)$", r".experts.experts.\1[\2]"),
    (r"^lm_head\.layer_?norm\.", "lm_head.norm."),
)
_UNREAD = re.compile(
    r"_extra_state|rotary_pos_emb|inv_freq|word_embeddings_for_head|masked_bias"
)
_ROWS = re.compile(
    r"word_embeddings\.weight|^output_layer\.weight|^lm_head\.bias"
    r"|linear_(qkv|fc1)\.(weight|bias)"
)
_COLUMNS = re.compile(r"linear_proj\.weight|linear_fc2\.weight")


@dataclass(frozen=True, slots=True)
class LegacyFolder:
    """An old checkpoint with its shards joined."""

    description: dict[str, Any]
    """Description of the model; see ``families``."""
    table: Table
    """Rules from Megatron's names to logical names."""
    tensors: dict[str, TensorEntry]
    """Complete tensors by Megatron's name, as chunks of the files."""


@dataclass(frozen=True, slots=True)
class _Part:
    tensor: FileTensor
    file: str


def read_legacy_folder(
    folder: Path, vocab_size: int = 0, description: dict[str, Any] | None = None
) -> LegacyFolder:
    """Read an old checkpoint as data, without executing its pickles.

    Args:
        folder: contains a folder for each rank.
        vocab_size: tokens without padding; 0: as in the stored arguments.
        description: description of the model; required if no arguments are stored.
    """
    states = _states(folder)
    first = next(iter(states.values()))[1]
    version = float(first.get("checkpoint_version") or 0)
    parts = _parts(states)
    names = set(parts)
    is_bert = "binary_head.weight" in names or any(n.startswith("lm_head.dense") for n in names)
    word = parts.get("embedding.word_embeddings.weight")
    if word is None:
        raise CheckpointError(f"{folder} has no word embeddings: its first stage is missing.")
    padded = sum(part.tensor.shape[0] for part in word)
    if not description:
        args = first.get("args")
        if not isinstance(args, Record):
            raise ValueError(
                f"{folder} holds no arguments of Megatron: give --config with the "
                "config.json of the model."
            )
        values = {"padded_vocab_size": padded, **args.fields()}
        shapes = (part.tensor.shape for shards in parts.values() for part in shards)
        check_counts(values, shapes, str(folder))
        make = _bert_description if is_bert else megatron_names.from_arguments
        description = make(values, vocab_size)
    tensors = {
        name: _joined(name, shards, description, version)
        for name, shards in parts.items()
        if name not in _copied_heads(description, names)
    }
    return LegacyFolder(description, _table(description, padded, version), tensors)


def _states(folder: Path) -> dict[tuple[int, int, int], tuple[str, dict[str, Any]]]:
    """Read the file of every rank, by its tensor, pipeline and expert parallel rank."""
    states = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _FOLDER.fullmatch(path.name)
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if match is None or file is None:
            raise CheckpointError(f"{path} is not a rank's folder: it holds no {_FILES[0]}.")
        tp, *more = (int(n) for n in match.groups() if n is not None)
        pp, ep = (*more, 0, 0)[:2]
        state = read_torch_file(file)
        if not isinstance(state, dict):
            raise CheckpointError(f"{file} is not a file of Megatron.")
        if len(more) == 1 and _expert_degree(state) > 1:
            pp, ep = 0, more[0]
        states[(tp, pp, ep)] = (f"{path.name}/{file.name}", state)
    degrees = [max(key[axis] for key in states) + 1 for axis in range(3)] if states else [0]
    if not states or len(states) != degrees[0] * degrees[1] * degrees[2]:
        raise CheckpointError(
            f"{folder} holds {len(states)} ranks of {' x '.join(map(str, degrees))} (tensor, "
            "pipeline, expert): some are missing."
        )
    return states


def _expert_degree(state: Mapping[str, Any]) -> int:
    args = state.get("args")
    return args.get("expert_model_parallel_size", 1) if isinstance(args, Record) else 1


def _parts(
    states: Mapping[tuple[int, int, int], tuple[str, dict[str, Any]]],
) -> dict[str, list[_Part]]:
    """Group the shards of each tensor, in the order of tensor parallel ranks."""
    parts: dict[str, list[_Part]] = {}
    chunks = [key for key in next(iter(states.values()))[1] if re.fullmatch(r"model\d*", key)]
    experts = _experts_of_a_rank(states, chunks)
    for tp, ep in sorted({(key[0], key[2]) for key in states}):
        layers_before = 0
        for chunk in sorted(chunks, key=lambda key: int(key[5:] or 0)):
            for pp in sorted({key[1] for key in states}):
                file, state = states[(tp, pp, ep)]
                count = 0
                for name_in_file, tensor in _flat(state[chunk]):
                    global_name, layer = _renumbered(_renamed(name_in_file), layers_before)
                    count = max(count, layer)
                    name, is_expert = _expert_renumbered(global_name, ep * experts)
                    if not _UNREAD.search(name) and (is_expert or ep == 0):
                        parts.setdefault(name, []).append(_Part(tensor, file))
                layers_before += count
    return parts


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, FileTensor]]:
    for key, value in tree.items():
        if isinstance(value, FileTensor):
            yield prefix + str(key), value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")


def _renamed(name: str) -> str:
    for pattern, new in _RENAMED:
        name = re.sub(pattern, new, name)
    return name


def _renumbered(name: str, before: int) -> tuple[str, int]:
    """Return a name with ``before`` added to its layer, and the layer's number in its stage."""
    match = re.match(r"(decoder\.layers\.)(\d+)(\..*)", name)
    if match is None:
        return name, 0
    return f"{match[1]}{int(match[2]) + before}{match[3]}", int(match[2]) + 1


def _expert_renumbered(name: str, before: int) -> tuple[str, bool]:
    match = re.match(r"(.*)\[(\d+)\]$", name)
    if match is None:
        return name, False
    return f"{match[1]}[{int(match[2]) + before}]", True


def _experts_of_a_rank(
    states: Mapping[tuple[int, int, int], tuple[str, dict[str, Any]]], chunks: list[str]
) -> int:
    numbers = [0]
    for _, state in states.values():
        for chunk in chunks:
            for name, _ in _flat(state[chunk]):
                match = re.search(r"\[(\d+)\]$", _renamed(name))
                numbers += [int(match[1]) + 1] if match else []
    return max(numbers)


def _joined(
    name: str, parts: list[_Part], description: Mapping[str, Any], version: float
) -> TensorEntry:
    """Return the entry of shards joined along rows or columns, or of one of equal copies."""
    shape, count = parts[0].tensor.shape, len(parts)
    if any((p.tensor.shape, p.tensor.dtype) != (shape, parts[0].tensor.dtype) for p in parts):
        raise CheckpointError(f"{name} has another shape or dtype on another rank")
    dtype = parts[0].tensor.dtype
    bands = _bands(name, description, version)
    if bands and _ROWS.search(name):
        whole = (shape[0] * count, *shape[1:])
        chunks = [c for rank, p in enumerate(parts) for c in _row_chunks(p, rank, count, bands)]
    elif len(shape) == 2 and _COLUMNS.search(name):
        whole = (shape[0], shape[1] * count)
        chunks = [
            StoredBox(p.file, p.tensor.offset, (0, rank * shape[1]), shape)
            for rank, p in enumerate(parts)
        ]
    else:
        whole, first = shape, parts[0]
        chunks = [StoredBox(first.file, first.tensor.offset, (0,) * len(shape), shape)]
    problems = cover_problems(whole, [(c.offsets, c.lengths) for c in chunks])
    if problems:
        raise CheckpointError(f"{name}: {problems[0]}")
    return TensorEntry(whole, dtype, tuple(chunks))


def _bands(name: str, description: Mapping[str, Any], version: float) -> int:
    """Return the number of equal bands of rows that are split separately; 0: not split."""
    if "linear_qkv." in name and "layer_norm" not in name:
        return 3 if version < 1 else 1
    if "linear_fc1." in name and "layer_norm" not in name:
        return 2 if is_gated(settings(description)) and description["family"] == "gpt" else 1
    return 0 if "layer_norm" in name else 1


def _row_chunks(part: _Part, rank: int, count: int, bands: int) -> Iterator[StoredBox]:
    shape = part.tensor.shape
    rows = shape[0] // bands
    row_bytes = DTYPE_BYTES[part.tensor.dtype] * prod(shape[1:])
    for band in range(bands):
        begin = (band * count + rank) * rows
        offset = part.tensor.offset + band * rows * row_bytes
        zeros = (0,) * (len(shape) - 1)
        yield StoredBox(part.file, offset, (begin, *zeros), (rows, *shape[1:]))


def _copied_heads(description: Mapping[str, Any], names: set[str]) -> set[str]:
    """Return the names of a last stage's copy of the tied embedding."""
    is_tied = not setting(description, "untie_embeddings_and_output_weights")
    return {"output_layer.weight"} & names if is_tied else set()


def _bert_description(values: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    gpt_description = megatron_names.from_arguments(values, vocab_size)
    config = gpt_description["config"]
    defaults = {
        "ffn_hidden_size": 4 * config["hidden_size"],
        "max_position_embeddings": 512,
        "num_tokentypes": 2,
        "norm_epsilon": 1e-5,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "init_method_std": 0.02,
    }
    sizes = ("num_layers", "hidden_size", "num_attention_heads")
    config = {name: config[name] for name in sizes} | {
        name: config.get(name) or default for name, default in defaults.items()
    }
    config["bert_heads"] = ["pooler", "lm", "binary"]
    return {**gpt_description, "family": "bert", "config": config}


def _table(description: dict[str, Any], padded_vocab_size: int, version: float) -> Table:
    if description["family"] == "gpt":
        return megatron_names.table(
            description,
            padded_vocab_size,
            transformer_impl="local",
            is_numbered=True,
            version=version,
        )
    config = description["config"]
    gpt_config = {
        **config,
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
    }
    as_gpt = {**description, "family": "gpt", "config": gpt_config}
    body = megatron_names.table(
        as_gpt, padded_vocab_size, transformer_impl="local", is_numbered=True, version=version
    )
    padding = padded_vocab_size - description["vocab_size"]
    ends = {"lm_head.dense": "lm_head.dense", "lm_head.norm": "lm_head.norm"}
    ends |= {"binary_head": "binary_head", "pooler.dense": "pooler.dense"}
    rules = (
        *body.rules,
        Rule("tokentype_embedding.weight", "embedding.tokentype_embeddings.weight"),
        Rule("lm_head.bias", "lm_head.bias", padding=padding),
        *(
            Rule(f"{ours}.{kind}", f"{theirs}.{kind}")
            for ours, theirs in ends.items()
            for kind in ("weight", "bias")
        ),
    )
    return replace(body, rules=rules)
