"""``MoEAxes``: the parallel axes of an expert layer."""

from dataclasses import dataclass

from mcore_parallel.mesh import SINGLE, Axis, ParallelContext


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEAxes:
    """The ranks that share the tokens and the experts of a ``MoELayer``."""

    tp: Axis = SINGLE
    """Tensor ranks."""
    sequence_parallel: bool = False
    """Whether tokens are split over ``tp``; False: all ranks of ``tp`` have the same tokens."""
    cp_tp: Axis = SINGLE
    """All ranks that share a micro-batch: counts of choices are summed over them."""
    dp_cp_tp: Axis = SINGLE
    """All ranks that share a step's batch; the global balancing loss sums over them."""
    ep: Axis = SINGLE
    """Ranks that share the experts."""
    ep_levels: tuple[Axis, Axis] = (SINGLE, SINGLE)
    """``ep`` between nodes and within one, if tokens are exchanged in two steps."""
    expert_tp: Axis = SINGLE
    """Ranks that share each expert's matrices."""


ONE_RANK = MoEAxes()
"""All experts and tokens on one rank."""


def moe_axes(ctx: ParallelContext) -> MoEAxes:
    """Return the axes of a ``MoELayer`` in a parallel layout; no communication."""
    return MoEAxes(
        tp=ctx.tp,
        sequence_parallel=ctx.config.sequence_parallel and ctx.tp.size > 1,
        cp_tp=ctx.axis("cp", "tp"),
        dp_cp_tp=ctx.axis("dp", "cp", "tp"),
        ep=ctx.ep,
        ep_levels=(ctx.ep_nodes, ctx.ep_node),
        expert_tp=ctx.expert_tp,
    )
