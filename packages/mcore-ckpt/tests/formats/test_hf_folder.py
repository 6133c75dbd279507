"""Odd Hugging Face folders: read as transformers loads them, or refused."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.hf_folder import not_carried, read_hf_folder
from mcore_ckpt.formats.sources import opened

D, F, V = 8, 6, 11
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": D,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "intermediate_size": F,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "dtype": "float32",
}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "w/" + SINGLE)


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens": (V, D),
        "model.norm": (D,),
        "lm_head": (V, D),
    }
    for layer in ("model.layers.0.",):
        shapes |= {f"{layer}self_attn.{p}_proj": (D, D) for p in "qo"}
        shapes |= {f"{layer}self_attn.{p}_proj": (D // 2, D) for p in "kv"}
        shapes |= {f"{layer}mlp.{p}_proj": (F, D) for p in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj": (D, F), f"{layer}input_layernorm": (D,)}
        shapes |= {f"{layer}post_attention_layernorm": (D,)}
    return {f"{n}.weight": torch.randn(s, generator=generator) for n, s in shapes.items()}


OLD, NEW = weights(0), weights(1)
NAMES = sorted(NEW)


@dataclass
class Folder:
    """What to write: tensors by file, and what the index tells of them."""

    files: dict[str, dict[str, Tensor]]
    weight_map: dict[str, str] | None
    config: dict[str, object] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        for file, tensors in self.files.items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path / file, metadata={"format": "pt"})
        if self.weight_map is not None:
            table = {"metadata": {}, "weight_map": self.weight_map}
            (path / INDEX).write_text(json.dumps(table))
        (path / "config.json").write_text(json.dumps(CONFIG | self.config))
        return path


@st.composite
def folders(draw: st.DrawFn) -> Folder:
    """Draw a folder of two or three shards, with a few things that are odd."""
    places = {name: FILES[draw(st.integers(0, 2))] for name in NAMES}
    files: dict[str, dict[str, Tensor]] = {}
    for name, file in places.items():
        files.setdefault(file, {})[name] = NEW[name]
    listed = dict(places)
    used = sorted(files)
    for odd in draw(st.lists(st.sampled_from(ODD), max_size=2)):
        name, file = draw(st.sampled_from(NAMES)), draw(st.sampled_from(used))
        odd(name, file, files, listed)
    config = {"tie_word_embeddings": draw(st.sampled_from((False, False, True)))}
    if config["tie_word_embeddings"] and draw(st.booleans()):
        for tensors in files.values():
            tensors.pop("lm_head.weight", None)
    return Folder({file: tensors for file, tensors in files.items() if tensors}, listed, config)


def unlisted(name, _, files, listed):
    listed.pop(name, None)


def listed_elsewhere(name, file, files, listed):
    listed[name] = file


def equal_copy(name, file, files, listed):
    files[file][name] = NEW[name]


def old_copy(name, file, files, listed):
    files[file].setdefault(name, OLD[name])


def absent(name, _, files, listed):
    for tensors in files.values():
        tensors.pop(name, None)


def unknown_tensor(_, file, files, listed):
    files[file]["model.layers.0.extra.weight"] = torch.ones(2)


def unlisted_file(name, _, files, listed):
    files["model-00003-of-00003.safetensors"] = {name: OLD[name]}


def single_file(_name, _file, files, listed):
    files[SINGLE] = dict(OLD)


ODD = (unlisted, listed_elsewhere, equal_copy, old_copy, absent, unknown_tensor)
ODD = (*ODD, unlisted_file, single_file)


def loaded_by_transformers(path: Path) -> Mapping[str, Tensor] | None:
    """Load a folder; None if transformers drew weights, or left tensors of the files out."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    is_whole = not any(info[key] for key in ("missing_keys", "unexpected_keys"))
    return model.state_dict() if is_whole else None


def read_here(path: Path) -> dict[str, Tensor]:
    with opened("hf", path) as found:
        return {
            link.theirs: found.theirs.rows(
                link.theirs, 0, found.theirs.entries[link.theirs].shape[0]
            )
            for link in found.links
        }


@settings(max_examples=20, deadline=None, derandomize=True)
@given(folders())
def test_odd_folders_are_read_as_transformers_loads_them_or_refused(folder):
    path = Path(tempfile.mkdtemp())
    try:
        folder.write(path)
        want = loaded_by_transformers(path)
        listed = set(folder.weight_map.values())
        stored = [name for file in listed for name in folder.files[file]]
        got, problem = None, ""
        try:
            got = read_here(path)
        except (ValueError, CheckpointError) as error:
            problem = str(error)
        if got is None:
            is_twice = SINGLE in folder.files or len(stored) > len(set(stored))
            is_tied = folder.config["tie_word_embeddings"] and "lm_head.weight" in stored
            assert want is None or is_twice or is_tied, problem
            return
        assert want is not None
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, want[name], rtol=0, atol=0)
        assert want.keys() - got.keys() <= {"lm_head.weight"}
    finally:
        shutil.rmtree(path)


def split(names: dict[str, list[str]], listed: dict[str, str] | None = None) -> Folder:
    """Put tensors into files, all others into the first."""
    others = [name for name in NAMES if not any(name in some for some in names.values())]
    files = {FILES[0]: {name: NEW[name] for name in others}}
    files |= {file: {name: NEW[name] for name in some} for file, some in names.items()}
    listed = listed or {name: file for file, tensors in files.items() for name in tensors}
    return Folder(files, listed)


def test_a_shard_in_a_folder_is_not_taken_for_the_file_of_its_name_beside_it(tmp_path):
    name, inner = "model.embed_tokens.weight", f"w/{FILES[0]}"
    folder = split({inner: [name]})
    folder.write(tmp_path)
    assert torch.equal(read_here(tmp_path)[name], NEW[name])
    (tmp_path / "notes.md").write_text("")
    (tmp_path / "w" / "more.txt").write_text("")
    assert not_carried(read_hf_folder(tmp_path)) == ("notes.md", "w/more.txt")


@pytest.mark.parametrize("suffix", [INDEX, "pytorch_model.bin.index.json"])
@pytest.mark.parametrize("place", ["../{}", "{absolute}", "w/../../{}"])
def test_an_index_cannot_name_files_outside_of_its_folder(tmp_path, place, suffix):
    outside = tmp_path / SINGLE
    save_file(NEW, outside)
    (tmp_path / "hf" / "w").mkdir(parents=True)
    name = place.format(SINGLE, absolute=outside)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    table = {"metadata": {}, "weight_map": dict.fromkeys(NAMES, name)}
    (tmp_path / "hf" / suffix).write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        read_hf_folder(tmp_path / "hf")


def test_links_of_a_cache_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    save_file(NEW, tmp_path / "blobs" / "1234")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (snapshot / SINGLE).symlink_to("../../blobs/1234")
    assert torch.equal(read_here(snapshot)["lm_head.weight"], NEW["lm_head.weight"])


def test_a_tensor_in_two_shards_is_refused_if_the_copies_differ(tmp_path):
    folder = split({FILES[1]: ["lm_head.weight"]})
    folder.files[FILES[1]]["model.norm.weight"] = OLD["model.norm.weight"]
    folder.write(tmp_path)
    with pytest.raises(ValueError, match=f"in {FILES[0]} and in {FILES[1]}, which transform"):
        read_hf_folder(tmp_path)


@pytest.mark.parametrize("table", [{"weight_map": {"a": ["b"]}}, {"weight_map": [1]}, {}, []])
def test_an_index_that_is_no_table_of_files_is_damaged(tmp_path, table):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / INDEX).write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        read_hf_folder(tmp_path)


@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_nested_json_is_a_damaged_file_not_a_traceback(tmp_path, file):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / file).write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match=f"{file} is damaged: maximum recursion"):
        read_hf_folder(tmp_path)


def test_pickled_weights_beside_an_index_of_pickles_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(OLD, tmp_path / "pytorch_model.bin")
    torch.save(NEW, tmp_path / "shard.bin")
    table = {"weight_map": dict.fromkeys(NAMES, "shard.bin")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"holds weights twice: pytorch_model\.bin, which"):
        read_hf_folder(tmp_path)
