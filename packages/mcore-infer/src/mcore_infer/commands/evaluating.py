"""The command ``mcore-infer eval``: perplexity of texts, and zero-shot tasks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mcore_base.command_line import file_text
from mcore_base.options import Rule, rules
from mcore_infer.commands.opening import ModelOptions, opened

if TYPE_CHECKING:
    from mcore_data.tokenizers.protocol import Tokenizer

_OVERLAP = 32
"""Default of --overlapping-eval for WIKITEXT103."""


_ONE_FILE = Rule(
    ("task", "valid_data"),
    lambda v: v.task != "TEXT" and len(v.valid_data) != 1,
    "--task {task} takes one --valid-data, not {valid_data}.",
)
_NO_WINDOWS = Rule(
    ("task", "overlapping_eval"),
    lambda v: v.overlapping_eval and v.task == "LAMBADA",
    "--overlapping-eval has no effect on --task LAMBADA: leave it out.",
)
_LAMBADA_ALONE = Rule(
    ("task", "strict_lambada"),
    lambda v: v.strict_lambada and v.task != "LAMBADA",
    "--strict-lambada has no effect on --task {task}: leave it out.",
)


def evaluate(
    model: ModelOptions,
    valid_data: Annotated[tuple[Path, ...], _ONE_FILE],
    task: Literal["TEXT", "WIKITEXT103", "LAMBADA"] = "TEXT",
    seq_length: Annotated[int, rules(minimum=0)] = 0,
    overlapping_eval: Annotated[int, rules(minimum=0), _NO_WINDOWS] = 0,
    strict_lambada: Annotated[bool, _LAMBADA_ALONE] = False,
    micro_batch_size: Annotated[int, rules(minimum=1)] = 8,
) -> int:
    """Print how well a model predicts text files, or its result on a zero-shot task.

    Args:
        model: model, device and ranks.
        valid_data: Files in UTF-8: texts, each a document (TEXT); the tokens of WikiText-103
            (WIKITEXT103); JSON lines with the field text (LAMBADA).
        task: Measure. TEXT: loss, perplexity, bits per byte; WIKITEXT103: perplexity
            per token and per word of the original text; LAMBADA: how many last words the
            model predicts.
        seq_length: Tokens of context; 0: the model's positions, or 1024.
        overlapping_eval: New tokens of each window; 0: half the context (TEXT), 32
            (WIKITEXT103).
        strict_lambada: Count a last word only if all its tokens are predicted.
        micro_batch_size: Windows in one forward pass.
    """
    texts = [file_text("--valid-data", file) for file in valid_data]
    if not any(text.strip() for text in texts):
        raise ValueError(f"--valid-data {' '.join(map(str, valid_data))} has no text.")
    with opened(model) as (loaded, tokenizer, is_first):
        limit = loaded.description.config.max_position_embeddings
        options = {
            "context_tokens": seq_length or limit or 1024,
            "batch": micro_batch_size,
            "axis": loaded.data,
        }
        if task == "TEXT":
            result = _on_text(loaded.model, tokenizer, texts, overlapping_eval, options)
        elif task == "WIKITEXT103":
            overlap = overlapping_eval or min(_OVERLAP, options["context_tokens"])
            result = _on_wikitext(
                loaded.model, tokenizer, texts[0], str(valid_data[0]), overlap, options
            )
        else:
            result = _on_lambada(loaded.model, tokenizer, texts[0], strict_lambada, options)
        if is_first:
            print(result)
    return 0


def _on_text(
    model: Any, tokenizer: "Tokenizer", texts: list[str], stride: int, options: dict[str, Any]
) -> str:
    from mcore_infer.evaluation.scoring import score_texts

    score = score_texts(model, tokenizer, texts, stride=stride, **options)
    return (
        f"loss {score.loss:.4f} per token | perplexity {score.perplexity:.2f} | "
        f"bits per byte {score.bits_per_byte:.4f} | {score.num_tokens} tokens | "
        f"{score.num_bytes} bytes"
    )


def _on_wikitext(
    model: Any,
    tokenizer: "Tokenizer",
    text: str,
    path: str,
    overlap: int,
    options: dict[str, Any],
) -> str:
    from mcore_infer.evaluation.wikitext import detokenizer_name, score_wikitext

    detokenizer = detokenizer_name(path)
    score = score_wikitext(
        model, tokenizer, text, detokenizer=detokenizer, overlap=overlap, **options
    )
    return (
        f"WIKITEXT103 | avg loss {score.loss:.4f} | ppl {score.perplexity:.4f} | adjusted ppl "
        f"{score.adjusted_perplexity:.4f} | token ratio {score.token_ratio:.6f} | "
        f"{score.num_tokenized} tokens | {score.num_original} words | "
        f"detokenizer {detokenizer or 'none'}"
    )


def _on_lambada(
    model: Any, tokenizer: "Tokenizer", text: str, strict: bool, options: dict[str, Any]
) -> str:
    from mcore_infer.evaluation.lambada import read_texts, score_lambada

    score = score_lambada(
        model, tokenizer, read_texts(text.split("\n")), strict=strict, **options
    )
    return (
        f"LAMBADA{' strict' if strict else ''} | accuracy {score.accuracy:.4f} | "
        f"{score.num_correct} correct | {score.num_examples} examples"
    )
