"""Text of a given number of words, sampled from a model."""

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.config import SamplingConfig
from mcore_infer.generation import generate
from mcore_models.protocol import LanguageModel


def write_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    num_words: int,
    context_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Sample a text of ``num_words`` words, longer than the model's context if need be.

    Written in stretches of half a context, each after the half before it. Ends of documents
    become line breaks.

    Args:
        model: whole, in eval mode.
        tokenizer: has an end-of-document token, which begins the text.
        num_words: length of the text, after which it is cut.
        context_tokens: tokens that the model was trained to see.
        temperature: scores are divided by it; below 1 the likely becomes likelier.
        seed: of the draws.
    """
    eod, half = tokenizer.eod, context_tokens // 2
    assert eod is not None
    sampling = SamplingConfig(num_tokens=half, temperature=temperature, ignore_eod=True)
    tokens, text = [eod], ""
    while len(text.split()) <= num_words:
        (more,) = generate(model, [tokens[-half:]], sampling, seed=seed + len(tokens))
        tokens += more.ids
        text = _decode(tokens, tokenizer)
    return " ".join(text.split()[:num_words])


def _decode(tokens: list[int], tokenizer: Tokenizer) -> str:
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == tokenizer.eod:
            parts.append([])
        else:
            parts[-1].append(token)
    return "\n".join(tokenizer.decode(part) for part in parts if part)
