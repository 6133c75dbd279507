"""Completion scripts for bash and zsh, built from the help texts of a program's commands.

The help text is the only description of options that all commands have, as some parse their
words themselves. The script contains all words, so that pressing Tab starts no Python.
"""

import re
from collections.abc import Callable, Mapping

SHELLS = ("bash", "zsh")

_OPTION = re.compile(r"^  --(\[no-\])?([a-z0-9][a-z0-9-]*)(?:\s+\{([^}]*)\})?", re.MULTILINE)
_VERB = re.compile(r"^  ([a-z][a-z-]*)(?: [A-Z]+)?(?:  |$)", re.MULTILINE)

_TEMPLATE = r"""# Completion of PROGRAM for SHELL, written by PROGRAM --print-completion SHELL.
PREFACE_NAME_words() {
    case "$1" in
CASES
    esac
}
_NAME() {
    local current="${COMP_WORDS[COMP_CWORD]}" command="" words
    local before="${COMP_WORDS[COMP_CWORD-1]}"
    if [ "$COMP_CWORD" -gt 1 ]; then command="${COMP_WORDS[1]}"; fi
    if [ "$COMP_CWORD" -gt 2 ]; then
        case "${COMP_WORDS[2]}" in
            -*) ;;
            *) if [ -n "$(_NAME_words "$command ${COMP_WORDS[2]}")" ]; then
                command="$command ${COMP_WORDS[2]}"
            fi ;;
        esac
    fi
    words="$(_NAME_words "$command $before")"  # choices of the option before
    if [ -z "$words" ]; then words="$(_NAME_words "$command")"; fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _NAME PROGRAM
"""


def completion_script(
    program: str, shell: str, commands: Mapping[str, object], help_of: Callable[..., str]
) -> str:
    """Return the shell script that completes commands, verbs, options and their choices.

    Args:
        program: name of the program.
        shell: ``bash`` or ``zsh``.
        commands: commands by name.
        help_of: returns the whole help text of a command, or of a command and its verb.

    Raises:
        ValueError: for another shell.
    """
    if shell not in SHELLS:
        raise ValueError(f"--print-completion {shell!r} is unknown: use bash or zsh.")
    words = {"": [*commands, "--help", "--version", "--print-completion"]}
    words["--print-completion"] = [*SHELLS]
    for command in commands:
        text = help_of(command)
        verbs = _VERB.findall(text.partition("examples:")[0])
        words[command] = verbs or _add_options(command, text, words)
        for verb in verbs:
            words_before = f"{command} {verb}"
            words[words_before] = _add_options(words_before, help_of(command, verb), words)
    cases = "\n".join(f'        "{k}") echo "{" ".join(each)}" ;;' for k, each in words.items())
    preface = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    texts = {"PREFACE": preface, "CASES": cases, "PROGRAM": program, "SHELL": shell}
    script = _TEMPLATE.replace("_NAME", "_" + program.replace("-", "_"))
    for name, text in texts.items():
        script = script.replace(name, text)
    return script


def _add_options(words_before: str, text: str, words: dict[str, list[str]]) -> list[str]:
    """Return the options in a help text; add the choices of each option to ``words``."""
    options = ["--help"]
    for negated, name, choices in _OPTION.findall(text):
        options += [f"--{name}", *([f"--no-{name}"] if negated else [])]
        if choices:
            words[f"{words_before} --{name}"] = re.sub(r"\s", "", choices).split(",")
    return options
