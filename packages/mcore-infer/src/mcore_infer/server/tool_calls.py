"""Tool calls in answers: formats of model families, parsing, and grammars that force calls.

The marks in a chat template identify the format in which its model writes calls. Parsed calls
become OpenAI's ``tool_calls``; text that only resembles a call remains content. Reasoning is
returned as a separate field.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.server.schemas import Function
from mcore_infer.writing.grammars import Structure, json_rule
from mcore_infer.writing.token_text import overlap

_MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""Marks that may be a single token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """The format of calls of one model family."""

    mark: str
    """Text before calls inside an answer; empty: an answer that begins with ``{`` is a call."""
    begin: str = ""
    """Text before all calls, if calls are forced."""
    before: str
    """Text before the arguments of a call, with NAME in place of the function's name."""
    after: str
    """Text after the arguments."""
    between: str | None = None
    """Text between two calls; None: an answer has at most one call."""
    end: str = ""
    """Text after all calls."""
    named: str = ""
    """Regular expression of the text before the arguments, whose group is the function's name.
    Empty: a call is JSON with ``name`` and ``arguments`` (or ``parameters``)."""
    parameter: str = ""
    """Text of one argument, with KEY and VALUE in place of its name and value. Empty: the
    arguments are one JSON object."""
    separators: tuple[str, ...] = ()
    """Marks around calls that the parser skips."""


def _json_calls(mark: str, argument_name: str = "arguments", **more: Any) -> ToolFormat:
    before = f'{{"name": "NAME", "{argument_name}": '
    fields: dict[str, Any] = {"before": before, "after": "}", **more}
    return ToolFormat(mark=mark, **fields)


_HERMES = _json_calls(
    "<tool_call>",
    before='<tool_call>\n{"name": "NAME", "arguments": ',
    after="}\n</tool_call>",
    between="\n",
    separators=("<tool_call>", "</tool_call>"),
)
_LLAMA = _json_calls("", "parameters", separators=("<|python_tag|>", ";"))
_MISTRAL = _json_calls(
    "[TOOL_CALLS]", begin="[TOOL_CALLS][", between=", ", end="]", separators=("[TOOL_CALLS]",)
)
_MISTRAL_ARGS = ToolFormat(
    mark="[TOOL_CALLS]",
    before="[TOOL_CALLS]NAME[ARGS]",
    after="",
    between="",
    named=r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*",
)


def _deepseek(before: str, after: str, between: str, named: str) -> ToolFormat:
    """Return a format whose marks are written with DeepSeek's letters for ``|`` and ``_``."""

    def marked(text: str) -> str:
        return text.replace("|", "\uff5c").replace("_", "\u2581")

    begin, end = marked("<|tool_calls_begin|>"), marked("<|tool_calls_end|>")
    return ToolFormat(
        mark=begin,
        begin=begin,
        before=marked(before),
        after=marked(after),
        between=between,
        end=end,
        named=marked(named),
        separators=(begin, end, marked("<|tool_call_end|>"), "```"),
    )


_DEEPSEEK_V3 = _deepseek(
    "<|tool_call_begin|>function<|tool_sep|>NAME\n```json\n",
    "\n```<|tool_call_end|>",
    "\n",
    r"<|tool_call_begin|>\w*<|tool_sep|>([\w.-]+)\s*```json\s*",
)
_DEEPSEEK_V31 = _deepseek(
    "<|tool_call_begin|>NAME<|tool_sep|>",
    "<|tool_call_end|>",
    "",
    r"<|tool_call_begin|>([\w.-]+)<|tool_sep|>\s*",
)
_LIST = _json_calls(
    "<|tool_call|>",
    begin="<|tool_call|>[",
    between=", ",
    end="]",
    separators=("<|tool_call|>", "<|/tool_call|>"),
)
_QWEN_XML = ToolFormat(
    mark="<tool_call>",
    before="<tool_call>\n<function=NAME>\n",
    parameter="<parameter=KEY>\nVALUE\n</parameter>\n",
    after="</function>\n</tool_call>",
    between="\n",
    named=r"<tool_call>\s*<function=([^<>\s]+)>\s*",
)
_GLM = ToolFormat(
    mark="<tool_call>",
    before="<tool_call>NAME\n",
    parameter="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    after="</tool_call>",
    between="\n",
    named=r"<tool_call>\s*([\w.-]+)\s*(?=<)",
)
_MINIMAX = ToolFormat(
    mark="<minimax:tool_call>",
    begin="<minimax:tool_call>\n",
    before='<invoke name="NAME">\n',
    parameter='<parameter name="KEY">VALUE</parameter>\n',
    after="</invoke>\n",
    between="",
    end="</minimax:tool_call>",
    named=r'<invoke name="([^"<>]+)">\s*',
    separators=("<minimax:tool_call>", "</minimax:tool_call>"),
)
CHANNEL_ENDS = ("<|call|>", "<|return|>")
"""Marks that end an answer of gpt-oss."""
HARMONY = ToolFormat(
    mark="<|channel|>",
    before="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    after="",
    separators=("<|start|>", "<|end|>", *CHANNEL_ENDS),
)
"""Format of gpt-oss, whose answers consist of messages in channels; see ``ChannelReader``."""
PLAIN = _json_calls("", begin="[", between=", ", end="]")
"""Format of forced calls if the template has no known format: a JSON list."""
_FORMATS = (  # marks that a template must all contain, and their format; first match wins
    ((HARMONY.mark, "<|message|>"), HARMONY),
    (("<minimax:tool_call>",), _MINIMAX),
    (("<tool_call>", "<function="), _QWEN_XML),
    (("<tool_call>", "<arg_key>"), _GLM),
    (("<tool_call>",), _HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL_ARGS),
    (("[TOOL_CALLS]",), _MISTRAL),
    ((_DEEPSEEK_V3.mark, "```json"), _DEEPSEEK_V3),
    ((_DEEPSEEK_V31.mark,), _DEEPSEEK_V31),
    (("<|tool_call|>",), _LIST),
    (('"parameters"', "ipython"), _LLAMA),
    (("<|python_tag|>",), _LLAMA),
)


def tool_format(template: str) -> ToolFormat | None:
    """Return the format of calls that a chat template's marks identify; None: unknown."""
    for marks, form in _FORMATS:
        if all(mark in template for mark in marks):
            return form
    return None


def kept_tokens(marks: Sequence[str], tokenizer: Tokenizer) -> dict[int, str]:
    """Return the marks that are special tokens, by id.

    Decoding must keep these tokens in the text, because the parser looks for their marks.
    """
    marks_by_id = {tokenizer.token_id(mark): mark for mark in marks if mark}
    return {token: mark for token, mark in marks_by_id.items() if token is not None}


def marks_of(form: ToolFormat) -> list[str]:
    """Return all marks of a format that may be single tokens, sorted."""
    texts = (form.mark, form.begin, form.before, form.after, form.end, form.parameter)
    texts += form.separators
    return sorted({mark for text in texts for mark in _MARK.findall(text)})


def calls_structure(
    form: ToolFormat,
    functions: Sequence[Function],
    tokenizer: Tokenizer,
    *,
    is_parallel: bool,
    answer: Structure | None = None,
    thinking_end: str = "",
) -> Structure:
    """Return the grammar of texts that call functions in a model's format.

    Args:
        form: format of the model's calls.
        functions: functions that may be called.
        tokenizer: special tokens in the format become tokens of the grammar.
        is_parallel: whether several calls may follow each other.
        answer: structure of an answer without calls; None: calls are required.
        thinking_end: mark after the reasoning at the start of a text; empty: no reasoning.

    Raises:
        ValueError: if no value matches the schema of a function's parameters.
    """
    rules = []
    for i, function in enumerate(functions):
        before = form.before.replace("NAME", function.name)
        parts = _literal(before, tokenizer), f"arguments{i}", _literal(form.after, tokenizer)
        rules.append(f"call{i}: {' '.join(parts)}")
        if form.parameter:
            rules += _parameter_rules(f"arguments{i}", form, function.parameters, tokenizer)
        else:
            # The arguments of a call are an object also if the schema allows other values.
            schema = {**function.parameters, "type": "object"}
            rules.append(f"arguments{i}: {json_rule(schema)}")
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
    more = ""
    if is_parallel and form.between is not None:
        more = f" ({_literal(form.between, tokenizer)} call)*"
    begin, end = _literal(form.begin, tokenizer), _literal(form.end, tokenizer)
    rules.append(f"calls: {begin} call{more} {end}")
    texts = "calls" if answer is None else "calls | answer"
    if answer is not None:
        rules.append(f"answer: {_answer_rule(answer)}")
    return Structure("lark", "\n".join([*_start(texts, thinking_end, tokenizer), *rules, ""]))


def _parameter_rules(
    name: str, form: ToolFormat, schema: Mapping[str, Any], tokenizer: Tokenizer
) -> list[str]:
    """Return the rules of arguments that are written one by one, in the order of the schema."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    before, _, after = form.parameter.partition("VALUE")
    rules, parts = [], []
    for i, (key, value_schema) in enumerate(properties.items()):
        part = f"{name}_{i}"
        parts.append(part if key in required else f"{part}?")
        end = _literal(after, tokenizer)
        choices = value_schema.get("enum", ()) if isinstance(value_schema, Mapping) else ()
        choices = [json.dumps(each, ensure_ascii=False) for each in choices]
        if not _is_text(value_schema):
            if isinstance(value_schema, dict):
                value_schema = {**shared, **value_schema}  # noqa: PLW2901
            value = f"{part}_value {end}"
            rules.append(f"{part}_value: {json_rule(value_schema)}")
        elif choices:
            value = f"({' | '.join(choices)}) {end}"
        elif end.startswith("<["):  # the end is a special token, which no text can contain
            value = f"/(?s:.*)/ {end}"
        else:
            # A lazy rule matches the shortest text up to the end, so that the end itself
            # cannot be part of the value.
            value = f"{part}_text"
            expression = "(?s:.*)" + re.escape(after).replace("\\\n", "\\n")
            rules.append(f"{part}_text[lazy]: {_expression(expression)}")
        rules.append(f"{part}: {_literal(before.replace('KEY', key), tokenizer)} {value}")
    return [f"{name}: {' '.join(parts) or json.dumps('')}", *rules]


def _is_text(schema: Any) -> bool:
    """Whether values of a schema are strings or null, which are written without quotes."""
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if isinstance(choices := schema.get("anyOf"), list):
        kinds = [choice.get("type") for choice in choices if isinstance(choice, Mapping)]
    return "string" in kinds and set(kinds) <= {"string", "null"}


def answer_after_thinking(
    answer: Structure, thinking_end: str, tokenizer: Tokenizer
) -> Structure:
    """Return the grammar of unrestricted reasoning followed by an answer with a structure."""
    rules = [*_start("answer", thinking_end, tokenizer), f"answer: {_answer_rule(answer)}", ""]
    return Structure("lark", "\n".join(rules))


def _start(texts: str, thinking_end: str, tokenizer: Tokenizer) -> list[str]:
    if not thinking_end:
        return [f"start: {texts}"]
    if tokenizer.token_id(thinking_end) is not None:
        mark = _literal(thinking_end, tokenizer)
        thinking = [f"thinking: /(?s:.*)/ {mark}"]
    else:
        thinking = [f"thinking[lazy]: {_expression('(?s:.*)' + re.escape(thinking_end))}"]
    return ['start: thinking "\\n"* text', *thinking, f"text: {texts}"]


def _answer_rule(answer: Structure) -> str:
    if answer.kind == "regex":
        return _expression(answer.text)
    return json_rule(json.loads(answer.text))


def _expression(text: str) -> str:
    """Return a regular expression as a Lark literal, with slashes escaped."""
    escaped = re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], text)
    return f"/{escaped}/".replace("\n", "\\n")


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """Return a text as Lark literals, with special tokens by id: ``"a" <[7]>``."""
    parts, position = [], 0
    for mark in _MARK.finditer(text):
        token = tokenizer.token_id(mark[0])
        if token is not None:
            parts += [text[position : mark.start()], f"<[{token}]>"]
            position = mark.end()
    parts.append(text[position:])
    is_token = [bool(re.fullmatch(r"<\[\d+\]>", part)) for part in parts]
    literals = [
        part if is_id else json.dumps(part, ensure_ascii=False)
        for part, is_id in zip(parts, is_token, strict=True)
        if part
    ]
    return " ".join(literals)


@dataclass(slots=True)
class AnswerDelta:
    """New content, reasoning and calls of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name of the function and its arguments as JSON, for each call."""


class AnswerReader:
    """Splits the text of one answer, as it arrives, into reasoning, content and calls.

    A state machine: reasoning, then content, then calls. Text that may be the start of a mark
    is held back. ``ChannelReader`` reads the format of gpt-oss.

    Attributes:
        num_calls: number of parsed calls.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        functions: Sequence[Function] = (),
        *,
        reasoning: tuple[str, str] | None = None,
        begins_in_reasoning: bool = False,
        is_forced: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """Begin with no text.

        Args:
            form: format of calls; None: calls are not parsed.
            functions: functions whose schemas distinguish strings from JSON, in formats
                without quotes around strings.
            reasoning: marks around reasoning; None: reasoning is not separated.
            begins_in_reasoning: whether the prompt ends with the first of these marks.
            is_forced: whether the text consists of calls.
            max_calls: largest number of calls to return; None: no limit.
        """
        self._form, self._reasoning = form, reasoning
        self._schemas = {each.name: each.parameters for each in functions}
        self._mark = "" if form is None else form.mark
        self._is_forced, self._max_calls = is_forced, max_calls
        self._text = ""  # text that is not yet returned as a part
        self.num_calls = 0
        self._after = "content" if form is None else "start"
        self._state = "in reasoning" if begins_in_reasoning else "maybe reasoning"
        if reasoning is None:
            self._state = self._after

    def add(self, text: str, *, is_last: bool = False) -> AnswerDelta:
        """Add a piece of text; return the parts that are complete by now."""
        self._text += text
        delta = AnswerDelta()
        state = ""
        while state != self._state:
            state = self._state
            match state:
                case "maybe reasoning":
                    self._look_for_reasoning(is_last)
                case "in reasoning":
                    self._reason(delta, is_last)
                case "after reasoning":
                    self._text = self._text.lstrip("\n")
                    if self._text or is_last:
                        self._state = self._after
                case "start":
                    self._look_for_call(is_last)
                case "content":
                    self._write(delta, is_last)
                case "calls":
                    self._call(delta, is_last)
        return delta

    def _look_for_reasoning(self, is_last: bool) -> None:
        assert self._reasoning is not None
        mark, text = self._reasoning[0], self._text.lstrip()
        if text.startswith(mark):
            self._text, self._state = text[len(mark) :], "in reasoning"
        elif is_last or not mark.startswith(text):
            self._state = self._after

    def _reason(self, delta: AnswerDelta, is_last: bool) -> None:
        assert self._reasoning is not None
        mark = self._reasoning[1]
        end = self._text.find(mark)
        if end >= 0:
            delta.reasoning += self._text[:end].rstrip("\n")
            self._text, self._state = self._text[end + len(mark) :], "after reasoning"
            return
        # Hold back a suffix that may be the start of the mark.
        end = len(self._text) - (0 if is_last else overlap(self._text, mark))
        delta.reasoning, self._text = delta.reasoning + self._text[:end], self._text[end:]

    def _look_for_call(self, is_last: bool) -> None:
        """Decide whether an answer starts with a call, for formats without a mark."""
        assert self._form is not None
        text = self._text.lstrip()
        begins = ("{", "[{", *(mark for mark in self._form.separators if len(mark) > 1))
        if self._is_forced or (not self._mark and text.startswith(begins)):
            self._state = "calls"
        elif self._mark or is_last or not any(begin.startswith(text) for begin in begins):
            self._state = "content"

    def _write(self, delta: AnswerDelta, is_last: bool) -> None:
        end = self._text.find(self._mark) if self._mark else -1
        if end >= 0:
            self._state = "calls"
        else:
            num_held = 0 if is_last or not self._mark else overlap(self._text, self._mark)
            end = len(self._text) - num_held
        delta.content, self._text = delta.content + self._text[:end], self._text[end:]

    def _call(self, delta: AnswerDelta, is_last: bool) -> None:
        assert self._form is not None
        parsed_end = 0
        for call, end in calls_in(self._text, self._form, self._schemas):
            parsed_end = end
            if self._max_calls is None or self.num_calls < self._max_calls:
                delta.calls.append(call)
                self.num_calls += 1
        self._text = self._text[parsed_end:]
        if is_last:
            # After calls, the end mark of the last call and separators belong to the format,
            # and any other text is content.
            if self.num_calls:
                call_end = self._form.after.removeprefix("}").strip()
                self._text = self._text.lstrip().removeprefix(call_end).lstrip()
            rest = self._text
            for mark in (*self._form.separators, ",", "[", "]") if self.num_calls else ():
                rest = rest.replace(mark, "")
            delta.content += self._text if rest.strip() else ""
            self._text = ""


class ChannelReader:
    """Splits an answer of gpt-oss, as it arrives, into reasoning, content and calls.

    The answer consists of messages: a header, ``<|message|>`` and text up to an end mark. A
    message in the channel ``analysis`` is reasoning, a message ``to=functions.NAME`` is a call,
    every other message is content. A text without a header is content.

    Attributes:
        num_calls: number of parsed calls.

    Reference:
        OpenAI 2025, harmony response format.
    """

    _ENDS = ("<|end|>", "<|start|>", *CHANNEL_ENDS)

    def __init__(self, *, max_calls: int | None = None) -> None:
        """Begin with no text; returns at most ``max_calls`` calls, None: all."""
        self._max_calls, self.num_calls = max_calls, 0
        self._text, self._header = "", ""
        self._is_header = True

    def add(self, text: str, *, is_last: bool = False) -> AnswerDelta:
        """Add a piece of text; return the parts that are complete by now."""
        self._text += text
        delta = AnswerDelta()
        while (
            self._read_header(is_last) if self._is_header else self._read_body(delta, is_last)
        ):
            pass
        return delta

    def _read_header(self, is_last: bool) -> bool:
        begins = (HARMONY.mark, " to=", *self._ENDS)
        text = self._text
        may_be = any(mark.startswith(text) or text.startswith(mark) for mark in begins)
        header, mark, rest = text.partition("<|message|>")
        if may_be and mark:
            self._header, self._text = header, rest
        elif is_last or not may_be:
            self._header = ""
        else:
            return False
        self._is_header = False
        return True

    def _read_body(self, delta: AnswerDelta, is_last: bool) -> bool:
        """Read text up to the end of a message; return whether the message has ended."""
        call = re.search(r"\bto=(?:functions\.)?([\w.-]+)", self._header)
        text = self._text
        end = min((i for i in map(text.find, self._ENDS) if i >= 0), default=-1)
        if end < 0 and call and not is_last:
            return False  # the arguments of a call are parsed once they are complete
        has_ended = end >= 0
        if not has_ended:
            num_held = 0 if is_last else max(overlap(text, mark) for mark in self._ENDS)
            end = len(text) - num_held
        body, self._text = text[:end], text[end:]
        if has_ended:
            self._is_header = True
            for mark in ("<|end|>", *CHANNEL_ENDS):
                self._text = self._text.removeprefix(mark)
        if call and (arguments := _object(body)) is not None:
            if self._max_calls is None or self.num_calls < self._max_calls:
                delta.calls.append((call[1], _text(json.dumps(arguments, ensure_ascii=False))))
                self.num_calls += 1
        elif "<|channel|>analysis" in self._header and not call:
            delta.reasoning += body
        else:
            delta.content += body
        return has_ended


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def calls_in(
    text: str, form: ToolFormat, schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield the calls at the start of a text, and the position after each call.

    Stops at the first text that is not a complete call.

    Args:
        text: part of an answer that begins with a call.
        form: format of the calls.
        schemas: schemas of functions' parameters, by function.
    """
    decoder, position = json.JSONDecoder(), 0
    blank = re.compile("|".join([r"[\s,]", *map(re.escape, form.separators)]))
    named = re.compile(form.named)
    while True:
        while match := blank.match(text, position):  # skip separators between calls
            if form.named and named.match(text, position):
                break
            position = match.end()
        name = None
        if form.named:
            if not (match := named.match(text, position)):
                return
            name, position = match[1], match.end()
        if form.parameter:
            assert name is not None
            arguments_and_end = _arguments_in(text, position, form, schemas.get(name, {}))
            if arguments_and_end is None:
                return
            arguments, position = arguments_and_end
            yield (name, _text(json.dumps(arguments, ensure_ascii=False))), position
            continue
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return
        values = value if isinstance(value, list) and name is None else [value]
        calls = [(name, value) if name else _call_of(value) for value in values]
        if any(call is None or not isinstance(call[1], dict) for call in calls):
            return
        for call in calls:
            assert call is not None
            yield (
                (_text(str(call[0])), _text(json.dumps(call[1], ensure_ascii=False))),
                position,
            )


def _arguments_in(
    text: str, position: int, form: ToolFormat, schema: Mapping[str, Any]
) -> tuple[dict[str, Any], int] | None:
    """Parse arguments that are written one by one; return them and the end of their call.

    None: the text is not a complete call.
    """
    # Turn the format's text, such as <parameter=KEY>VALUE</parameter>, into an expression.
    expression = re.escape(form.parameter.strip()).replace("\\\n", r"\n?")
    expression = expression.replace("KEY", '([^<>"\\n]+)').replace("VALUE", "(.*?)")
    parameter = re.compile(rf"\s*{expression}", re.DOTALL)
    properties = schema.get("properties") or {}
    arguments: dict[str, Any] = {}
    while match := parameter.match(text, position):
        arguments[match[1]] = _value_of(match[2], properties.get(match[1]))
        position = match.end()
    end = re.compile(r"\s*" + r"\s*".join(map(re.escape, form.after.split())))
    match = end.match(text, position)
    return (arguments, match.end()) if match else None


def _value_of(text: str, schema: Any) -> Any:
    """Return an argument's value: the text if its type is string, else the parsed JSON.

    Text that is not JSON is returned as text.
    """
    if _is_text(schema) and not (text == "null" and "null" in str(schema)):
        return text
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text


def _text(text: str) -> str:
    """Replace unpaired surrogates, which JSON allows and UTF-8 does not, by question marks."""
    return text.encode(errors="replace").decode()


def _call_of(value: Any) -> tuple[str, Any] | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as a string of JSON
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    return value["name"], arguments
