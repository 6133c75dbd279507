"""Sums over partial and tied gradients, their norm and the clip coefficient.

These functions depend on layouts, never on names: ``Part.partial`` lists the ranks whose
gradients are parts of a sum, ``ParamLayout.tied`` the stages that hold a copy,
``Shard.is_owner`` the rank that counts an element in the norm. Sums are coalesced into one
all-reduce for each axis, in the order of the axes' names, which is the same on all ranks.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from mcore_parallel.launch.call_checks import agree
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import NamedParameter, Part, Shard

Gradient = tuple[NamedParameter, Tensor]
"""A parameter and a tensor of its shape that holds its gradient."""


def sum_partial_gradients(gradients: Sequence[Gradient]) -> None:
    """All-reduce, in place, the boxes whose ranks each hold a part of the gradient.

    Args:
        gradients: gradients on this rank; all ranks of a ``Part.partial`` give the same
            parameters.
    """
    _sum_coalesced(
        [
            (part.partial, _box(gradient, part))
            for named, gradient in gradients
            for part in named.layout.parts
            if part.partial.size > 1
        ]
    )


def sum_views(views: Sequence[tuple[Axis, Tensor]]) -> None:
    """All-reduce views of gradients in place, each over its axis.

    Args:
        views: views on this rank; all ranks of an axis give equal shapes in the same order.
    """
    _sum_coalesced([(axis, view) for axis, view in views if axis.size > 1])


def sum_tied_gradients(gradients: Sequence[Gradient]) -> None:
    """All-reduce, in place, the gradients of parameters that several stages hold.

    Call it before any reduce-scatter, after which stages may hold different ranges of a tied
    parameter.
    """
    _sum_coalesced(
        [
            (named.layout.tied, gradient)
            for named, gradient in gradients
            if named.layout.tied.size > 1
        ]
    )


def owned_views(shards: Iterable[Shard]) -> list[Tensor]:
    """List the memory of every piece that this rank counts in the norm."""
    return [
        piece.data
        for shard in shards
        if shard.is_owner
        for piece in shard.pieces
        if piece.data.numel()
    ]


def grad_norm(
    views: Sequence[Tensor], world: Axis, device: torch.device | str = "cpu"
) -> Float[Tensor, ""]:
    """Return the L2 norm over all logical gradients, equal on all ranks.

    Squares are summed in float32 or wider; one all-reduce over ``world``, no host sync.

    Args:
        views: gradients that this rank counts, such as ``owned_views`` of finished gradients;
            each logical element is counted by exactly one rank of the world.
        world: every rank of the job, since all stages and experts count.
        device: device of the result, also on a rank without views.

    Returns:
        Scalar, float64, since ranks may hold gradients of different dtypes.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for dtype, same in _by_dtype(views).items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(same, 2.0, dtype=wide))
        squares += norms.double().square().sum()  # a norm for each view -> one sum
    if world.size > 1:
        agree(world.agreement, "all_reduce (sum)", squares)
        with world.waiting():
            dist.all_reduce(squares, group=world.group)
    return squares.sqrt()


def clip_coefficient(norm: Float[Tensor, ""], max_norm: float) -> Float[Tensor, ""]:
    """Return the factor, at most 1, that scales gradients of ``norm`` to ``max_norm``.

    The norm is increased by 1e-6 as in torch and Megatron, so that loss curves compare.

    Raises:
        ValueError: if ``max_norm`` is not above 0.
    """
    if max_norm <= 0.0:
        raise ValueError(
            f"--clip-grad {max_norm} must be above 0: leave clipping out instead (0)."
        )
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _box(tensor: Tensor, part: Part) -> Tensor:
    for dim, (begin, length) in enumerate(zip(part.local_offsets, part.lengths, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


def _sum_coalesced(views: list[tuple[Axis, Tensor]]) -> None:
    # One all-reduce for each axis and dtype, sorted by their names: the same order on all
    # ranks, even if their parameters are in different orders.
    groups: dict[tuple[str, str], tuple[Axis, list[Tensor]]] = {}
    for axis, view in views:
        groups.setdefault((axis.name, str(view.dtype)), (axis, []))[1].append(view)
    for _, (axis, boxes) in sorted(groups.items(), key=lambda entry: entry[0]):
        packed = torch.cat([box.reshape(-1) for box in boxes])
        agree(axis.agreement, "all_reduce (sum)", packed)
        with axis.waiting():
            dist.all_reduce(packed, group=axis.group)
        sums = packed.split([box.numel() for box in boxes])
        torch._foreach_copy_(
            boxes, [s.view(box.shape) for s, box in zip(sums, boxes, strict=True)]
        )


def _by_dtype(views: Sequence[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for view in views:
        groups.setdefault(view.dtype, []).append(view)
    return groups
