"""Mixture of experts for any PyTorch model: routing, dispatch, grouped experts.

The front is lazy (PEP 562): a name imports its module at first use, so a command that only
prints help never loads torch.
"""

from mcore_base.lazy_front import lazy_front

_EXPORTS: dict[str, str] = {
    "AllGatherDispatcher": "dispatch.all_gather",
    "AllToAllDispatcher": "dispatch.all_to_all",
    "DispatchOptions": "dispatch.protocol",
    "DispatchedTokens": "dispatch.protocol",
    "Dispatcher": "dispatch.protocol",
    "ExpertNetwork": "experts.network",
    "Experts": "experts.experts",
    "LocalDispatcher": "dispatch.local",
    "MixtureOfExperts": "facade",
    "MoEAxes": "axes",
    "MoEConfig": "config",
    "MoELayer": "layer",
    "MoERuntime": "layer",
    "Router": "routing.router",
    "RouterStats": "routing.router_stats",
    "Routing": "routing.topk",
    "RowPlan": "dispatch.permutation",
    "SUMMARY_COLUMNS": "routing.router_stats",
    "SharedExpert": "experts.shared_expert",
    "aux_loss": "routing.load_balancing",
    "average_expert_gradients": "expert_parallel",
    "build_dispatcher": "dispatch.dispatching",
    "expert_capacity": "config",
    "expert_scores": "routing.topk",
    "finish_step": "routing.router_stats",
    "global_aux_loss": "routing.load_balancing",
    "grouped_linear": "experts.grouped_gemm",
    "moe_axes": "axes",
    "limit_to_capacity": "routing.topk",
    "permute": "dispatch.permutation",
    "plan_rows": "dispatch.permutation",
    "rank_local_names": "expert_parallel",
    "record_routing": "routing.replay",
    "replay_routing": "routing.replay",
    "route": "routing.topk",
    "sequence_aux_loss": "routing.load_balancing",
    "sequential_linear": "experts.grouped_gemm",
    "sinkhorn": "routing.load_balancing",
    "summarize": "routing.router_stats",
    "unpermute": "dispatch.permutation",
    "updated_expert_bias": "routing.load_balancing",
    "z_loss": "routing.load_balancing",
}

__all__ = list(_EXPORTS)

__getattr__, __dir__ = lazy_front(__name__, _EXPORTS)
