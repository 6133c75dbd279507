"""Sends weights from any training layout to engines of mcore-infer on ranks of the same world.

The transfers are planned once. A push writes to a second copy of the engine's weights, compares
digests of all bytes, and only then overwrites the engine's weights, so an engine never computes
with weights of two versions. If the transfer fails, the engine keeps its old version.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_ckpt.save_load.tensor_exchange import ROUND_BYTES, ExchangeDigests
from mcore_ckpt.save_load.weight_transfer import WeightTransfer
from mcore_infer.engine.engine import Engine
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Shard, named_shards

ReadWeights = Callable[[], Mapping[str, Shard]]
"""Returns a run's weights by logical name with the prefix ``model.``, as the run's
``model_shards`` does. Called at each push because an optimizer may still gather weights of the
last step."""


class EngineSync:
    """Pushes versions of a run's weights to the engines of a world.

    Attributes:
        version: version of the last complete push; 0 before the first push.
    """

    def __init__(
        self,
        world: Axis,
        *,
        weights: ReadWeights | None = None,
        engine: Engine | None = None,
        round_bytes: int = ROUND_BYTES,
    ) -> None:
        """Plan the transfers; collective over ``world``.

        Args:
            world: ranks of training and of engines; a rank may be both.
            weights: weights of this rank; None if the rank does not train.
            engine: engine of this rank; None if the rank does not serve. A push needs memory
                for a second copy of its weights.
            round_bytes: largest number of bytes that a rank sends at once.

        Raises:
            ValueError: on all ranks, if names or shapes of the two models differ, or the
                engine's weights are quantized.
        """
        self.world, self.version = world, 0
        self._weights, self._engine, self._round_bytes = weights, engine, round_bytes
        self._target: dict[str, Shard] = {}
        if engine is not None:
            shards = named_shards(engine.model)
            self._target = {f"model.{name}": shard for name, shard in shards.items()}
        self._transfer = WeightTransfer.plan(self._read(), self._target, world=world)

    def push(self, version: int | None = None) -> int:
        """Replace the weights of all engines by those of the run; return the version.

        Collective; call it between steps of training and of the engines. The engine continues
        its requests as ``Engine.weights_changed`` describes.

        Args:
            version: version of these weights, above the last; None: the last version plus 1.

        Raises:
            ValueError: on all ranks, if the version is not above the last or differs between
                ranks.
            RuntimeError: if a rank is lost or bytes arrive damaged. Every engine keeps its
                weights and its version.
        """
        number = self.version + 1 if version is None else version
        self._check_version(number)
        staged = {name: _like(shard) for name, shard in self._target.items()}
        digests = ExchangeDigests()
        self._transfer.run(self._read(), staged, round_bytes=self._round_bytes, digests=digests)
        damaged = gather_json(digests.damaged(self.world), self.world)
        faults = [(rank, senders) for rank, senders in enumerate(damaged) if senders]
        if faults:
            texts = "; ".join(f"on rank {rank} from ranks {ranks}" for rank, ranks in faults)
            raise RuntimeError(
                f"version {number} of the weights arrived damaged ({texts}): every engine "
                f"keeps version {self.version}. Push again."
            )
        if self._engine is not None:
            with torch.no_grad():
                for name, shard in self._target.items():
                    for piece, new in zip(shard.pieces, staged[name].pieces, strict=True):
                        piece.data.copy_(new.data)
            self._engine.weights_changed(number)
        self.version = number
        return number

    def _read(self) -> Mapping[str, Shard]:
        return {} if self._weights is None else self._weights()

    def _check_version(self, number: int) -> None:
        numbers = gather_json(number, self.world)
        if len(set(numbers)) > 1 or number <= self.version:
            raise ValueError(
                f"push of versions {numbers} after version {self.version}: give all ranks the "
                "same number, above the last version."
            )


def _like(shard: Shard) -> Shard:
    """Return a shard with the same boxes and new, uninitialized memory."""
    pieces = [replace(p, data=torch.empty_like(p.data.detach())) for p in shard.pieces]
    return replace(shard, pieces=tuple(pieces))
