"""The ``main`` of a program with several commands: usage, version, completion, errors.

The help of a command ends with its examples and pages, taken from the text about the program.
An error that the user can mend is printed as one line. If the reader of the output exits early,
as ``head`` does, the program ends without an error.
"""

import difflib
import io
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from itertools import takewhile

from mcore_base.completion import completion_script

log = logging.getLogger(__name__)

Commands = Mapping[str, tuple[str, Callable[..., int]]]
"""Summary and function of each command, by name."""
ADDING = ("--recipe",)
"""Options whose values add up when the option is repeated; of other options the last counts."""
LAUNCHER = "MCORE_LAUNCHER_PID"
"""Environment variable with the process id of ``launch_local``, set for the ranks it starts.

The launcher has read their command line already, so they do not repeat its notes."""
_HELP = {"-h", "--help", "--help-all"}


def run_program(
    program: str,
    about: str,
    commands: Commands,
    argv: Sequence[str] | None,
    exit_code: Callable[[BaseException], int],
    call: Callable[[Callable[..., int], str, list[str]], int],
) -> int:
    """Run one command of a program; print its errors as one line and return an exit code.

    Args:
        program: name of the program, which is also the name of its package.
        about: text of the help, in three paragraphs: a line on the program; ``examples:`` and
            commands; ``pages:`` and, a line each, a page of the repository and its commands.
        commands: commands of the program, in the order of the help.
        argv: the words after the program's name; None: those of this process.
        exit_code: returns 2 for bad input, 1 or another code for a failure of files or devices,
            0 for a bug of the program, whose traceback is shown.
        call: runs a function of ``commands``, given ``"program command"`` and the other words.

    Returns:
        0 after success, 2 for bad input, else the result of ``exit_code`` or 1.
    """
    try:
        return _dispatch(program, about, commands, argv, call)
    except SystemExit as end:  # after help
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return _refuse(program, "interrupted", 1)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return 0
        code = exit_code(error)
        if not code:
            raise
        return _refuse(program, str(error), code)
    finally:
        _is_unread()


def _refuse(program: str, message: str, code: int) -> int:
    print(f"{program}: error: {message}", file=sys.stderr)
    return code


def _is_unread() -> bool:
    """Flush standard output; if its reader has exited, discard the rest and return True."""
    try:
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        has_failed = any(event & select.POLLERR for _, event in poll.poll(0))
    except io.UnsupportedOperation:  # standard output is not a file, as in tests
        return False
    except BrokenPipeError:
        has_failed = True
    if has_failed:
        # Python flushes again at exit: let that flush write to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return has_failed


def _dispatch(
    program: str,
    about: str,
    commands: Commands,
    argv: Sequence[str] | None,
    call: Callable[[Callable[..., int], str, list[str]], int],
) -> int:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in _HELP:
        print(_usage(program, about, commands))
        return 0
    if name == "--print-completion":

        def help_of(*words: str) -> str:
            text = io.StringIO()
            with redirect_stdout(text), suppress(SystemExit):
                call(commands[words[0]][1], f"{program} {words[0]}", [*words[1:], "--help-all"])
            return text.getvalue()

        print(completion_script(program, " ".join(rest), commands, help_of), end="")
        return 0
    if name == "--version":
        print(program, import_module(program.replace("-", "_")).__version__)
        return 0
    if name not in commands:
        similar = difflib.get_close_matches(name, commands, n=1)
        suggestion = f": did you mean {similar[0]}?" if similar else "."
        raise ValueError(
            f"unknown command {name}{suggestion} The commands are {', '.join(commands)}."
        )
    for flag, values in _repeated(rest) if is_first_rank() else ():
        log.warning("%s is given more than once: the last counts, %s.", flag, values)
    if not _HELP & set(rest):
        return call(commands[name][1], f"{program} {name}", rest)
    code = 0
    with suppress(SystemExit):  # Some commands raise it after help, others return.
        code = call(commands[name][1], f"{program} {name}", rest)
    print(_help_end(program, about, name))
    return code


def is_first_rank() -> bool:
    """Whether this process logs notes on the command line: the launcher, else rank 0."""
    return os.environ.get("RANK", "0") == "0" and LAUNCHER not in os.environ


def _repeated(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option that is repeated with different values, and its last form."""
    forms_by_name: dict[str, list[str]] = {}
    for position, word in enumerate(words):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            following = takewhile(
                lambda other: not other.startswith("--"), words[position + 1 :]
            )
            form = " ".join([name, *([value] if value else following)])
            forms_by_name.setdefault(name.replace("_", "-").replace("--no-", "--"), []).append(
                form
            )
    for name, forms in forms_by_name.items():
        if name not in ADDING and len(set(forms)) > 1:
            yield name, forms[-1]


def _usage(program: str, about: str, commands: Commands) -> str:
    width = max(map(len, commands))
    lines = "\n".join(f"  {name:{width}}  {commands[name][0]}" for name in commands)
    purpose, _, examples = about.partition("\n\n")
    examples = examples.replace("\n\npages:\n", "\n\npages of the repository:\n")
    return (
        f"usage: {program} COMMAND ...\n\n{purpose}\n\ncommands:\n{lines}\n\n{examples}\n\n"
        f"{program} COMMAND --help shows a command's options; {program} --version its version; "
        f"\n{program} --print-completion bash (or zsh) a script that completes them."
    )


def _help_end(program: str, about: str, command: str) -> str:
    """Return a command's examples and pages, taken from the text about the program."""
    examples, _, pages = about.partition("examples:\n")[2].partition("\n\npages:\n")
    starts = (
        f"  {program} {command} ",
        f"  torchrun --nproc-per-node 8 -m {program} {command} ",
    )
    lines, is_example = [], False
    for line in examples.splitlines():
        if not line.startswith("   "):  # otherwise it continues the line before
            is_example = f"{line} ".replace("_", "-").startswith(starts)
        lines += [line] * is_example
    lines = ["", "examples:", *lines] if lines else []
    command_pages = [
        line.split()[0] for line in pages.splitlines() if command in line.split()[1:]
    ]
    return "\n".join(
        [
            *lines,
            *(
                ["", f"see {', '.join(command_pages)} of the repository"]
                if command_pages
                else []
            ),
        ]
    )
