"""The command ``mcore-infer evaluate``: how well a model predicts text files."""

from pathlib import Path

from mcore_infer.commands.opening import ModelOptions, opened


def evaluate(
    model: ModelOptions,
    input: tuple[Path, ...],
    seq_length: int = 0,
    overlapping_eval: int = 0,
    micro_batch_size: int = 8,
) -> int:
    """Print how well a model predicts text files, one document each.

    Args:
        model: which one.
        input: Text files in UTF-8.
        seq_length: Tokens of context; 0: the model's positions, or 1024.
        overlapping_eval: New tokens of each window; 0: half the context.
        micro_batch_size: Windows in one forward pass.
    """
    texts = [_read_text(file) for file in input]
    with opened(model) as (loaded, tokenizer, is_first):
        from mcore_infer.evaluation import score_texts

        limit = loaded.description.config.max_position_embeddings
        score = score_texts(
            loaded.model,
            tokenizer,
            texts,
            context_tokens=seq_length or limit or 1024,
            stride=overlapping_eval,
            batch=micro_batch_size,
        )
        if is_first:
            print(
                f"loss {score.loss:.4f} per token | perplexity {score.perplexity:.2f} | "
                f"bits per byte {score.bits_per_byte:.4f} | {score.num_tokens} tokens | "
                f"{score.num_bytes} bytes"
            )
    return 0


def _read_text(file: Path) -> str:
    if file.is_dir():
        raise ValueError(f"--input {file} is a folder: give text files.")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--input {file} is no text in UTF-8 ({error.reason}).") from None
