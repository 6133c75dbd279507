"""The experts of a rank: stacked weights, and the forward pass over rows.

Tokens are copied to rows sorted by expert, and the results of a token's rows are summed;
``grouped_gemm`` has the GEMMs. The router's weight multiplies the activation before the second
GEMM (and the second bias), so that only the sum over a token's rows follows that GEMM.

Each matrix of an expert is a logical tensor: ``{e}.fc1.gate.weight``, with e counted over all
ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_moe.axes import ONE_RANK, MoEAxes
from mcore_moe.config import MoEConfig
from mcore_moe.dispatch.permutation import RowPlan, permute, permute_probs, unpermute
from mcore_moe.experts.fp8_rows import fp8_linear
from mcore_moe.experts.grouped_gemm import (
    Linear,
    accumulating_linear,
    grouped_linear,
    sequential_linear,
)
from mcore_moe.experts.network import DEFAULT_NETWORK, ExpertNetwork
from mcore_moe.kernels import quack_gemm
from mcore_moe.kernels.gate import weighted_gated
from mcore_parallel.autograd.functions import cast_factor
from mcore_parallel.autograd.grad_slot import grad_slot, overwrites, slot_of
from mcore_parallel.autograd.recomputing import recompute_between
from mcore_parallel.mesh import Axis
from mcore_parallel.precision.fp8 import WeightCasts
from mcore_parallel.rng import fill_parameter_
from mcore_parallel.sharding import ParamLayout, Part, named_parameters


@runtime_checkable
class RowsAdapter(Protocol):
    """Low-rank adapters of mcore-models, which add to the outputs of fc1 and fc2 by row."""

    def add_fc1(
        self,
        hidden: Float[Tensor, "R F"],
        rows: Float[Tensor, "R D"],
        offsets: Int[Tensor, " E"],
    ) -> Float[Tensor, "R F"]:
        """Return the output of fc1, without biases, plus the adapter's output for ``rows``."""

    def add_fc2(
        self, y: Float[Tensor, "R D"], active: Float[Tensor, "R F"], offsets: Int[Tensor, " E"]
    ) -> Float[Tensor, "R D"]:
        """Return the output of fc2, without biases, plus the adapter's for ``active``."""


class Experts(nn.Module):
    """Runs this rank's expert networks, each on its own rows.

    Attributes:
        fc1_weight: ``[e, 2F/expert_tp, D]``, rows of the gate, then of the up-projection
            (``[e, F/expert_tp, D]`` without a gate).
        fc2_weight: ``[e, D, F/expert_tp]``.
        fc1_bias, fc2_bias: ``[e, ...]`` or None.
        adapter: adds to the outputs of fc1 and fc2, or None.
        linear: replaces this package's GEMMs, forward and backward, or None.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        config: MoEConfig,
        network: ExpertNetwork = DEFAULT_NETWORK,
        *,
        axes: MoEAxes = ONE_RANK,
        fp8_casts: WeightCasts | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's experts and initialise them.

        Args:
            hidden_size: D.
            ffn_hidden_size: F of one expert.
            config: number of experts over all ranks, and options of their GEMMs; rank r of
                ``ep`` holds the r-th equal share. With ``moe_wgrad_micro_batches`` above 1 the
                owner of the main gradients must call ``GradSlot.end_backward``, as
                ``DataParallel`` does.
            network: of each expert.
            axes: ranks that share the experts (``ep``) and each expert's matrices
                (``expert_tp``).
            fp8_casts: cache of the weights' casts for GEMMs in fp8; None: GEMMs in the dtype of
                the weights.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: if the experts do not divide over ``ep``, or F over ``expert_tp``.
        """
        super().__init__()
        num_experts, ep, expert_tp = config.num_experts, axes.ep, axes.expert_tp
        _check_divides("--num-experts", num_experts, "--expert-model-parallel-size", ep)
        flag = "--expert-tensor-parallel-size"
        _check_divides("--moe-ffn-hidden-size", ffn_hidden_size, flag, expert_tp)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.num_experts, self.num_local_experts = num_experts, num_experts // ep.size
        self.network, self.ep, self.expert_tp = network, ep, expert_tp
        self.grouped = config.moe_grouped_gemm
        self.probs_on_input = config.moe_apply_probs_on_input
        self.fp8_casts = fp8_casts
        width = ffn_hidden_size // expert_tp.size
        rows = 2 * width if network.gated else width

        def allocate(*shape: int) -> nn.Parameter:
            full = (self.num_local_experts, *shape)
            return nn.Parameter(torch.empty(full, device=device, dtype=dtype))

        self.fc1_weight = overwrites(allocate(rows, hidden_size))
        self.fc2_weight = overwrites(allocate(hidden_size, width))
        for weight in (self.fc1_weight, self.fc2_weight):
            grad_slot(weight).num_together = config.num_wgrads_together
        self.fc1_bias = allocate(rows) if network.bias else None
        self.fc2_bias = allocate(hidden_size) if network.bias else None
        self.adapter: RowsAdapter | None = None
        self.linear: Linear | None = None
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Fill the weights by logical name, the biases with zeros.

        The same seed gives every expert the same weights under all layouts.

        Args:
            seed: None: drawn from torch's default CPU generator, which must have the same seed
                on all ranks.
        """
        if self.fc1_weight.is_meta:
            return
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if self.network.init_std == 0.0:
            return
        if seed is None:
            seed = int(torch.randint(2**62, ()).item())
        stds = {"fc1_weight": self.network.init_std, "fc2_weight": self.network.fc2_std}
        for named in named_parameters(self):
            if named.name in stds:
                fill_parameter_(named, seed=seed, std=stds[named.name])

    def forward(
        self, x: Float[Tensor, "M D"], probs: Float[Tensor, "M k"], plan: RowPlan
    ) -> Float[Tensor, "M D"]:
        """Return the weighted sum of the experts' outputs for every token; no communication.

        With ``expert_tp`` the result is this rank's part of a sum over ``expert_tp``.

        Args:
            x: tokens, or rows received from other ranks.
            probs: weight of each choice.
            plan: the row of each choice, rows sorted by expert.
        """
        row_probs = permute_probs(probs, plan)
        first, second = self._linears(x, plan, row_probs)
        if self.probs_on_input:
            row_probs = torch.ones_like(row_probs)
        hidden = first(x)
        if self.fc1_bias is not None:
            hidden = hidden + self._of_rows(self.fc1_bias, plan)
        activate = partial(self._activate, probs=row_probs, end=plan.offsets[-1])
        if self.network.recompute_activation and self.training:
            return recompute_between(activate, partial(second, probs=row_probs), hidden)
        return second(activate(hidden), probs=row_probs)

    def _linears(
        self, x: Tensor, plan: RowPlan, row_probs: Tensor
    ) -> tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]:
        """Return fc1, from tokens to rows, and fc2, from rows to sums by token."""
        casts = self.fp8_casts
        if self._gathers(x, plan):
            from mcore_moe.experts.gathered_gemm import gathered_linear, summed_linear

            return (
                partial(gathered_linear, weight=self.fc1_weight, plan=plan, casts=casts),
                lambda rows, probs: summed_linear(rows, self.fc2_weight, plan, casts),  # noqa: ARG005
            )
        linear = grouped_linear if self.grouped else sequential_linear
        if casts is not None:
            linear = partial(fp8_linear, casts=casts)
        elif self.linear is not None:
            linear = self.linear
        elif slot_of(self.fc1_weight) is not None:
            linear = partial(accumulating_linear, linear=linear)

        def first(x: Tensor) -> Tensor:
            rows = permute(x, plan)
            if self.probs_on_input:
                rows = (rows * row_probs[:, None]).to(rows.dtype)
            hidden = linear(rows, self.fc1_weight, plan.offsets)
            if self.adapter is not None:
                hidden = self.adapter.add_fc1(hidden, rows, plan.offsets)
            return hidden

        def second(active: Tensor, probs: Tensor) -> Tensor:
            rows = linear(active, self.fc2_weight, plan.offsets)
            if self.adapter is not None:
                rows = self.adapter.add_fc2(rows, active, plan.offsets)
            if self.fc2_bias is not None:
                # The sum over expert_tp must contain the bias once: its first rank adds it.
                weights = probs if self.expert_tp.rank == 0 else torch.zeros_like(probs)
                bias = self._of_rows(self.fc2_bias, plan)
                rows = rows + (bias * weights[:, None]).to(rows.dtype)
            return unpermute(rows, plan)

        return first, second

    def _gathers(self, x: Tensor, plan: RowPlan) -> bool:
        """Return whether quack's gathering GEMMs support these inputs, and are faster."""
        weight, has_bias = self.fc1_weight, self.fc2_bias is not None
        if self.probs_on_input or self.adapter is not None:
            return False
        if self.linear is not None or plan.is_in_order:
            return False
        if not self.grouped or has_bias or not plan.is_dense or not x.shape[0]:
            return False
        if plan.choices.dtype != torch.int32:  # a plan by plain torch; the kernels need int32
            return False
        return quack_gemm.gathers_faster(weight) and quack_gemm.usable(cast_factor(x), weight)

    def _activate(self, hidden: Tensor, probs: Tensor, end: Tensor) -> Tensor:
        network = self.network
        if network.gated:
            shape = network.activation, network.clamp, network.offset
            return weighted_gated(hidden, probs, end, *shape)
        return (network.activate(hidden) * probs[:, None]).to(hidden.dtype)

    def deferrable_weights(self) -> list[nn.Parameter]:
        """Return the weights whose gradients a ``mcore_parallel.WeightQueue`` may defer."""
        return [self.fc1_weight, self.fc2_weight]

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the stacked parameters expert by expert."""
        # Expert e = ep.rank * num_local + i. Rows [n * width, (n + 1) * width) of fc1_weight[i]
        # are this rank's slice of F of the gate (n = 0) or the up-projection (n = 1); columns
        # of fc2_weight[i] are the same slice of F.
        D, F_ = self.hidden_size, self.ffn_hidden_size
        names = ("fc1.gate", "fc1.up") if self.network.gated else ("fc1",)
        width = F_ // self.expert_tp.size
        begin = self.expert_tp.rank * width
        weight1, weight2, bias1, bias2 = [], [], [], []
        for i in range(self.num_local_experts):
            e = self.ep.rank * self.num_local_experts + i
            for n, name in enumerate(names):
                weight1.append(
                    Part(
                        f"{e}.{name}.weight",
                        (F_, D),
                        (begin, 0),
                        (i, n * width, 0),
                        (1, width, D),
                    )
                )
                bias1.append(
                    Part(f"{e}.{name}.bias", (F_,), (begin,), (i, n * width), (1, width))
                )
            weight2.append(
                Part(f"{e}.fc2.weight", (D, F_), (0, begin), (i, 0, 0), (1, D, width))
            )
            # Only the first rank of expert_tp adds the bias, so gradients are parts of a sum.
            bias2.append(
                Part(
                    f"{e}.fc2.bias",
                    (D,),
                    (0,),
                    (i, 0),
                    (1, D),
                    replicas=self.expert_tp,
                    partial=self.expert_tp,
                )
            )
        parts = {"fc1_weight": weight1, "fc2_weight": weight2}
        if self.fc1_bias is not None:
            parts |= {"fc1_bias": bias1, "fc2_bias": bias2}
        return {name: ParamLayout(tuple(p), data="expert") for name, p in parts.items()}

    def _of_rows(self, bias: Tensor, plan: RowPlan) -> Tensor:
        row = torch.arange(plan.choices.numel(), device=bias.device)
        experts = torch.searchsorted(plan.offsets[1:], row, right=True)
        # searchsorted returns e for rows of no expert, whose values and gradients are
        # undefined: they read an extra row of zeros, so no expert's bias gets their gradients.
        return F.pad(bias, (0, 0, 0, 1))[experts]  # [e, N] -> [R, N]

    def extra_repr(self) -> str:
        """Return the text of the layer in ``print(model)``."""
        return (
            f"{self.num_local_experts} of {self.num_experts}, D={self.hidden_size}, "
            f"F={self.ffn_hidden_size}, gated={self.network.gated}, grouped={self.grouped}"
        )


def _check_divides(what: str, number: int, flag: str, axis: Axis) -> None:
    if number % axis.size:
        raise ValueError(
            f"{what} {number} cannot be split over {flag} {axis.size}: use a divisor of "
            f"{number}."
        )
