"""Checks which ranks share random numbers: dropout masks and streams of a layout.

Tensor ranks that hold the same activations drop the same elements; every other pair of ranks
draws different numbers. Masks differ between layouts by design, so only this rule can be
compared.
"""

from hashlib import sha256
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_parallel.rng import RngStreams, StreamDropout
from mcore_train.assembly import Run
from mcore_train.batches.micro_batches import train_batches

NUM_DRAWS = 64
"""Numbers of each stream that are compared."""


def noise_faults(run: Run) -> list[str]:
    """Return the faults of random streams and dropout masks, compared over all ranks.

    Draws from every stream and dropout layer of the run. All-gathers over the world, with a
    forward pass if the model has dropout; all ranks call it together.

    Returns:
        Numbers that two ranks share but must not, or do not share but must; equal on all ranks.
    """
    ctx = run.ctx
    drawn = {name: _draw(run.streams, name) for name in RngStreams.NAMES}
    drawn |= _masks(run)
    is_cut = run.plan.config.parallelism.sequence_parallel
    rank_draws = {
        "drawn": drawn,
        "place": [ctx.cp.rank, ctx.dp.rank, ctx.pp.rank],
        "rank": ctx.global_rank,
    }
    ranks: list[dict[str, Any]] = gather_json(rank_draws, ctx.world)
    faults = []
    for one, other in combinations(ranks, 2):
        for name in one["drawn"].keys() & other["drawn"].keys():
            is_whole = name == "replicated" or (name not in RngStreams.NAMES and not is_cut)
            must_share = is_whole and one["place"] == other["place"]
            if (one["drawn"][name] == other["drawn"][name]) != must_share:
                verb = "must drop alike" if must_share else "drop alike"
                faults.append(f"{name}: ranks {one['rank']} and {other['rank']} {verb}")
    return sorted(faults)


def _draw(streams: RngStreams, name: str) -> str:
    with streams.fork(name):
        return _digest(torch.rand(NUM_DRAWS, device=streams.device) < 0.5)


def _masks(run: Run) -> dict[str, str]:
    """Return a digest of the first mask of every active dropout layer, by name."""
    masks: dict[str, str] = {}
    handles = []

    def watch(name: str, layer: nn.Module) -> None:
        def keep(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
            masks.setdefault(name, _digest(output == 0))

        handles.append(layer.register_forward_hook(keep))

    for number, chunk in enumerate(run.chunks):
        for name, layer in chunk.named_modules():
            if isinstance(layer, StreamDropout) and layer.prob:
                watch(f"dropout {number} {name}", layer)
    if not handles:
        return {}
    with torch.no_grad():
        run.pipeline.forward(next(train_batches(run)), lambda *_: None)
    for handle in handles:
        handle.remove()
    return masks


def _digest(bits: Tensor) -> str:
    return sha256(bits.flatten().cpu().numpy().tobytes()).hexdigest()
