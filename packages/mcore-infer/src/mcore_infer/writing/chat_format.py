"""Chat format of a model: template, end mark of a turn, and marks around reasoning."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_data.datasets.chat import CHATML, Render, load_template, tokenizer_template
from mcore_data.tokenizers.protocol import Tokenizer

log = logging.getLogger(__name__)

_MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_PROBE = "mcore ends here"
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Marks around the reasoning before an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """Template that renders chats as prompts, and the marks that end a turn or reasoning."""

    render: Render
    """Renders messages as text; with ``tools``, by the template ``tool_use`` if one exists."""
    source: str
    """Source of the templates."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a turn."""
    end_texts: tuple[str, ...] = ()
    """Strings that end a turn, if the end mark is not a single token."""
    reasoning: tuple[str, str] | None = None
    """Marks around reasoning; None: the template does not mark reasoning."""

    def reasons_first(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the start of reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])


def load_chat_format(template: str, tokenizer: Tokenizer) -> ChatFormat:
    """Compile a model's chat templates, and return them with the marks that they write.

    Args:
        template: text of a Jinja template; empty: the tokenizer's template, else ChatML with a
            warning.
        tokenizer: tokenizer of the model.

    Raises:
        ImportError: if jinja2 is missing.
        ValueError: if the text is not a Jinja template.
    """
    source = template or tokenizer_template(tokenizer)
    if not source:
        log.warning(
            "the tokenizer has no chat template: chats are rendered as ChatML, whose turns "
            "end at <|im_end|>. Give the model's template by --chat-template."
        )
    plain = source or CHATML
    for_tools = template or tokenizer_template(tokenizer, "tool_use") or plain
    renders = [load_template(text, tokenizer) for text in (plain, for_tools)]

    def render(messages: Sequence[Mapping[str, Any]], add: bool, **variables: Any) -> str:
        return renders[bool(variables.get("tools"))](messages, add, **variables)

    marks = [_turn_end(renders[0], role) for role in ("user", "system")]
    end = next((mark for mark in marks if mark), "")
    end_id = tokenizer.token_id(end) if end else None
    source = plain if for_tools == plain else plain + for_tools
    return ChatFormat(
        render=render,
        source=source,
        end_ids=() if end_id is None else (end_id,),
        end_texts=(end,) if end and end_id is None else (),
        reasoning=next((pair for pair in _REASONING if pair[1] in source), None),
    )


def _turn_end(render: Render, role: str) -> str:
    """Render an answer and return the mark that follows it; empty: the template has no mark."""
    answer = {"role": "assistant", "content": _PROBE}
    try:
        text = render([{"role": role, "content": "a"}, answer], False)
    except ValueError:
        return ""
    mark = _MARK.match(text.rpartition(_PROBE)[2].lstrip())
    return mark[0] if mark and _PROBE in text else ""
