"""Reads and writes Hugging Face folders: weight files, config.json, tokenizer and licence."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_base.atomic_files import write_durably
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.json_files import json_bytes, parse_json_object, read_json_object
from mcore_ckpt.mapping.row_streams import Source, same_tensors
from mcore_ckpt.storage.files import Item, Reader, write_file
from mcore_ckpt.storage.headers import read_header
from mcore_ckpt.storage.index import StoredBox, TensorEntry
from mcore_ckpt.storage.paths import path_within

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
"""Names of tokenizer files; a folder has some of them."""

COMPANIONS = (
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("1_Pooling/config.json", "preprocessor_config.json", "processor_config.json"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md"),
)
"""Names of files about use and licence of a model, which are copied with the tokenizer."""

_TEMPLATES = "additional_chat_templates"

GENERATION = "generation_config.json"
"""Default sampling options of ``generate``."""


ReadFile = Callable[[Path, str], dict[str, TensorEntry]]
"""Lists the tensors of one file, given the folder and the file's path within it."""


@dataclass(frozen=True, slots=True)
class HFFolder:
    """Config and tensors of a Hugging Face folder."""

    path: Path
    """The folder."""
    config: dict[str, Any]
    """Content of config.json."""
    tensors: dict[str, TensorEntry]
    """Tensors by name, each as one chunk of a file."""


def read_hf_folder(path: str | Path) -> HFFolder:
    """Read config.json and the headers of the weight files; pickles are read as data.

    Raises:
        ValueError: if the folder has no weights, has weights twice, or is of another format.
        CheckpointError: if files are missing or damaged, or the index names files outside of
            the folder.
    """
    path = Path(path)
    try:
        config = read_json_object(path / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} is not a Hugging Face folder: it has no config.json. To convert a run "
            "folder of mcore, use mcore-to-hf."
        ) from None
    for single, index, read_file in (
        (_SINGLE, _INDEX, read_header),
        (_PICKLE, _PICKLE_INDEX, _read_pickle),
    ):
        has_single = (path / single).is_file()
        if (path / index).is_file():
            files = _listed_files(path / index)
            if has_single and files != [single]:
                raise ValueError(
                    f"{path} holds weights twice: {single}, which transformers opens, and the "
                    f"files of {index}. Remove the old ones."
                )
            return HFFolder(path, config, _read_shards(path, files, read_file))
        if has_single:
            return HFFolder(path, config, read_file(path, single))
    if (path / "rank0.safetensors").is_file():
        raise ValueError(
            f"{path} is a checkpoint for TensorRT-LLM: give the folder from which it was "
            "exported."
        )
    raise ValueError(
        f"{path} has no weights: it must have {_SINGLE}, {_INDEX}, {_PICKLE} or "
        f"{_PICKLE_INDEX}."
    )


def _read_pickle(folder: Path, file: str) -> dict[str, TensorEntry]:
    """Return the tensors in a file of torch.save; nothing in the file is executed."""
    from mcore_ckpt.formats.torch_files import FileTensor, read_torch_file

    path = path_within(folder, file)
    content = read_torch_file(path)
    if not isinstance(content, dict) or not all(
        isinstance(value, FileTensor) for value in content.values()
    ):
        raise CheckpointError(
            f"{path} is not a dictionary of tensors, as transformers saves it."
        )
    entries = {}
    for name, tensor in content.items():
        chunk = StoredBox(file, tensor.offset, (0,) * len(tensor.shape), tensor.shape)
        entries[str(name)] = TensorEntry(tensor.shape, tensor.dtype, (chunk,))
    return entries


def _listed_files(index: Path) -> list[str]:
    """Return the files that an index of shards names, sorted."""
    file_of_tensor = read_json_object(index).get("weight_map")
    if not isinstance(file_of_tensor, dict) or not all(
        isinstance(f, str) for f in file_of_tensor.values()
    ):
        raise CheckpointError(
            f"{index} is damaged: weight_map must map names of tensors to names of files."
        )
    files = sorted(set(file_of_tensor.values()))
    for file in files:
        if not path_within(index.parent, file).is_file():
            raise CheckpointError(
                f"{index.parent / file} is missing, but {index.name} lists it."
            )
    return files


def _read_shards(folder: Path, files: Sequence[str], read: ReadFile) -> dict[str, TensorEntry]:
    """Return the tensors of all files, as transformers does.

    The index determines the files, and the files determine the tensors: a tensor that the index
    omits or assigns to another file is also read. A tensor may be in two files if the copies
    are equal.
    """
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read(folder, file).items():
            if name in tensors and not _are_equal(folder, tensors[name], entry):
                raise ValueError(
                    f"{folder} holds {name} twice, with different values: in "
                    f"{tensors[name].chunks[0].file} and in {file}, which transformers reads. "
                    "Remove the old file, or the tensor in it."
                )
            tensors[name] = entry
    return tensors


def _are_equal(folder: Path, one: TensorEntry, other: TensorEntry) -> bool:
    with Reader(folder) as reader:
        return same_tensors(Source(reader, {"one": one, "other": other}), "one", "other")


def write_hf_folder(
    path: Path, config: dict[str, Any], items: Sequence[Item], max_shard_bytes: int
) -> None:
    """Write weights in files of bounded size, then the index and config.json.

    Args:
        path: an empty folder.
        config: content of config.json.
        items: all tensors, in file order; a file with a single tensor may exceed the bound.
        max_shard_bytes: largest number of bytes of tensors in one file.
    """
    shards: list[list[Item]] = [[]]
    for item in items:
        size = sum(other.num_bytes for other in shards[-1])
        if shards[-1] and size + item.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(item)
    file_of_tensor = {}
    for number, shard in enumerate(shards, 1):
        file = (
            _SINGLE
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        write_file(path / file, shard)
        file_of_tensor |= {item.name: file for item in shard}
    if len(shards) > 1:
        total = sum(item.num_bytes for item in items)
        table = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(file_of_tensor.items())),
        }
        write_durably(path / _INDEX, json_bytes(table))
    write_durably(path / "config.json", json_bytes(config))


def num_tokens(tokenizer: Mapping[str, bytes]) -> int:
    """Return the number of ids of a tokenizer; 0 if it has neither JSON files nor vocab.txt.

    Raises:
        CheckpointError: naming the file that is damaged.
    """
    counts = [0]
    name = next((n for n in ("tokenizer.json", "vocab.json") if n in tokenizer), "vocab.txt")
    try:
        if name == "tokenizer.json":
            table = parse_json_object(tokenizer[name], name)
            vocab = (table.get("model") or {}).get("vocab") or []
            ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
            counts += [max(ids, default=-1) + 1]
            counts += [one["id"] + 1 for one in table.get("added_tokens") or []]
        elif name == "vocab.json":
            vocab = parse_json_object(tokenizer[name], name)
            counts.append(max(vocab.values(), default=-1) + 1)
        elif name in tokenizer:
            counts.append(len(tokenizer[name].splitlines()))
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name} is damaged: {error!r}") from None
    return max(counts)


def small_files(path: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Read a folder's tokenizer with its companions, and its generation_config.json.

    Returns:
        Contents by file name of the tokenizer with ``COMPANIONS``, and of the generation
        config; each is empty if no such file exists.
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
    """List the files and folders of a Hugging Face folder that no conversion copies."""
    read = {chunk.file for entry in folder.tensors.values() for chunk in entry.chunks}
    is_pickled = not any(file.endswith(".safetensors") for file in read)
    templates = {f"{_TEMPLATES}/{one.name}" for one in (folder.path / _TEMPLATES).glob("*")}
    known = {*TOKENIZER_FILES, *COMPANIONS, *templates, GENERATION, "config.json", *read}
    known.add(_PICKLE_INDEX if is_pickled else _INDEX)

    def unknown(below: Path, prefix: str) -> Iterator[str]:
        for entry in below.iterdir():
            name = prefix + entry.name
            if any(other.startswith(f"{name}/") for other in known) and entry.is_dir():
                yield from unknown(entry, f"{name}/")
            elif name not in known and not name.startswith("."):
                yield name

    return tuple(sorted(unknown(folder.path, "")))
