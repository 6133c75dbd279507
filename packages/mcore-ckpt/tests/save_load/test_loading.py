"""What a load promises: every difference is named, every damage found, nothing else read."""

import json
import logging

import pytest
import torch
from warm_ranks import run_ranks

from mcore_ckpt.config import StrictnessConfig
from mcore_ckpt.conversion.inspection import check
from mcore_ckpt.save_load.loading import load, read_tensor
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.index import BLOCK_BYTES, digest
from mcore_ckpt.storage.paths import TRACKER, resolve_folder
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import Piece, Shard


def whole(data):
    zeros = (0,) * data.dim()
    return Shard(tuple(data.shape), data.dtype, (Piece(zeros, tuple(data.shape), data),))


@pytest.fixture
def step(tmp_path):
    shards = {
        "model.blocks.0.gate.weight": whole(torch.arange(12.0).view(3, 4)),
        "model.norm": whole(torch.arange(4.0)),
        "optimizer.exp_avg.norm": whole(torch.ones(4)),
    }
    return save(tmp_path, 5, shards, world=SINGLE, extra={"iteration": 5})


def targets():
    return {
        "model.blocks.0.gate.weight": whole(torch.zeros(3, 4)),
        "model.norm": whole(torch.zeros(4)),
        "optimizer.exp_avg.norm": whole(torch.zeros(4)),
    }


def data(shards, name):
    return shards[name].pieces[0].data


def test_missing_and_unexpected_tensors_are_named_with_their_neighbours(step):
    shards = targets()
    shards["model.blocks.0.gat.weight"] = shards.pop("model.blocks.0.gate.weight")
    del shards["optimizer.exp_avg.norm"]
    with pytest.raises(ValueError, match="cannot load") as caught:
        load(step, shards)
    text = str(caught.value)
    assert (
        "missing in the checkpoint: model.blocks.0.gat.weight "
        "(nearest there: model.blocks.0.gate.weight)" in text
    )
    assert "in the checkpoint, not in the model: optimizer.exp_avg.norm" in text
    assert text.endswith("\nEverything else is loaded with --dist-ckpt-strictness log_all.")


def test_without_strict_they_are_logged_and_the_rest_is_loaded(step, caplog):
    shards = targets()
    shards["model.new"] = whole(torch.full((2,), 9.0))
    del shards["optimizer.exp_avg.norm"]
    with caplog.at_level(logging.WARNING):
        load(step, shards, strictness=StrictnessConfig(dist_ckpt_strictness="log_all"))
    assert "missing in the checkpoint: model.new" in caplog.text
    assert torch.equal(data(shards, "model.norm"), torch.arange(4.0))
    assert torch.equal(data(shards, "model.new"), torch.full((2,), 9.0))


def test_names_that_are_ignored_need_not_be_asked_for_but_may_be(step):
    shards = targets()
    load(step, shards, ignore=("optimizer.",))
    assert torch.equal(data(shards, "optimizer.exp_avg.norm"), torch.ones(4))
    del shards["optimizer.exp_avg.norm"]
    load(step, shards, ignore=("optimizer.",))


def test_shapes_and_dtypes_that_differ_are_listed_together(step):
    shards = targets()
    shards["model.norm"] = whole(torch.zeros(5))
    shards["optimizer.exp_avg.norm"] = whole(torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="cannot load") as caught:
        load(step, shards, strictness=StrictnessConfig(dist_ckpt_strictness="log_all"))
    text = str(caught.value)
    assert "model.norm: shape [4] in the checkpoint, [5] wanted" in text
    assert "optimizer.exp_avg.norm: dtype F32 in the checkpoint, BF16 wanted" in text
    ways = "--dist-ckpt-shape-mismatch skip and --dist-ckpt-dtype-mismatch cast"
    assert text.endswith(f"\nEverything else is loaded with {ways}.")


def test_dtypes_are_cast_only_when_asked(step):
    shards = targets()
    shards["model.norm"] = whole(torch.zeros(4, dtype=torch.bfloat16))
    load(step, shards, cast=True)
    assert torch.equal(data(shards, "model.norm"), torch.arange(4.0).bfloat16())


LEVELS = {
    "raise_all": (True, True, False),
    "raise_unexpected": (True, False, False),
    "assume_ok_unexpected": (True, False, False),
    "log_all": (False, False, True),
    "log_unexpected": (False, False, True),
    "ignore_all": (False, False, False),
}
"""Of each level: whether a name is an error that the checkpoint lacks, that nobody asks for,
and whether something is logged."""


@pytest.mark.parametrize("level", list(LEVELS))
def test_each_level_of_strictness_answers_names_in_its_way(step, caplog, level):
    on_missing, on_unexpected, is_logged = LEVELS[level]
    strictness = StrictnessConfig(dist_ckpt_strictness=level)
    lacking = targets() | {"model.new": whole(torch.full((2,), 9.0))}
    unasked = targets()
    del unasked["model.norm"]
    with caplog.at_level(logging.WARNING):
        for shards, is_error in ((lacking, on_missing), (unasked, on_unexpected)):
            if is_error:
                with pytest.raises(ValueError, match=r"model\.n"):
                    load(step, shards, strictness=strictness)
            else:
                load(step, shards, strictness=strictness)
                assert torch.equal(data(shards, "optimizer.exp_avg.norm"), torch.ones(4))
    assert ("model.new" in caplog.text) == is_logged
    assert ("model.norm" in caplog.text) == (level == "log_all")
    assert torch.equal(data(lacking, "model.new"), torch.full((2,), 9.0))


def test_tensors_of_another_shape_can_be_left_and_of_another_dtype_cast(step, caplog):
    shards = targets()
    shards["model.norm"] = whole(torch.full((5,), 9.0))
    shards["optimizer.exp_avg.norm"] = whole(torch.zeros(4, dtype=torch.bfloat16))
    strictness = StrictnessConfig(
        dist_ckpt_shape_mismatch="skip", dist_ckpt_dtype_mismatch="cast"
    )
    with caplog.at_level(logging.WARNING):
        load(step, shards, strictness=strictness)
    assert "not loaded: model.norm: shape [4] in the checkpoint, [5] wanted" in caplog.text
    assert "cast: optimizer.exp_avg.norm: dtype F32 in the checkpoint" in caplog.text
    assert torch.equal(data(shards, "model.norm"), torch.full((5,), 9.0))
    assert torch.equal(data(shards, "optimizer.exp_avg.norm"), torch.ones(4).bfloat16())


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x40
    path.write_bytes(content)


def test_a_flipped_byte_is_found_and_named_and_can_be_passed_over(step):
    flip(step / "rank_00000.safetensors", -3)
    with pytest.raises(RuntimeError, match=r"the checksum of optimizer.exp_avg.norm differs"):
        load(step, targets())
    load(step, targets(), checksums=False)


def test_only_the_blocks_that_are_needed_are_read(tmp_path):
    rows = 3 * BLOCK_BYTES // 4096
    step = save(tmp_path, 1, {"w": whole(torch.ones(rows, 1024))}, world=SINGLE)
    flip(step / "rank_00000.safetensors", -3)
    first = torch.zeros(2 * rows // 3, 1024)
    load(step, {"w": Shard((rows, 1024), first.dtype, (Piece((0, 0), first.shape, first),))})
    assert torch.all(first == 1)
    last = torch.zeros(1, 1024)
    piece = Piece((rows - 1, 0), (1, 1024), last)
    with pytest.raises(RuntimeError, match="the checksum of w differs"):
        load(step, {"w": Shard((rows, 1024), last.dtype, (piece,))})


def test_a_file_that_was_cut_short_or_is_gone_is_an_error(step):
    file = step / "rank_00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-4])
    with pytest.raises(RuntimeError, match=rf"has {len(content) - 4} bytes, but"):
        load(step, targets())
    file.unlink()
    with pytest.raises(RuntimeError, match=r"rank_00000.safetensors is missing"):
        load(step, targets())


def rewrite(step, change):
    """Change the index as one that was written so, with the digest that belongs to it."""
    path = step / "index.json"
    table = json.loads(path.read_text())
    del table["digest"]
    change(table)
    content = json.dumps(table).encode().removesuffix(b"}")
    path.write_bytes(content + b',\n "digest": "' + digest(content).encode() + b'"\n}\n')


def test_a_shape_that_its_files_do_not_hold_is_not_walked(step):
    rewrite(step, lambda t: t["tensors"]["model.norm"].__setitem__(1, [10**18]))
    with pytest.raises(RuntimeError, match=r"model\.norm of shape \[10{18}\] has \d+ elements"):
        check(step)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.update(extra=None), RuntimeError, "is damaged: TypeError"),
        (lambda t: t.pop("files"), RuntimeError, "is damaged: KeyError"),
        (
            lambda t: t["tensors"]["model.norm"][2][0].__setitem__(1, 10**12),
            RuntimeError,
            "model.norm ends outside of rank_0",
        ),
        (
            lambda t: t.update(extra={"model": {"config": {"num_layers": 10**12}}}),
            ValueError,
            "has num_layers=1000000000000, but the checkpoint has",
        ),
        (lambda t: t.update(version=1), ValueError, "has version 1: this program reads 2"),
        (lambda t: t.update(format="other"), ValueError, "is not an index of the mcore format"),
        (
            lambda t: t["files"].__setitem__("../../evil", [3, ""]),
            RuntimeError,
            "evil', which is outside of the folder",
        ),
        (
            lambda t: t["tensors"]["model.norm"][2][0].__setitem__(0, "../../evil"),
            RuntimeError,
            "model.norm is in a file that it does not list",
        ),
    ],
)
def test_an_index_that_cannot_be_right_is_an_error(step, change, error, message):
    rewrite(step, change)
    with pytest.raises(error, match=message):
        load(step, targets())


@pytest.mark.parametrize("content", [b"\xff\xfe", b"9" * 5000])
def test_a_pointer_that_is_no_number_is_told_as_such(step, content):
    (step.parent / TRACKER).write_bytes(content)
    with pytest.raises(ValueError, match="it must hold a step or 'release'"):
        load(step.parent, targets())


def test_an_index_that_is_not_json_is_an_error(step):
    (step / "index.json").write_bytes((step / "index.json").read_bytes()[:50])
    with pytest.raises(RuntimeError, match=r"index.json is damaged"):
        load(step, targets())


def test_a_folder_without_an_index_is_no_checkpoint(step):
    with pytest.raises(ValueError, match="--ckpt-step 99 needs a run folder"):
        resolve_folder(step, 99)
    (step / "index.json").unlink()
    with pytest.raises(ValueError, match=r"holds no complete checkpoint .* there: none"):
        load(step.parent, targets())
    (step / "metadata.json").write_text("{}")
    for folder in (step, step.parent):
        with pytest.raises(ValueError, match=r"metadata.json.*convert megatron-to-mcore"):
            resolve_folder(folder)


def test_a_run_folder_means_its_latest_step_and_a_step_can_be_chosen(tmp_path):
    for number in (1, 2):
        save(tmp_path, number, {"w": whole(torch.full((1,), float(number)))}, world=SINGLE)
    assert read_tensor(resolve_folder(tmp_path), "w") == 2
    assert read_tensor(resolve_folder(tmp_path, step=1), "w") == 1
    with pytest.raises(ValueError, match=r"iter_0000009 holds no complete.*: 1, 2\."):
        resolve_folder(tmp_path, step=9)
    with pytest.raises(ValueError, match="absent is not a folder"):
        resolve_folder(tmp_path / "absent")
    (tmp_path / TRACKER).unlink()
    assert read_tensor(resolve_folder(tmp_path), "w") == 2


def test_reading_a_tensor_that_is_not_there_names_the_nearest(step):
    with pytest.raises(
        ValueError, match=r"does not hold model.nrm \(nearest there: model.norm\)"
    ):
        read_tensor(step, "model.nrm")


def test_damage_that_one_rank_meets_is_raised_on_all(tmp_path):
    rows = 2 * BLOCK_BYTES // 4096
    save(tmp_path, 1, {"w": whole(torch.ones(rows, 1024))}, world=SINGLE)
    flip(resolve_folder(tmp_path) / "rank_00000.safetensors", -3)
    said = run_ranks(load_halves, 2, str(tmp_path), rows)
    assert "the checksum of w differs" in said[1]
    assert "1 of 2 ranks failed:\nrank 1: " in said[0]


def load_halves(folder, rows):
    from mcore_parallel.config import ParallelConfig

    ctx = ParallelContext.build(ParallelConfig())
    half = torch.zeros(rows // 2, 1024)
    piece = Piece((ctx.world.rank * rows // 2, 0), tuple(half.shape), half)
    shards = {"w": Shard((rows, 1024), half.dtype, (piece,))}
    try:
        load(folder, shards, world=ctx.world)
    except RuntimeError as error:
        ctx.destroy()
        return str(error)
    raise AssertionError("no error")
