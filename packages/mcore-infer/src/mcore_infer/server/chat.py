"""``POST /v1/chat/completions`` in OpenAI's format: engine requests of a chat, and reply."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from mcore_data.datasets.chat_records import template_message
from mcore_infer.server.replies import (
    OpenAIReply,
    ServedModel,
    check_model,
    check_structured_output,
    encode,
    num_tokens_for,
    response_structure,
    text_requests,
)
from mcore_infer.server.schemas import ChatBody, Message, NamedTool, RequestError, Tool
from mcore_infer.server.tool_calls import (
    CHANNEL_ENDS,
    HARMONY,
    PLAIN,
    AnswerDelta,
    AnswerReader,
    ChannelReader,
    ToolFormat,
    answer_after_thinking,
    calls_structure,
    kept_tokens,
    marks_of,
    tool_format,
)
from mcore_infer.writing.chat_format import ChatFormat
from mcore_infer.writing.grammars import Structure
from mcore_infer.writing.sequence import ScoreRequest, TextRequest
from mcore_infer.writing.token_text import Answer, AnswerPiece, ScoredToken


def read_chat(body: ChatBody, served: ServedModel) -> "ChatReply":
    """Render a chat as a prompt; return its engine requests in the reply that collects them.

    Raises:
        RequestError: for values that the served model does not support, or messages that are
            too long or that the chat template refuses.
    """
    check_model(body, served)
    chat = served.chat
    if chat is None:
        message = "chats need jinja2: pip install 'mcore-infer[server]'."
        raise RequestError(501, message, "messages")
    is_forced, names = body.must_call, body.chosen_names
    # A named tool restricts the grammar only, and the prompt lists all tools; "none" and
    # allowed_tools also remove the other tools from the prompt.
    hides_others = names is not None and not isinstance(body.tool_choice, NamedTool)
    tools = [t for t in body.tools if not hides_others or t.function.name in (names or ())]
    if is_forced:
        check_structured_output("tool_choice")
    prompt = _rendered(body, served, chat, tools)
    ids = encode(served, prompt, "messages", is_rendered=True)
    if not ids:
        raise RequestError(
            400, "the chat template renders no text for these messages.", "messages"
        )
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    model_form = tool_format(chat.source)
    has_channels = model_form is HARMONY
    form = model_form if tools else None
    if is_forced and form is None:
        form = PLAIN
    reasons_first = chat.reasons_first(prompt)
    marks = [*(marks_of(form) if form else ()), *(chat.reasoning or ())]
    if has_channels:
        marks = [*marks_of(HARMONY), *marks]
    requests, answers = text_requests(
        body,
        served,
        [(ids, num_tokens_for(served, ids, max_tokens))],
        scores=ScoreRequest(log_probs=body.logprobs, num_top=body.top_logprobs),
        structure=_structure(body, served, chat, form, tools, is_forced, reasons_first),
        end_texts=chat.end_texts,
        end_ids=(*chat.end_ids, *kept_tokens(CHANNEL_ENDS * has_channels, served.tokenizer)),
        kept=kept_tokens(marks, served.tokenizer),
    )
    max_calls = None if body.parallel_tool_calls else 1
    readers = [
        ChannelReader(max_calls=max_calls)
        if has_channels
        else AnswerReader(
            form,
            [tool.function for tool in tools],
            reasoning=chat.reasoning,
            begins_in_reasoning=reasons_first,
            is_forced=is_forced,
            max_calls=max_calls,
        )
        for _ in answers
    ]
    return ChatReply(body, served, requests, answers, readers)


def _structure(
    body: ChatBody,
    served: ServedModel,
    chat: ChatFormat,
    form: ToolFormat | None,
    tools: Sequence[Tool],
    is_forced: bool,
    reasons_first: bool,
) -> Structure | None:
    """Return the grammar of the answer: calls, the response format, or a choice of both.

    None: the answer may be any text.
    """
    answer = response_structure(body)
    thinking_end = chat.reasoning[1] if reasons_first and chat.reasoning else ""
    if is_forced or (answer is not None and form is not None):
        choice = body.tool_choice
        functions = [
            tool.function
            for tool in tools
            if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name
        ]
        try:
            return calls_structure(
                form or PLAIN,
                functions,
                served.tokenizer,
                is_parallel=body.parallel_tool_calls and not isinstance(choice, NamedTool),
                answer=None if is_forced else answer,
                thinking_end=thinking_end,
            )
        except ValueError as error:
            raise RequestError(400, f"tools: {error}", "tools") from None
    if answer is not None and thinking_end:
        return answer_after_thinking(answer, thinking_end, served.tokenizer)
    return answer


def _rendered(
    body: ChatBody, served: ServedModel, chat: ChatFormat, tools: Sequence[Tool]
) -> str:
    """Render the messages as a prompt; refuse messages that cannot fit before rendering."""
    messages = [_for_template(message, chat) for message in body.messages]
    texts = [str(message["content"]) for message in messages]
    size = sum(map(len, texts)) if served.texts.longest else 0
    # A message has at least one token, and a token at most ``longest`` bytes.
    if len(messages) > served.max_tokens or size > served.max_tokens * served.texts.longest:
        encode(served, "".join(texts), "messages")
        message = (
            f"the maximum context length was exceeded: {len(messages)} messages have more than "
            f"{served.max_tokens} tokens."
        )
        raise RequestError(400, message, "messages", "context_length_exceeded")
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            variables["enable_thinking"] = False
    variables |= body.chat_template_kwargs
    tool_values = [tool.model_dump(exclude_unset=True) for tool in tools] or None
    try:
        text = chat.render(messages, True, **variables, tools=tool_values)
        ignores_tools = bool(tool_values) and text == chat.render(
            messages, True, **variables, tools=None
        )
    except ValueError as error:
        raise RequestError(400, str(error)[:500], "messages") from error
    if ignores_tools:
        raise RequestError(
            400,
            "the chat template has no place for tools: leave tools out, or serve with a "
            "--chat-template that renders them.",
            "tools",
        )
    return text


def _for_template(message: Message, chat: ChatFormat) -> dict[str, Any]:
    """Return a message in the form in which training passed messages to the template."""
    values = message.model_dump(exclude_none=True)
    if message.role == "developer" and "developer" not in chat.source:
        values["role"] = "system"  # OpenAI's older name of the role
    try:
        return template_message(values)
    except ValueError as error:
        raise RequestError(400, f"messages: {error}", "messages") from None


class ChatReply(OpenAIReply):
    """Builds chat answers and their stream events."""

    def __init__(
        self,
        body: ChatBody,
        served: ServedModel,
        requests: list[TextRequest],
        answers: list[Answer],
        readers: Sequence[AnswerReader | ChannelReader],
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(body, served, requests, answers, kind=kind, id_prefix="chatcmpl")
        self.body, self.readers = body, readers

    def first_events(self) -> Sequence[Any]:
        """Return one event with the role for each choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._event(index, delta, None, None) for index in range(len(self.answers))]

    def event(self, index: int, piece: AnswerPiece) -> Any:
        """Return the event of a new piece; None if the piece completes no part of a message."""
        reason, reader = self.answers[index].finish_reason, self.readers[index]
        num_calls = reader.num_calls
        parts = reader.add(piece.text, is_last=reason is not None)
        delta: dict[str, Any] = {}
        if parts.content:
            delta["content"] = parts.content
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.calls:
            calls = self._calls(parts)
            delta["tool_calls"] = [
                {"index": num_calls + i, **call} for i, call in enumerate(calls)
            ]
        if not delta and not piece.tokens and reason is None:
            return None
        return self._event(index, delta, self._scores(piece.tokens), self._reason(index))

    def complete(self, pieces: Sequence[Sequence[AnswerPiece]]) -> dict[str, Any]:
        """Return a message for each text, and the token counts."""
        choices = []
        for index, text_pieces in enumerate(pieces):
            text = "".join(piece.text for piece in text_pieces)
            parts = self.readers[index].add(text, is_last=True)
            has_content = parts.content.strip() or not parts.calls
            message: dict[str, Any] = {
                "role": "assistant",
                "content": parts.content if has_content else None,
                "refusal": None,
            }
            if parts.reasoning:
                message["reasoning_content"] = parts.reasoning
            if parts.calls:
                message["tool_calls"] = self._calls(parts)
            scores = self._scores(t for piece in text_pieces for t in piece.tokens)
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": scores,
                    "finish_reason": self._reason(index),
                }
            )
        return {**self.head, "choices": choices, "usage": self.usage()}

    def _calls(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        return [
            {
                # Mistral's templates require nine letters and digits.
                "id": secrets.token_hex(5)[:9],
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in delta.calls
        ]

    def _reason(self, index: int) -> str | None:
        reason = self.answers[index].finish_reason
        has_called = reason == "stop" and self.readers[index].num_calls
        return "tool_calls" if has_called else reason

    def _event(
        self, index: int, delta: dict[str, Any], scores: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": scores,
            "finish_reason": finish_reason,
        }
        return {**self.head, "choices": [choice]}

    def _scores(self, tokens: Iterable[ScoredToken]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": (self._score(token) for token in tokens), "refusal": None}

    def _score(self, token: ScoredToken) -> dict[str, Any]:
        top = token.top if self.body.top_logprobs else ()
        alternatives = [self._named(rival, value) for rival, value in top]
        return {**self._named(token.id, token.log_prob), "top_logprobs": alternatives}

    def _named(self, token: int, log_prob: float | None) -> dict[str, Any]:
        texts = self.served.texts
        return {
            "token": texts.name(token),
            "logprob": log_prob,
            "bytes": list(texts.of(token)),
        }
