"""``Router``: the module with the gate's weight, the expert bias and the counts of a step.

The computations are pure functions in ``topk`` and ``load_balancing``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mcore_moe.axes import ONE_RANK, MoEAxes
from mcore_moe.config import MoEConfig
from mcore_moe.routing.load_balancing import (
    aux_loss,
    count_choices,
    global_aux_loss,
    sequence_aux_loss,
    sinkhorn,
    z_loss,
)
from mcore_moe.routing.replay import RoutingTape, is_replayed
from mcore_moe.routing.topk import (
    Routing,
    balanced_ids,
    expert_scores,
    limit_to_capacity,
    route,
    scale_weights,
    top_experts,
)
from mcore_parallel.autograd.functions import OnceDifferentiable, without_autocast
from mcore_parallel.collectives import all_reduce
from mcore_parallel.dtensors import is_dtensor
from mcore_parallel.rng import RngStreams, reset_weight_
from mcore_parallel.sharding import ParamLayout, whole_layout

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


RouterLinear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Returns logits from tokens, weight and bias."""


class Router(nn.Module):
    """The gate of a mixture of experts: a linear map, top-k choice and balancing losses.

    Attributes:
        weight: ``[E, D]``, the same on all tensor ranks; each rank routes its own tokens, so
            gradients are partial sums over ``tp``.
        bias: ``[E]``, replicated like the weight; None without ``moe_router_bias``.
        expert_bias: ``[E]`` parameter without gradient, updated by ``finish_step``; None
            without ``moe_router_enable_expert_bias``. Stays float32 if the model is cast.
        step_counts: ``[E]`` int64 buffer: choices of this rank's tokens since the last step.
        step_scored_counts: ``[E]`` int64 buffer: choices by the top-k of the scores (without
            bias and groups), for the global loss.
        step_dropped: int64 buffer: choices of real tokens beyond their experts' capacity.
        step_losses: ``[3]`` float64 buffer of sums over this rank's forward passes: this rank's
            shares of load-balancing loss and z-loss (without coefficients) times the number of
            ranks that share a micro-batch; and the number of passes.
        tape: records choices, or replays recorded choices; see ``replay``.
        linear: replacement of torch's linear for the logits, or None.
    """

    def __init__(
        self,
        hidden_size: int,
        config: MoEConfig,
        *,
        axes: MoEAxes = ONE_RANK,
        streams: RngStreams | None = None,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate and initialise the gate.

        Args:
            hidden_size: D.
            config: options of routing and balance.
            axes: ranks that hold the weight and route different tokens (``tp``), ranks that
                share a micro-batch (``cp_tp``) and ranks that share a step's batch
                (``dp_cp_tp``).
            streams: random streams of the jitter; None: torch's default generator, which the
                caller must seed differently on every rank.
            init_std: of the weight; 0 leaves zeros and draws nothing.
            device: of the weight.
            dtype: of the weight.
        """
        super().__init__()
        self.config = config
        self.tp, self.cp_tp, self.dp_cp_tp = axes.tp, axes.cp_tp, axes.dp_cp_tp
        self.streams = streams
        self.init_std = init_std
        shape = (config.num_experts, hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = None
        if config.moe_router_bias:
            zeros = torch.zeros(config.num_experts, device=device, dtype=dtype)
            self.bias = nn.Parameter(zeros)
        counts = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self.register_buffer("step_counts", counts, persistent=False)
        self.register_buffer("step_scored_counts", counts.clone(), persistent=False)
        self.register_buffer("step_dropped", counts.new_zeros(()), persistent=False)
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.register_buffer("step_losses", sums, persistent=False)
        self.tape: RoutingTape | None = None
        self.linear: RouterLinear | None = None
        # A parameter, so that checkpoints store the bias like any other logical tensor.
        self.expert_bias = (
            nn.Parameter(
                torch.zeros(config.num_experts, dtype=torch.float32, device=device),
                requires_grad=False,
            )
            if config.moe_router_enable_expert_bias
            else None
        )
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Fill the weight with normal numbers of ``init_std``, biases and counts with zeros.

        Args:
            seed: None: drawn from torch's default CPU generator.
        """
        reset_weight_(self, std=self.init_std, seed=seed)
        for counts in self.buffers():
            counts.zero_()

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding: complete on every tensor rank, with partial gradients."""
        shape = tuple(self.weight.shape)
        layouts = {"weight": whole_layout("", shape, replicas=self.tp, partial=self.tp)}
        if self.bias is not None:
            layouts["bias"] = whole_layout("", shape[:1], replicas=self.tp, partial=self.tp)
        if self.expert_bias is not None:
            layouts["expert_bias"] = whole_layout("", shape[:1], replicas=self.tp)
        return layouts

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # In bf16 a bias would not change by small updates: move it to devices, never cast it.
        before = None if self.expert_bias is None else self.expert_bias.detach()
        super()._apply(fn, recurse)
        self.step_losses = self.step_losses.double()
        bias = self.expert_bias
        if bias is not None and before is not None and bias.dtype != torch.float32:
            bias.data = bias.detach().float() if before.is_meta else before.to(bias.device)
        return self

    def forward(
        self,
        x: Float[Tensor, "T D"],
        sequences: Int[Tensor, " T"] | None = None,
        num_sequences: int = 1,
        mask: Bool[Tensor, " T"] | None = None,
    ) -> tuple[Routing, Float[Tensor, ""]]:
        """Return the routing of tokens, and this rank's share of the balancing losses.

        In training, all-reduces counts over ``cp_tp`` (and ``dp_cp_tp`` for the global loss)
        if a loss needs them.

        Args:
            x: this rank's tokens; T may be 0.
            sequences: sequence of each token, for the loss by sequence; None: one sequence.
            num_sequences: sequences in the micro-batch.
            mask: true for real tokens; padding gets no expert and does not count.

        Returns:
            The routing, and this rank's share of all losses times their coefficients.
        """
        with without_autocast(x.device):
            return self._route(x, sequences, num_sequences, mask)

    def _route(
        self, x: Tensor, sequences: Tensor | None, num_sequences: int, mask: Tensor | None
    ) -> tuple[Routing, Tensor]:
        logits = self._logits(x)
        fixed_ids = self._given_ids(x)
        if self.config.moe_router_load_balancing_type == "sinkhorn":
            routing = self._assign(logits, fixed_ids, mask)
        else:
            routing = route(logits, self.config, self.expert_bias, fixed_ids)
        if self.tape is not None:
            self.tape.note(routing.ids, is_replayed())
        routing = limit_to_capacity(routing, self.config, mask)
        aux = torch.zeros((), dtype=routing.probs.dtype, device=x.device)
        if self.training:
            self._count(routing, mask)
            ids = routing.ids if fixed_ids is None and self._chooses_plainly() else None
            aux = aux + self._losses(logits, ids, sequences, num_sequences, mask)
        return routing, aux

    def _chooses_plainly(self) -> bool:
        """Return whether chosen experts are the top-k of the scores, in this order."""
        config = self.config
        sinkhorn = config.moe_router_load_balancing_type == "sinkhorn"
        return self.expert_bias is None and not config.moe_router_group_topk and not sinkhorn

    def _logits(self, x: Tensor) -> Tensor:
        eps = self.config.moe_input_jitter_eps
        if self.training and eps:
            # Each rank routes different tokens, so each rank draws different noise.
            stream = self.streams.fork("tensor_parallel") if self.streams else nullcontext()
            with stream:
                x = x * torch.empty_like(x).uniform_(1 - eps, 1 + eps)
        dtype = _DTYPES.get(self.config.moe_router_dtype, x.dtype)
        if self.linear is not None:
            bias = None if self.bias is None else self.bias.to(dtype)
            return self.linear(x.to(dtype), self.weight.to(dtype), bias)
        if dtype == torch.float32 and _is_narrow(x) and _is_narrow(self.weight):
            wide = _WideLinear.apply(x, self.weight)
            return wide if self.bias is None else wide + self.bias.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.weight.to(dtype), bias)

    def _given_ids(self, x: Tensor) -> Tensor | None:
        """Return recorded or balanced choices, or None if scores choose the experts."""
        if self.tape is not None and self.tape.is_given:
            return self.tape.next_ids(x.shape[0], self.config.moe_router_topk, is_replayed())
        if self.config.moe_router_force_load_balancing:
            return balanced_ids(x.shape[0], self.config, x.device)
        return None

    def _assign(self, logits: Tensor, ids: Tensor | None, mask: Tensor | None) -> Routing:
        topk = self.config.moe_router_topk
        scores = expert_scores(logits, "sigmoid" if topk == 1 else "softmax")
        if ids is None:
            balanced = sinkhorn(logits, self.cp_tp, mask=mask) if self.training else scores
            ids = top_experts(balanced, topk)
        return Routing(ids, scale_weights(scores.gather(1, ids), self.config))

    def _count(self, routing: Routing, mask: Tensor | None) -> None:
        if not is_replayed():
            counts = count_choices(routing.ids, self.config.num_experts, mask)
            self.step_counts += counts
            if self.config.moe_expert_capacity_factor and routing.keep is not None:
                self.step_dropped += counts.sum() - routing.keep.sum()

    def _losses(
        self,
        logits: Tensor,
        ids: Tensor | None,
        sequences: Tensor | None,
        num_sequences: int,
        mask: Tensor | None,
    ) -> Tensor | float:
        config = self.config
        total: Tensor | float = 0.0
        if config.moe_z_loss_coeff:
            z = z_loss(logits, mask, self.cp_tp)
            total = config.moe_z_loss_coeff * z
            self._note_loss(1, z)
        if config.moe_aux_loss_coeff:
            balance = self._balance_loss(logits, ids, sequences, num_sequences, mask)
            total = total + config.moe_aux_loss_coeff * balance
            self._note_loss(0, balance)
        if not is_replayed():
            self.step_losses[2].add_(1.0)
        return total

    def _note_loss(self, index: int, share: Tensor) -> None:
        """Add this rank's share of a loss to ``step_losses[index]``."""
        if not is_replayed():
            # finish_step divides the sum over ranks by the sum of their passes, and every rank
            # of cp_tp counts the pass: multiply the share by the number of these ranks.
            self.step_losses[index].add_(share.detach(), alpha=self.cp_tp.size)

    def _balance_loss(
        self,
        logits: Tensor,
        ids: Tensor | None,
        sequences: Tensor | None,
        num_sequences: int,
        mask: Tensor | None,
    ) -> Tensor:
        # Count the top-k of the scores: the loss must measure the imbalance that bias, groups
        # and capacity correct.
        topk, kind = self.config.moe_router_topk, self.config.moe_router_load_balancing_type
        scores = expert_scores(logits, self.config.moe_router_score_function)
        if self.config.moe_router_score_function != "softmax":
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        if ids is None:
            ids = top_experts(scores, topk)
        if kind == "seq_aux_loss":
            if sequences is None:
                sequences = torch.zeros(scores.shape[0], dtype=torch.int64, device=ids.device)
            return sequence_aux_loss(
                scores, ids, sequences, num_sequences, mask=mask, axis=self.cp_tp
            )
        counts = count_choices(ids, self.config.num_experts, mask)
        if mask is not None:
            scores = scores * mask[:, None]
        if kind == "aux_loss":
            return aux_loss(scores, counts, topk, self.cp_tp)
        return global_aux_loss(scores, counts, self._seen(counts), topk, self.cp_tp)

    def _seen(self, counts: Tensor) -> Tensor:
        if is_replayed():
            raise ValueError(
                "--moe-router-load-balancing-type global_aux_loss cannot be recomputed: the "
                "counts of the step have changed since the forward pass. Leave the router out "
                "of recomputation, or use aux_loss or seq_aux_loss."
            )
        self.step_scored_counts += counts
        return all_reduce(self.step_scored_counts, self.dp_cp_tp)


def _is_narrow(x: Tensor) -> bool:
    is_here = x.is_cuda and not torch.compiler.is_compiling() and not is_dtensor(x)
    return is_here and x.dtype == torch.bfloat16


class _WideLinear(OnceDifferentiable):
    """A linear of bfloat16 factors with a float32 result, without float32 copies.

    Forward sums exact products in float32, as a GEMM of float32 copies does. Backward splits
    the float32 gradient into a sum of two bfloat16 numbers, together 16 bits of precision.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        high = grad.to(x.dtype)
        high_low = torch.cat([high, (grad - high).to(x.dtype)], 1)  # [T, 2E]
        grad_weight = torch.mm(high_low.t(), x, out_dtype=torch.float32)
        grad_weight = grad_weight.view(2, *weight.shape).sum(0).to(weight.dtype)
        return high_low @ weight.repeat(2, 1), grad_weight
