"""The command ``mcore-infer generate``: text from prompts."""

from typing import TYPE_CHECKING

from mcore_infer.commands.opening import ModelOptions, opened
from mcore_infer.config import SamplingConfig

if TYPE_CHECKING:
    from mcore_data.tokenizers.protocol import Tokenizer
    from mcore_models.protocol import LanguageModel


def generate(
    model: ModelOptions,
    sampling: SamplingConfig,
    prompt: tuple[str, ...] = ("",),
    seed: int = 1234,
) -> int:
    """Write on after a prompt; the text streams to standard output.

    Args:
        model: which one.
        sampling: how tokens are drawn.
        prompt: Beginning of the text; several prompts are written on together. An empty one
            begins a document.
        seed: Of the draws; prompt i draws from seed + i.
    """
    with opened(model) as (loaded, tokenizer, is_first):
        if len(prompt) == 1:
            _write_one(prompt[0], sampling, seed, loaded.model, tokenizer, is_first)
            return 0
        from mcore_infer.generation import generate_text

        texts = generate_text(loaded.model, tokenizer, prompt, sampling, seed)
        if is_first:
            for beginning, text in zip(prompt, texts, strict=True):
                print(f"{beginning}{text}\n")
    return 0


def _write_one(
    prompt: str,
    sampling: SamplingConfig,
    seed: int,
    model: "LanguageModel",
    tokenizer: "Tokenizer",
    is_first: bool,
) -> None:
    """Continue one prompt, printing text as soon as it ends in whole characters."""
    from mcore_infer.generation import prompt_ids, stop_ids, stream
    from mcore_infer.streaming import TextStream

    text = TextStream(tokenizer)
    tokens = stream(
        model,
        [prompt_ids(tokenizer, prompt)],
        sampling,
        seed=seed,
        eod=None if sampling.ignore_eod else tokenizer.eod,
        stop=stop_ids(tokenizer, sampling),
    )
    pieces = (text.add(token.id) for token in tokens)
    if not is_first:
        for _ in pieces:
            pass
        return
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(text.rest())
