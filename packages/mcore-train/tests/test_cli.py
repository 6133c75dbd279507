import os
import re
import shlex
import subprocess
import sys

import pytest

from mcore_ckpt.errors import CheckpointError
from mcore_data.indexed.index_format import CorruptDatasetError
from mcore_parallel.data_parallel.replica_checks import UnlikeWeightsError
from mcore_train import cli
from mcore_train.cli import ABOUT, COMMANDS, main, without_option
from mcore_train.options.parsing import parse
from mcore_train.resolution import resolve


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "mcore_train", *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_names_every_command_and_does_not_load_torch():
    script = (
        "import sys; from mcore_train.cli import main; main(['--help'])\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert all(name in done.stdout for name in COMMANDS)
    assert done.stdout.endswith("[]\n")


def test_the_examples_of_the_help_can_be_run_without_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [line.strip() for line in ABOUT.split("examples:")[1].splitlines()]
    (whole,) = (line for line in lines if line.startswith("mcore-train gpt"))
    config = parse(shlex.split(whole)[2:])
    assert resolve(config, 1).train_iters == 100
    for line in lines:
        read = re.sub(r"--output \S+", "", line)
        assert not re.search(r"\S+\.toml|\.\./|recipes/", read), line


def processor_time_s(*words):
    """Of a command: other work on the host slows the answer, and this little."""
    before = os.times()
    assert command(*words).returncode == 0
    after = os.times()
    user_s = after.children_user - before.children_user
    return user_s + after.children_system - before.children_system


@pytest.mark.parametrize("words", [["--help"], ["gpt", "--help"], ["gpt", "--help-all"]])
def test_help_answers_in_half_a_second(words):
    # The first call of a fresh clone compiles what it imports.
    assert any(processor_time_s(*words) < 0.5 for _ in range(3))


def test_help_of_gpt_is_grouped_by_concept_and_does_not_load_torch():
    script = (
        "import sys; from mcore_train.cli import main; main(['gpt', '--help'])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    for words in ("model: Shape", "parallelism: How", "--moe-router-topk", "--recipe"):
        assert words in done.stdout
    assert done.stdout.endswith("False\n")


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    assert main(["gtp"]) == 2
    assert "unknown command gtp: did you mean gpt?" in capsys.readouterr().err
    assert main(["serve"]) == 2
    assert (
        "unknown command serve. The commands are gpt, mamba, bert, t5, quickstart"
        in capsys.readouterr().err
    )


def test_a_schedule_is_drawn_as_text_and_as_a_picture(capsys, tmp_path):
    picture = tmp_path / "x.svg"
    words = ["--ranks", "2", "--microbatches", "3", "--pipeline-schedule", "zb-h1"]
    assert main(["schedule", "show", *words, "--output", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "rank 1" in out
    assert "bubble" in out
    assert picture.read_text().startswith("<svg")
    assert main(["schedule", "show", *words[:4], "--pipeline-schedule", "auto"]) == 0
    assert capsys.readouterr().out.startswith("schedule            time   bubble\nzb-v ")


def test_a_stage_takes_as_long_as_it_has_layers_and_megatrons_names_are_known(capsys):
    words = ["--pipeline-model-parallel-size", "2", "--microbatches", "2", "--num-layers", "4"]
    drawn = []
    for layout in ("Ett|ttL", "Et|tttL"):
        layout_words = ["--pipeline-model-parallel-layout", layout]
        assert main(["schedule", "show", *words, *layout_words]) == 0
        drawn.append(capsys.readouterr().out)
    assert "bubble 50.0%" in drawn[0]
    assert "bubble 75.0%" in drawn[1]  # 24 of 2 x 21 units are work
    stages = ["--num-virtual-stages-per-pipeline-rank", "2"]
    theirs = ["--num_layers=4", "--num-layers-per-virtual-pipeline-stage", "1"]
    for options in (stages, theirs):
        own = ["--num-microbatches=2", *options]
        assert main(["schedule", "show", *words[:2], *words[4:], *own]) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[2] == drawn[3] != drawn[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layers", "4", "--pipeline-model-parallel-layout", "Et|ttL"], "holds 3 layers t"),
        (["--pipeline-model-parallel-layout", "Et|ttL"], "give their number by --layers"),
        (["--layers", "3"], "--num-layers 3 cannot be split"),
        (
            ["--output", "/proc/a/x.svg"],
            "--output /proc/a/x.svg cannot be made in /proc",
        ),
        (["--output", "x.png"], "--output x.png must be an SVG file: use the suffix .svg"),
    ],
)
def test_a_schedule_that_cannot_be_drawn_says_what_to_change(capsys, words, told):
    assert main(["schedule", "show", "--ranks", "2", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_schedule_that_does_not_fit_is_refused(capsys):
    words = [
        "--ranks",
        "2",
        "--microbatches",
        "3",
        "--num-virtual-stages-per-pipeline-rank",
        "2",
    ]
    assert main(["schedule", "show", *words]) == 2
    assert "--global-batch-size" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--nproc", "2", "--lr", "1"], ["--lr", "1", "--nproc=2"]])
def test_ranks_do_not_start_ranks_of_their_own(words):
    assert without_option(words, "--nproc") == ["--lr", "1"]


def test_nproc_starts_the_same_command_once_a_rank(tmp_path, monkeypatch):
    # An interpreter that only writes down which rank it is, and what it was to run.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$WORLD_SIZE $*" > {tmp_path}/rank_$RANK\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    words = ["--mock-data", "--num-layers", "2", "--hidden-size", "8"]
    words += ["--num-attention-heads", "2", "--seq-length", "8", "--vocab-size", "40"]
    words += ["--train-iters", "1", "--lr", "1e-3", "--global-batch-size", "2"]
    words += ["--device", "cpu", "--precision", "auto"]
    assert main(["gpt", *words, "--nproc", "2"]) == 0
    told = {path.name: path.read_text() for path in tmp_path.glob("rank_*")}
    ran = f"2 -m mcore_train gpt {' '.join(words)}\n"
    assert told == {"rank_0": ran, "rank_1": ran}


@pytest.mark.parametrize(
    ("kind", "code"), [(CheckpointError, 1), (CorruptDatasetError, 1), (UnlikeWeightsError, 39)]
)
def test_faults_of_machines_end_a_command_with_one_line(monkeypatch, capsys, kind, code):
    def damaged(_):
        raise kind("x.bin is damaged")

    monkeypatch.setitem(cli.COMMANDS, "gpt", ("", damaged))
    assert cli.main(["gpt"]) == code
    assert capsys.readouterr().err == "mcore-train: error: x.bin is damaged\n"


def test_a_fault_of_the_program_shows_where_it_is(monkeypatch):
    def broken(_):
        raise RuntimeError("a bug")

    monkeypatch.setitem(cli.COMMANDS, "gpt", ("", broken))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["gpt"])
