"""State of a run other than weights and optimizer: random streams, scales, recent losses.

Streams are each rank's own (``rng.<stream>.<rank>``), histories logical tensors
(``fp8.<linear>.history``), which any layout loads.
"""

from collections.abc import Mapping
from typing import Any

from mcore_data.datasets.mock import mock_t5_ids
from mcore_data.datasets.t5 import decoder_start
from mcore_parallel.sharding import Piece, Shard
from mcore_train.assembly import Run


def rng_shards(run: Run) -> dict[str, Shard]:
    """Describe copies of this rank's random streams, under names no other rank has."""
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
    """Describe the fp8 histories of linears; none without ``--fp8-recipe delayed``."""
    scales = run.precision.fp8_scales
    shards = {} if scales is None else scales.shards()
    return {f"fp8.{name}": shard for name, shard in shards.items()}


def fp8_kind(run: Run) -> list[Any]:
    """Return recipe and length of the fp8 histories: only equal ones are loaded."""
    fp8 = run.plan.config.fp8
    return (
        [] if run.precision.fp8_scales is None else [fp8.fp8_recipe, fp8.fp8_amax_history_len]
    )


def wanted_fp8_shards(run: Run, extra: Mapping[str, Any]) -> dict[str, Shard]:
    """Describe the histories that a run loads from a checkpoint; none of another kind."""
    return fp8_shards(run) if extra.get("fp8_kind") == fp8_kind(run) else {}


def take_fp8_histories(run: Run) -> None:
    """Compute fp8 scales from the histories that were loaded."""
    if run.precision.fp8_scales is not None:
        run.precision.fp8_scales.restored()


def side_numbers(run: Run) -> dict[str, Any]:
    """Return the plain numbers of this state, for a checkpoint's index."""
    scale = {} if run.precision.loss_scaler is None else run.precision.loss_scaler.state()
    found: dict[str, Any] = {"fp8_kind": fp8_kind(run), "loss_scale": scale}
    if run.recent is not None:
        found["recent_steps"] = {**run.recent.state(), "spikes": run.progress.spikes}
    return found


def hf_words(run: Run) -> dict[str, Any]:
    """Return fields of a config.json that no model config has: a T5's first decoder token.

    transformers shifts labels by it and writes from it, and has no default for it.
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
    """Set the loss scale and the window of recent steps to a checkpoint's, if it had them."""
    if run.recent is not None and (recent := extra.get("recent_steps")):
        run.recent.set_state(recent)
        run.progress.spikes = sorted({*run.progress.spikes, *recent["spikes"]})
    if run.precision.loss_scaler is not None and extra.get("loss_scale"):
        run.precision.loss_scaler.set_state(extra["loss_scale"])
