"""Hugging Face folders: which tensor stands in which file, and the small files around."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.torch_files import FileTensor, read_torch_file
from mcore_ckpt.storage.files import Item, write_file
from mcore_ckpt.storage.headers import read_header
from mcore_ckpt.storage.index import StoredBox, TensorEntry
from mcore_ckpt.storage.paths import write_durably

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_PICKLE = "pytorch_model.bin"

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model"),
    *("chat_template.jinja", "chat_template.json", "tekken.json"),
    *("sentencepiece.bpe.model", "tiktoken.model"),
)
"""Files that make up a tokenizer, of which a folder has some."""

COMPANIONS = (
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("1_Pooling/config.json", "preprocessor_config.json", "processor_config.json"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md"),
)
"""Files that say how a model is used and under which terms; they go along with a tokenizer."""

_TEMPLATES = "additional_chat_templates"

GENERATION = "generation_config.json"
"""How ``generate`` samples by default."""


@dataclass(frozen=True, slots=True)
class HFFolder:
    """What a Hugging Face folder holds."""

    path: Path
    """The folder."""
    config: dict[str, Any]
    """Its config.json."""
    tensors: dict[str, TensorEntry]
    """Each tensor as one chunk of a file."""


def read_hf_folder(path: str | Path) -> HFFolder:
    """Read config.json and the headers of the weight files; pickles are read as data."""
    path = Path(path)
    try:
        config = json.loads((path / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} is no Hugging Face folder: it has no config.json. To convert one of "
            "ours, say mcore->hf."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'} is damaged: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / 'config.json'} is damaged: it holds no object")
    if (path / _INDEX).is_file():
        tensors = _read_sharded(path, _INDEX)
        files = {chunk.file for entry in tensors.values() for chunk in entry.chunks}
        if (path / _SINGLE).is_file() and _SINGLE not in files:
            raise ValueError(
                f"{path} holds weights twice: {_SINGLE}, which transformers opens, and the "
                f"files of {_INDEX}. Take those away that are old."
            )
        return HFFolder(path, config, tensors)
    if (path / _SINGLE).is_file():
        return HFFolder(path, config, read_header(path / _SINGLE))
    if (path / _PICKLE_INDEX).is_file():
        return HFFolder(path, config, _read_sharded(path, _PICKLE_INDEX))
    if (path / _PICKLE).is_file():
        return HFFolder(path, config, _read_pickle(path / _PICKLE))
    if (path / "rank0.safetensors").is_file():
        raise ValueError(
            f"{path} is a checkpoint for TensorRT-LLM, which builds engines of it: give the "
            "folder that it was exported from."
        )
    raise ValueError(
        f"{path} has neither {_SINGLE} nor {_INDEX}, nor {_PICKLE} or {_PICKLE_INDEX}."
    )


def _read_pickle(path: Path) -> dict[str, TensorEntry]:
    """Read where the tensors of torch.save stand; nothing in the file is executed."""
    found = read_torch_file(path)
    if not isinstance(found, dict) or not all(
        isinstance(value, FileTensor) for value in found.values()
    ):
        raise CheckpointError(f"{path} is no table of tensors, as transformers saves it.")
    entries = {}
    for name, tensor in found.items():
        chunk = StoredBox(path.name, tensor.offset, (0,) * len(tensor.shape), tensor.shape)
        entries[str(name)] = TensorEntry(tensor.shape, tensor.dtype, (chunk,))
    return entries


def _read_sharded(path: Path, index: str) -> dict[str, TensorEntry]:
    read = read_header if index == _INDEX else _read_pickle
    try:
        places: dict[str, str] = json.loads((path / index).read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path / index} is damaged: {error!r}") from None
    tensors: dict[str, TensorEntry] = {}
    for file in sorted(set(places.values())):
        if not (path / file).is_file():
            raise CheckpointError(f"{path / file} is missing: {index} names it.")
        for name, entry in read(path / file).items():
            if places.get(name) == file:
                tensors[name] = entry
    absent = sorted(places.keys() - tensors.keys())
    if absent:
        raise CheckpointError(
            f"{places[absent[0]]} does not hold {absent[0]}, as {index} says."
        )
    return tensors


def write_hf_folder(
    path: Path, config: dict[str, Any], items: Sequence[Item], max_shard_bytes: int
) -> None:
    """Write weights in files of bounded size, then the index and config.json.

    Args:
        path: an empty folder.
        config: content of config.json.
        items: every tensor, in order; a file may exceed the bound by one large tensor.
        max_shard_bytes: most bytes of tensors in one file.
    """
    shards: list[list[Item]] = [[]]
    for item in items:
        size = sum(other.num_bytes for other in shards[-1])
        if shards[-1] and size + item.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(item)
    places = {}
    for number, shard in enumerate(shards, 1):
        file = (
            _SINGLE
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        write_file(path / file, shard)
        places |= {item.name: file for item in shard}
    if len(shards) > 1:
        total = sum(item.num_bytes for item in items)
        table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_durably(path / _INDEX, json.dumps(table, indent=2).encode() + b"\n")
    write_durably(path / "config.json", json.dumps(config, indent=2).encode() + b"\n")


def num_tokens(tokenizer: Mapping[str, bytes]) -> int:
    """Count a tokenizer's ids, as far as its files are JSON or lists; else 0."""
    counts = [0]
    if "tokenizer.json" in tokenizer:
        table = json.loads(tokenizer["tokenizer.json"])
        vocab = (table.get("model") or {}).get("vocab") or []
        counts.append(
            max(vocab.values(), default=-1) + 1 if isinstance(vocab, dict) else len(vocab)
        )
        counts += [one["id"] + 1 for one in table.get("added_tokens") or []]
    elif "vocab.json" in tokenizer:
        counts.append(max(json.loads(tokenizer["vocab.json"]).values(), default=-1) + 1)
    elif "vocab.txt" in tokenizer:
        counts.append(len(tokenizer["vocab.txt"].splitlines()))
    return max(counts)


def small_files(path: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Read the tokenizer's files and companions of a folder, and its generation_config.json.

    Returns:
        Both by name; empty where there are none.
    """
    templates = [f"{_TEMPLATES}/{file.name}" for file in sorted((path / _TEMPLATES).glob("*"))]
    tokenizer = {
        name: (path / name).read_bytes()
        for name in (*TOKENIZER_FILES, *COMPANIONS, *templates)
        if (path / name).is_file()
    }
    generation = path / GENERATION
    return tokenizer, {GENERATION: generation.read_bytes()} if generation.is_file() else {}


def not_carried(folder: HFFolder) -> tuple[str, ...]:
    """List the files and folders of a Hugging Face folder that no conversion takes along."""
    read = {chunk.file for entry in folder.tensors.values() for chunk in entry.chunks}
    is_pickled = not any(file.endswith(".safetensors") for file in read)
    known = {*TOKENIZER_FILES, *COMPANIONS, GENERATION, "config.json", *read}
    known.add(_PICKLE_INDEX if is_pickled else _INDEX)
    shared = {_TEMPLATES, *(name.partition("/")[0] for name in COMPANIONS if "/" in name)}
    names = []
    for entry in folder.path.iterdir():
        inside = entry.iterdir() if entry.name in shared else ()
        names += [f"{entry.name}/{one.name}" for one in inside] or [entry.name]
    templates = {name for name in names if name.startswith(f"{_TEMPLATES}/")}
    known |= {name for name in templates if (folder.path / name).is_file()}
    return tuple(sorted(n for n in names if n not in known and not n.startswith(".")))
