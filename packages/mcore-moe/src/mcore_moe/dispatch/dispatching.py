"""``build_dispatcher``: the ``Dispatcher`` that a layer's config selects.

* ``LocalDispatcher``: all experts are on this rank; no communication.
* ``AllToAllDispatcher``: an all-to-all sends each row to its expert's rank, after the counts.
* ``HierarchicalDispatcher``: an all-to-all between nodes, then one within the node.
* ``AllGatherDispatcher``: every rank gathers all tokens and computes its own experts' rows.
* ``SymmetricDispatcher``: each rank reads its rows from the memory of the others.
* ``DeepEPDispatcher``: DeepEP's kernels.

If ``expert_tp`` splits each expert's matrices, its ranks gather each other's rows and sum their
results. A rank may have any number of tokens, also 0.
"""

from mcore_moe.config import MoEConfig
from mcore_moe.dispatch.all_gather import AllGatherDispatcher
from mcore_moe.dispatch.all_to_all import AllToAllDispatcher
from mcore_moe.dispatch.local import LocalDispatcher
from mcore_moe.dispatch.protocol import Dispatcher
from mcore_parallel.mesh import SINGLE, Axis


def build_dispatcher(
    config: MoEConfig, ep: Axis, expert_tp: Axis, levels: tuple[Axis, Axis] = (SINGLE, SINGLE)
) -> Dispatcher:
    """Return the dispatcher that the config selects; on one rank a ``LocalDispatcher``.

    Args:
        config: of the layer.
        ep: ranks that share the experts.
        expert_tp: ranks that share each expert's matrices.
        levels: ``ep`` between nodes and within a node; single ranks: one exchange over ``ep``.

    Raises:
        ValueError: if ``deepep`` is not installed, or ``expert_tp`` is more than one rank with
            ``deepep`` or ``symmetric``.
    """
    if ep.size == 1 and expert_tp.size == 1:
        return LocalDispatcher(config)
    if levels[0].size > 1:
        from mcore_moe.dispatch.hierarchical import HierarchicalDispatcher

        return HierarchicalDispatcher(config, *levels)
    kind = config.moe_token_dispatcher_type
    if kind in ("deepep", "symmetric") and expert_tp.size > 1:
        raise ValueError(
            f"--moe-token-dispatcher-type {kind} requires complete experts: use "
            f"--expert-tensor-parallel-size 1, not {expert_tp.size}, or alltoall."
        )
    if kind == "deepep":
        from mcore_moe.kernels.deepep import DeepEPDispatcher

        return DeepEPDispatcher(config, ep)
    if kind == "symmetric":
        from mcore_moe.dispatch.symmetric import SymmetricDispatcher

        return SymmetricDispatcher(config, ep)
    if kind == "allgather":
        return AllGatherDispatcher(config, ep, expert_tp)
    return AllToAllDispatcher(config, ep, expert_tp)
