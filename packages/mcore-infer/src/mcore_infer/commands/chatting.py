"""The command ``mcore-infer chat``: a conversation in the terminal."""

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event
from typing import TYPE_CHECKING

from mcore_base.command_line import file_text
from mcore_infer.commands.opening import ModelOptions, opened
from mcore_infer.config import InferenceConfig, SamplingConfig, check_seed

if TYPE_CHECKING:
    from mcore_infer.conversation import Conversation

_HELP = "/reset forgets the conversation, /exit ends; Ctrl-C ends an answer."


def chat(
    model: ModelOptions,
    sampling: SamplingConfig,
    engine: InferenceConfig,
    system: str = "",
    chat_template: str = "",
    seed: int = 1234,
) -> int:
    """Chat with a model: each line is a message, and its answer streams below it.

    Args:
        model: model, device and ranks.
        sampling: how tokens are chosen; --num-tokens limits each answer.
        engine: limits of the engine.
        system: System message at the start of the conversation.
        chat_template: File with a Jinja template; empty: the tokenizer's template, or ChatML.
        seed: Seed of the random numbers; answer i uses seed + i.
    """
    check_seed(seed)
    template = file_text("--chat-template", chat_template)
    with opened(model, draft=engine.draft_load) as (loaded, tokenizer, _):
        from mcore_infer.conversation import Conversation
        from mcore_infer.writing.chat_format import load_chat_format

        if loaded.world.size > 1:
            raise ValueError(
                "chat reads a terminal: start it in one process, without torchrun."
            )
        conversation = Conversation(
            loaded,
            tokenizer,
            load_chat_format(template, tokenizer),
            sampling,
            engine,
            system=system,
            seed=seed,
        )
        print(_HELP, file=sys.stderr)
        _converse(conversation)
    return 0


def _converse(conversation: "Conversation") -> None:
    while True:
        try:
            message = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if message == "/exit":
            return
        if message == "/reset":
            conversation.reset()
        elif message:
            _answer(conversation, message)


def _answer(conversation: "Conversation", message: str) -> None:
    with _interrupted() as is_interrupted, closing(conversation.answer(message)) as pieces:
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
                if is_interrupted.is_set():
                    break
        except ValueError as error:  # the conversation is too long, and unchanged
            print(f"{error} Or start again with /reset.", file=sys.stderr)
    print()


@contextmanager
def _interrupted() -> Iterator[Event]:
    """Within the context, Ctrl-C sets the event instead of interrupting a step."""
    event = Event()
    before = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
