"""Finds the training command of a launch script without running the script.

Assignments, arrays, ``if`` with plain tests, and expansions (``$X``, ``${X:-y}``, ``${A[@]}``,
``$(( ))``) are evaluated in order. The environment is not read, and no command is started. An
expansion whose value only a running shell has stays in the words, enclosed in ``UNKNOWN``.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mcore_base.command_line import is_flag

UNKNOWN = "\x00"
"""Marks begin and end of an expansion in a word, if the script does not contain its value."""
Value = str | list[str]

_OPERATOR = re.compile(r"\n|;;|;|&&|\|\||&>>?|\d*>>?&?\d*|\d*<<<|<<-?|<|[&|()]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_PARAMETER = re.compile(
    r"(?P<count>#?)(?P<name>[A-Za-z_]\w*|\d+|[@*?#$!-])(?:\[(?P<index>[^]]*)\])?"
    r"(?P<op>:-|-|:=|=|:\+|\+|:\?|\?|%%|%|##|#)?(?P<word>.*)",
    re.DOTALL,
)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_OPENING = {
    "if": "fi",
    "for": "done",
    "while": "done",
    "until": "done",
    "case": "esac",
    "{": "}",
}
_LEADING = ("if", "then", "elif", "else", "do", "while", "until", "{", "!")
"""Words after which a command begins."""
_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: int(a / b),  # a shell rounds towards zero
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_MOST_DIGITS = 18
"""Largest number of digits in arithmetic, within the 64 bits of a shell."""


@dataclass(slots=True)
class Script:
    """Command that a launch script starts, as far as its text determines it."""

    words: list[str] = field(default_factory=list)
    """Words after the training script or module."""
    launcher: list[str] = field(default_factory=list)
    """Words before the training script or module: ``torchrun`` and its options."""
    program: str = ""
    """Training script or module."""
    exports: dict[str, str] = field(default_factory=dict)
    """Exported variables and their values."""
    batch_options: list[str] = field(default_factory=list)
    """Options of ``#SBATCH`` lines."""
    skipped: list[str] = field(default_factory=list)
    """Lines that were not evaluated, one sentence each."""


@dataclass(frozen=True, slots=True)
class _Token:
    """One raw word with its quotes, or an operator."""

    text: str
    line: int
    is_operator: bool = False
    array: tuple[str, ...] | None = None
    """Raw words of ``NAME=(...)``; ``text`` is then ``NAME=`` or ``NAME+=``."""


def read_script(text: str, settings: Mapping[str, str]) -> Script:
    """Find the training command of a shell script and expand its words.

    Args:
        text: text of the script.
        settings: values of variables by name, and of positional parameters by number. They
            override assignments of the script.

    Raises:
        ValueError: if quotes or brackets are not closed, or the script starts no training.
    """
    script = Script()
    for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE):
        script.batch_options += line.split("#")[0].replace("=", " ").split()
    reader = _Evaluator(script, settings)
    reader.run(list(_tokens(text)))
    if not script.program:
        skipped = "".join(f"\n  {line}" for line in script.skipped)
        raise ValueError(
            "no training command was found: a line that starts pretrain_gpt.py (or another .py "
            "file, or -m MODULE) with --flags, directly or through torchrun, srun, bash -c or "
            f"a variable.{skipped}"
        )
    return script


def unknown_in(words: list[str]) -> list[str]:
    """List the expansions in words whose values the script does not contain."""
    return [part for word in words for part in word.split(UNKNOWN)[1::2]]


def shown(word: str) -> str:
    """Return a word without the marks of unknown expansions."""
    return word.replace(UNKNOWN, "")


def _tokens(text: str, line: int = 1) -> Iterator[_Token]:
    """Split a script into raw words and operators, without comments and here-documents."""
    position = 0
    ends: list[tuple[str, bool]] = []
    while position < len(text):
        if text.startswith("\\\n", position):
            position, line = position + 2, line + 1
        elif text[position] in " \t\r":
            position += 1
        elif text[position] == "#":
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        elif match := _OPERATOR.match(text, position):
            found, position = match[0], match.end()
            if found.startswith("<<") and found != "<<<":
                while text[position : position + 1] in (" ", "\t"):
                    position += 1
                raw, position = _word(text, position, line)
                ends.append((raw.strip("'\"").replace("\\", ""), found == "<<-"))
                continue
            yield _Token(found, line, is_operator=True)
            if found == "\n":
                line += 1
                for end, is_indented in ends:
                    position, line = _skip_document(text, position, line, end, is_indented)
                ends = []
        else:
            begin = line
            raw, after = _word(text, position, line)
            line += text.count("\n", position, after)
            if re.fullmatch(r"[A-Za-z_]\w*\+?=", raw) and text.startswith("(", after):
                items, end = _array(text, after + 1, begin)
                line += text.count("\n", after, end)
                yield _Token(raw, begin, array=tuple(items))
                after = end
            else:
                yield _Token(raw, begin)
            position = after


def _skip_document(
    text: str, position: int, line: int, end: str, is_indented: bool
) -> tuple[int, int]:
    while position < len(text):
        stop = text.find("\n", position)
        stop = len(text) if stop < 0 else stop
        row = text[position:stop]
        position, line = stop + 1, line + 1
        if (row.lstrip("\t") if is_indented else row) == end:
            break
    return position, line


def _array(text: str, position: int, line: int) -> tuple[list[str], int]:
    """Read raw words up to the bracket that ends an array."""
    items: list[str] = []
    while position < len(text):
        if text.startswith("\\\n", position):
            position += 2
        elif text[position] in " \t\r\n":
            position += 1
        elif text[position] == "#":
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        elif text[position] == ")":
            return items, position + 1
        else:
            raw, after = _word(text, position, line)
            if after == position:  # an operator, which no array holds
                raise ValueError(
                    _unquoted(line, text[position], "in the array that begins here")
                )
            items.append(raw)
            position = after
    raise ValueError(f"line {line}: the array that begins here never ends.")


def _word(text: str, position: int, line: int) -> tuple[str, int]:
    """Read one raw word; return the word with its quotes, and its end position."""
    begin = position
    while position < len(text):
        letter = text[position]
        if letter in " \t\r\n;&|()<>":
            break
        position = _after_piece(text, position, line)
    return text[begin:position].replace("\\\n", ""), position


def _after_piece(text: str, position: int, line: int) -> int:
    """Return the end of the quoted text, expansion or letter that starts at a position."""
    letter = text[position]
    if letter == "\\":
        return position + 2
    if letter in ("'", "`", UNKNOWN):  # an unknown part is not expanded again
        end = text.find(letter, position + 1)
    elif letter == '"':
        end = position + 1
        while end < len(text) and text[end] != '"':
            end = end + 1 if text[end] == "'" else _after_piece(text, end, line)
        end = end if end < len(text) else -1
    elif text.startswith(("$(", "${"), position):
        close = ")" if text[position + 1] == "(" else "}"
        end = position + 2
        while end < len(text) and text[end] != close:
            is_bracket = text[end] == "(" and close == ")"
            end = (
                _after_bracket(text, end, line) if is_bracket else _after_piece(text, end, line)
            )
        end = end if end < len(text) else -1
    else:
        return position + 1
    if end < 0:
        raise ValueError(f"line {line}: {text[position : position + 2]!r} never ends.")
    return end + 1


def _after_bracket(text: str, position: int, line: int) -> int:
    position += 1
    while position < len(text) and text[position] != ")":
        is_bracket = text[position] == "("
        step = _after_bracket if is_bracket else _after_piece
        position = step(text, position, line)
    return position + 1


class _Evaluator:
    """Evaluates the commands of a script in order, and stores its variables."""

    def __init__(self, script: Script, settings: Mapping[str, str]) -> None:
        self.script = script
        self.settings = settings
        self.variables: dict[str, Value] = dict(settings)

    def run(self, tokens: list[_Token]) -> None:
        """Evaluate commands; && and || depend on the result of the previous command."""
        position, status, joint = 0, True, ""
        while position < len(tokens):
            token = tokens[position]
            if test_end := _test_end(tokens, position):
                if not joint or status is (joint == "&&"):  # else left out, or not known
                    status = self._test(tokens[position:test_end])
                position, joint = test_end, ""
                continue
            if token.is_operator:
                if token.text != "\n":  # && and || may end a line
                    joint = token.text if token.text in ("&&", "||") else ""
                position += 1
                continue
            is_function = [each.text for each in tokens[position + 1 : position + 3]] == [
                "(",
                ")",
            ]
            if token.text in _OPENING or token.text == "function" or is_function:
                position = self._compound(tokens, position)
                continue
            end = position
            while end < len(tokens) and not _ends_command(tokens[end]):
                end += 1
            command = _without_redirections(tokens[position:end])
            self._check_quotes(tokens, position, end, [each.text for each in command])
            position = end
            is_left_out = (joint == "&&" and status is False) or (joint == "||" and status)
            if joint and status is None:
                self._skip(token, command, "whether it is reached depends on the machine")
            elif not is_left_out and command:
                status = self._simple(command)
            joint = ""

    def _check_quotes(
        self, tokens: list[_Token], position: int, end: int, command: list[str]
    ) -> None:
        """Refuse or list flags whose value has a bracket or ``|`` outside quotes."""
        flags = [word for word in command if is_flag(word)]
        if not flags:
            return
        line, after = tokens[position].line, tokens[position - 1].text if position else ""
        if end < len(tokens) and tokens[end].text == "(":
            raise ValueError(_unquoted(tokens[end].line, "(", f"after {command[-1]!r}"))
        if after in ("|", ")") and _program_place(command) is None:
            self.script.skipped.append(
                f"line {line}: {' '.join(flags)} follow a {after!r} outside quotes: another "
                "command gets them. A flag's value that contains it needs quotes."
            )

    def _compound(self, tokens: list[_Token], position: int) -> int:
        """Evaluate an ``if`` by its tests; skip loops, cases and functions."""
        token = tokens[position]
        if token.text not in _OPENING:  # a function
            while position < len(tokens) and tokens[position].text != "{":
                position += 1
            end = _closing(tokens, position)
            self._skip(token, tokens[position:end], "functions are not followed")
            return end
        end = _closing(tokens, position)
        inner = tokens[position + 1 : end - 1]
        if token.text == "{":
            self.run(inner)
        elif token.text == "if":
            self._if(token, inner)
        else:
            self._skip(token, inner, f"{token.text} is not followed")
        return end

    def _if(self, token: _Token, inner: list[_Token]) -> None:
        """Evaluate the first branch whose test holds; none if a test cannot be decided."""
        parts: list[tuple[str, list[_Token]]] = [("if", [])]
        depth = 0
        for index, each in enumerate(inner):
            depth += _depth_change(inner, index)
            if not depth and each.text in ("then", "elif", "else"):
                parts.append((each.text, []))
            else:
                parts[-1][1].append(each)
        holds: bool | None = False
        for kind, body in parts:
            if kind in ("if", "elif"):
                tests = [each for each in body if each.text not in ("\n", ";")]
                holds = self._joined_tests(tests)
                if holds is None:
                    test = " ".join(each.text for each in tests)
                    self._skip(token, inner, f"the test {test} depends on the machine")
                    return
            elif kind == "else" or holds:
                self.run(body)
                return

    def _joined_tests(self, tokens: list[_Token]) -> bool | None:
        """Return the result of tests joined by ``&&`` and ``||``, from left to right."""
        holds: bool | None = None
        position, joint = 0, ""
        while position < len(tokens):
            end = _test_end(tokens, position)
            if not end:
                return None
            holds = _join(joint, holds, self._test(tokens[position:end]))
            joint = tokens[end].text if end < len(tokens) else ""
            if joint not in ("", "&&", "||"):
                return None
            position = end + 1
        return holds

    def _test(self, tokens: list[_Token]) -> bool | None:
        """Return the result of a test of strings or numbers; None if unknown."""
        raw = [token.text for token in tokens]
        if raw[0] == "(":  # (( )) of arithmetic
            result = self._arithmetic("".join(raw[2:-2]))
            return bool(int(result)) if result else None
        if raw[0] != "[[":
            raw = [token.text for token in _without_redirections(tokens)]
        raw = raw[1:] if raw[0] == "test" else raw[1:-1]
        if raw.count("(") or raw.count(")"):
            return None
        either: bool | None = False
        for alternative in _cut_words(raw, "||"):  # inside [[ ]] && binds more tightly
            both: bool | None = True
            for words in _cut_words(alternative, "&&"):
                both = _join("&&", both, self._plain_test(words, tokens[0].text == "[["))
            either = _join("||", either, both)
        return either

    def _plain_test(self, raw: list[str], has_patterns: bool) -> bool | None:
        """Return the result of one comparison of raw words; None if unknown."""
        is_negated = raw[:1] == ["!"]
        raw = raw[1:] if is_negated else raw
        words = ["".join(self._expand(word, splits=False)) for word in raw]
        if unknown_in(words):
            return None
        holds: bool | None = None
        match words:
            case ["-z", word]:
                holds = not word
            case ["-n", word] | [word]:
                holds = bool(word)
            case [left, "=" | "==", right]:
                holds = fnmatchcase(left, right) if has_patterns else left == right
            case [left, "!=", right]:
                holds = not fnmatchcase(left, right)
            case [left, sign, right] if sign in _COMPARISONS:
                if re.fullmatch(r"-?\d{1,18}", left) and re.fullmatch(r"-?\d{1,18}", right):
                    holds = _COMPARISONS[sign](int(left), int(right))
        return holds if holds is None else holds != is_negated

    def _skip(self, token: _Token, tokens: list[_Token], why: str) -> None:
        """Report a part that is not evaluated, if it sets variables or passes flags."""
        text = " ".join(each.text + " ".join(each.array or ()) for each in tokens)
        names = sorted(set(re.findall(r"\b([A-Za-z_]\w*)\+?=", text)))
        if names or "--" in text:
            what = f": {', '.join(names)} may have other values" if names else ""
            self.script.skipped.append(f"line {token.line}: {why}{what}.")

    def _simple(self, command: list[_Token]) -> bool | None:
        """Evaluate one command; return whether it succeeds, None if unknown."""
        is_declared = command[0].text in _DECLARING
        rest = command[1:] if is_declared else command
        if command[0].text == "unset":
            for token in rest[1:]:
                self.variables.pop(token.text, None)
            return True
        while is_declared and rest and rest[0].text.startswith("-"):
            rest = rest[1:]
        leading = 0
        while leading < len(rest) and _is_assignment(rest[leading]):
            leading += 1
        is_export = is_declared and command[0].text == "export"
        if is_declared or leading == len(rest):
            for token in rest:
                self._assign(token, is_export)
            return True
        for token in rest[:leading]:  # NAME=value before a command is in its environment
            name, _, value = token.text.partition("=")
            self.script.exports[name] = shown("".join(self._expand(value, splits=False)))
        words = [word for token in rest[leading:] for word in self._expand(token.text)]
        return self._command(words, rest[leading])

    def _assign(self, token: _Token, is_export: bool) -> None:
        match = _ASSIGNMENT.match(token.text)
        if match is None:
            if is_export and isinstance(value := self.variables.get(token.text), str):
                self.script.exports[token.text] = shown(value)
            return
        name, plus = match[1], match[2]
        if name in self.settings:
            return
        old = self.variables.get(name)
        if token.array is not None:
            items = [word for raw in token.array for word in self._expand(raw)]
            before = [old] if isinstance(old, str) else list(old or ())
            self.variables[name] = before + items if plus else items
            return
        text = "".join(self._expand(token.text[match.end() :], splits=False))
        if plus and isinstance(old, list):
            self.variables[name] = [*old[:1], *old[1:]]
            self.variables[name] = [(old[0] if old else "") + text, *old[1:]]
        else:
            self.variables[name] = (old if plus and isinstance(old, str) else "") + text
        if is_export:
            self.script.exports[name] = shown(text)

    def _command(self, words: list[str], token: _Token) -> bool | None:
        """Store the training command of expanded words; evaluate commands inside strings."""
        for index, word in enumerate(words):
            is_shell = word.rpartition("/")[2] in ("bash", "sh") and index + 2 < len(words)
            flag = words[index + 1] if is_shell else ""
            if is_shell and re.fullmatch(r"-\w*c", flag):
                self.run(list(_tokens(words[index + 2], token.line)))
                return True
        if words[:1] == ["eval"]:
            self.run(list(_tokens(" ".join(words[1:]), token.line)))
            return True
        if words[:1] in (["source"], ["."]):
            self.script.skipped.append(
                f"line {token.line}: {shown(' '.join(words))} is not read: what it sets is "
                "missing here."
            )
            return True
        place = _program_place(words)
        if place is None or len(words) - place <= len(self.script.words):
            return True
        if self.script.program:
            self.script.skipped.append(
                f"line {token.line}: of several training commands, the one with most flags is "
                "read."
            )
        self.script.program = shown(words[place])
        self.script.launcher = [shown(word) for word in words[:place] if word != "-m"]
        self.script.words = words[place + 1 :]
        return True

    def _expand(self, raw: str, *, splits: bool = True) -> list[str]:
        """Expand one raw word; unquoted expansions become several words if it ``splits``."""
        fields: list[str] = []
        text, has_text = "", False
        position = 0
        while position < len(raw):
            end = _after_piece(raw, position, 0)
            piece = raw[position:end]
            position = end
            if piece[0] == "'":
                text, has_text = text + piece[1:-1], True
            elif piece[0] == UNKNOWN:
                text += piece
            elif piece[0] == "\\":
                text, has_text = text + piece[1:], True
            elif piece[0] == '"':
                inner = piece[1:-1]
                if inner in ("$@", "${@}"):
                    continue  # $1, $2, ...: the script is read without arguments
                if match := re.fullmatch(r"\$\{(\w+)\[@\]\}", inner):  # each item is a word
                    items = self._items(match[1], inner)
                    if items and not splits:
                        items = [" ".join(items)]
                    if items:
                        fields += [text + items[0], *items[1:]][:-1] if len(items) > 1 else []
                        text = items[-1] if len(items) > 1 else text + items[0]
                        has_text = True
                    continue
                text, has_text = text + self._quoted(inner), True
            elif piece[0] in "$`":
                if piece == "$" and (match := re.match(r"\w+|[@*#?!$-]", raw[position:])):
                    # \w+ would take letters after a positional parameter's one digit
                    name = match[0][:1] if match[0][0].isdigit() else match[0]
                    piece, position = f"${name}", position + len(name)
                value = self._value(piece)
                parts = _split(value) if splits else [value]
                for part in parts[:-1]:
                    if text or part or has_text:
                        fields.append(text + part)
                    text, has_text = "", False
                text += parts[-1]
            else:
                text += piece
        return [*fields, text] if text or has_text else fields

    def _quoted(self, text: str) -> str:
        """Expand the inside of double quotes."""
        result, position = "", 0
        while position < len(text):
            end = position + 1 if text[position] in "'\"" else _after_piece(text, position, 0)
            piece = text[position:end]
            position = end
            if piece[0] == "\\":
                result += piece[1:] if piece[1:] in ('"', "\\", "$", "`") else piece
            elif piece[0] in "$`":
                if piece == "$" and (match := re.match(r"\w+|[@*#?!$-]", text[position:])):
                    name = match[0][:1] if match[0][0].isdigit() else match[0]
                    piece, position = f"${name}", position + len(name)
                result += self._value(piece)
            else:
                result += piece
        return result

    def _items(self, name: str, piece: str) -> list[str]:
        value = self.variables.get(name)
        if value is None:
            return [f"{UNKNOWN}{piece}{UNKNOWN}"]
        return [value] if isinstance(value, str) else value

    def _value(self, piece: str) -> str:
        """Return the value of one expansion, or the expansion marked as unknown."""
        unknown = f"{UNKNOWN}{piece}{UNKNOWN}"
        if piece.startswith("$((") and piece.endswith("))"):
            return self._arithmetic(piece[3:-2]) or unknown
        if piece.startswith(("$(", "`")) or piece == "$":
            return piece if piece == "$" else unknown
        inner = piece[2:-1] if piece.startswith("${") else piece[1:]
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return unknown
        name, mode, word = match["name"], match["op"] or "", match["word"]
        if word and not mode:
            return unknown
        if name in ("@", "*") and name not in self.variables:
            return ""  # $1, $2, ...: the script is read without arguments
        value = self.variables.get(name)
        if isinstance(value, list):
            index = match["index"] or "0"
            if match["count"]:
                return str(len(value)) if index in ("@", "*") else unknown
            if index in ("@", "*"):
                value = " ".join(value)
            elif index.isdecimal():
                value = value[int(index)] if int(index) < len(value) else ""
            else:
                return unknown
        elif match["count"]:
            return unknown if value is None else str(len(value))
        if mode in (":-", "-", ":=", "=", ":?", "?", ":+", "+"):
            is_set = bool(value) if mode.startswith(":") else value is not None
            if mode[-1] == "+":
                return self._inner(word) if is_set else ""
            if is_set or mode[-1] == "?":
                return unknown if value is None else value
            value = self._inner(word)
            if mode[-1] == "=":
                self.variables[name] = value
            return value
        if value is None:
            return unknown
        return _cut(value, mode, self._inner(word)) if mode else value

    def _inner(self, word: str) -> str:
        return "".join(self._expand(word, splits=False))

    def _arithmetic(self, text: str) -> str:
        """Compute and compare whole numbers; return "" for anything else."""
        text = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
        names = {name: self.variables.get(name) for name in _NAME.findall(text)}
        for name, value in names.items():
            if not isinstance(value, str) or not re.fullmatch(r"-?\d{1,18}", value.strip()):
                return ""
            text = re.sub(rf"\b{name}\b", f"({value.strip()})", text)
        text = text.replace("/", "//").replace("&&", " and ").replace("||", " or ")
        text = re.sub(r"!(?!=)", " not ", text).strip()
        try:
            tree = ast.parse(text, mode="eval").body if len(text) < 1000 else None
            return "" if tree is None else str(_computed(tree))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return ""


def _split(value: str) -> list[str]:
    """Split a value at white space outside of its unknown expansions."""
    pieces = value.split(UNKNOWN)
    parts = [""]
    for index, piece in enumerate(pieces):
        if index % 2:
            parts[-1] += f"{UNKNOWN}{piece}{UNKNOWN}"
        else:
            first, *rest = re.split(r"[ \t\n]+", piece)
            parts[-1] += first
            parts += rest
    return parts


def _computed(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if len(str(value)) <= _MOST_DIGITS:
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_computed(left), _computed(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _ARITHMETIC:
            return int(_ARITHMETIC[type(op)](_computed(left), _computed(right)))
        case ast.BoolOp(op=op, values=values):
            join = all if isinstance(op, ast.And) else any
            return int(join([_computed(value) for value in values]))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _computed(operand))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand)
    raise ValueError("no arithmetic of whole numbers")


def _cut(value: str, mode: str, pattern: str) -> str:
    """Remove the shortest or longest match of a pattern from the front (#) or the end (%)."""
    ends = range(len(value) + 1)
    if mode[0] == "#":
        order = ends if mode == "#" else reversed(ends)
        return next((value[n:] for n in order if fnmatchcase(value[:n], pattern)), value)
    order = reversed(ends) if mode == "%" else ends
    return next((value[:n] for n in order if fnmatchcase(value[n:], pattern)), value)


def _is_assignment(token: _Token) -> bool:
    return token.array is not None or _ASSIGNMENT.match(token.text) is not None


def _ends_command(token: _Token) -> bool:
    return token.is_operator and not re.search("[<>]", token.text)


def _without_redirections(tokens: list[_Token]) -> list[_Token]:
    kept, skips = [], False
    for token in tokens:
        if token.is_operator:
            skips = not re.fullmatch(r"\d*>&\d+", token.text)
        elif skips:
            skips = False
        else:
            kept.append(token)
    return kept


def _unquoted(line: int, mark: str, place: str) -> str:
    return (
        f"line {line}: {mark!r} outside quotes {place}: a shell refuses it. Quote the value, "
        "as in --moe-layer-freq '([0]*3+[1]*58)', and once more inside bash -c or eval."
    )


def _test_end(tokens: list[_Token], position: int) -> int:
    """Return the end of the test that starts at a position; 0 if no test starts there."""
    texts = [token.text for token in tokens[position:]]
    if texts[:2] == ["(", "("]:
        ends = [n for n in range(2, len(texts) - 1) if texts[n : n + 2] == [")", ")"]]
        return position + ends[0] + 2 if ends else 0
    if texts[0] == "[[":
        return position + texts.index("]]") + 1 if "]]" in texts else 0
    if texts[0] not in ("[", "test"):
        return 0
    ends = (n for n, token in enumerate(tokens[position:]) if _ends_command(token))
    return position + next(ends, len(texts))


def _join(joint: str, left: bool | None, right: bool | None) -> bool | None:
    """Return ``left && right`` or ``left || right``; None means unknown."""
    if not joint:
        return right
    decides = joint == "||"
    if left is decides or right is decides:
        return decides
    return None if left is None or right is None else not decides


def _cut_words(words: list[str], mark: str) -> list[list[str]]:
    """Split words at each ``mark``."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == mark:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _closing(tokens: list[_Token], position: int) -> int:
    """Return the index after the word that ends a compound command."""
    depth = 0
    for index in range(position, len(tokens)):
        change = _depth_change(tokens, index)
        depth += change
        if change and not depth:
            return index + 1
    raise ValueError(f"line {tokens[position].line}: {tokens[position].text} never ends.")


def _depth_change(tokens: list[_Token], index: int) -> int:
    """Return 1 for a word that opens a compound command, -1 for one that ends it, else 0."""
    before = tokens[index - 1] if index else None
    starts = before is None or before.is_operator or before.text in _LEADING
    if tokens[index].is_operator or not starts:
        return 0
    text = tokens[index].text
    return (text in _OPENING) - (text in _OPENING.values())


def _program_place(words: list[str]) -> int | None:
    """Return the index of the training program: a .py file or -m MODULE before its flags."""
    for index, word in enumerate(words):
        is_module = index > 0 and words[index - 1] == "-m" and "distributed" not in word
        if shown(word).endswith(".py") or (is_module and not word.endswith("torchrun")):
            has_flags = any(is_flag(each) or UNKNOWN in each for each in words[index + 1 :])
            return index if has_flags else None
    return None
