"""``POST /v1/completions`` in OpenAI's format: engine requests of prompts, and the reply."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, tee
from typing import Any

from mcore_infer.server.replies import (
    OpenAIReply,
    ServedModel,
    check_model,
    encode,
    num_tokens_for,
    response_structure,
    text_requests,
)
from mcore_infer.server.schemas import CompletionBody, RequestError
from mcore_infer.writing.sequence import ScoreRequest, TextRequest
from mcore_infer.writing.token_text import Answer, AnswerPiece, ScoredToken, prompt_tokens


def read_completion(body: CompletionBody, served: ServedModel) -> "CompletionReply":
    """Build the engine requests of a body, and the reply that collects their texts.

    Raises:
        RequestError: for values that the served model does not support, or a prompt that is
            too long.
    """
    check_model(body, served)
    is_scored = body.logprobs is not None
    prompts = _prompts(body, served)
    requests, answers = text_requests(
        body,
        served,
        [(ids, num_tokens_for(served, ids, body.max_tokens)) for _, ids in prompts],
        scores=ScoreRequest(
            log_probs=is_scored, num_top=body.logprobs or 0, prompt=is_scored and body.echo
        ),
        structure=response_structure(body),
        offsets=[len(text) if body.echo else 0 for text, _ in prompts],
    )
    for i, request in enumerate(requests):
        # All n texts of a prompt share its scores: only the first text computes them.
        if i % body.n and request.scores.prompt:
            requests[i] = replace(request, scores=replace(request.scores, prompt=False))
    return CompletionReply(body, served, [text for text, _ in prompts], requests, answers)


def _prompts(body: CompletionBody, served: ServedModel) -> list[tuple[str, Sequence[int]]]:
    """Return the text and the token ids of each prompt."""
    body_prompts: Any = body.prompt
    if isinstance(body_prompts, str) or isinstance(body_prompts[0], int):
        body_prompts = [body_prompts]
    prompts: list[tuple[str, Sequence[int]]] = []
    for prompt in body_prompts:
        if isinstance(prompt, str):
            prompts.append((prompt, encode(served, prompt)))
            continue
        num_tokens_for(served, prompt, body.max_tokens)
        if max(prompt) >= served.vocab_size:
            message = f"prompt must have token ids from 0 to {served.vocab_size - 1}."
            raise RequestError(400, message, "prompt")
        prompts.append((served.tokenizer.decode(prompt), prompt))
    return prompts


class CompletionReply(OpenAIReply):
    """Builds completions and their stream events."""

    def __init__(
        self,
        body: CompletionBody,
        served: ServedModel,
        prompts: Sequence[str],
        requests: list[TextRequest],
        answers: list[Answer],
    ) -> None:
        kind, id_prefix = "text_completion", "cmpl"
        super().__init__(body, served, requests, answers, kind=kind, id_prefix=id_prefix)
        self.body, self.prompts = body, prompts

    def first_events(self) -> Sequence[Any]:
        """Return one event with the prompt for each choice, if ``echo`` is set."""
        if not self.body.echo:
            return ()
        return [
            self._event(index, self._prompt(index), None, None)
            for index in range(len(self.answers))
        ]

    def event(self, index: int, piece: AnswerPiece) -> Any:
        """Return the event of a new piece."""
        scores = None if self.body.logprobs is None else self._scores(piece.tokens)
        return self._event(index, piece.text, scores, self.answers[index].finish_reason)

    def complete(self, pieces: Sequence[Sequence[AnswerPiece]]) -> dict[str, Any]:
        """Return a choice for each text, and the token counts."""
        choices = []
        for index, text_pieces in enumerate(pieces):
            text = "".join(piece.text for piece in text_pieces)
            choice = _choice(index, text, None, self.answers[index].finish_reason)
            if self.body.echo:
                choice["text"] = self._prompt(index) + text
            if self.requests[index].scores.log_probs:
                tokens = (token for piece in text_pieces for token in piece.tokens)
                choice["logprobs"] = self._scores(chain(self._scored_prompt(index), tokens))
            choices.append(choice)
        return {**self.head, "choices": choices, "usage": self.usage()}

    def _scored_prompt(self, index: int) -> Iterator[ScoredToken]:
        """Return the scored prompt tokens, from the result of the prompt's first text."""
        first = index - index % self.body.n
        result = self.answers[first].result
        if not self.body.echo or result is None:
            return iter(())
        return prompt_tokens(self.served.texts, self.requests[first].prompt, result)

    def _prompt(self, index: int) -> str:
        return self.prompts[index // self.body.n]

    def _event(
        self, index: int, text: str, scores: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        return {**self.head, "choices": [_choice(index, text, scores, finish_reason)]}

    def _scores(self, tokens: Iterable[ScoredToken]) -> dict[str, Any]:
        texts = self.served.texts
        for_names, for_log_probs, for_offsets, for_top = tee(tokens, 4)
        return {
            "tokens": (texts.name(token.id) for token in for_names),
            "token_logprobs": (token.log_prob for token in for_log_probs),
            "text_offset": (token.offset for token in for_offsets),
            "top_logprobs": (
                None if token.log_prob is None else texts.by_name(token.top)
                for token in for_top
            ),
        }


def _choice(index: int, text: str, scores: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish_reason}
