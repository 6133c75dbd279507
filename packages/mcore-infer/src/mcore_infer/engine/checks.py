"""Checks whether an engine supports a model, a draft model or a beam search."""

from mcore_infer.config import Drafts
from mcore_infer.writing.sequence import RunningSequence
from mcore_models.building.mtp_model import MTPLanguageModel
from mcore_models.config import TransformerConfig
from mcore_models.protocol import LanguageModel
from mcore_parallel.mesh import SINGLE, Axis

_BY_LENGTH = ("dynamic", "longrope")
"""Rotary scalings whose angles depend on the length of the text."""


def check_beams(sequence: RunningSequence, vocab_size: int) -> None:
    """Raise ValueError for options that beam search does not support."""
    if sequence.changes_scores or sequence.matcher is not None or not sequence.num_tokens:
        raise ValueError(
            "beam search does not support biases, forbidden tokens, structures and texts of no "
            "token: leave them out."
        )
    scores = sequence.request.scores
    if scores.prompt or scores.num_top:
        raise ValueError(
            "beam search returns scores of complete texts: request no log probabilities of the "
            "prompt or of the likeliest tokens."
        )
    if any(len(sequence) > 1 for sequence in sequence.stop):
        raise ValueError(
            "beam search ends texts at single tokens only: give stop sequences of one token."
        )
    if 2 * sequence.sampling.beam_width > vocab_size:
        raise ValueError(
            f"--beam-width {sequence.sampling.beam_width} exceeds half the vocabulary of "
            f"{vocab_size} tokens: use {vocab_size // 2} or less."
        )


def check_speculation(
    model: LanguageModel, drafts: Drafts, draft: LanguageModel | None, in_step: Axis = SINGLE
) -> None:
    """Raise ValueError if a model cannot verify proposals, or has no source of proposals."""
    if drafts == "mtp" and model.pp.size > 1:
        raise ValueError(
            "--speculative-drafts mtp reads hidden states that only the last stage has: use "
            "--pipeline-model-parallel-size 1, ngram, or a draft model."
        )
    if in_step.size > 1 and drafts != "ngram":
        raise ValueError(
            f"--speculative-drafts {drafts} runs extra forwards, which replicas with shared "
            "experts cannot run together: use ngram, or an --expert-model-parallel-size within "
            "--tensor-model-parallel-size."
        )
    if has_recurrent_layers(model.config):
        raise ValueError(
            "the state of a recurrent layer cannot be reset after a rejected proposal: set "
            "--num-speculative-tokens 0."
        )
    if depends_on_length(model.config):
        raise ValueError(
            f"the angles of --rope-type {model.config.rope_type} depend on the length of the "
            "text, which a rejected proposal changes: set --num-speculative-tokens 0."
        )
    if (drafts == "model") != (draft is not None):
        raise ValueError(
            f"--speculative-drafts {drafts} "
            + (
                "uses no draft model: leave out --draft-load."
                if draft
                else "needs --draft-load."
            )
        )
    if drafts == "mtp" and not (isinstance(model, MTPLanguageModel) and model.predicts_further):
        raise ValueError(
            "--speculative-drafts mtp: this model has no multi-token prediction layer "
            "(--mtp-num-layers). Use ngram, or a draft model."
        )
    if draft is not None:
        _check_draft(draft, model)


def _check_draft(draft: LanguageModel, model: LanguageModel) -> None:
    if has_recurrent_layers(draft.config) or depends_on_length(draft.config):
        raise ValueError(
            "a draft model with recurrent layers, or with rotary angles that depend on the "
            "length of the text, cannot be reset after a rejected proposal: use another draft "
            "model."
        )
    if draft.vocab_size != model.vocab_size:
        raise ValueError(
            f"the draft model has {draft.vocab_size} tokens and the model {model.vocab_size}: "
            "use a draft model with the same tokenizer."
        )
    limit, needed = draft.config.max_position_embeddings, model.config.max_position_embeddings
    if limit and not 0 < needed <= limit:
        raise ValueError(
            f"the draft model has {limit} positions and the model {needed or 'no limit'}: use "
            "a draft model with at least as many."
        )


def depends_on_length(config: TransformerConfig) -> bool:
    """Whether rotary angles depend on the length of a text; a step then has one text only."""
    return config.rope_type in _BY_LENGTH


def has_recurrent_layers(config: TransformerConfig) -> bool:
    """Whether a model has recurrent layers, whose states cannot be shared by prefixes."""
    return bool(set(config.hybrid_override_pattern) & set("MGCLK"))
