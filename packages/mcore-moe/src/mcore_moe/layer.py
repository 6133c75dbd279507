"""The mixture-of-experts layer: route, dispatch, compute, combine.

Input and output are ``[T, D]``. The auxiliary loss is a second output, which the caller adds to
the loss or passes to backward as a second root. Exactly one rank routes each token: under
sequence parallelism tensor ranks have different tokens; otherwise the layer splits the tokens
over tp, and sums the zero-padded outputs over tp.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mcore_moe.axes import ONE_RANK, MoEAxes
from mcore_moe.config import MoEConfig
from mcore_moe.dispatch.dispatching import build_dispatcher
from mcore_moe.dispatch.protocol import DispatchOptions
from mcore_moe.expert_parallel import check_same
from mcore_moe.experts.experts import Experts
from mcore_moe.experts.latent import latent_projections
from mcore_moe.experts.network import DEFAULT_NETWORK, ExpertNetwork
from mcore_moe.experts.shared_expert import SharedExpert
from mcore_moe.routing.router import Router
from mcore_moe.routing.topk import Routing
from mcore_parallel.autograd.functions import cast_factor
from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.collectives import OverlapCallback, copy_to, reduce_from
from mcore_parallel.dtensors import is_dtensor
from mcore_parallel.precision.fp8 import WeightCasts
from mcore_parallel.rng import RngStreams


@dataclass(frozen=True, kw_only=True, slots=True)
class MoERuntime:
    """Random streams, caches and assumptions of a training program, for its expert layers."""

    streams: RngStreams | None = None
    """Random streams of the router's jitter, see ``Router``."""
    fp8_casts: WeightCasts | None = None
    """Cache of the weights' casts, used with ``moe_experts_dtype``; None: every call casts the
    weights."""
    equal_tokens: bool = False
    """Whether in training all ranks of ``ep`` and ``expert_tp`` have the same number of tokens
    in every call, so that they need not exchange it."""
    recompute_shared: bool = False
    """Whether backward computes the shared expert again."""


_ALONE = MoERuntime()


class RoutedTokens(NamedTuple):
    """Routed tokens before dispatch, the auxiliary loss and the shared expert's output."""

    inputs: Float[Tensor, "t d"]
    """Inputs of the experts: the tokens that this rank routes."""
    ids: Int[Tensor, "t k"]
    """``Routing.ids``."""
    probs: Float[Tensor, "t k"]
    """``Routing.probs``."""
    keep: Bool[Tensor, "t k"] | None
    """``Routing.keep``."""
    aux_loss: Float[Tensor, ""]
    """This rank's share of the auxiliary losses."""
    shared_output: Float[Tensor, "T D"] | None
    """Output of the shared expert, or None."""
    num_tokens: int
    """T of the layer's input."""


class MoELayer(nn.Module):
    """Feed-forward layer in which the router sends each token to k of E experts.

    Attributes:
        router: chooses experts, see ``Router``.
        experts: this rank's experts, see ``Experts``.
        shared: the expert that every token runs through, or None.
        latent_down, latent_up: projections into the experts' latent space and out of it, or
            None.
        dispatcher: exchanges tokens with the ranks of their experts, see ``Dispatcher``.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        config: MoEConfig,
        network: ExpertNetwork = DEFAULT_NETWORK,
        *,
        axes: MoEAxes = ONE_RANK,
        runtime: MoERuntime = _ALONE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate and initialise the layer; no communication.

        Args:
            hidden_size: D.
            ffn_hidden_size: F of one expert if ``config.moe_ffn_hidden_size`` is 0.
            config: options of experts, routing, balance and dispatch.
            network: layers and activation of each expert, routed and shared.
            axes: ranks that share the experts, and ranks that share the tokens.
            runtime: random streams, caches and assumptions of the training program.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ValueError: if there are no experts, or the axes do not divide the experts.
        """
        super().__init__()
        if config.num_experts == 0:
            raise ValueError("--num-experts 0 means no experts: set it to 1 or more.")
        factory_kwargs = {"device": device, "dtype": dtype}
        self.tp = axes.tp
        self.runtime = runtime
        self.splits_tokens = axes.tp.size > 1 and not axes.sequence_parallel
        self.router = Router(
            hidden_size,
            config,
            axes=axes,
            streams=runtime.streams,
            init_std=network.init_std,
            **factory_kwargs,
        )
        stds = network.init_std, network.fc2_std
        self.latent_down, self.latent_up = latent_projections(
            hidden_size, config.moe_latent_size, stds, tp=axes.tp, **factory_kwargs
        )
        self.experts = Experts(
            config.moe_latent_size or hidden_size,
            config.moe_ffn_hidden_size or ffn_hidden_size,
            config,
            network,
            axes=axes,
            fp8_casts=runtime.fp8_casts or WeightCasts() if config.moe_experts_dtype else None,
            **factory_kwargs,
        )
        self.shared: SharedExpert | None = None
        if config.moe_shared_expert_intermediate_size:
            self.shared = SharedExpert(
                hidden_size,
                config.moe_shared_expert_intermediate_size,
                network,
                axes=axes,
                has_token_gate=config.moe_shared_expert_gate,
                **factory_kwargs,
            )
        self.dispatcher = build_dispatcher(config, axes.ep, axes.expert_tp, axes.ep_levels)
        self.router_axes = (axes.cp_tp, axes.ep)
        self._has_compared_routers = False

    def forward(
        self,
        x: Float[Tensor, "T D"],
        num_sequences: int = 1,
        mask: Bool[Tensor, " T"] | None = None,
    ) -> tuple[Float[Tensor, "T D"], Float[Tensor, ""]]:
        """Return the weighted sum of each token's experts, and the auxiliary loss.

        Exchanges tokens over ``ep`` and ``expert_tp``, and in training counts over ``cp_tp``.
        The first call compares the routers of these ranks, except in compiled code.

        Args:
            x: this rank's tokens; equal on all ranks of ``tp`` unless sequence parallel.
            num_sequences: B if x is the flat view of ``[S, B, D]``: token t belongs to
                sequence t % B. Only the loss by sequence reads it.
            mask: true for real tokens, false for padding, which routed experts do not compute
                and statistics do not count; split like x. None: all tokens are real.

        Returns:
            The output, split like x, and this rank's share of the auxiliary losses times their
            coefficients, 0 in eval mode. The sum of the shares over ``cp_tp`` is the loss of
            the micro-batch, so gradients are summed over these ranks.

        Raises:
            ValueError: on all ranks, if they hold different routers.
        """
        self._check_routers()
        tokens, sequences, mask = self._split_tokens(x, num_sequences, mask)  # [T, D] -> [t, D]
        inputs = self._expert_inputs(tokens)
        equal_tokens = self._has_equal_tokens(x.shape[0])
        # allgather sends all tokens, so its exchange does not need the routing: it overlaps the
        # router.
        in_flight = self.dispatcher.begin(inputs, equal_tokens=equal_tokens)
        routing, aux_loss = self.router(tokens, sequences, num_sequences, mask)
        # With --moe-shared-expert-overlap the dispatcher calls ``overlap`` during its exchange.
        # A dispatcher that does not exchange asynchronously may leave the list empty.
        shared: list[Tensor] = []
        overlap = None
        if self.router.config.moe_shared_expert_overlap:
            overlap = lambda: shared.append(self._shared_output(x))  # noqa: E731
        options = DispatchOptions(equal_tokens, in_flight, overlap)
        y = self._join_tokens(
            self.dispatcher.run(inputs, routing, self.experts, options), x.shape[0]
        )
        if self.shared is not None:
            y = y + (shared[0] if shared else self._shared_output(x))
        return y, aux_loss

    def route(self, x: Float[Tensor, "T D"], num_sequences: int = 1) -> RoutedTokens:
        """Route tokens and run the shared expert; return the input of ``run_experts``.

        No tensor's size depends on the routing. ``run_experts`` computes the rest of
        ``forward``.

        Args:
            x: as in ``forward``.
            num_sequences: as in ``forward``.
        """
        self._check_routers()
        tokens, sequences, _ = self._split_tokens(x, num_sequences, None)
        inputs = self._expert_inputs(tokens)
        routing, aux_loss = self.router(tokens, sequences, num_sequences)
        shared = None if self.shared is None else self._shared_output(x)
        ids, probs, keep = routing.ids, routing.probs, routing.keep
        return RoutedTokens(inputs, ids, probs, keep, aux_loss, shared, x.shape[0])

    def run_experts(self, routed: RoutedTokens) -> Float[Tensor, "T D"]:
        """Dispatch routed tokens, run the experts and return the layer's output."""
        equal_tokens = self._has_equal_tokens(routed.num_tokens)
        in_flight = self.dispatcher.begin(routed.inputs, equal_tokens=equal_tokens)
        routing = Routing(routed.ids, routed.probs, routed.keep)
        options = DispatchOptions(equal_tokens, in_flight)
        y = self.dispatcher.run(routed.inputs, routing, self.experts, options)
        y = self._join_tokens(y, routed.num_tokens)
        return y if routed.shared_output is None else y + routed.shared_output

    def set_overlap_callback(self, callback: OverlapCallback) -> None:
        """Set a function that the dispatcher calls during each of its exchanges.

        All ranks of ``ep`` call the function equally often, in forward and backward. It is not
        called on one rank, or if ranks all-gather different numbers of tokens.
        """
        self.dispatcher.set_overlap_callback(callback)

    def _shared_output(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        recomputes = self.runtime.recompute_shared and self.training
        return recompute(self.shared, x) if recomputes else self.shared(x)

    def _split_tokens(
        self, x: Tensor, num_sequences: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tokens that this rank routes, their sequences and their mask."""
        begin, end = self._token_range(x.shape[0])
        tokens = x
        if self.splits_tokens:
            # copy_to is the identity; its backward all-reduces over tp, since each rank's
            # gradient is zero for the tokens of the other ranks.
            tokens = copy_to(x, self.tp)[begin:end]
        sequences = torch.arange(begin, end, device=x.device) % num_sequences
        return tokens, sequences, mask if mask is None else mask[begin:end]

    def _expert_inputs(self, tokens: Tensor) -> Tensor:
        """Return the tokens to dispatch: in autocast's dtype, projected to the latent space."""
        tokens = cast_factor(tokens)
        return tokens if self.latent_down is None else self.latent_down(tokens)

    def _join_tokens(self, y: Tensor, num_tokens: int) -> Tensor:
        """Return outputs in the model's width for all tokens of the layer's input."""
        if self.latent_up is not None:
            y = self.latent_up(y)
        if self.splits_tokens:
            # An all-reduce of zero-padded outputs in place of an all-gather: its backward is
            # the identity, so that every rank gets the gradient of its tokens.
            begin, end = self._token_range(num_tokens)
            y = reduce_from(F.pad(y, (0, 0, begin, num_tokens - end)), self.tp)
        return y

    def _has_equal_tokens(self, num_tokens: int) -> bool:
        is_cut_evenly = not self.splits_tokens or num_tokens % self.tp.size == 0
        return self.runtime.equal_tokens and self.training and is_cut_evenly

    def _check_routers(self) -> None:
        """In the first call, compare the routers of ranks that exchange tokens."""
        if self._has_compared_routers or torch.compiler.is_compiling():
            return
        self._has_compared_routers = True
        weight = self.router.weight
        if not is_dtensor(weight):  # under FSDP2 ranks hold rows of one weight, no copies
            for axis in self.router_axes:
                check_same("the router", weight, axis)

    def _token_range(self, num_tokens: int) -> tuple[int, int]:
        """Return the range of tokens that this rank routes; shares differ by one at most."""
        if not self.splits_tokens:
            return 0, num_tokens
        size, rank = self.tp.size, self.tp.rank
        return num_tokens * rank // size, num_tokens * (rank + 1) // size
