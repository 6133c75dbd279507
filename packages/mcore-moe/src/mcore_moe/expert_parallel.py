"""Expert parallelism under torch's DDP or FSDP2, and the comparison of replicas.

``mcore_parallel.DataParallel`` needs none of this: layers declare over which ranks gradients
are summed. torch's DDP and FSDP2 treat every parameter as a replica, but the ranks of ``ep``
hold different experts, and each expert computes tokens of all these ranks.
"""

from torch import Tensor, nn

from mcore_moe.routing.router import Router
from mcore_parallel.collectives import all_reduce
from mcore_parallel.digests import unlike_tensors
from mcore_parallel.mesh import Axis, ParallelContext
from mcore_parallel.sharding import named_parameters


def rank_local_names(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that DDP and FSDP2 must ignore.

    These are the experts, and the counts and biases that ``finish_step`` updates. DDP would
    average different experts, and overwrite counts with the counts of rank 0.
    """
    names = [n.name for n in named_parameters(model) if n.layout.data == "expert"]
    for path, module in model.named_modules():
        if isinstance(module, Router):
            tensors = ["step_counts", "step_scored_counts", "step_dropped", "step_losses"]
            tensors += [] if module.expert_bias is None else ["expert_bias"]
            names += [f"{path}.{name}" if path else name for name in tensors]
    return names


def average_expert_gradients(model: nn.Module, ctx: ParallelContext) -> None:
    """Average the experts' gradients in place after backward, like DDP all other gradients.

    An expert's gradient on a rank is a sum over the tokens of all ranks of ``ep``. The function
    sums this gradient over the ranks that hold the same expert (``ctx.expert_dp``, one
    all-reduce for each tensor) and divides the sum by the number of ranks over which DDP
    averages (``ctx.dp_cp``). The result is the gradient of the mean of the ranks' losses.

    Args:
        model: unwrapped or wrapped.
        ctx: the layout, with one tensor rank. Under tensor parallelism use
            ``mcore_parallel.DataParallel``, as other gradients are partial sums too.

    Raises:
        ValueError: under tensor parallelism; on all ranks, in the first call, if ranks that
            should hold the same expert were seeded differently.
    """
    if ctx.tp.size > 1:
        raise ValueError(
            f"expert gradients under --tensor-model-parallel-size {ctx.tp.size} need "
            "mcore_parallel.DataParallel, which also sums gradients over tensor ranks."
        )
    for named in named_parameters(model):
        if named.layout.data != "expert" or named.parameter.grad is None:
            continue
        _compare_once(named.parameter, ctx.expert_dp, named.name)
        partial = named.layout.parts[0].partial
        total = all_reduce(all_reduce(named.parameter.grad, partial), ctx.expert_dp)
        named.parameter.grad.copy_(total / ctx.dp_cp.size)


def check_same(name: str, tensor: Tensor, axis: Axis) -> None:
    """Check that a tensor is equal on all ranks of an axis, by one all-gather of digests.

    The host waits for the digests.

    Raises:
        ValueError: on all ranks, with the tensor's name and the ranks that differ.
    """
    for _, digests in unlike_tensors([(name, tensor)], axis):
        others = [rank for rank, number in enumerate(digests) if number != digests[0]]
        raise ValueError(
            f"{name} of ranks {others} of axis {axis.name} differs from rank 0: these ranks "
            "used different seeds. Call torch.manual_seed with one seed on all ranks before "
            "building the layers, or call reset_parameters(seed=...) on the layers."
        )


def _compare_once(parameter: nn.Parameter, axis: Axis, name: str) -> None:
    if axis.size > 1 and not getattr(parameter, "is_compared", False):
        parameter.is_compared = True  # pyrefly: ignore
        check_same(name, parameter, axis)
