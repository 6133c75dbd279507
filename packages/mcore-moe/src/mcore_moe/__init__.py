"""Mixture of experts for any PyTorch model: routing, dispatch, grouped experts.

The front is lazy (PEP 562): importing it imports no room, so a command that only
needs help text never loads torch.
"""

from mcore_parallel.lazy_front import lazy_front

_EXPORTS: dict[str, str] = {
    "AllGatherDispatcher": "dispatching",
    "AllToAllDispatcher": "dispatching",
    "Dispatched": "protocol",
    "Dispatcher": "protocol",
    "Experts": "experts",
    "LocalDispatcher": "dispatching",
    "MixtureOfExperts": "facade",
    "MoEConfig": "config",
    "MoELayer": "layer",
    "Router": "router",
    "RouterStats": "stats",
    "Routing": "routing",
    "RowPlan": "permutation",
    "SUMMARY": "stats",
    "SharedExpert": "shared",
    "aux_loss": "balance",
    "average_expert_gradients": "over_ranks",
    "build_dispatcher": "dispatching",
    "expert_capacity": "config",
    "expert_scores": "routing",
    "finish_step": "stats",
    "global_aux_loss": "balance",
    "grouped_linear": "grouped_gemm",
    "moe_axes": "over_ranks",
    "limited": "routing",
    "permute": "permutation",
    "plan_rows": "permutation",
    "rank_local_names": "over_ranks",
    "record_routing": "replay",
    "replay_routing": "replay",
    "route": "routing",
    "sequence_aux_loss": "balance",
    "sequential_linear": "grouped_gemm",
    "sinkhorn": "balance",
    "summarize": "stats",
    "unpermute": "permutation",
    "updated_expert_bias": "balance",
    "z_loss": "balance",
}

__all__ = list(_EXPORTS)

__getattr__, __dir__ = lazy_front(__name__, _EXPORTS)
