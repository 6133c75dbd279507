"""``POST /v1/completions`` in OpenAI's format: bodies to jobs, results to replies."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from mcore_infer.server.job import (
    Job,
    ServedModel,
    check_model,
    encode,
    num_tokens_for,
    response_structure,
    text_requests,
)
from mcore_infer.server.schemas import CompletionBody, RequestError
from mcore_infer.server.worker import TextRequest
from mcore_infer.writing.sequence import ScoreRequest
from mcore_infer.writing.token_text import Answer, AnswerPiece, ScoredToken, prompt_tokens


def read_completion(body: CompletionBody, served: ServedModel) -> Job:
    """Return the job of a request body.

    Raises:
        RequestError: for fields that exclude each other, or a prompt that is too long.
    """
    check_model(body, served)
    if not body.max_tokens and not body.echo:
        raise RequestError(400, "max_tokens=0 needs echo=true.", "max_tokens")
    if body.best_of not in (None, body.n):
        raise RequestError(400, "best_of must be n: every text is returned.", "best_of")
    is_scored = body.logprobs is not None
    scores_prompt = is_scored and body.echo
    if body.stream and scores_prompt:
        raise RequestError(400, "echo with logprobs cannot be streamed.", "stream")
    scores = ScoreRequest(log_probs=is_scored, num_top=body.logprobs or 0, prompt=scores_prompt)
    prompts = _prompts(body, served)
    requests, answers = text_requests(
        body,
        served,
        [(ids, num_tokens_for(served, ids, body.max_tokens)) for _, ids in prompts],
        scores=scores,
        structure=response_structure(body),
        offsets=[len(text) if body.echo else 0 for text, _ in prompts],
    )
    return Job(
        requests=requests,
        answers=answers,
        reply=CompletionReply(body, served, prompts, requests, answers),
        is_stream=body.stream,
        needs_result=scores_prompt,
    )


def _prompts(body: CompletionBody, served: ServedModel) -> list[tuple[str, Sequence[int]]]:
    """Return texts and token ids of the prompts."""
    given: Any = body.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    found: list[tuple[str, Sequence[int]]] = []
    for one in given:
        if isinstance(one, str):
            found.append((one, encode(served, one)))
            continue
        num_tokens_for(served, one, body.max_tokens)
        if max(one) >= served.vocab_size:
            message = f"prompt: token ids are from 0 to {served.vocab_size - 1}."
            raise RequestError(400, message, "prompt")
        found.append((served.tokenizer.decode(one), one))
    return found


class CompletionReply:
    """Builds completions and stream events in OpenAI's format."""

    def __init__(
        self,
        body: CompletionBody,
        served: ServedModel,
        prompts: Sequence[tuple[str, Sequence[int]]],
        requests: Sequence[TextRequest],
        answers: Sequence[Answer],
    ) -> None:
        """Create the id and the fields that all events share."""
        self.body, self.served, self.prompts = body, served, prompts
        self.requests, self.answers = requests, answers
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def begin(self) -> Sequence[Any]:
        """Return one event with the prompt for every choice, if echoed."""
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

    def end(self) -> Sequence[Any]:
        """Return the event of token counts, if requested."""
        if not self.body.stream_options.include_usage:
            return ()
        return [{**self.head, "choices": [], "usage": self._usage()}]

    def whole(self, pieces: Sequence[Sequence[AnswerPiece]]) -> dict[str, Any]:
        """Return all choices and the token counts."""
        choices = []
        for index, of_one in enumerate(pieces):
            text = "".join(piece.text for piece in of_one)
            choice = _choice(index, text, None, self.answers[index].finish_reason)
            request, answer = self.requests[index], self.answers[index]
            if self.body.echo:
                choice["text"] = self._prompt(index) + text
            if request.scores.log_probs:
                tokens = [token for piece in of_one for token in piece.tokens]
                if request.scores.prompt and answer.result:
                    own = prompt_tokens(self.served.texts, request.prompt, answer.result)
                    tokens = [*own, *tokens]
                choice["logprobs"] = self._scores(tokens)
            choices.append(choice)
        return {**self.head, "choices": choices, "usage": self._usage()}

    def _prompt(self, index: int) -> str:
        return self.prompts[index // self.body.n][0]

    def _event(
        self, index: int, text: str, scores: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        return {**self.head, "choices": [_choice(index, text, scores, finish_reason)]}

    def _scores(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        texts = self.served.texts
        return {
            "tokens": [texts.name(token.id) for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "text_offset": [token.offset for token in tokens],
            "top_logprobs": [
                None if token.log_prob is None else texts.by_name(token.top) for token in tokens
            ],
        }

    def _usage(self) -> dict[str, int]:
        return usage(sum(len(ids) for _, ids in self.prompts), self.answers)


def _choice(index: int, text: str, scores: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish_reason}


def usage(prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, int]:
    """Return OpenAI's token counts; a prompt with several texts counts once."""
    written = sum(len(answer.ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
    }
