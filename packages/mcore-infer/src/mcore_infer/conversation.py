"""A conversation with a model: its messages, and answers as streams of text."""

from collections.abc import Generator

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.config import InferenceConfig, SamplingConfig
from mcore_infer.engine.building import build_engine
from mcore_infer.generation import room, stop_ids
from mcore_infer.loading import LoadedModel
from mcore_infer.writing.chat_format import ChatFormat
from mcore_infer.writing.sequence import Generation, NewToken, ScoreRequest
from mcore_infer.writing.token_text import Answer, TokenTexts


class Conversation:
    """The messages of one chat, and an engine that answers them and caches earlier turns.

    Attributes:
        messages: ``{"role", "content"}`` of each turn.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Tokenizer,
        chat: ChatFormat,
        sampling: SamplingConfig,
        config: InferenceConfig,
        *,
        system: str = "",
        seed: int = 1234,
    ) -> None:
        """Build the engine and start without messages.

        Args:
            loaded: the model, its draft model and the scales of an fp8 cache.
            tokenizer: tokenizer of the model.
            chat: template and end of turns, see ``load_chat_format``.
            sampling: how tokens are chosen; ``num_tokens`` limits each answer.
            config: limits of the engine.
            system: first message of the conversation; empty: no system message.
            seed: answer i draws from ``seed + i``.

        Raises:
            ValueError: as ``build_engine``.
        """
        self.model, self.tokenizer, self.chat = loaded.model, tokenizer, chat
        self.sampling, self.system, self.seed = sampling, system, seed
        self._stop = stop_ids(tokenizer, sampling, (*loaded.ends, *chat.end_ids))
        self.engine = build_engine(loaded.model, config, loaded.draft, loaded.kv_scales)
        self._num_answers = 0
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, message: str) -> Generator[str]:
        """Send a message; yield the answer in pieces.

        The caller may stop at any piece. The pieces yielded so far become the answer in
        ``messages``.

        Raises:
            ValueError: if the conversation is too long; ``messages`` is then unchanged.
        """
        turns = [*self.messages, {"role": "user", "content": message}]
        # The template itself writes the token that begins a document.
        ids = self.tokenizer.encode(self.chat.render(turns, True), add_special_tokens=False)
        limit = self.engine.config.max_sequence_tokens
        positions = self.model.config.max_position_embeddings
        num_tokens = room(positions, self.sampling.num_tokens, ids, limit, "the conversation")
        stop = () if self.sampling.ignore_eod else self.chat.end_texts
        text, pieces = Answer(TokenTexts(self.tokenizer), stop=stop), list[str]()
        tokens = self._tokens(ids, num_tokens)
        try:
            for token in tokens:
                pieces.append(text.add(token).text)
                yield pieces[-1]
                if text.finish_reason:
                    break
            else:
                pieces.append(text.finish(Generation((), (), "stop")).text)
                yield pieces[-1]
        finally:
            tokens.close()
            if pieces:
                self._num_answers += 1
                answer = {"role": "assistant", "content": "".join(pieces)}
                self.messages = [*turns, answer]

    def _tokens(self, ids: list[int], num_tokens: int) -> Generator[NewToken]:
        eod = None if self.sampling.ignore_eod else self.tokenizer.eod
        seed = self.seed + self._num_answers
        number = self.engine.add(
            ids,
            self.sampling,
            num_tokens=num_tokens,
            seed=seed,
            eod=eod,
            stop=self._stop,
            scores=ScoreRequest(log_probs=False),
        )
        try:
            for event in self.engine.run():
                if isinstance(event, NewToken):
                    yield event
        finally:
            self.engine.abort(number)
