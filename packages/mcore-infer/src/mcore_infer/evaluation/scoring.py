"""Scores of texts under a model: loss, perplexity, bits per byte.

A text is evaluated in windows of the model's context. Each window but the first overlaps the
previous window, and only its new tokens count. Every token thus counts once, with at least the
overlap as context. Results are totals over tokens, never means of means.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.engine.stages import from_last_stage, run_stages
from mcore_models.protocol import LanguageModel
from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import SINGLE, Axis


@dataclass(frozen=True, slots=True)
class TextScore:
    """Total loss over texts, and measures derived from it."""

    loss_sum: float
    """Nats."""
    num_tokens: int
    """Predicted tokens."""
    num_bytes: int = 0
    """Bytes of the texts in UTF-8; 0: unknown."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.loss_sum / max(1, self.num_tokens)

    @property
    def perplexity(self) -> float:
        """Perplexity per token; the loss is capped at 20, as in Megatron."""
        return math.exp(min(20.0, self.loss))

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte of text, comparable between tokenizers; nan without bytes."""
        return self.loss_sum / math.log(2) / self.num_bytes if self.num_bytes else math.nan


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive targets of one document, scored in one forward pass."""

    document: int
    begin: int
    """First target in the document."""
    end: int
    """One past the last target."""
    first_counted: int
    """First target that counts; earlier targets are context."""


def plan_windows(lengths: Sequence[int], context_tokens: int, stride: int) -> list[Window]:
    """Cut documents into windows so that every target counts once.

    Args:
        lengths: targets of each document.
        context_tokens: longest window.
        stride: targets that each window but the first adds; ``context_tokens``: no overlap.

    Raises:
        ValueError: if the stride is not from 1 to ``context_tokens``.
    """
    if not 1 <= stride <= context_tokens:
        raise ValueError(
            f"--overlapping-eval {stride} must be from 1 to the context of {context_tokens} "
            "tokens."
        )
    windows = []
    for document, length in enumerate(lengths):
        num_counted = 0
        while num_counted < length:
            # The first window counts all its targets; later windows end ``stride`` further.
            end = min(length, max(num_counted + stride, context_tokens))
            begin = max(0, end - context_tokens)
            windows.append(Window(document, begin, end, num_counted))
            num_counted = end
    return windows


def score_documents(
    model: LanguageModel,
    documents: Sequence[Sequence[int]],
    *,
    begin_token: int,
    context_tokens: int,
    stride: int = 0,
    batch: int = 8,
    axis: Axis = SINGLE,
) -> TextScore:
    """Sum the loss of all tokens of documents.

    Communicates over the model's ``tp`` and ``pp``, and sums over ``axis`` at the end.

    Args:
        model: in eval mode.
        documents: token ids; an end-of-document token in them is a target too.
        begin_token: token before each document.
        context_tokens: longest window.
        stride: see ``plan_windows``; 0: half the context.
        batch: windows in one forward pass.
        axis: data ranks that share the work; each rank passes all documents.

    Raises:
        ValueError: if the model is in training mode, or as ``plan_windows``.
    """
    lengths = [len(document) for document in documents]
    windows = plan_windows(lengths, context_tokens, stride or max(1, context_tokens // 2))
    loss_sum = score_windows(
        model, documents, windows, begin_token=begin_token, batch=batch, axis=axis
    )
    return TextScore(loss_sum, sum(lengths))


def score_windows(
    model: LanguageModel,
    documents: Sequence[Sequence[int]],
    windows: Sequence[Window],
    *,
    begin_token: int,
    batch: int = 8,
    axis: Axis = SINGLE,
) -> float:
    """Sum the loss of the targets that windows count, over all ranks of ``axis``.

    Arguments and communication are those of ``score_documents``.

    Raises:
        ValueError: if the model is in training mode.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for losses in counted_losses(
        model, documents, windows, begin_token=begin_token, batch=batch, axis=axis
    ):
        total += losses.sum()
    return all_reduce(from_last_stage(total, model.pp), axis).item()


def counted_losses(
    model: LanguageModel,
    documents: Sequence[Sequence[int]],
    windows: Sequence[Window],
    *,
    begin_token: int,
    batch: int = 8,
    axis: Axis = SINGLE,
) -> Iterator[Tensor]:
    """Yield the losses ``[batch, targets]`` of this rank's windows in float64.

    The order of windows does not depend on the model. A target that does not count has loss 0.
    Losses are not summed over ranks.
    """
    check_eval_mode(model)
    # Longest first, so that batches have little padding.
    windows = sorted(windows, key=lambda w: w.end - w.begin, reverse=True)
    # All ranks run the same number of forwards with equal shapes, because experts may
    # communicate over the data ranks.
    for first in range(0, len(windows), batch * axis.size):
        begin = first + batch * axis.rank
        group = windows[begin : begin + batch]
        shape = (batch, windows[first].end - windows[first].begin)
        yield _losses(model, documents, group, shape, begin_token)


def check_eval_mode(model: LanguageModel) -> None:
    """Raise ValueError for a model in training mode."""
    if model.training:
        raise ValueError("evaluation needs a model in eval mode: call model.eval() first.")


def score_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    context_tokens: int,
    stride: int = 0,
    batch: int = 8,
    axis: Axis = SINGLE,
) -> TextScore:
    """Tokenize texts and sum their loss; each text is a document without an end token.

    Raises:
        ValueError: as ``score_documents``, or if no token of the tokenizer begins a document.
    """
    begin_token = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    if begin_token is None:
        raise ValueError("this tokenizer has no token that begins a document (BOS or EOD).")
    documents = tokenizer.encode_batch(texts, add_special_tokens=False)
    score = score_documents(
        model,
        documents,
        begin_token=begin_token,
        context_tokens=context_tokens,
        stride=stride,
        batch=batch,
        axis=axis,
    )
    num_bytes = sum(len(text.encode()) for text in texts)
    return TextScore(score.loss_sum, score.num_tokens, num_bytes)


def _losses(
    model: LanguageModel,
    documents: Sequence[Sequence[int]],
    windows: Sequence[Window],
    shape: tuple[int, int],
    begin_token: int,
) -> Tensor:
    """Return the losses of one batch; short windows are padded on the right."""
    tokens = torch.full(shape, begin_token)
    labels = torch.full(shape, begin_token)
    counted = torch.zeros(shape, dtype=torch.bool)
    for row, window in enumerate(windows):
        targets = torch.as_tensor(documents[window.document][window.begin : window.end])
        length = len(targets)
        # The input of each target is the token before it: at the start of a document, the
        # begin token; at the start of a later window, the last token of the earlier targets.
        labels[row, :length] = targets
        tokens[row, 1:length] = targets[:-1]
        if window.begin:
            tokens[row, 0] = documents[window.document][window.begin - 1]
        counted[row, window.first_counted - window.begin : length] = True
    device = next(model.parameters()).device
    with torch.no_grad():
        hidden = run_stages(model, tokens.to(device))
        if not model.stage.has_loss:
            return torch.zeros(shape, dtype=torch.float64, device=device)
        losses = model.token_losses(hidden, labels.to(device))
        return losses.double().where(counted.to(device), 0)
