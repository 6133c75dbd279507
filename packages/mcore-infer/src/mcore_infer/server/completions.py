"""``POST /v1/completions`` in OpenAI's format: engine requests of a body, and their reply."""

from collections.abc import Sequence
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
    """Turn a body into engine requests and their reply.

    Raises:
        RequestError: for values that this model does not take, or a prompt that is too long.
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
    return CompletionReply(body, served, [text for text, _ in prompts], requests, answers)


def _prompts(body: CompletionBody, served: ServedModel) -> list[tuple[str, Sequence[int]]]:
    """Return texts and token ids of the prompts."""
    given: Any = body.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    prompts: list[tuple[str, Sequence[int]]] = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append((prompt, encode(served, prompt)))
            continue
        num_tokens_for(served, prompt, body.max_tokens)
        if max(prompt) >= served.vocab_size:
            message = f"prompt: token ids are from 0 to {served.vocab_size - 1}."
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
        self.needs_result = requests[0].scores.prompt

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
            request, answer = self.requests[index], self.answers[index]
            if self.body.echo:
                choice["text"] = self._prompt(index) + text
            if request.scores.log_probs:
                tokens = [token for piece in text_pieces for token in piece.tokens]
                if request.scores.prompt and answer.result:
                    scored_prompt = prompt_tokens(
                        self.served.texts, request.prompt, answer.result
                    )
                    tokens = [*scored_prompt, *tokens]
                choice["logprobs"] = self._scores(tokens)
            choices.append(choice)
        return {**self.head, "choices": choices, "usage": self.usage()}

    def _prompt(self, index: int) -> str:
        return self.prompts[index // self.body.n]

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


def _choice(index: int, text: str, scores: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish_reason}
