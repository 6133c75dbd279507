"""What a run remembers beside weights and optimizer: random streams, scales, histories.

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
    """Draw on from where loaded streams stand."""
    states = {name.split(".")[1]: shard.pieces[0].data for name, shard in rng.items()}
    run.streams.set_state(states)


def fp8_shards(run: Run) -> dict[str, Shard]:
    """Describe the histories of a run's linears; none without ``--fp8-recipe delayed``."""
    found = {} if run.precision.fp8_scales is None else run.precision.fp8_scales.shards()
    return {f"fp8.{name}": shard for name, shard in found.items()}


def fp8_kind(run: Run) -> list[Any]:
    """Say of what kind the histories are: a run has no use for others than its own."""
    fp8 = run.plan.config.fp8
    return (
        [] if run.precision.fp8_scales is None else [fp8.fp8_recipe, fp8.fp8_amax_history_len]
    )


def wanted_fp8_shards(run: Run, extra: Mapping[str, Any]) -> dict[str, Shard]:
    """Describe the histories that a run takes from a checkpoint; none of another kind."""
    return fp8_shards(run) if extra.get("fp8_kind") == fp8_kind(run) else {}


def take_fp8_histories(run: Run) -> None:
    """Scale by the histories that were loaded."""
    if run.precision.fp8_scales is not None:
        run.precision.fp8_scales.restored()


def side_numbers(run: Run) -> dict[str, Any]:
    """Return what a checkpoint's index keeps of these: plain data."""
    scale = {} if run.precision.loss_scaler is None else run.precision.loss_scaler.state()
    return {"fp8_kind": fp8_kind(run), "loss_scale": scale}


def hf_words(run: Run) -> dict[str, Any]:
    """Return fields of a config.json that no model has: where a T5's decoder begins.

    transformers shifts labels and writes from there, and has no default for it.
    """
    data, begin = run.plan.config.data, None
    if run.plan.family.dataset != "t5":
        return {}
    if run.tokenizer is not None:
        begin = decoder_start(run.tokenizer)
    elif data.mock_data:
        begin = mock_t5_ids(data.mock_vocab_size).bos
    return {} if begin is None else {"decoder_start_token_id": begin}


def take_loss_scale(run: Run, extra: Mapping[str, Any]) -> None:
    """Scale on from where a checkpoint's loss scale stands, if it had one."""
    if run.precision.loss_scaler is not None and extra.get("loss_scale"):
        run.precision.loss_scaler.set_state(extra["loss_scale"])
