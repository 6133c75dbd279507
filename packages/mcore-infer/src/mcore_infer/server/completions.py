"""``POST /v1/completions`` as OpenAI's clients know it."""

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from mcore_infer.server.answer import Answer, AnswerPiece, ScoredToken, prompt_tokens
from mcore_infer.server.fields import (
    Flag,
    Integer,
    Only,
    Own,
    RequestError,
    Schema,
    Table,
    read_fields,
)
from mcore_infer.server.job import (
    MAX_TEXTS,
    WITHOUT_EFFECT,
    Job,
    ServedModel,
    TextOptions,
    check_count,
    encode,
    num_tokens_for,
    options_table,
    text_options,
)
from mcore_infer.server.worker import TextRequest
from mcore_infer.writing import ScoreRequest

MAX_TOP = 20


def completion_table(served: ServedModel) -> Table:
    """Return the fields of a body."""
    return {
        "prompt": Own(partial(_prompts, served), _prompt_schema(served), required=True),
        **options_table(served),
        "max_tokens": Integer(16, 0, 2**31),
        "logprobs": Integer(-1, 0, MAX_TOP),
        "echo": Flag(),
        "best_of": Integer(None, 1, MAX_TEXTS),
        "suffix": Only("is refused: models here write at the end only.", ("",)),
    }


def read_completion(body: dict[str, Any], served: ServedModel) -> Job:
    """Turn a body into a job.

    Raises:
        RequestError: with status 400, for a wrong or unknown field.
    """
    fields = read_fields(body, completion_table(served), WITHOUT_EFFECT)
    prompts, options, echo = fields["prompt"], text_options(fields), fields["echo"]
    num_tokens, num_top = fields["max_tokens"], fields["logprobs"]
    if not num_tokens and not echo:
        raise RequestError(400, "max_tokens=0 needs echo=true.", "max_tokens")
    if fields["best_of"] not in (None, options.n):
        raise RequestError(400, "best_of must be n: every text is returned.", "best_of")
    is_scored, scores_prompt = num_top >= 0, num_top >= 0 and echo
    if options.is_stream and scores_prompt:
        raise RequestError(400, "echo with logprobs cannot be streamed.", "stream")
    check_count(len(prompts) * options.n)
    scores = ScoreRequest(log_probs=is_scored, num_top=max(0, num_top), prompt=scores_prompt)
    requests, answers = [], []
    for text, ids in prompts:
        for _ in range(options.n):
            wanted = num_tokens_for(served, ids, num_tokens)
            requests.append(text_request(served, ids, wanted, options, scores, len(requests)))
            offset = len(text) if echo else 0
            answers.append(text_answer(served, options, is_scored, offset))
    reply = CompletionReply(served, prompts, requests, answers, options, echo)
    return Job(
        requests=requests,
        answers=answers,
        reply=reply,
        is_stream=options.is_stream,
        needs_result=scores_prompt,
    )


def text_request(
    served: ServedModel,
    prompt: Sequence[int],
    num_tokens: int,
    options: TextOptions,
    scores: ScoreRequest,
    index: int,
) -> TextRequest:
    """Return one text of a request; text i draws from its seed + i."""
    return TextRequest(
        prompt=prompt,
        sampling=options.sampling,
        num_tokens=num_tokens,
        seed=options.seed + index,
        eod=None if options.ignore_eos else served.tokenizer.eod,
        stop=() if options.ignore_eos else [[token] for token in served.ends],
        rules=options.rules,
        scores=scores,
        structure=options.structure,
    )


def text_answer(
    served: ServedModel, options: TextOptions, is_scored: bool, offset: int = 0
) -> Answer:
    """Return what collects one text."""
    return Answer(
        served.tokenizer,
        eod=None if options.ignore_eos else served.tokenizer.eod,
        stop=options.stop,
        is_scored=is_scored,
        offset=offset,
    )


def _prompts(served: ServedModel, prompt: Any) -> list[tuple[str, list[int]]]:
    """Return texts and token ids of the prompts."""
    if _is_ids(prompt) or isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not 1 <= len(prompt) <= MAX_TEXTS:
        raise RequestError(
            400,
            "prompt must be a string, a list of token ids, or a list of at most "
            f"{MAX_TEXTS} of either.",
            "prompt",
        )
    found = []
    for one in prompt:
        if isinstance(one, str):
            found.append((one, encode(served, one)))
        elif _is_ids(one):
            if not 0 <= min(one) <= max(one) < served.vocab_size:
                raise RequestError(
                    400, f"prompt: token ids are from 0 to {served.vocab_size - 1}.", "prompt"
                )
            found.append((served.tokenizer.decode(one), one))
        else:
            raise RequestError(
                400, "prompt: each must be a string or a list of token ids.", "prompt"
            )
    return found


def _prompt_schema(served: ServedModel) -> Schema:
    ids = {"type": "integer", "minimum": 0, "maximum": served.vocab_size - 1}
    one = [{"type": "string"}, {"type": "array", "items": ids, "minItems": 1}]
    many = {"type": "array", "items": {"anyOf": one}, "minItems": 1, "maxItems": MAX_TEXTS}
    return {"anyOf": [*one, many]}


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    )


class CompletionReply:
    """Choices in OpenAI's form."""

    def __init__(
        self,
        served: ServedModel,
        prompts: Sequence[tuple[str, Sequence[int]]],
        requests: Sequence[TextRequest],
        answers: Sequence[Answer],
        options: TextOptions,
        echo: bool,
    ) -> None:
        """Give the reply its id."""
        self.served, self.prompts, self.requests = served, prompts, requests
        self.answers, self.options, self.echo = answers, options, echo
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def begin(self) -> Sequence[Any]:
        """Return the prompts where they are echoed."""
        if not self.echo:
            return ()
        return [
            self._event(index, self._prompt(index), None, None)
            for index in range(len(self.answers))
        ]

    def event(self, index: int, piece: AnswerPiece) -> Any:
        """Return one choice with what is new."""
        scores = self._scores(piece.tokens) if self.requests[index].scores.log_probs else None
        return self._event(index, piece.text, scores, self.answers[index].finish_reason)

    def end(self) -> Sequence[Any]:
        """Return the counts where they are wanted."""
        if not self.options.has_usage:
            return ()
        return [{**self.head, "choices": [], "usage": self._usage()}]

    def whole(self, pieces: Sequence[Sequence[AnswerPiece]]) -> dict[str, Any]:
        """Return all choices and the counts."""
        choices = []
        for index, of_one in enumerate(pieces):
            text = "".join(piece.text for piece in of_one)
            choice = _choice(index, text, None, self.answers[index].finish_reason)
            request, answer = self.requests[index], self.answers[index]
            if self.echo:
                choice["text"] = self._prompt(index) + text
            if request.scores.log_probs:
                tokens = [token for piece in of_one for token in piece.tokens]
                if request.scores.prompt and answer.result:
                    own = prompt_tokens(self.served.tokenizer, request.prompt, answer.result)
                    tokens = [*own, *tokens]
                choice["logprobs"] = self._scores(tokens)
            choices.append(choice)
        return {**self.head, "choices": choices, "usage": self._usage()}

    def _prompt(self, index: int) -> str:
        return self.prompts[index // self.options.n][0]

    def _event(
        self, index: int, text: str, scores: Any, finish_reason: str | None
    ) -> dict[str, Any]:
        return {**self.head, "choices": [_choice(index, text, scores, finish_reason)]}

    def _scores(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "text_offset": [token.offset for token in tokens],
            "top_logprobs": [
                None if token.log_prob is None else dict(reversed(token.top))
                for token in tokens
            ],
        }

    def _usage(self) -> dict[str, int]:
        return usage(sum(len(ids) for _, ids in self.prompts), self.answers)


def _choice(index: int, text: str, scores: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish_reason}


def usage(prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, int]:
    """Return OpenAI's counts; a prompt with several texts counts once."""
    written = sum(len(answer.ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
    }
