"""``PUT /api``: Megatron's interface, with its fields and their limits.

Each field has an effect or is refused: what a value cannot mean here (``length_penalty``
without beam search) gets a status of 400, as does everything out of range.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_infer.config import MAX_SEED, SamplingConfig
from mcore_infer.server.answer import Answer, AnswerPiece
from mcore_infer.server.fields import (
    Flag,
    Integer,
    Number,
    Only,
    Own,
    RequestError,
    Schema,
    Table,
    read_fields,
)
from mcore_infer.server.job import (
    Job,
    ServedModel,
    checked,
    encode,
    num_tokens_for,
    seed_of,
)
from mcore_infer.server.worker import TextRequest
from mcore_infer.streaming import TextStream
from mcore_infer.writing import ScoreRequest, TokenRules

MAX_PROMPTS = 128
MAX_TOP_K = 1000
MAX_TEMPERATURE = 100.0
_GONE = {
    "max_len": "is no longer used: give tokens_to_generate.",
    "sentences": "is no longer used: give prompts.",
}
_PROMPTS: Schema = {
    "type": "array",
    "items": {"type": "string"},
    "minItems": 1,
    "maxItems": MAX_PROMPTS,
}
_TOP_P: Schema = {
    "type": "number",
    "minimum": 0,
    "maximum": 1,
    "default": 0.0,
    "description": "Written with a decimal point: 1.0, not 1.",
}


def api_table(served: ServedModel) -> Table:
    """Return the fields of a body."""
    return {
        **{name: Only(why) for name, why in _GONE.items()},
        "prompts": Own(_prompts, _PROMPTS, required=True),
        "tokens_to_generate": Integer(64, 0, 2**31),
        "logprobs": Flag(),
        "top_n_logprobs": Integer(0, 0, 20),
        "temperature": Number(1.0, 0, MAX_TEMPERATURE, above=True),
        "top_k": Integer(0, 0, MAX_TOP_K),
        "top_p": Own(_top_p, _TOP_P),
        "top_p_decay": Number(0.0, 0, 1),
        "top_p_bound": Number(0.0, 0, 1),
        "beam_width": Integer(0, 1, 128),
        "length_penalty": Number(1.0, -10, 10),
        "random_seed": Integer(None, 0, MAX_SEED),
        "stop_token": Integer(None, 0, served.vocab_size - 1),
        "add_BOS": Flag(),
        "stop_on_double_eol": Flag(),
        "stop_on_eol": Flag(),
        "prevent_newline_after_colon": Flag(),
    }


def read_api(body: dict[str, Any], served: ServedModel) -> Job:
    """Turn a body into a job.

    Raises:
        RequestError: with status 400, for a wrong or unknown field.
    """
    fields = read_fields(body, api_table(served))
    prompts, num_tokens = fields["prompts"], fields["tokens_to_generate"]
    is_scored, num_top = fields["logprobs"], fields["top_n_logprobs"]
    if not num_tokens and not is_scored:
        raise RequestError(400, "tokens_to_generate=0 needs logprobs=true.")
    if num_top and not is_scored:
        raise RequestError(400, "top_n_logprobs needs logprobs=true.")
    sampling, seed = _sampling(fields), seed_of(fields["random_seed"])
    end = served.tokenizer.eod if fields["stop_token"] is None else fields["stop_token"]
    stop = ("\n\n",) if fields["stop_on_double_eol"] else ()
    if fields["stop_on_eol"]:
        stop = ("\n",)
    rules = _rules(served) if fields["prevent_newline_after_colon"] else TokenRules()
    if sampling.beam_width and (is_scored or len(prompts) > 1 or stop or rules != TokenRules()):
        raise RequestError(
            400,
            "beam_width takes one prompt, no logprobs, stop_on_eol, stop_on_double_eol or "
            "prevent_newline_after_colon.",
            "beam_width",
        )
    requests, answers = [], []
    for i, prompt in enumerate(prompts):
        ids = _prompt_ids(served, prompt, fields["add_BOS"])
        requests.append(
            TextRequest(
                prompt=ids,
                sampling=sampling,
                num_tokens=num_tokens_for(served, ids, num_tokens),
                seed=seed + i,
                eod=end,
                stop=[[token] for token in served.ends],
                rules=rules,
                scores=ScoreRequest(log_probs=is_scored, num_top=num_top, prompt=is_scored),
            )
        )
        answers.append(Answer(served.tokenizer, eod=end, stop=stop, keeps_stop=True))
    reply = ApiReply(served, prompts, requests, answers)
    return Job(
        requests=requests,
        answers=answers,
        reply=reply,
        needs_result=is_scored,
        has_plain_errors=True,
    )


class ApiReply:
    """The whole answer; this interface has no streams."""

    def __init__(
        self,
        served: ServedModel,
        prompts: Sequence[str],
        requests: Sequence[TextRequest],
        answers: Sequence[Answer],
    ) -> None:
        """Remember what was sent."""
        self.served, self.prompts = served, prompts
        self.requests, self.answers = requests, answers

    def begin(self) -> Sequence[Any]:
        """Return nothing."""
        return ()

    def event(self, index: int, piece: AnswerPiece) -> Any:
        """Return nothing."""
        del index, piece

    def end(self) -> Sequence[Any]:
        """Return nothing."""
        return ()

    def whole(self, pieces: Sequence[Sequence[AnswerPiece]]) -> dict[str, Any]:
        """Return texts, tokens and segments, prompts included, and scores where wanted."""
        if self.requests[0].sampling.beam_width:
            return self._beams()
        texts = [
            prompt + "".join(piece.text for piece in of_one)
            for prompt, of_one in zip(self.prompts, pieces, strict=True)
        ]
        tokens = [
            [*request.prompt, *answer.ids]
            for request, answer in zip(self.requests, self.answers, strict=True)
        ]
        reply: dict[str, Any] = {
            "text": texts,
            "tokens": tokens,
            "segments": [self._segments(ids) for ids in tokens],
        }
        scores = self.requests[0].scores
        if scores.log_probs:
            reply["logprobs"] = [self._log_probs(answer) for answer in self.answers]
        if scores.num_top:
            reply["top_n_logprobs"] = [self._top(answer) for answer in self.answers]
        return reply

    def _beams(self) -> dict[str, Any]:
        """Return the same of every beam, best first, and their scores."""
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
        found = [stream.add(token) for token in ids]
        found[-1] += stream.rest()
        return found

    def _log_probs(self, answer: Answer) -> list[float | None]:
        assert answer.result is not None
        written = [token.log_prob for token in answer.written]
        return [*answer.result.prompt_log_probs, *written]

    def _top(self, answer: Answer) -> list[dict[str, float]]:
        assert answer.result is not None
        decode = self.served.tokenizer.decode
        places = [*answer.result.prompt_top, *(token.top for token in answer.written)]
        return [{decode([token]): value for token, value in reversed(top)} for top in places]


def _prompts(prompts: Any) -> list[str]:
    if prompts is None:
        raise RequestError(400, "prompts argument required", "prompts")
    if not isinstance(prompts, list):
        raise RequestError(400, "prompts is not a list of strings", "prompts")
    if not prompts:
        raise RequestError(400, "prompts is empty", "prompts")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(400, f"Maximum number of prompts is {MAX_PROMPTS}", "prompts")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError(400, "prompts is not a list of strings", "prompts")
    return prompts


def _top_p(top_p: Any) -> float:
    if top_p is None:
        return 0.0
    if not isinstance(top_p, float) or not 0 <= top_p <= 1:
        raise RequestError(400, "top_p must be a float from 0.0 to 1.0", "top_p")
    return top_p


def _sampling(fields: Mapping[str, Any]) -> SamplingConfig:
    if fields["top_p"] and fields["top_k"]:
        raise RequestError(400, "cannot set both top-k and top-p samplings.", "top_p")
    names = ("temperature", "top_k", "top_p", "top_p_decay", "top_p_bound", "beam_width")
    given = {name: fields[name] for name in (*names, "length_penalty")}
    return checked(lambda: SamplingConfig(**given))


def _rules(served: ServedModel) -> TokenRules:
    colon, newline = (
        served.tokenizer.encode(text, add_special_tokens=False) for text in (":", "\n")
    )
    if not colon or not newline:
        raise RequestError(400, "prevent_newline_after_colon: no token is a colon or newline.")
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
        raise RequestError(400, "add_BOS: no token begins a document.", "add_BOS")
    return ids if ids[0] == begin else [begin, *ids]
