"""Saves and loads random streams, fp8 scales, the loss scale and recent losses of a run.

Random streams are each rank's own (``rng.<stream>.<rank>``); fp8 histories are logical tensors
(``fp8.<linear>.history``), which any layout loads.
"""

from collections.abc import Mapping
from typing import Any

from mcore_data.datasets.mock import mock_t5_ids
from mcore_data.datasets.t5 import decoder_start
from mcore_parallel.sharding import Piece, Shard
from mcore_train.assembly import Run


def rng_shards(run: Run) -> dict[str, Shard]:
    """Return copies of this rank's random streams as shards, under names of this rank."""
    rank = run.ctx.global_rank
    shards = {}
    for stream, state in run.streams.state().items():
        shape = tuple(state.shape)
        piece = Piece((0,), shape, state.cpu())
        shards[f"rng.{stream}.{rank}"] = Shard(shape, state.dtype, (piece,))
    return shards


def take_streams(run: Run, rng: Mapping[str, Shard]) -> None:
    """Set the run's random streams to loaded ones."""
    states = {name.split(".")[1]: shard.pieces[0].data for name, shard in rng.items()}
    run.streams.set_state(states)


def fp8_shards(run: Run) -> dict[str, Shard]:
    """Return shards of the fp8 histories; empty without ``--fp8-recipe delayed``."""
    scales = run.precision.fp8_scales
    shards = {} if scales is None else scales.shards()
    return {f"fp8.{name}": shard for name, shard in shards.items()}


def fp8_kind(run: Run) -> list[Any]:
    """Return recipe and length of fp8 histories; only histories of equal kind are loaded."""
    fp8 = run.plan.config.fp8
    return (
        [] if run.precision.fp8_scales is None else [fp8.fp8_recipe, fp8.fp8_amax_history_len]
    )


def wanted_fp8_shards(run: Run, extra: Mapping[str, Any]) -> dict[str, Shard]:
    """Return shards of the histories to load from a checkpoint; empty if of another kind."""
    return fp8_shards(run) if extra.get("fp8_kind") == fp8_kind(run) else {}


def take_fp8_histories(run: Run) -> None:
    """Compute fp8 scales from the loaded histories."""
    if run.precision.fp8_scales is not None:
        run.precision.fp8_scales.restored()


def side_numbers(run: Run) -> dict[str, Any]:
    """Return loss scale, recent steps and kind of histories for a checkpoint's index."""
    scale = {} if run.precision.loss_scaler is None else run.precision.loss_scaler.state()
    numbers: dict[str, Any] = {"fp8_kind": fp8_kind(run), "loss_scale": scale}
    if run.recent is not None:
        numbers["recent_steps"] = {**run.recent.state(), "spikes": run.progress.spikes}
    return numbers


def hf_words(run: Run) -> dict[str, Any]:
    """Return fields of config.json that no model config has: a T5's first decoder token.

    transformers shifts labels and generates by this token, and has no default for it.
    """
    data, begin = run.plan.config.data, None
    if run.plan.family.dataset != "t5":
        return {}
    if run.tokenizer is not None:
        begin = decoder_start(run.tokenizer)
    elif data.mock_data:
        begin = mock_t5_ids(data.mock_vocab_size).bos
    return {} if begin is None else {"decoder_start_token_id": begin}


def take_side_numbers(run: Run, extra: Mapping[str, Any]) -> None:
    """Set the loss scale and the window of recent steps to a checkpoint's, if it has them."""
    if run.recent is not None and (recent := extra.get("recent_steps")):
        run.recent.set_state(recent)
        run.progress.spikes = sorted({*run.progress.spikes, *recent["spikes"]})
    if run.precision.loss_scaler is not None and extra.get("loss_scale"):
        run.precision.loss_scaler.set_state(extra["loss_scale"])
