"""No byte of a step changes unseen: what verify finds, load finds, and the reverse."""

import random
import shutil

import pytest
import torch

from mcore_ckpt.conversion.inspection import check
from mcore_ckpt.families.common.fields import expert_settings, settings
from mcore_ckpt.save_load.hf_saving import hf_view
from mcore_ckpt.save_load.loading import load
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.files import Item, write_file
from mcore_ckpt.storage.headers import read_header
from mcore_models.logical_tensors import tensor_shapes
from mcore_parallel.mesh import SINGLE
from mcore_parallel.sharding import Piece, Shard

MODEL = {
    "family": "gpt",
    "vocab_size": 7,
    "config": {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 2}
    | {"ffn_hidden_size": 3, "norm_epsilon": 1e-05},
}
FLIPS = 12


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A step that is a Hugging Face folder too, with an optimizer and small files beside it."""
    run = tmp_path_factory.mktemp("run")
    (run / "words").mkdir()
    (run / "words" / "tokenizer.json").write_text('{"model": {}}')
    files, folders = {"recipe.toml": b"lr = 0.1"}, {"tokenizer": run / "words"}
    more = {"extra": {"model": MODEL}, "files": files, "folders": folders}
    return save(run, 3, shards(torch.ones), world=SINGLE, hf=hf_view(MODEL), **more)


def shards(make):
    shapes = tensor_shapes(settings(MODEL), 7, expert_settings(MODEL))
    names = {f"model.{name}": shape for name, shape in shapes.items()}
    names["optimizer.exp_avg.final_norm.weight"] = (4,)
    found = {}
    for name, shape in names.items():
        piece = Piece((0,) * len(shape), shape, make(shape))
        found[name] = Shard(shape, torch.float32, (piece,))
    return found


def refuses(work):
    try:
        work()
    except (ValueError, RuntimeError):
        return True
    return False


def found_by(step):
    """Say whether verify, and whether load, finds fault with a step."""
    by_load = refuses(lambda: load(step, shards(torch.zeros)))
    return refuses(lambda: check(step)), by_load


def test_a_flipped_bit_in_any_file_is_found_by_verify_and_by_load(step, tmp_path):
    assert found_by(step) == (False, False)
    copy = shutil.copytree(step, tmp_path / "iter_0000003")
    draw = random.Random(14)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    assert [str(path.relative_to(copy)) for path in files] == [
        "config.json",
        "index.json",
        "model.safetensors",
        "rank_00000.safetensors",
        "recipe.toml",
        "tokenizer/tokenizer.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for path in files:
        content = path.read_bytes()
        for place in [
            0,
            len(content) - 1,
            *(draw.randrange(len(content)) for _ in range(FLIPS)),
        ]:
            damaged = bytearray(content)
            damaged[place] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
            assert found_by(copy) == (True, True), (path, place)
        path.unlink()
        assert found_by(copy) == (True, True), path
        path.write_bytes(content)
    assert found_by(copy) == (False, False)


def test_what_is_damaged_is_named(step, tmp_path):
    for name, wanted in (
        ("config.json", "config.json is damaged: its content has changed"),
        ("model.safetensors", "the header of .*model.safetensors is damaged"),
        ("index.json", "index.json is damaged: its digest differs from its content"),
    ):
        copy = shutil.copytree(step, tmp_path / name)
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content.replace(b"1e-05", b"1e-01").replace(b"[4]", b"[2]"))
        with pytest.raises(RuntimeError, match=wanted):
            check(copy)


def test_what_is_added_later_is_no_damage(step, tmp_path):
    copy = shutil.copytree(step, tmp_path / "copy")
    (copy / "README.md").write_text("mine")
    assert found_by(copy) == (False, False)


def test_a_shape_without_data_is_bounded_by_its_file(tmp_path):
    header = b'{"a":{"dtype":"F32","shape":[1000000000000,0],"data_offsets":[0,0]}}'
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(RuntimeError, match=r"shape \[1000000000000, 0\] without data"):
        read_header(tmp_path, "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content + b"\0" * 100, r"file of 300 bytes: .* not fully covered"),
        (lambda content: content[:-3], r"file of 197 bytes: .* not fully covered. Copy or dow"),
        (lambda content: content.replace(b"[4,8]", b"[0,4]"), "invalid offset for tensor"),
        (lambda content: content.replace(b'"F32"', b'"F99"'), "unknown variant `F99`"),
        (
            lambda content: content.replace(b"[1]", b"[9]", 1),
            "invalid shape, data type, or",
        ),
        (lambda content: b"\xff" * 7 + content[7:], "header too large"),
    ],
)
def test_data_that_is_not_exactly_the_headers_is_refused(tmp_path, change, message):
    items = [Item(name, "F32", (1,), lambda: [torch.ones(1)]) for name in "ab"]
    path = tmp_path / "model.safetensors"
    write_file(path, items)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RuntimeError, match=message):
        read_header(tmp_path, path.name)
