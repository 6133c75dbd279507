from contextlib import nullcontext

import pytest
from warm_ranks import run_command

from mcore_base.destinations import check_file, check_folder
from mcore_train.composition import compose
from mcore_train.options.output_checks import check_destinations

FLAGS = (
    *("--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--mock-data"),
    *("--seq-length", 8, "--lr", 0.1, "--train-iters", 1),
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "notes"
    path.write_text("kept")
    return path


def test_what_is_new_or_of_the_right_kind_is_taken(tmp_path, file):
    check_folder("--save", str(tmp_path))
    check_folder("--save", str(tmp_path / "new" / "run"))
    check_file("--metrics-file", str(file))
    check_file("--metrics-file", str(tmp_path / "new" / "numbers"))
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"save": "notes"}, "--save .*notes is a file: give a folder"),
        ({"save": "notes/run"}, "--save .*notes/run cannot be made: .*notes is a file"),
        ({"metrics_file": ""}, "--metrics-file .* is a folder: give a file"),
        ({"metrics_file": "notes/n"}, "--metrics-file .*notes/n cannot be made"),
        ({"save": "/proc/x"}, "--save /proc/x cannot be made: /proc does not take it"),
        ({"save": "long" * 99}, r"--save .*long cannot be made: .* \(File name too long\)"),
        ({"data_cache_path": "notes"}, "--data-cache-path .*notes is a file"),
        (
            {"optimizer_cpu_offload": True, "optimizer_offload_dir": "/proc/x"},
            "--optimizer-offload-dir /proc/x cannot be made",
        ),
        (
            {"non_persistent_local_ckpt_dir": "/proc/x", "non_persistent_save_interval": 1},
            "--non-persistent-local-ckpt-dir /proc/x cannot be made",
        ),
    ],
)
def test_what_is_in_the_way_is_named_with_its_flag(tmp_path, file, changes, told):
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    there = {n: str(tmp_path / v) if isinstance(v, str) else v for n, v in changes.items()}
    config = compose(model | there)
    with pytest.raises(ValueError, match=told):
        check_destinations(config)


@pytest.fixture
def earlier(tmp_path):
    """A run folder whose newest step is 2, of a run that was killed before it pointed there."""
    step = tmp_path / "earlier" / "iter_0000002"
    step.mkdir(parents=True)
    (step / "index.json").write_text("{}")
    return step.parent


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "--save .* holds step 2 of an earlier run.*--load .*--auto-resume.*--overwrite"),
        ({"load": "other"}, "this new run would overwrite"),
        ({"load": "earlier", "finetune": True}, "would overwrite: leave out --finetune"),
        (
            {"load": "earlier/iter_0000002", "finetune": True, "overwrite": True},
            "--overwrite would delete the run .* starts from",
        ),
        ({"load": "earlier", "overwrite": True}, "--overwrite would delete the run"),
        ({"auto_resume": True, "overwrite": True}, "--overwrite would delete the run"),
        ({"load": "earlier"}, ""),
        ({"load": "earlier/iter_0000002"}, ""),
        ({"auto_resume": True}, ""),
        ({"auto_resume": True, "load": "other", "finetune": True}, ""),
        ({"overwrite": True}, ""),
        ({"load": "other", "overwrite": True}, ""),
    ],
)
def test_a_folder_of_an_earlier_run_is_continued_or_deleted_on_purpose(earlier, changes, told):
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    if "load" in changes:
        changes = {**changes, "load": str(earlier.parent / changes["load"])}
    config = compose(model | {"save": str(earlier)} | changes)
    with pytest.raises(ValueError, match=told) if told else nullcontext():
        check_destinations(config)


def test_a_release_in_the_folder_of_a_run_may_be_trained_there(earlier):
    (earlier / "latest_checkpointed_iteration.txt").write_text("release")
    (earlier / "iter_0000002").rename(earlier / "release")
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    start = {"save": str(earlier), "load": str(earlier), "finetune": True}
    check_destinations(compose(model | start))


def test_a_url_of_a_disk_is_looked_at_like_a_folder(file):
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    with pytest.raises(ValueError, match=f"--save {file} is a file"):
        check_destinations(compose(model | {"save": f"file://{file}"}))


def test_a_run_is_refused_before_it_starts_ranks(file):
    done = run_command("mcore_train", "gpt", *FLAGS, "--nproc", 2, "--save", file)
    assert done.returncode == 2
    assert done.stderr == f"mcore-train: error: --save {file} is a file: give a folder.\n"


def test_a_verification_is_refused_before_it_computes(tmp_path):
    done = run_command("mcore_train", "verify", "gpt", *FLAGS, "--certificate", tmp_path)
    assert done.returncode == 2
    told = f"mcore-train: error: --certificate {tmp_path} is a folder: give a file.\n"
    assert done.stderr == told
