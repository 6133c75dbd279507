"""``PUT /api``: engine requests and replies in the format of Megatron's text server.

Fields and their limits are Megatron's. A field without effect (``length_penalty`` without beam
search) or out of range is refused with status 400.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from mcore_infer.config import SamplingConfig
from mcore_infer.server.replies import (
    Reply,
    ServedModel,
    build_sampling,
    encode,
    num_tokens_for,
    seed_or_random,
)
from mcore_infer.server.schemas import ApiBody, RequestError
from mcore_infer.writing.sequence import NewToken, ScoreRequest, TextRequest, TokenRules
from mcore_infer.writing.token_text import Answer, AnswerPiece, TextStream, with_drawn


def read_api(body: ApiBody, served: ServedModel) -> "ApiReply":
    """Build the engine requests of a body, and the reply that collects their texts.

    Raises:
        RequestError: with status 400, for values that the served model does not support.
    """
    scores = ScoreRequest(
        log_probs=body.logprobs, num_top=body.top_n_logprobs, prompt=body.logprobs
    )
    if (body.stop_token or 0) >= served.vocab_size:
        message = f"stop_token must be a token id from 0 to {served.vocab_size - 1}."
        raise RequestError(400, message, "stop_token")
    sampling, seed = _sampling(body), seed_or_random(body.random_seed)
    end = served.tokenizer.eod if body.stop_token is None else body.stop_token
    stop = ("\n\n",) if body.stop_on_double_eol else ()
    if body.stop_on_eol:
        stop = ("\n",)
    rules = _rules(served) if body.prevent_newline_after_colon else TokenRules()
    requests, answers = [], []
    for i, prompt in enumerate(body.prompts):
        ids = _prompt_ids(served, prompt, body.add_BOS)
        requests.append(
            TextRequest(
                prompt=ids,
                sampling=sampling,
                num_tokens=num_tokens_for(served, ids, body.tokens_to_generate),
                seed=seed + i,
                eod=end,
                stop=[[token] for token in served.ends],
                rules=rules,
                scores=scores,
            )
        )
        answers.append(Answer(served.texts, eod=end, stop=stop, keeps_stop=True))
    return ApiReply(served, body.prompts, requests, answers)


class ApiReply(Reply):
    """Builds the answer of ``/api``, which has no streams: texts, tokens and scores."""

    has_plain_errors = True

    def __init__(
        self,
        served: ServedModel,
        prompts: Sequence[str],
        requests: list[TextRequest],
        answers: list[Answer],
    ) -> None:
        super().__init__(served, requests, answers)
        self.prompts = prompts

    def complete(self, pieces: Sequence[Sequence[AnswerPiece]]) -> dict[str, Any]:
        """Return texts, tokens and segments, prompts included, and requested scores."""
        if self.requests[0].sampling.beam_width:
            return self._beams()
        texts = [
            prompt + "".join(piece.text for piece in text_pieces)
            for prompt, text_pieces in zip(self.prompts, pieces, strict=True)
        ]
        tokens = [
            [*request.prompt, *answer.ids]
            for request, answer in zip(self.requests, self.answers, strict=True)
        ]
        reply: dict[str, Any] = {
            "text": texts,
            "tokens": tokens,
            "segments": (self._segments(ids) for ids in tokens),
        }
        scores = self.requests[0].scores
        if scores.log_probs:
            reply["logprobs"] = [self._log_probs(answer) for answer in self.answers]
        if scores.num_top:
            reply["top_n_logprobs"] = (
                self._top(request.prompt, answer)
                for request, answer in zip(self.requests, self.answers, strict=True)
            )
        return reply

    def _beams(self) -> dict[str, Any]:
        """Return text, tokens, segments and score of every beam, best first."""
        (request,), (answer,) = self.requests, self.answers
        assert answer.result is not None
        beams, decode = answer.result.beams, self.served.tokenizer.decode
        tokens = [[*request.prompt, *beam.ids] for beam in beams]
        texts = [decode(beam.ids[: len(beam.ids) - beam.has_end]) for beam in beams]
        return {
            "text": [self.prompts[0] + text for text in texts],
            "tokens": tokens,
            "segments": [self._segments(ids) for ids in tokens],
            "scores": [beam.score for beam in beams],
        }

    def _segments(self, ids: Sequence[int]) -> list[str]:
        stream = TextStream(self.served.tokenizer)
        segments = [stream.add(token) for token in ids]
        segments[-1] += stream.rest()
        return segments

    def _log_probs(self, answer: Answer) -> list[float | None]:
        assert answer.result is not None
        written = [token.log_prob for token in answer.written]
        return [*answer.result.prompt_log_probs, *written]

    def _top(self, prompt: Sequence[int], answer: Answer) -> Iterator[dict[str, float]]:
        result = answer.result
        assert result is not None
        scored = zip(prompt[1:], result.prompt_log_probs, result.prompt_top, strict=True)
        tokens = chain((NewToken(0, *token) for token in scored), answer.written)
        return (self.served.texts.by_name(with_drawn(token)) for token in tokens)


def _sampling(body: ApiBody) -> SamplingConfig:
    return build_sampling(
        lambda: SamplingConfig(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            top_p_decay=body.top_p_decay,
            top_p_bound=body.top_p_bound,
            beam_width=body.beam_width or 0,
            length_penalty=body.length_penalty,
        )
    )


def _rules(served: ServedModel) -> TokenRules:
    colon, newline = (
        served.tokenizer.encode(text, add_special_tokens=False) for text in (":", "\n")
    )
    if not colon or not newline:
        raise RequestError(
            400, "prevent_newline_after_colon: the tokenizer has no colon or newline."
        )
    return TokenRules(never_after=(colon[-1], newline[-1]))


def _prompt_ids(served: ServedModel, prompt: str, add_bos: bool) -> list[int]:
    if not prompt and not add_bos:
        raise RequestError(400, "Empty prompts require add_BOS=true", "prompts")
    ids = encode(served, prompt, "prompts")
    if not add_bos:
        return ids
    tokenizer = served.tokenizer
    begin = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    if begin is None:
        raise RequestError(
            400, "add_BOS: the tokenizer has no token that begins a document.", "add_BOS"
        )
    return ids if ids[0] == begin else [begin, *ids]
