"""A tokenizer that encodes in a separate process, which opens it while others work.

The library's tokenizer of a large vocabulary takes half a second to build and encodes a
thousandth of the texts. Meanwhile the engine is opened here and workers begin; all of them
may send it texts, one at a time, through a pipe that forks inherit.
"""

import signal
import traceback
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from mcore_data.preprocessing.workers import started
from mcore_data.tokenizers.protocol import Tokenizer


class ReferenceProcess:
    """Encodes by a tokenizer in another process, which opens it at once.

    Args:
        tokenizer: any; handed over by a fork.

    Attributes:
        pid: of the process.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        context = get_context("fork")
        self._turn = context.Lock()
        self._pipe, theirs = context.Pipe()
        self._process = started(context, _serve, (tokenizer, theirs, self._pipe))
        theirs.close()
        self.pid: int = self._process.pid

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Ids of many texts.

        Raises:
            RuntimeError: if the process died.
            Exception: what the tokenizer raised.
        """
        with self._turn:
            try:
                self._pipe.send((list(texts), add_special_tokens))
                answer = self._pipe.recv()
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise RuntimeError(
                    "the process of the reference tokenizer died, most likely for want of "
                    "memory. The same command continues where it stopped."
                ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _serve(tokenizer: Tokenizer, pipe: Connection, other: Connection) -> None:
    """Encode what comes until every sender has closed its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    other.close()
    tokenizer.encode("")  # opens it
    while True:
        try:
            texts, add_special_tokens = pipe.recv()
        except EOFError:
            return
        answer: Any
        try:
            answer = tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        except Exception as error:  # noqa: BLE001 - raised in the caller
            error.add_note("in the reference tokenizer's process:\n" + traceback.format_exc())
            answer = error
        try:
            pipe.send(answer)
        except BrokenPipeError:
            return
