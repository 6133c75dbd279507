"""Keeps the plan of a save, which assigns boxes to ranks, while ranks hold the same shards."""

import hashlib
import json
from collections.abc import Mapping
from weakref import ReferenceType, ref

from mcore_ckpt.save_load.claims import build_claim
from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_ckpt.save_load.replica_checks import compare_replicas
from mcore_ckpt.storage.shard_plans import Claim, PlannedTensor, Write, plan_writes
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Shard


class PlanCache:
    """Plans saves, and reuses the last plan while no rank's shards change.

    Ranks exchange a hash of their claims, and plan again only if a hash has changed. Claims of
    unchanged shard objects of unchanged shape are reused, since a model with many experts has
    ten thousand tensors. Replicas are compared once for each plan, at its first save, which
    reads all of them.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[ReferenceType[Shard], Claim]] = {}
        self._claims: Mapping[str, Claim] = {}
        self._key = ""
        self._keys: list[str] = []
        self._plan: tuple[list[dict[str, Claim]], list[list[Write]]] = ([], [])
        self._entries: list[PlannedTensor] = []
        self._is_compared = False

    def claims(self, shards: Mapping[str, Shard]) -> dict[str, Claim]:
        """Return this rank's claims as ``build_claims`` does; no communication.

        Raises:
            ValueError: as ``build_claims``.
        """
        known = {}
        for name, shard in shards.items():
            cached = self._known.get(name)
            if cached is None or cached[0]() is not shard or _is_reshaped(shard):
                cached = ref(shard), build_claim(name, shard)
            known[name] = cached
        self._known = known
        return {name: claim for name, (_, claim) in known.items()}

    def compare(self, shards: Mapping[str, Shard], world: Axis) -> None:
        """Compare the replicas if the plan is new; communicates over ``world`` then.

        Args:
            shards: shards of the last ``plan``.
            world: the ranks that planned.

        Raises:
            ValueError: as ``compare_replicas``, on all ranks.
        """
        if not self._is_compared:
            compare_replicas(self._plan[0], shards, world)
            self._is_compared = True

    def plan(
        self, claims: Mapping[str, Claim], world: Axis
    ) -> tuple[list[dict[str, Claim]], list[list[Write]]]:
        """Return every rank's claims and the boxes it writes; communicates over ``world``.

        Raises:
            ValueError: as ``plan_writes``, on all ranks.
        """
        if claims != self._claims:
            table = {name: claim.to_json() for name, claim in claims.items()}
            text = json.dumps(table, separators=(",", ":"))
            self._key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            self._claims = dict(claims)
        keys = gather_json(self._key, world)
        if keys != self._keys:
            tables = gather_json({n: claim.to_json() for n, claim in claims.items()}, world)
            all_claims = [{n: Claim.from_json(v) for n, v in mine.items()} for mine in tables]
            self._plan = (all_claims, plan_writes(all_claims))
            own_writes = self._plan[1][world.rank]
            self._entries = [_entry(one, claims[one.name]) for one in own_writes]
            self._keys, self._is_compared = keys, False
        return self._plan

    def entries(self) -> list[PlannedTensor]:
        """Return the entries of this rank's file by the last plan."""
        return self._entries


def _is_reshaped(shard: Shard) -> bool:
    lengths = [piece.lengths for piece in shard.pieces]
    return [piece.data.shape for piece in shard.pieces] != lengths


def _entry(write: Write, claim: Claim) -> PlannedTensor:
    offsets, lengths = write.box
    key = write.name
    if lengths != claim.shape:
        cuts = ",".join(f"{o}:{o + n}" for o, n in zip(offsets, lengths, strict=True))
        key = f"{write.name}[{cuts}]"
    return PlannedTensor(key, claim.dtype, lengths, (write,))
