"""The mixture-of-experts layer: route, dispatch, compute, combine.

Input and output are ``[T, D]``. The layer returns its auxiliary loss as a second output and
root of backward; no gradient is changed on its way. Every token is routed by exactly one
rank: under sequence parallelism the tensor ranks hold different tokens already, without it
the layer shares the tokens out among them and sums the results.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mcore_moe.config import MoEConfig
from mcore_moe.dispatch.dispatching import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    build_dispatcher,
)
from mcore_moe.dispatch.protocol import DispatchOptions
from mcore_moe.dispatch.symmetric import SymmetricDispatcher
from mcore_moe.expert_parallel import check_same
from mcore_moe.experts.chunked import run_in_parts, run_with_fixed_rows, run_with_read_rows
from mcore_moe.experts.experts import Experts
from mcore_moe.experts.latent import latent_projections
from mcore_moe.experts.shared_expert import SharedExpert
from mcore_moe.routing.router import Router
from mcore_moe.routing.topk import Routing
from mcore_parallel.autograd_functions import cast_factor
from mcore_parallel.collectives import copy_to, reduce_from
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.precision.fp8 import WeightCasts
from mcore_parallel.recomputing import recompute
from mcore_parallel.rng import RngStreams


class Routed(NamedTuple):
    """Tokens that know their experts, none of which travels yet."""

    sent: Float[Tensor, "t d"]
    """What will travel of those that this rank routes."""
    ids: Int[Tensor, "t k"]
    """Of ``Routing``, as are the next two."""
    probs: Float[Tensor, "t k"]
    keep: Bool[Tensor, "t k"] | None
    aux: Float[Tensor, ""]
    """This rank's share of the auxiliary losses."""
    shared: Float[Tensor, "T D"] | None
    """What the expert for all tokens says."""
    num_tokens: int
    """Of the layer's input: T."""


class MoELayer(nn.Module):
    """A feed-forward layer of many experts, few of which serve each token.

    Attributes:
        router: chooses experts, see ``Router``.
        experts: this rank's experts, see ``Experts``.
        shared: the expert for all tokens, or None.
        latent_down, latent_up: into the experts' narrower space and out of it, or None.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        config: MoEConfig,
        *,
        tp: Axis = SINGLE,
        cp_tp: Axis = SINGLE,
        dp_cp_tp: Axis = SINGLE,
        ep: Axis = SINGLE,
        ep_levels: tuple[Axis, Axis] = (SINGLE, SINGLE),
        expert_tp: Axis = SINGLE,
        streams: RngStreams | None = None,
        sequence_parallel: bool = False,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
        clamp: float = 0.0,
        offset: float = 0.0,
        init_std: float = 0.02,
        output_std: float | None = None,
        recompute_activation: bool = False,
        recompute_shared: bool = False,
        equal_tokens: bool = False,
        fp8_casts: WeightCasts | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate and initialise the layer; makes no group, no communication.

        Args:
            hidden_size: D.
            ffn_hidden_size: F of one expert where ``config.moe_ffn_hidden_size`` is 0.
            config: experts, routing, balance and dispatch.
            tp: tensor ranks, which hold the same tokens or (sequence parallel) neighbours.
            cp_tp: all ranks that share a micro-batch: counts are summed over them.
            dp_cp_tp: all ranks that share a step's batch; the global loss sums over them.
            ep: ranks that share the experts.
            ep_levels: ``ep`` between nodes and within one, if tokens travel in two steps.
            expert_tp: ranks that share each expert's matrices.
            streams: of random numbers, for the router's jitter; see ``Router``.
            sequence_parallel: whether tokens are cut over ``tp``.
            gated: whether experts have a gate and an up-projection.
            activation: see ``activations.ACTIVATIONS``.
            bias: whether the experts' GEMMs have one (the shared expert has none).
            clamp: of gates and up-projections, see ``activations.gated``.
            offset: of up-projections, likewise.
            init_std: of router and fc1; 0.0 leaves all zeros and draws nothing.
            output_std: of fc2; None: as fc1.
            recompute_activation: forget what goes into the experts' fc2, make it again in
                backward.
            recompute_shared: compute the shared expert again in backward.
            equal_tokens: whether in training all ranks of ``ep`` and ``expert_tp`` bring
                equally many tokens to every call, so that none has to say how many.
            fp8_casts: where casts of weights are kept with ``config.moe_experts_dtype``; None:
                nowhere, every call casts them.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: if there are no experts, or they do not fit the axes.
        """
        super().__init__()
        if config.num_experts == 0:
            raise ValueError("--num-experts 0 means no experts: set it to 1 or more.")
        placed = {"device": device, "dtype": dtype}
        self.tp = tp
        self.recompute_shared = recompute_shared
        self.splits_tokens = tp.size > 1 and not sequence_parallel
        self.router = Router(
            hidden_size,
            config,
            tp=tp,
            cp_tp=cp_tp,
            dp_cp_tp=dp_cp_tp,
            streams=streams,
            init_std=init_std,
            **placed,
        )
        feed_forward = {
            "gated": gated,
            "activation": activation,
            "clamp": clamp,
            "offset": offset,
            "init_std": init_std,
            "output_std": output_std,
            **placed,
        }
        down, up = latent_projections(
            hidden_size, config.moe_latent_size, (init_std, output_std), tp=tp, **placed
        )
        self.latent_down, self.latent_up = down, up
        self.experts = Experts(
            config.moe_latent_size or hidden_size,
            config.moe_ffn_hidden_size or ffn_hidden_size,
            config.num_experts,
            ep=ep,
            expert_tp=expert_tp,
            bias=bias,
            grouped=config.moe_grouped_gemm,
            probs_on_input=config.moe_apply_probs_on_input,
            recompute_activation=recompute_activation,
            fp8_casts=(fp8_casts or WeightCasts()) if config.moe_experts_dtype else None,
            wgrad_micro_batches=config.moe_wgrad_micro_batches,
            **feed_forward,
        )
        self.shared = (
            SharedExpert(
                hidden_size,
                config.moe_shared_expert_intermediate_size,
                tp=tp,
                sequence_parallel=sequence_parallel,
                has_token_gate=config.moe_shared_expert_gate,
                **feed_forward,
            )
            if config.moe_shared_expert_intermediate_size
            else None
        )
        self.dispatcher = build_dispatcher(config, ep, expert_tp, ep_levels)
        self.equal_tokens = equal_tokens
        self.peers = (cp_tp, ep)
        self._is_compared = False

    def forward(
        self,
        x: Float[Tensor, "T D"],
        num_sequences: int = 1,
        mask: Bool[Tensor, " T"] | None = None,
    ) -> tuple[Float[Tensor, "T D"], Float[Tensor, ""]]:
        """Send each token through its experts.

        Exchanges tokens over ``ep`` and ``expert_tp``, counts over ``cp_tp`` in training. The
        first call compares the routers of these ranks, except in compiled code.

        Args:
            x: this rank's tokens; whole and equal over ``tp`` unless sequence parallel.
            num_sequences: B when x is the flat view of ``[S, B, D]``: token t belongs to
                sequence t % B. Only the loss by sequence needs it.
            mask: true for real tokens, false for padding, which no expert computes (the shared
                one does) and no statistic counts; cut like x. Left out: all are real.

        Returns:
            The output, cut like x, and this rank's share of the auxiliary losses times their
            coefficients: summed over ``cp_tp`` it is the loss of the micro-batch, so its
            gradients are summed over these ranks like any other. 0 in eval mode.

        Raises:
            ValueError: on all ranks, if they hold different routers.
        """
        self._check_routers()
        begin, end = self._own_tokens(x.shape[0])
        own, sent, sequences = self._own(x, num_sequences)
        own_mask = mask if mask is None else mask[begin:end]
        equal_tokens = self._has_equal_tokens(x.shape[0])
        in_flight = self.dispatcher.begin(sent, equal_tokens=equal_tokens)
        routing, aux = self.router(own, sequences, num_sequences, own_mask)
        shared: list[Tensor] = []
        overlap = None
        if self.router.config.moe_shared_expert_overlap:
            overlap = lambda: shared.append(self._shared_output(x))  # noqa: E731
        options = DispatchOptions(equal_tokens, in_flight, overlap)
        y = self._exchanged(sent, routing, options, x.shape[0])
        if self.shared is not None:
            y = y + (shared[0] if shared else self._shared_output(x))
        return y, aux

    def route(self, x: Float[Tensor, "T D"], num_sequences: int = 1) -> Routed:
        """Do what comes before tokens travel, whose sizes do not depend on routing.

        ``exchange`` does the rest: together they are ``forward``, one after the other.

        Args:
            x: see ``forward``, as is the other.
            num_sequences: see there.
        """
        self._check_routers()
        own, sent, sequences = self._own(x, num_sequences)
        routing, aux = self.router(own, sequences, num_sequences)
        shared = None if self.shared is None else self._shared_output(x)
        return Routed(sent, routing.ids, routing.probs, routing.keep, aux, shared, x.shape[0])

    def exchange(self, routed: Routed) -> Float[Tensor, "T D"]:
        """Send tokens to their experts and add up what these say of each; see ``route``."""
        equal_tokens = self._has_equal_tokens(routed.num_tokens)
        in_flight = self.dispatcher.begin(routed.sent, equal_tokens=equal_tokens)
        routing = Routing(routed.ids, routed.probs, routed.keep)
        options = DispatchOptions(equal_tokens, in_flight)
        y = self._exchanged(routed.sent, routing, options, routed.num_tokens)
        return y if routed.shared is None else y + routed.shared

    def take_turns(self, change: Callable[[], None]) -> None:
        """Call a function from now on while tokens, sums or their gradients travel.

        Forward and backward do so the same number of times on all ranks of ``ep``; not where
        experts' ranks are one, or tokens are gathered of which ranks bring different numbers.
        """
        if isinstance(self.dispatcher, AllToAllDispatcher | AllGatherDispatcher):
            self.dispatcher.meanwhile = change

    def _shared_output(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        again = self.recompute_shared and self.training
        return recompute(self.shared, x) if again else self.shared(x)

    def _own(self, x: Tensor, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens that this rank routes, what travels, and their sequences."""
        begin, end = self._own_tokens(x.shape[0])
        own = copy_to(x, self.tp)[begin:end] if self.splits_tokens else x
        sent = cast_factor(own)
        if self.latent_down is not None:
            sent = self.latent_down(sent)
        return own, sent, torch.arange(begin, end, device=x.device) % num_sequences

    def _has_equal_tokens(self, num_tokens: int) -> bool:
        is_cut_evenly = not self.splits_tokens or num_tokens % self.tp.size == 0
        return self.equal_tokens and self.training and is_cut_evenly

    def _exchanged(
        self, sent: Tensor, routing: Routing, options: DispatchOptions, num_tokens: int
    ) -> Tensor:
        """Send tokens to their experts, and return sums for all tokens of the layer."""
        y = self._by_experts(sent, routing, options)
        if self.latent_up is not None:
            y = self.latent_up(y)
        if self.splits_tokens:
            begin, end = self._own_tokens(num_tokens)
            y = reduce_from(F.pad(y, (0, 0, begin, num_tokens - end)), self.tp)
        return y

    def _by_experts(self, x: Tensor, routing: Routing, options: DispatchOptions) -> Tensor:
        """Send tokens to their experts, and sum what these say of each."""
        config, dispatcher = self.router.config, self.dispatcher
        limit, splits = config.moe_expert_rows_limit, config.moe_split_batch_overlap
        if (limit or splits) and isinstance(dispatcher, AllToAllDispatcher):
            how = {"splits": splits, "overlap": options.overlap}
            return run_in_parts(dispatcher, x, routing, self.experts, limit, **how)
        if limit and isinstance(dispatcher, AllGatherDispatcher):
            return run_with_fixed_rows(dispatcher, x, routing, self.experts, limit, options)
        if limit and isinstance(dispatcher, SymmetricDispatcher):
            return run_with_read_rows(dispatcher, x, routing, self.experts, limit, options)
        sent = dispatcher.dispatch(x, routing, options)
        return dispatcher.combine(self.experts(sent.x, sent.probs, sent.plan), sent.handle)

    def _check_routers(self) -> None:
        """Compare the routers of ranks that exchange tokens, once: they must be equal."""
        if self._is_compared or torch.compiler.is_compiling():
            return
        self._is_compared = True
        weight = self.router.weight
        if not isinstance(weight, DTensor):  # sharded by itself, so made alike
            for axis in self.peers:
                check_same({"the router": weight}, axis)

    def _own_tokens(self, num_tokens: int) -> tuple[int, int]:
        """Return the range of tokens that this rank routes; shares differ by one at most."""
        if not self.splits_tokens:
            return 0, num_tokens
        size, rank = self.tp.size, self.tp.rank
        return num_tokens * rank // size, num_tokens * (rank + 1) // size
