"""What a user meets when something is wrong: exit code 2, one clear message, no traceback."""

import json

import pytest
from warm_ranks import run_command

from mcore_ckpt.storage.folder_lock import FolderLock

SHAPE = "--num-layers 2 --hidden-size 48 --num-attention-heads 12 --seq-length 32"
RUN = "--mock-data --vocab-size 64 --lr 1e-3 --train-iters 2 --num-workers 0 --device cpu"


def train(*words):
    """Run the command; return its exit code and what it told on standard error."""
    line = [w for word in words for w in str(word).split(" ")]
    done = run_command("mcore_train", "gpt", *line)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def failed(*words):
    """Run a command that files or peers end; return its exit code and its last line."""
    line = [w for word in words for w in str(word).split(" ")]
    done = run_command("mcore_train", "gpt", *line)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


def test_an_unknown_flag_is_answered_with_the_nearest_known_one():
    code, told = train(SHAPE, "--tensor-model-paralel-size 2")
    assert code == 2
    assert "did you mean --tensor-model-parallel-size?" in told


def test_heads_that_cannot_be_split_are_refused_with_what_fits():
    code, told = train(SHAPE, RUN, "--tensor-model-parallel-size 8")
    assert code == 2
    assert "heads must divide evenly. Use 1, 2, 3, 4, 6 or 12." in told
    assert "does not divide the world of 1 ranks" in told


def test_what_is_wrong_is_told_once_before_ranks_are_started():
    code, told = train(SHAPE, RUN, "--nproc 2 --tensor-model-parallel-size 8")
    assert code == 2
    assert told.count("heads must divide evenly") == 1
    tour = run_command(
        "mcore_train", "quickstart", *["--nproc", "3", "--tensor-model-parallel-size", "3"]
    )
    assert tour.returncode == 2
    assert tour.stderr.count("heads must divide evenly") == 1, tour.stderr


def test_a_sequence_longer_than_the_models_positions_is_refused():
    code, told = train(SHAPE, RUN, "--max-position-embeddings 16")
    assert code == 2
    assert "--max-position-embeddings 16" in told


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("num_layer = 2\n", "unknown field num_layer: did you mean num_layers?"),
        ("seed = 2\nseed = 3\n", "seed is given twice"),
    ],
)
def test_a_recipe_with_an_unknown_or_doubled_field_names_file_and_field(tmp_path, text, wanted):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(text)
    code, told = train(SHAPE, RUN, "--recipe", recipe)
    assert code == 2
    assert "mine.toml" in told
    assert wanted in told


def test_a_recipe_and_a_dataset_that_are_not_there_are_named():
    code, told = train("--recipe /nowhere/x.toml")
    assert code == 2
    assert "/nowhere/x.toml" in told
    code, told = train(SHAPE, RUN.replace("--mock-data", "--data-path /nowhere/data"))
    assert code == 2
    assert "/nowhere/data" in told


def test_an_index_that_does_not_match_its_tokens_is_refused(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "some words " * 200}) + "\n")
    prefix = str(tmp_path / "data")
    words = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--output-prefix", prefix]
    run_command("mcore_data", "preprocess", "--input", text, *words).check_returncode()
    tokens = tmp_path / "data_text_document.bin"
    tokens.write_bytes(tokens.read_bytes()[:-7])
    flags = f"--data-path {prefix}_text_document --tokenizer-type ByteTokenizer --split 1"
    code, told = train(SHAPE, RUN.replace("--mock-data --vocab-size 64", flags))
    assert code == 2
    assert "data_text_document" in told


def test_a_checkpoint_of_another_model_and_one_that_is_not_whole(tmp_path):
    folder = tmp_path / "run"
    assert train(SHAPE, RUN, "--save", folder)[0] == 0
    code, told = train(RUN, "--load", folder, "--num-layers 3")
    assert code == 2
    assert "num_layers: 2 in the checkpoint, 3 here" in told
    (folder / "iter_0000002" / "index.json").unlink()
    code, told = train(RUN, "--load", folder, SHAPE)
    assert code == 2
    assert "iter_0000002" in told


def test_a_save_that_was_interrupted_leaves_the_one_before(tmp_path):
    folder = tmp_path / "run"
    assert train(SHAPE, RUN, "--save", folder, "--save-interval 1")[0] == 0
    half = folder / "iter_0000003"
    half.mkdir()
    (half / "rank_00000.safetensors").write_bytes(b"half a file")
    code, told = train(RUN.replace("--train-iters 2", "--train-iters 3"), "--load", folder)
    assert code == 2
    assert "--override-opt-param-scheduler" in told
    code, told = train(
        RUN.replace("--train-iters 2", "--train-iters 3"),
        "--override-opt-param-scheduler --load",
        folder,
    )
    assert code == 0, told
    assert "continuing at iteration 2" in told


def test_a_flipped_byte_and_a_second_job_are_told_and_an_older_step_loads(tmp_path):
    folder = tmp_path / "run"
    assert train(SHAPE, RUN, "--save", folder, "--save-interval 1")[0] == 0
    shard = folder / "iter_0000002" / "rank_00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    longer = RUN.replace("--train-iters 2", "--train-iters 3 --override-opt-param-scheduler")
    code, last = failed(longer, "--load", folder)
    assert code == 1
    assert f"{shard} is damaged" in last
    assert last.endswith("Load another step.")
    code, told = train(longer, "--ckpt-step 1 --load", folder)
    assert code == 0, told
    assert "continuing at iteration 1" in told
    with FolderLock(folder):
        code, last = failed(longer, "--ckpt-step 1 --load", folder, "--save", folder)
    assert code == 1
    assert f"is writing to {folder}" in last


def test_ranks_are_not_started_twice(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "x")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    code, told = train(SHAPE, RUN, "--nproc 2")
    assert code == 2
    assert "--nproc cannot be used under torchrun" in told
