"""Preprocessing that is killed at random points gives what an undisturbed run gives."""

import json
import random
import time

import pytest
from forks import exit_code, fork, kill

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.preprocessing import tokenizing
from mcore_data.preprocessing.preprocessing import preprocess

KEYS = ("text", "title")


def work(prefix, source, workers):
    config = PreprocessConfig(
        input=(str(source), str(source)), output_prefix=str(prefix), json_keys=KEYS,
        append_eod=True, split_sentences=True, workers=workers, on_bad_record="skip",
    )  # fmt: skip
    preprocess(config, TokenizerConfig(tokenizer_type="ByteTokenizer"), block_bytes=2000)


@pytest.fixture(autouse=True)
def a_journal_many_times_a_second(monkeypatch):
    monkeypatch.setattr(tokenizing, "_JOURNAL_EVERY_S", 0.02)
    monkeypatch.setattr(tokenizing, "_SAVE_SHARE", 1)


def files(folder):
    """Every file of a run but the manifests, which name the run's own files."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if not path.name.endswith(".manifest.json")
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("crash") / "in.jsonl"
    lines = [
        json.dumps({"text": f"Number {i} is here. " * (i % 9), "title": f"Nr {i}"})
        if i % 50
        else "no record"
        for i in range(2500)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def kill_until_done(folder, source, workers, num_kills, seed):
    """Run in a child that is killed without notice, again and again, and then to the end."""
    draw = random.Random(seed)
    for _ in range(num_kills):
        child = fork(lambda: work(folder / "out", source, workers))
        time.sleep(draw.uniform(0.01, 0.25))
        kill(child)
    assert exit_code(fork(lambda: work(folder / "out", source, workers))) == 0


@pytest.fixture(scope="module")
def expected(tmp_path_factory, source):
    folder = tmp_path_factory.mktemp("whole")
    work(folder / "out", source, 1)
    return files(folder)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.crash), 2])
def test_five_kills_change_no_byte(tmp_path, source, expected, workers):
    kill_until_done(tmp_path, source, workers, num_kills=5, seed=workers)
    assert files(tmp_path) == expected


@pytest.mark.crash
@pytest.mark.parametrize("seed", range(10))
def test_twenty_kills_at_other_points_change_no_byte(tmp_path, source, expected, seed):
    kill_until_done(tmp_path, source, 1 + seed % 2, num_kills=20, seed=100 + seed)
    assert files(tmp_path) == expected


def test_workers_end_when_their_parent_is_killed(tmp_path, source):
    child = fork(lambda: work(tmp_path / "out", source, 2))
    children = f"/proc/{child}/task/{child}/children"
    deadline = time.monotonic() + 120
    workers = []
    while len(workers) < 2 and time.monotonic() < deadline:
        with open(children) as file:
            workers = list(map(int, file.read().split()))
    kill(child)
    assert len(workers) == 2
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, workers))


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
