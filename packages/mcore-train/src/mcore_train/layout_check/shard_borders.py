"""Chooses buckets so that shards of a ZeRO-1 optimizer end inside rows and vectors.

A rank updates a flat range of each bucket. A range that ends inside a row of a matrix, or
inside a vector, takes another code path than a range that ends between two rows. Where ranges
end depends little on the widths of a small run, but on the sizes of its buckets.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_parallel.data_parallel.buckets import Bucket, build_buckets
from mcore_parallel.sharding import NamedParameter, flat_pieces, named_parameters
from mcore_train.assembly import Run
from mcore_train.layout_check.certificate import tensor_class

NUM_SIZES, GROWTH = 48, 1.15
"""Number of bucket sizes to try, and the ratio of each size to the one before."""

Cuts = dict[str, dict[str, bool]]
"""Whether a shard border cuts a tensor, by ``rows`` or ``vectors`` and by tensor class."""


def choose_bucket_size(run: Run) -> tuple[int, Cuts]:
    """Return the bucket size whose shard borders cut rows of most tensors, and the cuts.

    A border inside a vector is preferred and, with --qk-clip, which multiplies single rows of
    queries and keys, a border inside one of these rows; then borders inside rows of as many
    classes of matrices as possible. All ranks call it together. The run cannot train
    afterwards, as its weights were moved.

    Args:
        run: has an optimizer sharded in flat ranges; its bucket size is the smallest tried.

    Returns:
        The size, and the tensor classes that its borders cut on any rank.
    """
    config, ctx = run.plan.config.data_parallelism, run.ctx
    trained_parameters: dict[nn.Parameter, tuple[int, NamedParameter]] = {}
    for index, chunk in enumerate(run.chunks):
        for named in named_parameters(chunk):
            if named.parameter.requires_grad:
                trained_parameters.setdefault(named.parameter, (index, named))
    sizes = [int(config.ddp_bucket_size * GROWTH**power) for power in range(NUM_SIZES)]
    cuts = [
        _cuts(
            build_buckets(
                [*trained_parameters.values()], ctx, replace(config, ddp_bucket_size=size)
            )
        )
        for size in sizes
    ]
    totals = [_united(each) for each in zip(*gather_json(cuts, ctx.world), strict=True)]
    is_clipped = run.plan.config.qk_clipping.qk_clip

    def score(number: int) -> tuple[int, bool, int]:
        rows, vectors = totals[number]["rows"], any(totals[number]["vectors"].values())
        scaled = is_clipped and any(cut and _is_scaled(name) for name, cut in rows.items())
        return scaled + vectors, scaled, sum(rows.values())

    best = max(range(NUM_SIZES), key=score)
    return sizes[best], totals[best]


def _is_scaled(name: str) -> bool:
    """Whether --qk-clip multiplies rows of a class of matrices."""
    return name.endswith((".q.weight", ".k.weight", ".q_up.weight", ".kv_up.weight"))


def _cuts(buckets: Sequence[Bucket]) -> Cuts:
    """Return, for each class of sharded tensors, whether this rank's ranges cut a row."""
    cuts: Cuts = {"rows": {}, "vectors": {}}
    for bucket in buckets:
        if bucket.shard.size == 1:
            continue
        for owned in bucket.owned_ranges():
            first, stop, flat = owned.first, owned.stop, owned.view(bucket.own_weights())
            for part in owned.named.layout.parts:
                pieces = flat_pieces(owned.named, part, first, stop, flat)
                is_cut = any(piece.lengths[-1] < part.lengths[-1] for piece in pieces)
                cut_classes = cuts["vectors" if len(part.shape) == 1 else "rows"]
                name = tensor_class(part.name)
                cut_classes[name] = cut_classes.get(name, False) or is_cut
    return cuts


def _united(ranks: Sequence[Cuts]) -> Cuts:
    united: Cuts = {}
    for kind in ("rows", "vectors"):
        names = sorted({name for cuts in ranks for name in cuts[kind]})
        united[kind] = {n: any(cuts[kind].get(n, False) for cuts in ranks) for n in names}
    return united
