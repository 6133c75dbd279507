"""Object stores: whole objects, the index last, read by ranges."""

import dataclasses
import json

import fsspec
import pytest
import torch

from mcore_base.file_lock import Holder
from mcore_ckpt.cli import main
from mcore_ckpt.config import RetentionConfig
from mcore_ckpt.conversion.inspection import check, describe
from mcore_ckpt.save_load.async_saving import AsyncSaver
from mcore_ckpt.save_load.loading import load, read_tensor
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.folder_lock import LOCK, FolderLock
from mcore_ckpt.storage.paths import complete_steps, latest_step, resolve_folder, step_folder
from mcore_parallel.mesh import SINGLE
from mcore_parallel.sharding import Piece, Shard

RUN = "memory://bucket/run"


def state(value):
    data = torch.full((30, 10), float(value))
    return {"model.w": Shard((30, 10), data.dtype, (Piece((0, 0), (30, 10), data),))}


@pytest.fixture(autouse=True)
def store():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    return system


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_url_of_a_disk_is_the_folder_that_it_names(tmp_path, scheme, capsys):
    url = f"{scheme}://{tmp_path}/run"
    step = save(url, 1, state(3), world=SINGLE)
    assert step == tmp_path / "run" / "iter_0000001"
    save(url, 1, state(4), world=SINGLE, replace=True)
    assert main(["verify", url]) == 0
    assert main(["reshard", url, "--output", f"{url}2"]) == 0
    assert torch.all(read_tensor(tmp_path / "run2" / "iter_0000001", "model.w") == 4)
    assert main(["convert", "hf-to-mcore", "--input", url, "--output", f"{url}3"]) == 2
    assert f"{tmp_path}/run is not a Hugging Face folder" in capsys.readouterr().err


def test_a_step_is_saved_to_a_store_and_loaded_from_it(store, tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    step = save(
        RUN,
        100,
        state(3),
        world=SINGLE,
        extra={"n": 1},
        files={"recipe.toml": b"a = 1\n"},
        folders={"tokenizer": tmp_path},
    )
    assert sorted(name for name in store.store if "/run/" in name) == [
        "/bucket/run/iter_0000100/index.json",
        "/bucket/run/iter_0000100/rank_00000.safetensors",
        "/bucket/run/iter_0000100/recipe.toml",
        "/bucket/run/iter_0000100/tokenizer/vocab.json",
        "/bucket/run/latest_checkpointed_iteration.txt",
    ]
    shards = state(-1)
    assert load(RUN, shards) == {"n": 1}
    assert torch.all(shards["model.w"].pieces[0].data == 3)
    rows = torch.zeros(2, 10)
    load(RUN, {"model.w": Shard((30, 10), rows.dtype, (Piece((5, 0), (2, 10), rows),))})
    assert torch.all(rows == 3)
    assert check(step)[1:] == (1, 1200)
    assert "model.w" in describe(RUN)


def test_the_background_saves_to_a_store_and_keeps_the_newest(store):
    saver = AsyncSaver(SINGLE, retention=RetentionConfig(save_retain_last=2))
    for step in range(1, 5):
        saver.save(RUN, step, state(step))
        assert saver.wait() == step_folder(RUN, step)
    assert complete_steps(RUN) == [3, 4]
    assert torch.all(read_tensor(resolve_folder(RUN), "model.w") == 4)
    assert not any(LOCK in name for name in store.store)


def test_garbage_is_replaced_and_a_complete_step_never(store):
    store.pipe_file("bucket/run/iter_0000001/rank_00007.safetensors", b"half")
    save(RUN, 1, state(1), world=SINGLE)
    assert "/bucket/run/iter_0000001/rank_00007.safetensors" not in store.store
    for replace in (False, True):
        with pytest.raises(RuntimeError, match="already holds a complete checkpoint"):
            save(RUN, 1, state(2), world=SINGLE, replace=replace)
    assert torch.all(read_tensor(resolve_folder(RUN), "model.w") == 1)


def test_a_damaged_or_short_object_is_named(store):
    save(RUN, 1, state(1), world=SINGLE)
    name = "/bucket/run/iter_0000001/rank_00000.safetensors"
    content = store.cat_file(name)
    store.pipe_file(name, content[:-1] + b"\x01")
    with pytest.raises(RuntimeError, match=r"the checksum of model.w differs"):
        load(RUN, state(0))
    store.pipe_file(name, content[:-4])
    with pytest.raises(RuntimeError, match=r"bytes, but"):
        load(RUN, state(0))
    store.rm_file(name)
    with pytest.raises(RuntimeError, match=r"rank_00000.safetensors is missing"):
        load(RUN, state(0))


def test_a_second_job_is_refused_by_a_store_too(store):
    other = dataclasses.replace(Holder.current(), token="another", host="elsewhere")
    store.pipe_file(f"bucket/run/{LOCK}", json.dumps(dataclasses.asdict(other)).encode())
    with pytest.raises(RuntimeError, match=r"process \d+ on elsewhere is writing to memory:"):
        save(RUN, 1, state(1), world=SINGLE)
    assert latest_step(RUN) is None
    unseen = json.dumps(
        dataclasses.asdict(dataclasses.replace(other, namespace="another"))
    ).encode()
    store.pipe_file(f"bucket/run/{LOCK}", unseen)
    with FolderLock(RUN, silent_s=0.2):  # no sign of life
        pass
    assert not store.isfile(f"bucket/run/{LOCK}")
    with FolderLock(RUN):
        save(RUN, 1, state(1), world=SINGLE)
        assert store.isfile(f"bucket/run/{LOCK}")
    assert not store.isfile(f"bucket/run/{LOCK}")


def test_commands_read_and_write_stores_as_they_do_folders(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    for run, value in ((RUN, 1), ("memory://bucket/other", 3)):
        folders = {"tokenizer": tmp_path / "tokenizer"}
        save(run, 7, state(value), world=SINGLE, extra={"model": {}}, folders=folders)
    other = "memory://bucket/other"
    assert main(["verify", RUN]) == 0
    assert main(["inspect", RUN]) == 0
    assert main(["inspect", RUN, "--compare", other]) == 1
    assert main(["reshard", RUN, "--output", "here"]) == 0
    assert (tmp_path / "here" / "iter_0000007" / "tokenizer" / "tokenizer.json").is_file()
    assert main(["reshard", "here", "--output", "memory://bucket/there"]) == 0
    assert main(["inspect", RUN, "--compare", "memory://bucket/there"]) == 0
    assert main(["average", RUN, other, "--output", "memory://bucket/mean"]) == 0
    mean = read_tensor("memory://bucket/mean/release", "model.w")
    assert torch.equal(mean, torch.full((30, 10), 2.0))
    capsys.readouterr()
    assert main(["convert", "mcore-to-hf", "--input", RUN, "--output", "s3x://b/hf"]) == 2
    assert main(["convert", "mcore-to-hf", "--input", RUN, "--output", "memory://b/hf"]) == 2
    assert "only checkpoints of mcore are read and written" in capsys.readouterr().err
    assert main(["convert", "hf-to-mcore", "--input", "memory://b/hf", "--output", "x"]) == 2
    assert "copy the hf side to or from a disk" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "tokenizer"]
