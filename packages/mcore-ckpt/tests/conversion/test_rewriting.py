"""Checkpoints made of others: the same tensors in other files, or their mean."""

import pytest
import torch

from mcore_ckpt.cli import main
from mcore_ckpt.conversion.inspection import differences
from mcore_ckpt.conversion.resharding import average_checkpoints, reshard
from mcore_ckpt.save_load.loading import read_tensor
from mcore_ckpt.save_load.saving import save
from mcore_ckpt.storage.index import read_index
from mcore_ckpt.storage.paths import latest_step, resolve_folder
from mcore_parallel.mesh import SINGLE
from mcore_parallel.sharding import Piece, Shard, named_shards


def cut(data, rows):
    """A tensor held as boxes of so many rows."""
    pieces = tuple(
        Piece((i, 0), (min(rows, len(data) - i), data.shape[1]), data[i : i + rows])
        for i in range(0, len(data), rows)
    )
    return Shard(tuple(data.shape), data.dtype, pieces)


def save_step(folder, step, value, **more):
    shards = {
        "model.w": cut(torch.full((10, 3), value, dtype=torch.bfloat16), 3),
        "model.ids": cut(torch.arange(6).view(3, 2), 1),
        "optimizer.exp_avg.w": cut(torch.full((10, 3), value), 4),
        **more,
    }
    return save(
        folder,
        step,
        shards,
        world=SINGLE,
        extra={"model": {"family": "gpt"}, "iteration": step},
        files={"recipe.toml": b"a = 1\n"},
    )


def test_resharding_puts_boxes_together_and_keeps_everything(tmp_path):
    step = save_step(tmp_path / "a", 7, 1.5)
    new = reshard(tmp_path / "a", tmp_path / "b", num_files=2)
    assert new.name == step.name
    assert latest_step(tmp_path / "b") == 7
    assert differences(step, new) == []
    index = read_index(new)
    assert all(len(entry.chunks) == 1 for entry in index.tensors.values())
    assert index.extra == read_index(step).extra
    assert len(index.files) == 2
    assert (new / "recipe.toml").read_bytes() == b"a = 1\n"


def test_what_made_a_step_a_hugging_face_folder_stays_behind(tmp_path):
    step = save_step(tmp_path / "a", 7, 1.5)
    (step / "tokenizer").mkdir()
    for place in (step, step / "tokenizer"):
        (place / "tokenizer.json").write_text("{}")
    (step / "config.json").write_text("{}")
    new = reshard(tmp_path / "a", tmp_path / "b")
    assert (new / "tokenizer" / "tokenizer.json").read_text() == "{}"
    assert not (new / "tokenizer.json").exists()
    assert not (new / "config.json").exists()


def test_equal_bits_are_no_difference_even_where_they_are_no_numbers(tmp_path):
    steps = [save_step(tmp_path / name, 1, float("nan")) for name in "ab"]
    assert differences(*steps) == []
    assert differences(steps[0], save_step(tmp_path / "c", 1, 1.0)) == [
        "model.w: values differ",
        "optimizer.exp_avg.w: values differ",
    ]


def test_an_average_is_taken_in_float32_and_leaves_the_optimizer_behind(tmp_path):
    # 1 and 1 + 2^-7 are neighbours in bf16; the sum of three must not round on the way.
    steps = [save_step(tmp_path / str(v), 1, v) for v in (1.0, 1.0078125, 1.015625)]
    new = average_checkpoints(steps, tmp_path / "mean")
    assert torch.all(read_tensor(new, "model.w") == 1.0078125)
    assert torch.equal(read_tensor(new, "model.ids"), torch.arange(6).view(3, 2))
    index = read_index(resolve_folder(tmp_path / "mean"))
    assert set(index.tensors) == {"model.w", "model.ids"}
    assert index.extra["model"] == {"family": "gpt"}
    assert "iteration" not in index.extra


def test_what_cannot_be_averaged_is_refused_by_name(tmp_path):
    one = save_step(tmp_path / "one", 1, 1.0)
    with pytest.raises(ValueError, match="give two checkpoints or more"):
        average_checkpoints([one], tmp_path / "mean")
    other = save_step(
        tmp_path / "other",
        1,
        1.0,
        **{"model.w": cut(torch.ones(11, 3), 3), "model.new": cut(torch.ones(2, 2), 2)},
    )
    with pytest.raises(ValueError, match="not checkpoints of one model") as caught:
        average_checkpoints([one, other], tmp_path / "mean")
    assert f"only in {other}: model.new" in str(caught.value)
    assert "model.w: BF16 [10, 3]" in str(caught.value)
    third = save_step(
        tmp_path / "third", 1, 1.0, **{"model.ids": cut(torch.ones(3, 2).long(), 3)}
    )
    with pytest.raises(ValueError, match=r"model.ids holds integers that differ"):
        average_checkpoints([one, third], tmp_path / "mean")


def test_steps_without_weights_are_not_averaged_to_nothing(tmp_path):
    linear = named_shards(torch.nn.Linear(3, 2))
    steps = [save(tmp_path / "run", step, linear, world=SINGLE) for step in (1, 2)]
    with pytest.raises(ValueError, match="iter_0000001 holds no weights to average"):
        average_checkpoints(steps, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def test_an_output_in_a_step_which_a_run_may_delete_is_refused(tmp_path):
    save_step(tmp_path / "run", 1, 1.0)
    step = save_step(tmp_path / "run", 2, 1.0)
    for output in (step.with_name("iter_0000001") / "x", step.with_name("iter_0000003")):
        with pytest.raises(ValueError, match=r"is a step of the run .* may delete"):
            reshard(step, output)
        assert not output.exists()


def test_the_commands_do_the_same(tmp_path, capsys):
    steps = [str(save_step(tmp_path / str(v), v, float(v))) for v in (1, 3)]
    assert main(["average", *steps, "--output", str(tmp_path / "mean")]) == 0
    assert torch.all(read_tensor(resolve_folder(tmp_path / "mean"), "model.w") == 2)
    assert main(["reshard", steps[0], "--output", str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "mean" / "release"),
        str(tmp_path / "again" / "iter_0000001"),
    ]
    assert main(["reshard", steps[0], "--output", str(tmp_path), "--num-files", "0"]) == 2
