import os
import shlex
import subprocess
import sys

import pytest

from mcore_base.entry_point import run_program


def bad():
    raise ValueError("--size 3 is odd: use 4.")


def broken():
    raise KeyError("a fault of ours")


def stopped():
    raise KeyboardInterrupt


def talk():
    print("word\n" * 100_000)
    return 0


def choose(*words):
    if words[:1] == ("fast",):
        print("options\n  --size {1,2,\n      3}   how many\n  --[no-]all  of them\n")
        raise SystemExit(0)
    print("verbs:\n  fast        at once\n  slow FILE   later\n")
    return 0


COMMANDS = {
    "add": ("takes any words", lambda *_: 0),
    "bad": ("refuses", bad),
    "broken": ("fails", broken),
    "choose": ("has verbs", choose),
    "stopped": ("is interrupted", stopped),
    "talk": ("prints much", talk),
}
LIST = "The commands are add, bad, broken, choose, stopped, talk."
ABOUT = (
    "Show how programs end.\n\nexamples:\n  mcore-base talk\n  mcore-base choose fast \\\n"
    "      --size 3\n\npages:\n  docs/choosing.md   choose talk\n  docs/ends.md   bad choose"
)


def run(*words, commands=COMMANDS):
    return run_program(
        "mcore-base",
        ABOUT,
        commands,
        words,
        lambda error: 2 if isinstance(error, ValueError) else 0,
        lambda function, _, words: function(*words),
    )


def test_usage_names_the_commands_and_comes_without_words_too(capsys):
    for words in ([], ["--help"], ["-h"]):
        assert run(*words) == 0
        usage = capsys.readouterr().out
        assert usage.startswith("usage: mcore-base COMMAND ...\n\nShow how programs end.\n")
        assert "  talk     prints much\n" in usage
        assert "examples:\n  mcore-base talk\n" in usage
        assert "\n\npages of the repository:\n  docs/choosing.md   choose talk\n" in usage


def test_help_ends_with_the_examples_and_pages_of_the_command(capsys):
    end = "\nexamples:\n  mcore-base choose fast \\\n      --size 3\n\nsee docs/"
    for words in (["choose", "--help"], ["choose", "fast", "-h"]):
        assert run(*words) == 0
        assert capsys.readouterr().out.endswith(
            f"{end}choosing.md, docs/ends.md of the repository\n"
        )


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("mcore-base t", "talk"),
        ("mcore-base choose ", "fast slow"),
        ("mcore-base choose fast --", "--help --size --all --no-all"),
        ("mcore-base choose fast --size ", "1 2 3"),
        ("mcore-base choose fast --all --s", "--size"),
        ("mcore-base --print-completion b", "bash"),
    ],
)
def test_bash_completes_commands_verbs_options_and_choices(capsys, line, completions):
    commands = {"choose": ("has verbs", choose), "talk": ("prints much", lambda *_: 0)}
    assert run("--print-completion", "bash", commands=commands) == 0
    words = shlex.join([*line.split(), *([""] if line.endswith(" ") else [])])
    ask = f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _mcore_base"
    script = f"{capsys.readouterr().out}\n{ask}; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == completions.split()


def test_the_version_is_that_of_the_package(capsys):
    assert run("--version") == 0
    program, version = capsys.readouterr().out.split()
    assert program == "mcore-base"
    assert version[0].isdigit()


@pytest.mark.parametrize(
    ("word", "code", "line"),
    [
        ("bad", 2, "--size 3 is odd: use 4."),
        ("stopped", 1, "interrupted"),
        ("tlak", 2, f"unknown command tlak: did you mean talk? {LIST}"),
        ("--verbose", 2, f"unknown command --verbose. {LIST}"),
    ],
)
def test_what_a_user_can_mend_is_one_line(capsys, word, code, line):
    assert run(word) == code
    assert capsys.readouterr().err == f"mcore-base: error: {line}\n"


def test_an_option_that_is_given_again_with_other_values_is_named_once_a_job(
    monkeypatch, caplog
):
    again = ["--size=3", "--all", "--size", "4", "x", "--no-all", "--recipe", "a"]
    for rank, launcher in (("1", False), ("0", True)):  # who said it already started them
        monkeypatch.setenv("RANK", rank)
        if launcher:
            monkeypatch.setenv("MCORE_LAUNCHER_PID", "9")
        assert run("add", *again, "--lr", "1") == 0
        assert not caplog.records
    monkeypatch.delenv("MCORE_LAUNCHER_PID")
    assert run("add", *again, "--recipe", "b", "--lr", "1", "--lr", "1") == 0
    assert [record.getMessage() for record in caplog.records] == [
        "--size is given more than once: the last counts, --size 4 x.",
        "--all is given more than once: the last counts, --no-all.",
    ]


def test_a_fault_of_the_program_is_raised():
    with pytest.raises(KeyError, match="a fault of ours"):
        run("broken")


@pytest.mark.parametrize("words", [["talk"], ["--help"]])
def test_a_reader_that_has_seen_enough_ends_the_program_quietly(monkeypatch, capfd, words):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run(*words) == 0
        pipe.flush()  # what is left in the buffer has a place to go
    assert capfd.readouterr().err == ""
