"""Multi-head latent attention: keys and values of all heads from one small vector per token.

Later tokens need only a token's latent vector (``kv_lora_rank`` channels) and one rotated key
shared by all heads, so a cache stores only these two. In training the latent vector is
projected up to keys and values of every head. In decoding the projection is absorbed: queries
are projected down instead and attend to the latent vectors.

Heads are split over the tensor ranks. The down-projections are replicated. Heads of all ranks
read their outputs, so the gradients of these outputs are summed over the tensor ranks.

DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.building.layouts import cp_comm_type
from mcore_models.config import TransformerConfig, yarn_magnitude
from mcore_models.kernels.attention_backends import (
    attend,
    check_backend,
    same_document,
    visible_keys,
)
from mcore_models.kernels.fused_blocks import blocks_for
from mcore_models.kernels.rope import RotaryTables, rotate
from mcore_models.kernels.selected_attention import (
    Selection,
    attend_to_mask,
    index_scores,
    pack_keys,
    pack_queries,
    selected_keys,
)
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.norm import LayerNorm, RMSNorm
from mcore_models.layers.replicated_linear import ReplicatedLinear
from mcore_models.mup import score_scale
from mcore_models.peft.lora import full_weight
from mcore_models.protocol import LayerState
from mcore_models.qk_clip.score_tracking import ScoreTracker, largest_scores
from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.collectives import all_gather, copy_to, gather_partial_from
from mcore_parallel.context_parallel.all_gather_attention import all_gather_attention
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.ring_attention import (
    hierarchical_attention,
    ring_attention,
)
from mcore_parallel.context_parallel.zigzag import context_attention, ulysses_attention
from mcore_parallel.mesh import SINGLE

LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors, as in DeepSeek's release; ``--norm-epsilon`` does not
change it."""
_NO_INPUTS = BlockInputs()


class Indexer(nn.Module):
    """Selects the keys of each token of one layer; replicated over the tensor ranks.

    The indexer is not trained: the model's loss has no gradient with respect to a selection.
    DeepSeek's loss of the indexer, the divergence from attention weights, needs these weights,
    which fused kernels do not return.

    Attributes:
        q_up: the queries' latent vector to queries of the indexer.
        k: D to the index key, which all heads share.
        k_norm: LayerNorm of the key.
        weights: D to the weights of the heads.
    """

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate the weights, zero until the model fills them."""
        super().__init__()
        config, self.tp = setup.config, setup.ctx.tp
        self.sequence_parallel = setup.sequence_parallel
        self.selection = Selection(
            heads=config.dsa_indexer_n_heads,
            channels=config.dsa_indexer_head_dim,
            topk=config.dsa_indexer_topk,
        )
        heads, C, D = self.selection.heads, self.selection.channels, config.hidden_size
        replicated: dict[str, Any] = {"axis": setup.ctx.tp, **setup.factory_kwargs}
        self.q_up = ReplicatedLinear(config.q_lora_rank, heads * C, **replicated)
        self.k = ReplicatedLinear(D, C, **replicated)
        self.k_norm = LayerNorm(
            C, epsilon=LATENT_EPSILON, replicas=setup.ctx.tp, **setup.factory_kwargs
        )
        self.weights = ReplicatedLinear(D, heads, **replicated)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self, x: Float[Tensor, "s B D"], x_q: Float[Tensor, "s B R"], rotary: RotaryTables
    ) -> tuple[Float[Tensor, "S B I C"], Float[Tensor, "S B I"], Float[Tensor, "S B C"]]:
        """Return the indexer's queries, weights of heads and keys for all tokens.

        All-gathers latent vectors, keys and weights under sequence parallelism.
        """
        heads, C = self.selection.heads, self.selection.channels
        k, weights = self.k_norm(self.k(x)), self.weights(x)
        if self.sequence_parallel:
            x_q, k, weights = (all_gather(part, self.tp) for part in (x_q, k, weights))
        q = rotate(self.q_up(x_q).unflatten(-1, (heads, C)), rotary)
        k = rotate(k.unsqueeze(2), rotary).squeeze(2)
        return q, weights * (heads * C) ** -0.5, k


class LatentAttention(nn.Module):
    """Causal multi-head latent attention of one layer.

    Attributes:
        q: D to this rank's queries, without ``q_lora_rank``.
        q_down, q_norm, q_up: D to the queries' latent vector, its norm, to this rank's
            queries, with ``q_lora_rank``.
        kv_down: D to the latent vector of keys and values, and to the shared rotated key.
        kv_norm: norm of the latent vector, or None.
        kv_up: latent vector to this rank's keys (their part that is not rotated) and values.
        proj: heads to D.
        indexer: selects keys, with ``dsa_indexer_topk``, or None.
        tracker: records the largest scores of its heads in training, or None.
    """

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate this rank's heads; weights are zero until the model fills them.

        Down-projections to latent vectors multiply in the model's dtype, up-projections by
        ``setup.gemms``. With ``core_attn`` backward recomputes everything after the
        up-projections, with ``mla_up_proj`` also the up-projections.
        """
        super().__init__()
        config, ctx, self.layer = setup.config, setup.ctx, setup.layer
        self.config, self.tp, self.cp = config, ctx.tp, ctx.cp
        self.streams, self.recomputed = setup.streams, setup.recomputed
        self.comm_type = cp_comm_type(config, ctx.config, self.layer)
        self.cp_levels = ctx.cp_exchange, ctx.cp_ring
        self.backend = setup.kernels.attention_backend
        check_backend(self.backend)
        self.attend: Callable[..., Tensor] = attend
        self.sequence_parallel = setup.sequence_parallel
        self.tracker: ScoreTracker | None = None
        D, N = config.hidden_size, config.num_attention_heads
        R, rotated = config.kv_lora_rank, config.qk_pos_emb_head_dim
        self.key_sizes = (config.qk_head_dim, rotated)
        self.score_factor = _score_factor(config)
        factory_kwargs = setup.factory_kwargs
        replicated: dict[str, Any] = {
            "axis": ctx.tp,
            "sequence_parallel": self.sequence_parallel,
            **factory_kwargs,
        }
        queries = N * sum(self.key_sizes)
        if config.q_lora_rank:
            self.q_down = ReplicatedLinear(D, config.q_lora_rank, **replicated)
            self.q_norm = self._norm(config.q_lora_rank, factory_kwargs)
            self.q_up = setup.column_linear(config.q_lora_rank, queries)
        else:
            self.q = setup.column_linear(D, queries)
        self.kv_down = ReplicatedLinear(D, R + rotated, **replicated)
        self.kv_norm = self._norm(R, factory_kwargs)
        self.kv_up = setup.column_linear(R, N * (config.qk_head_dim + config.v_head_dim))
        self.indexer = Indexer(setup) if config.dsa_indexer_topk else None
        self.proj = setup.row_linear(N * config.v_head_dim, D, bias=config.add_bias_linear)

    def _norm(self, size: int, factory_kwargs: dict[str, Any]) -> RMSNorm | None:
        """Build the norm of a latent vector, or return None if the model has none."""
        if not self.config.qk_layernorm:
            return None
        partial = self.tp if self.sequence_parallel else SINGLE
        return RMSNorm(
            size, epsilon=LATENT_EPSILON, replicas=self.tp, partial=partial, **factory_kwargs
        )

    def forward(
        self, x: Float[Tensor, "s B D"], inputs: BlockInputs = _NO_INPUTS
    ) -> Float[Tensor, "s B D"]:
        """Attend from every token to itself and earlier tokens; return the projected output.

        Communicates in its linears (sequence parallelism gathers latent vectors, not D
        channels), and over ``cp``.

        Args:
            x: this rank's tokens.
            inputs: their rotary tables, documents and state.
        """
        latents = (*self._latents(x), inputs)
        index = None
        if self.indexer is not None and inputs.rotary is not None:
            index = self.indexer(x, latents[0], inputs.rotary)
        if inputs.state is not None:
            mixed = self._decode(*latents, inputs.state.layer(self.layer), index)
        elif (mask := self._selected(index, inputs.documents)) is not None:
            mixed = self._mixed(*latents, mask)
        elif "mla_up_proj" in self.recomputed and self.training:
            mixed = recompute(self._mixed, *latents, streams=self.streams)
        else:
            mixed = self._mixed(*latents)
        return self.proj(mixed)

    def _latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project down: return the input of queries, the latent of keys, and the shared key."""
        if self.config.q_lora_rank:
            x_q = self.q_down(x)
            x_q = x_q if self.q_norm is None else self.q_norm(x_q)
        else:
            x_q = x
        sizes = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        latent, k_rotated = self.kv_down(x).split(sizes, dim=-1)
        latent = latent if self.kv_norm is None else self.kv_norm(latent)
        # Heads on every rank read the complete key, like the input of a column-parallel linear.
        gather = gather_partial_from if self.sequence_parallel else copy_to
        return x_q, latent, gather(k_rotated, self.tp)

    def _selected(
        self, index: tuple[Tensor, ...] | None, documents: Documents | None
    ) -> Tensor | None:
        """Return a mask of the selected keys; None if every query attends to all keys."""
        if self.indexer is None or index is None:
            return None
        (q, weights, k), topk = index, self.indexer.selection.topk
        if len(k) <= topk:
            return None
        visible = visible_keys(len(q), len(k), device=q.device)
        if documents is not None:
            visible = same_document(documents, len(q), len(k), q.device).squeeze(1) & visible
        return selected_keys(index_scores(q, weights, k), visible, topk)

    def _project_queries(self, x_q: Tensor) -> Tensor:
        return self.q_up(x_q) if self.config.q_lora_rank else self.q(x_q)

    def _split_queries(self, q: Tensor, rotary: RotaryTables | None) -> tuple[Tensor, Tensor]:
        """Return unrotated and rotated channels of this rank's queries ``[S, B, N, .]``."""
        q = q.unflatten(-1, (-1, sum(self.key_sizes)))  # [S, B, N*H] -> [S, B, N, H]
        if self.score_factor != 1.0:
            q = q * self.score_factor
        plain, rotated = q.split(self.key_sizes, dim=-1)
        return plain, self._rotated(rotated, rotary)

    def _rotated(self, x: Tensor, rotary: RotaryTables | None) -> Tensor:
        return x if rotary is None else rotate(x, rotary, self.config.rotary_interleaved)

    def _mixed(
        self,
        x_q: Tensor,
        latent: Tensor,
        k_rotated: Tensor,
        inputs: BlockInputs,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Project up and attend: to the keys of ``mask``, or without a mask to all keys."""
        tensors = self._project_queries(x_q), self.kv_up(latent), k_rotated
        if "core_attn" in self.recomputed and self.training:
            return recompute(self._core, *tensors, inputs, mask, streams=self.streams)
        return self._core(*tensors, inputs, mask)

    def _core(
        self,
        q: Tensor,
        kv: Tensor,
        k_rotated: Tensor,
        inputs: BlockInputs,
        mask: Tensor | None = None,
    ) -> Float[Tensor, "S B X"]:
        q = torch.cat(self._split_queries(q, inputs.rotary), -1)
        sizes = self.config.qk_head_dim, self.config.v_head_dim
        k_plain, v = kv.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
        shared = self._rotated(k_rotated.unsqueeze(2), inputs.rotary)
        k = torch.cat([k_plain, shared.expand(-1, -1, q.shape[2], -1)], -1)
        if mask is not None:
            prob = self.config.attention_dropout if self.training else 0.0
            with self.streams.fork("tensor_parallel") if prob else nullcontext():
                return attend_to_mask(q, k, v, mask, dropout_prob=prob).flatten(-2)
        return self._mix(q, k, v, inputs.documents).flatten(-2)  # [S, B, N, J] -> [S, B, N*J]

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        """Attend over the complete sequence, including keys of other context ranks."""
        if self.tracker is not None and self.training:
            self.tracker.note(largest_scores(q, k, cp=self.cp, documents=documents))
        attend_on_rank = partial(self._attend, documents=documents)
        if self.cp.size == 1:
            return attend_on_rank(q, k, v)
        if self.comm_type == "a2a":
            return ulysses_attention(q, k, v, self.cp, attend_on_rank)
        if self.comm_type == "all_gather" and self.config.attention_dropout > 0:
            return context_attention(q, k, v, self.cp, attend_on_rank)
        channels = v.shape[-1]  # fused blocks require values as wide as queries
        v = F.pad(v, (0, max(0, q.shape[-1] - channels)))
        by_blocks = {
            "a2a+p2p": partial(hierarchical_attention, levels=self.cp_levels),
            "p2p": partial(ring_attention, axis=self.cp),
            "all_gather": partial(all_gather_attention, axis=self.cp),
        }[self.comm_type]
        blocks = blocks_for(q, v, self.backend)
        return by_blocks(q, k, v, attention=blocks, documents=documents)[..., :channels]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        prob = self.config.attention_dropout if self.training else 0.0
        # Tensor ranks have different heads: each rank draws its own dropout mask.
        stream = self.streams.fork("tensor_parallel") if prob else nullcontext()
        with stream:
            return self.attend(
                q, k, v, dropout_prob=prob, documents=documents, backend=self.backend
            )

    def _decode(
        self,
        x_q: Tensor,
        latent: Tensor,
        k_rotated: Tensor,
        inputs: BlockInputs,
        layer_state: LayerState,
        index: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "S B X"]:
        """Attend to stored latent vectors: one key head, whose first R channels are the values.

        With c the latent vector and K, V a head's rows of ``kv_up``, the head's score is
        q·(K c) = (K^T q)·c and its output sum(p V c) = V sum(p c), so keys and values of heads
        are never computed.
        """
        R = self.config.kv_lora_rank
        sizes = self.config.qk_head_dim, self.config.v_head_dim
        weight = full_weight(self.kv_up).unflatten(0, (-1, sum(sizes)))
        to_keys, to_values = weight.split(sizes, dim=1)  # [N, nope, R], [N, J, R]
        plain, q_rotated = self._split_queries(self._project_queries(x_q), inputs.rotary)
        if self.sequence_parallel:
            latent = gather_partial_from(latent, self.tp)
        q = torch.cat([torch.einsum("sbnh,nhr->sbnr", plain, to_keys), q_rotated], -1)
        # A state scales scores by 1/sqrt(R + rotated), the width of q without the indexer's
        # channels; the model's scale is 1/sqrt(nope + rotated).
        q = q * math.sqrt(q.shape[-1] / sum(self.key_sizes))
        k_rotated = self._rotated(k_rotated.unsqueeze(2), inputs.rotary)
        k = torch.cat([latent.unsqueeze(2), k_rotated], -1)
        options: dict[str, Any] = {"value_dim": R, "backend": self.backend}
        if self.indexer is not None and index is not None:
            q, k = pack_queries(q, index[0], index[1]), pack_keys(k, index[2])
            options["selection"] = self.indexer.selection
        # The slice drops the heads of the packed indexer.
        mixed = layer_state.attend(q, k, None, **options)[:, :, : plain.shape[2]]
        return torch.einsum("sbnr,njr->sbnj", mixed, to_values).flatten(-2)


def _score_factor(config: TransformerConfig) -> float:
    """Return the factor on scores in addition to 1 / sqrt(width): muP's times YaRN's."""
    width = config.qk_head_dim + config.qk_pos_emb_head_dim
    factor = score_scale(config, width) * math.sqrt(width) if config.use_mup else 1.0
    if config.rope_type != "yarn":
        return factor
    return factor * yarn_magnitude(config.rotary_scaling_factor, config.mscale_all_dim) ** 2
