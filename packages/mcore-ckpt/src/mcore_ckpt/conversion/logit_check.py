"""Checks a conversion by logits: mcore-models and transformers must compute the same ones.

``round_trip`` shows that a conversion and its inverse keep every bit, which a wrong rule with
an equally wrong inverse also does. Here mcore-models computes logits from one side's weights
and transformers from the other's. Needs the extra ``check``. Models are imported by name when a
check runs: no other module of this package needs a model class.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint
from mcore_ckpt.mapping.row_streams import Rows
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_shards

ROUNDING = 1e-4
"""Largest difference of float32 logits, relative to the largest of them, for equal weights."""

CAST_ROUNDING = 5e-2
"""The same bound if the weights of one side were cast to 16 bits."""

_LENGTH = 16


def require_model(description: Mapping[str, Any]) -> None:
    """Raise ValueError if transformers is missing or mcore-models cannot run the model."""
    try:
        import_module("transformers")
    except ImportError:
        raise ValueError(
            "--check needs transformers: pip install 'mcore-ckpt[check]', or leave --check out."
        ) from None
    family, known = description["family"], import_module("mcore_models.families").FAMILIES
    if family not in known:
        raise ValueError(
            f"--check cannot run this model: mcore-models has no model of the family "
            f"{family!r}, only of {', '.join(known)}. Leave --check out: names, shapes and "
            "bits are still compared."
        )
    import_module("mcore_models.description").ModelDescription.from_dict(description)


def compare_logits(
    source: OpenCheckpoint, weights: Rows, num_tokens: int, folder: Path, bound: float
) -> float:
    """Compute logits of random tokens by mcore-models and by transformers; compare them.

    Both models run in float32 on the CPU, one at a time. For a model without a head that
    predicts tokens, hidden states are compared.

    Args:
        source: the checkpoint that was converted; describes the model.
        weights: weights for mcore-models, by logical name.
        num_tokens: random tokens are below this number.
        folder: Hugging Face folder for transformers.
        bound: largest difference, relative to the largest logit.

    Returns:
        The largest difference, relative to the largest logit.

    Raises:
        CheckpointError: if the difference is above ``bound`` or transformers cannot run the
            folder.
    """
    heads = source.description["config"].get("bert_heads", ("lm",))
    has_logits = "head" not in source.hf and "lm" in heads
    generator = torch.Generator().manual_seed(0)
    try:
        vocab = min(num_tokens, _vocab_size(folder))
        tokens = torch.randint(vocab, (1, _LENGTH), generator=generator)
        their_logits = _their_logits(folder, tokens, source.description, has_logits)
    except Exception as error:  # any error of the library is reported the same way
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"--check: transformers cannot run the model in {folder}: {type(error).__name__}: "
            f"{reason}. The output was removed. Without --check, names, shapes and bits are "
            "still compared."
        ) from error
    our_logits = _our_logits(source.description, weights, tokens, has_logits)
    if has_logits:
        our_logits, their_logits = our_logits[..., :vocab], their_logits[..., :vocab]
    worst = ((our_logits - their_logits).abs().max() / their_logits.abs().max()).item()
    if not worst <= bound:
        raise CheckpointError(
            f"mcore against transformers: logits differ by {worst:.3g} of the largest, but "
            f"rounding explains at most {bound:.3g}. The output was removed."
        )
    return worst


def _vocab_size(folder: Path) -> int:
    return import_module("transformers").AutoConfig.from_pretrained(folder).vocab_size


def _their_logits(
    folder: Path, tokens: Tensor, description: Mapping[str, Any], has_logits: bool
) -> Float[Tensor, "B S V"]:
    """Return logits of transformers, or hidden states of a model without a head for tokens."""
    classes = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}
    name = classes.get(description["family"], "AutoModelForCausalLM")
    transformers = import_module("transformers")
    auto = getattr(transformers, name if has_logits else "AutoModel")
    config = transformers.AutoConfig.from_pretrained(folder)
    # transformers' grouped GEMMs of experts require widths that are multiples of 16 bytes.
    config._experts_implementation = "eager"
    model = auto.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    _recompute_decays(model)
    decoder_input = {"decoder_input_ids": tokens} if description["family"] == "t5" else {}
    with torch.no_grad():
        output = model(tokens, **decoder_input)
        return (output.logits if has_logits else output[0]).float()


def _recompute_decays(model: torch.nn.Module) -> None:
    """Compute the decays of lightning attention, which a 16-bit folder holds rounded."""
    names = ("query_decay", "key_decay", "diagonal_decay")
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "slope_rate")]
    for layer in layers:
        slopes = layer.get_slope_rate()
        layer.slope_rate.copy_(slopes)
        for name, decay in zip(names, layer.decay_factors(slopes), strict=True):
            getattr(layer, name).copy_(decay)


def _our_logits(
    description: Mapping[str, Any], weights: Rows, tokens: Tensor, has_logits: bool
) -> Float[Tensor, "B S V"]:
    model_description = import_module("mcore_models.description").ModelDescription.from_dict(
        description
    )
    family = import_module("mcore_models.families").FAMILIES[model_description.family]
    model = family.build(
        model_description.config,
        ParallelContext.single(),
        vocab_size=model_description.vocab_size,
        moe=model_description.moe,
    ).eval()
    with torch.no_grad():
        for name, shard in named_shards(model).items():
            rows = shard.shape[0] if shard.shape else 1
            (piece,) = shard.pieces
            piece.data.copy_(weights.rows(name, 0, rows))
        if model_description.family == "t5":
            hidden = model((tokens, tokens))["decoder"]
        else:
            hidden = model(tokens) if model_description.family == "bert" else model(tokens)[0]
        if has_logits:
            hidden = model.logits(hidden)
        return hidden.transpose(0, 1)  # [S, B, V] -> [B, S, V]
