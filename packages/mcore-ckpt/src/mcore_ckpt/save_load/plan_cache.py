"""A plan of who writes what, kept from save to save while ranks hold the same."""

import hashlib
import json
from collections.abc import Mapping

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_ckpt.save_load.replica_checks import compare_replicas
from mcore_ckpt.storage.shard_plans import Claim, Write, plan_writes
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import Shard


class PlanCache:
    """The last plan of a world that saves again and again, used while it fits.

    Ranks then exchange a hash of what they hold, and plan only if one has changed.
    What several ranks hold is compared once a plan: at its first save, which takes the longer
    by one look at all of it, and at no later one.
    """

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._plan: tuple[list[dict[str, Claim]], list[list[Write]]] = ([], [])
        self._is_compared = False

    def compare(self, shards: Mapping[str, Shard], world: Axis) -> None:
        """Compare the boxes that several ranks hold, if the plan is new.

        Communicates over ``world`` then.

        Args:
            shards: of which ``plan`` was made last.
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
        """Return what every rank holds and writes; communicates over ``world``.

        Raises:
            ValueError: as ``plan_writes``, on all ranks.
        """
        table = {name: claim.to_json() for name, claim in claims.items()}
        text = json.dumps(table, separators=(",", ":"))
        keys = gather_json(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), world)
        if keys != self._keys:
            tables = gather_json(table, world)
            every = [{n: Claim.from_json(v) for n, v in mine.items()} for mine in tables]
            self._plan = (every, plan_writes(every))
            self._keys, self._is_compared = keys, False
        return self._plan
