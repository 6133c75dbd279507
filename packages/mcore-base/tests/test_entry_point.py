import os
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


COMMANDS = {
    "add": ("takes any words", lambda *_: 0),
    "bad": ("refuses", bad),
    "broken": ("fails", broken),
    "stopped": ("is interrupted", stopped),
    "talk": ("prints much", talk),
}
LIST = "The commands are add, bad, broken, stopped, talk."
ABOUT = "Show how programs end.\n\nexamples:\n  mcore-base talk"


def run(*words):
    return run_program(
        "mcore-base",
        ABOUT,
        COMMANDS,
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
