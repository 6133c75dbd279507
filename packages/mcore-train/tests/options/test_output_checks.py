import pytest

from mcore_parallel.testing.ranks import run_command
from mcore_train.composition import compose
from mcore_train.options.output_checks import check_destinations, check_file, check_folder

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
    ],
)
def test_what_is_in_the_way_is_named_with_its_flag(tmp_path, file, changes, told):
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    config = compose(model | {name: f"{tmp_path}/{path}" for name, path in changes.items()})
    with pytest.raises(ValueError, match=told):
        check_destinations(config)


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
