"""QK-clip: bounds attention scores by scaling the weights of queries and keys.

During a step's micro-batches each attention layer records the largest score of each head. If
the score of a head exceeds the threshold t, its queries are scaled by (t/score)^a and its keys
by (t/score)^(1-a), so that all scores of the head are multiplied by t/score. In latent
attention all heads share the rotated key, so the rotated part of the queries gets the complete
factor. Kimi team 2025, Kimi K2, arXiv:2507.20534, section 2.1 (MuonClip).

The paper has no key/value heads that several query heads share. Here such a group uses its
largest score, and all its queries have the same factor, so that no score grows.
"""

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.layers.attention import Attention
from mcore_models.layers.mla import LatentAttention
from mcore_models.logical_tensors import head_dim
from mcore_models.qk_clip.config import QKClipConfig
from mcore_models.qk_clip.score_tracking import ScoreTracker
from mcore_parallel.collectives import all_reduce
from mcore_parallel.mesh import Axis


def track_scores(model: nn.Module) -> None:
    """Make every attention layer of a model record its largest scores in training."""
    for layer in attention_layers([model]).values():
        layer.tracker = ScoreTracker(layer.config.num_attention_heads // layer.tp.size)


def row_factors(
    models: Iterable[nn.Module], data: Axis, config: QKClipConfig
) -> Mapping[str, Float[Tensor, " F"]]:
    """Return the factors of this rank's rows of queries and keys; reset the scores.

    All-reduces the largest scores over ``data``, and over tensor ranks that hold one key/value
    head.

    Args:
        models: stages of this rank, prepared by ``track_scores``.
        data: ranks with different tokens: data and context ranks.
        config: threshold, and the share of a factor for queries.

    Returns:
        By the name of a weight (or bias) one factor for each of this rank's rows; 1 for rows
        that are not scaled.
    """
    layers = attention_layers(models)
    if not layers:
        return {}
    trackers = [layer.tracker for layer in layers.values()]
    local = [tracker.take() for tracker in trackers if tracker is not None]
    assert len(local) == len(layers)
    largest = all_reduce(torch.cat(local), data, "max").split([n.numel() for n in local])
    all_factors: dict[str, Tensor] = {}
    for (name, layer), scores in zip(layers.items(), largest, strict=True):
        if isinstance(layer, Attention):
            factors = _grouped(layer, scores, config)
        else:
            factors = _latent(layer, scores, config)
        all_factors |= {f"{name}.{parameter}": rows for parameter, rows in factors.items()}
    return all_factors


def attention_layers(models: Iterable[nn.Module]) -> dict[str, Attention | LatentAttention]:
    """Return the layers of some models that have attention logits, by name."""
    kinds = (Attention, LatentAttention)
    return {
        n: layer for m in models for n, layer in m.named_modules() if isinstance(layer, kinds)
    }


def _factor(scores: Tensor, threshold: float) -> Tensor:
    """Return threshold / score for scores above the threshold, else 1."""
    return threshold / scores.clamp(min=threshold)


def _grouped(layer: Attention, scores: Tensor, config: QKClipConfig) -> dict[str, Tensor]:
    H, alpha = head_dim(layer.config), config.qk_clip_alpha
    outputs = {output.name: output for output in layer.qkv.outputs}
    sizes = dict(zip(outputs, layer.qkv.output_sizes, strict=True))
    groups = scores.view(sizes["k"] // H, -1)  # [N] -> [G, N/G]
    shared = all_reduce(groups.amax(1), outputs["k"].replicas, "max")
    eta = _factor(shared, config.qk_clip_threshold)
    rows = {name: scores.new_ones(size) for name, size in sizes.items()}
    rows["q"] = (eta**alpha).repeat_interleave(groups.shape[1] * H)
    rows["k"] = (eta ** (1 - alpha)).repeat_interleave(H)
    factors = torch.cat(list(rows.values()))
    names = ("qkv.weight",) if layer.qkv.bias is None else ("qkv.weight", "qkv.bias")
    return dict.fromkeys(names, factors)


def _latent(layer: LatentAttention, scores: Tensor, config: QKClipConfig) -> dict[str, Tensor]:
    alpha = config.qk_clip_alpha
    eta = _factor(scores, config.qk_clip_threshold)[:, None]
    plain, rotated = layer.key_sizes
    queries = [(eta**alpha).expand(-1, plain), eta.expand(-1, rotated)]
    values = eta.new_ones(1, layer.config.v_head_dim).expand(eta.shape[0], -1)
    keys = [(eta ** (1 - alpha)).expand(-1, plain), values]
    return {
        "q_up.weight" if layer.config.q_lora_rank else "q.weight": torch.cat(
            queries, 1
        ).flatten(),
        "kv_up.weight": torch.cat(keys, 1).flatten(),
    }
