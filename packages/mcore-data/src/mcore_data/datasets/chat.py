"""Chats for supervised fine-tuning: encodes messages and marks the assistant's tokens.

Marks are decided by position: by the ``{% generation %}`` blocks of the template if it has any.
Otherwise the template is rendered, for each turn of the assistant, up to the start and up to
the end of the turn, and the text between is encoded separately. So a prompt has the same tokens
as at generation, and no token id (such as a padding id that is also an end of turn) can be
mistaken for a mark.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mcore_data.datasets.chat_records import OnBadRecord, encode_records, messages_of
from mcore_data.datasets.packing import PackedDataset, TooLong
from mcore_data.indexed.index_format import token_dtype
from mcore_data.indexed.output_lock import make_parent_folder
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.indexed.writer import IndexedWriter
from mcore_data.tokenizers.protocol import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Default template, for tokenizers without one."""

TOKENS, LEARNT = "_tokens", "_learnt"
"""Suffixes of the two pairs that hold chats: the tokens, and 1 for each token with a loss."""

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Mark the text of a generation block: code points that no text may contain."""

Render = Callable[..., str]
"""``render(messages, add_generation_prompt, **names)`` returns the text of messages; with True,
up to the start of a turn of the assistant. ``names`` are further variables, such as
``tools``."""


@dataclass(frozen=True, slots=True)
class ChatReport:
    """Counts of ``prepare_chats``.

    Attributes:
        num_chats: chats written.
        num_tokens: tokens written.
        num_learnt: tokens that count in the loss.
    """

    num_chats: int
    num_tokens: int
    num_learnt: int


def load_template(template: str, tokenizer: Tokenizer, *, has_marks: bool = False) -> Render:
    """Compile a Jinja chat template in a sandbox; return a function that renders messages.

    The function raises ``ValueError`` for messages that the template refuses or fails on.

    Args:
        template: text of the template; "" means the tokenizer's template, or ``CHATML``.
        tokenizer: provides ``bos_token`` and ``eos_token``.
        has_marks: whether texts keep the marks of generation blocks, for ``segments``.

    Raises:
        ImportError: if jinja2 is missing.
        ValueError: if the text is not a Jinja template.
    """
    try:
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError, TemplateSyntaxError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(
            "chat templates need jinja2: pip install 'mcore-data[chat]'."
        ) from error

    class Generation(Extension):
        """Puts marks around the text of ``{% generation %}`` blocks, the assistant's tokens."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's class attribute)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            return f"{_BEGIN}{caller()}{_END}" if has_marks else caller()

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    environment.filters["tojson"] = _to_json

    def refuse(message: str) -> str:
        raise TemplateError(message)

    try:
        compiled = environment.from_string(
            template or tokenizer_template(tokenizer) or CHATML,
            globals={
                "raise_exception": refuse,
                "strftime_now": lambda form: datetime.now().strftime(form),
            },
        )
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} of the chat template: {error}") from None
    names = {
        f"{role}_token": tokenizer.decode([number])
        for role, number in (("bos", tokenizer.bos), ("eos", tokenizer.eod))
        if number is not None
    }

    def render(
        messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **more: Any
    ) -> str:
        variables = {**names, **more, "messages": messages}
        try:
            return compiled.render(**variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is a program, which may fail in any way
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    return render


def tokenizer_template(tokenizer: Tokenizer, name: str = "default") -> str:
    """Return a tokenizer's chat template, or "" if it has none.

    Of several templates the one called ``name`` is returned, else the default, else the first.
    """
    config = getattr(tokenizer, "config", {})
    template = config.get("chat_template") if isinstance(config, Mapping) else None
    if isinstance(template, Sequence) and not isinstance(template, str):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = (
            by_name.get(name) or by_name.get("default") or next(iter(by_name.values()), "")
        )
    return template or ""


def _to_json(value: Any, indent: int | None = None) -> str:
    """Write JSON as templates expect it, without escapes for non-ASCII letters or HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def segments(
    messages: Sequence[Mapping[str, Any]], render: Render, tools: Sequence[Any] | None = None
) -> Iterator[tuple[str, bool]]:
    """Cut a chat into texts; yield each with whether it counts in the loss.

    The assistant's messages count, except those with ``"learn": false``.

    Args:
        messages: the chat.
        render: from ``load_template``.
        tools: descriptions of functions that the template writes into the prompt.

    Raises:
        ValueError: if the template refuses the messages, or its text cannot be cut by turns.
    """
    marked = render(messages, False, tools=tools)
    if _BEGIN in marked:
        yield from _marked_segments(marked, messages)
        return
    text_so_far = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:number], True, tools=tools)
        answered = render(messages[: number + 1], False, tools=tools)
        if not (prompt.startswith(text_so_far) and answered.startswith(prompt)):
            raise ValueError(
                f"the chat template renders the first {number + 1} messages differently when "
                "more messages follow, so that its turns cannot be separated by position. Use "
                "a template that appends only, or one with {% generation %} blocks."
            )
        yield prompt[len(text_so_far) :], False
        yield answered[len(prompt) :], bool(message.get("learn", True))
        text_so_far = answered
    if not marked.startswith(text_so_far):
        raise ValueError(
            "the chat template renders earlier turns differently at the end of a chat. Use a "
            "template that appends only, or one with {% generation %} blocks."
        )
    if len(marked) > len(text_so_far):
        yield marked[len(text_so_far) :], False


def _marked_segments(
    text: str, messages: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, bool]]:
    """Cut a text at the marks of its generation blocks."""
    learns = [bool(m.get("learn", True)) for m in messages if m["role"] == "assistant"]
    blocks = text.split(_BEGIN)
    if len(learns) != len(blocks) - 1:
        if not all(learns):
            raise ValueError(
                f"the chat has {len(learns)} messages of the assistant, some with "
                f'"learn": false, and the template renders {len(blocks) - 1} generation '
                "blocks: it must render one for each message of the assistant."
            )
        learns = [True] * (len(blocks) - 1)
    if blocks[0]:
        yield blocks[0], False
    for block, learn in zip(blocks[1:], learns, strict=True):
        inside, _, after = block.partition(_END)
        yield inside, learn
        if after:
            yield after, False


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    render: Render,
    tools: Sequence[Any] | None = None,
) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat, and for each token 1 if it counts in the loss, else 0."""
    tokens: list[int] = []
    learnt: list[int] = []
    for text, learn in segments(messages, render, tools):
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens += ids
        learnt += [int(learn)] * len(ids)
    return tokens, learnt


def check_template_writes(
    messages: Sequence[Mapping[str, Any]], render: Render, tools: Sequence[Any] | None
) -> None:
    """Raise ``ValueError`` if a template drops the tools or the tool calls of a chat."""
    text = render(messages, False, tools=tools)
    if tools and text == render(messages, False, tools=None):
        raise ValueError(
            "the chat template does not render tools: leave tools out, or give a "
            "--chat-template that renders them"
        )
    plain = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages]
    if plain != messages and text == render(plain, False, tools=tools):
        raise ValueError(
            "the chat template does not render tool_calls: give a --chat-template that does"
        )


def prepare_chats(
    path: str | Path,
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    template: str = "",
    *,
    json_key: str = "messages",
    on_bad_record: OnBadRecord = "refuse",
) -> ChatReport:
    """Write the chats of a JSONL file as the pairs ``<prefix>_tokens`` and ``<prefix>_learnt``.

    Args:
        path: JSONL file; a record has a list of messages, and ``tools`` if its chat has any.
        output_prefix: prefix of both pairs.
        tokenizer: encodes the texts.
        template: text of a Jinja template; "" means the tokenizer's template, or ``CHATML``.
        json_key: key of a record's list of messages.
        on_bad_record: refuse the file, or leave out the records that cannot be used.

    Raises:
        ValueError: for bad records, such as a chat without a turn of the assistant (names their
            lines), or if the outputs cannot be written.
    """
    make_parent_folder(output_prefix)
    render = load_template(template, tokenizer, has_marks=True)
    num_chats = num_tokens = num_learnt = 0
    dtype = token_dtype(tokenizer.vocab_size).name

    def encode(record: dict[str, Any]) -> tuple[list[int], list[int]]:
        return _encode_record(record, json_key, tokenizer, render)

    with (
        IndexedWriter(f"{output_prefix}{TOKENS}", dtype) as token_writer,
        IndexedWriter(f"{output_prefix}{LEARNT}", "uint8") as learnt_writer,
    ):
        for tokens, learnt in encode_records(path, encode, on_bad_record):
            token_writer.add_document(tokens)
            learnt_writer.add_document(learnt)
            num_chats += 1
            num_tokens += len(tokens)
            num_learnt += sum(learnt)
    return ChatReport(num_chats, num_tokens, num_learnt)


def _encode_record(
    record: Mapping[str, Any], json_key: str, tokenizer: Tokenizer, render: Render
) -> tuple[list[int], list[int]]:
    """Check a record and encode its chat; a template that drops tools or calls is refused."""
    messages = messages_of(record, json_key)
    tools = record.get("tools") or None
    check_template_writes(messages, render, tools)
    tokens, learnt = encode_chat(messages, tokenizer, render, tools)
    if not any(learnt):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise ValueError(
            "nothing to learn: no message that counts has the role 'assistant' "
            f"(roles: {roles})"
        )
    return tokens, learnt


class SFTDataset(PackedDataset):
    """Rows that pack full chats; only the assistant's tokens count in the loss.

    Args:
        prefix: output prefix of ``prepare_chats``.
        sequence_length: S, tokens in a row.
        mmap: whether to read by memory map (see ``IndexedDataset``).
        too_long: what to do with a chat of more than S + 1 tokens.
        **options: further options of ``PackedDataset``.

    Raises:
        FileNotFoundError: if a file of the two pairs is missing.
    """

    def __init__(
        self,
        prefix: str | Path,
        sequence_length: int,
        *,
        mmap: bool = True,
        too_long: TooLong = "truncate",
        **options: Any,
    ) -> None:
        super().__init__(
            IndexedDataset(f"{prefix}{TOKENS}", mmap=mmap),
            weights=IndexedDataset(f"{prefix}{LEARNT}", mmap=mmap),
            sequence_length=sequence_length,
            too_long=too_long,
            **options,
        )
