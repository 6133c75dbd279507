"""Self-attention with grouped key/value heads, split by heads over the tensor ranks.

One GEMM computes queries, keys and values. With fewer key/value heads than tensor ranks,
neighbouring ranks hold the same key/value heads; the gradient of these heads is the sum of the
parts that come from each rank's queries. Under context parallelism ``--cp-comm-type``
determines how ranks get the keys and values of each other's tokens.

The calls, outermost first: ``forward`` (GEMMs), ``_core`` (heads, rotation, gates),
``_attend_over_cp`` (exchange over context ranks), ``_attend`` (dropout and kernel).
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_models.building.layouts import cannot_be_cut, cp_comm_type
from mcore_models.config import chunk, is_rotated, window
from mcore_models.kernels.alibi import alibi_slopes
from mcore_models.kernels.attention_backends import attend, check_backend
from mcore_models.kernels.fused_blocks import blocks_for
from mcore_models.kernels.rope import RotaryTables, rotate
from mcore_models.layer_patterns import is_local, keys_layer
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.norm import HeadNorm, RMSNorm, SplitRMSNorm, build_norm, l2_normed
from mcore_models.layers.rope import rotary_kernel
from mcore_models.logical_tensors import (
    has_attention_bias,
    has_qkv_bias,
    head_dim,
    num_kv_heads,
    qkv_parts,
)
from mcore_models.mup import score_scale
from mcore_models.qk_clip.score_tracking import ScoreTracker, largest_scores
from mcore_parallel.autograd.recomputing import recompute
from mcore_parallel.context_parallel.all_gather_attention import all_gather_attention
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.context_parallel.ring_attention import ring_attention
from mcore_parallel.context_parallel.zigzag import (
    context_attention,
    ulysses_attention,
)
from mcore_parallel.mesh import Axis
from mcore_parallel.sharding import ParamLayout, sliced_layout
from mcore_parallel.tensor_parallel.linear import (
    LinearOutput,
)

_NO_INPUTS = BlockInputs()


class Attention(nn.Module):
    """Causal self-attention of one layer.

    Attributes:
        qkv: D to this rank's queries, keys, values and output gates, in this order. Layers
            that reuse the keys of another layer have no keys and values; layers whose keys
            are also their values have no values.
        proj: heads to D.
        q_norm, k_norm: norms of each head, or of all heads as one, or None.
        sinks: a score of each of this rank's heads for a sink without a value, or None.
        tracker: records the largest scores of its heads in training, or None.
    """

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate this rank's heads; weights are zero until the model fills them."""
        super().__init__()
        config, ctx, layer = setup.config, setup.ctx, setup.layer
        self.config, self.layer, self.cp, self.streams = config, layer, ctx.cp, setup.streams
        self.window, self.chunk = window(config, layer), chunk(config, layer)
        self.is_local, self.is_rotated = is_local(config, layer), is_rotated(config, layer)
        self.recompute_core = "core_attn" in setup.recomputed
        self.comm_type = cp_comm_type(config, ctx.config, layer)
        self.cp_levels = ctx.cp_exchange, ctx.cp_ring
        self.backend = setup.kernels.attention_backend
        check_backend(self.backend)
        self.attend: Callable[..., Tensor] = attend
        N, G, H = config.num_attention_heads, num_kv_heads(config), head_dim(config)
        tp = ctx.tp
        holders = ctx.tp_block(max(1, tp.size // G))
        self.state_layer = keys_layer(config, layer)  # its entry of the key/value cache is used
        self.parts = qkv_parts(config)
        outputs = [
            LinearOutput(part, G * H, holders)
            if part in ("k", "v")
            else LinearOutput(part, N * H)
            for part in self.parts
        ]
        D = config.hidden_size
        self.qkv = setup.column_linear(D, outputs, bias=has_qkv_bias(config))
        self.proj = setup.row_linear(N * H, D, bias=has_attention_bias(config))
        self.q_norm = self._build_qk_norm(N, tp, setup.factory_kwargs)
        self.k_norm = None
        if "k" in self.parts:
            self.k_norm = self._build_qk_norm(G, tp, setup.factory_kwargs)
        self.score_scale = score_scale(config, H)
        self.tp, self.sinks = tp, None
        self.tracker: ScoreTracker | None = None
        if config.softmax_type == "learnable":
            self.sinks = nn.Parameter(torch.zeros(N // tp.size, **setup.factory_kwargs))

    def _build_qk_norm(
        self, heads: int, tp: Axis, factory_kwargs: dict[str, Any]
    ) -> nn.Module | None:
        config, H = self.config, head_dim(self.config)
        if not config.qk_layernorm:
            return None
        if config.qk_norm_width == "layer":
            options = {
                "epsilon": config.norm_epsilon,
                "zero_centered": config.apply_layernorm_1p,
            }
            return SplitRMSNorm(heads * H, axis=tp, **options, **factory_kwargs)
        if config.qk_norm_width == "own_head":
            return HeadNorm(config, heads, axis=tp, **factory_kwargs)
        # All heads share one weight, and each tensor rank norms only some of the heads: the
        # weight's gradient on a rank is a part of the sum over tp.
        return build_norm(config, H, replicas=tp, partial=tp, **factory_kwargs)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the sinks."""
        if self.sinks is None:
            return {}
        return {"sinks": sliced_layout("", (self.config.num_attention_heads,), 0, self.tp)}

    def forward(
        self,
        x: Float[Tensor, "s B D"],
        inputs: BlockInputs = _NO_INPUTS,
    ) -> Float[Tensor, "s B D"]:
        """Attend from every token to itself and earlier tokens; return the projected output.

        Under sequence parallelism ``qkv`` all-gathers tokens over tp and ``proj``
        reduce-scatters its output; otherwise ``proj`` all-reduces. ``--cp-comm-type``
        determines the communication over ``cp``.

        Args:
            x: this rank's tokens.
            inputs: their rotary tables, documents and state.
        """
        qkv = self.qkv(x)
        if self.recompute_core and self.training and inputs.state is None:
            mixed = recompute(self._core, qkv, inputs, streams=self.streams)
        else:
            mixed = self._core(qkv, inputs)
        return self.proj(mixed)

    def _core(self, qkv: Tensor, inputs: BlockInputs) -> Float[Tensor, "S B X"]:
        """Compute attention between the GEMMs; ``--recompute-modules core_attn`` repeats it."""
        config = self.config
        qkv, gate = self._split_gate(qkv)
        q, k, v = self._split_heads(qkv, self._rotary(inputs), inputs.shared_keys)
        has_temperature = not self.is_rotated or config.attention_temperature_layers == "all"
        if inputs.temperature is not None and has_temperature:
            q = (q * inputs.temperature).to(q.dtype)
        if inputs.state is None:
            mixed = self._attend_over_cp(q, k, v, inputs.documents)
        else:
            layer_state = inputs.state.layer(self.state_layer)
            options: dict[str, Any] = {"window": self.window, **self._score_options(q)}
            mixed = layer_state.attend(q, k, v, backend=self.backend, **options)
        mixed = mixed.flatten(-2)  # [S, B, N, H] -> [S, B, N*H]
        return mixed if gate is None else mixed * gate.sigmoid()

    def _split_gate(self, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split the GEMM's output into attention's input and the gates of its output."""
        if not self.config.attention_output_gate:
            return qkv, None
        gates = self.qkv.output_sizes[-1]
        without_gate, gate = qkv.split((qkv.shape[-1] - gates, gates), -1)
        return without_gate, gate

    def _rotary(self, inputs: BlockInputs) -> RotaryTables | None:
        if not self.is_rotated:
            return None
        has_local_tables = self.is_local and inputs.local_rotary is not None
        return inputs.local_rotary if has_local_tables else inputs.rotary

    def _score_options(self, q: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of ``attend`` that change scores: scale, cap, sinks."""
        config, sinks, num_heads = self.config, self.sinks, q.shape[2]
        if sinks is not None and sinks.shape[0] != num_heads:
            # --cp-comm-type a2a: this rank attends with N/(tp cp) heads; take their sinks.
            sinks = sinks.chunk(self.cp.size)[self.cp.rank]
        values = {
            "scale": self.score_scale,
            "chunk": self.chunk,
            "softcap": config.attn_logit_softcapping,
        }
        options: dict[str, Any] = {name: value for name, value in values.items() if value}
        if config.position_embedding_type == "alibi":
            options["slopes"] = self._slopes(q)
        return options if sinks is None else {**options, "sinks": sinks}

    def _slopes(self, q: Tensor) -> Tensor:
        """Return the ALiBi slopes of this rank's heads."""
        slopes = alibi_slopes(self.config.num_attention_heads, q.device)
        return slopes.chunk(self.tp.size)[self.tp.rank]

    def _attend_over_cp(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None
    ) -> Tensor:
        """Attend over the complete sequence, including keys of other context ranks."""
        if self.tracker is not None and self.training:
            options: dict[str, Any] = {"window": self.window, "chunk": self.chunk}
            options |= {"scale": self.score_scale, "documents": documents}
            self.tracker.note(largest_scores(q, k, cp=self.cp, **options))
        attend_on_rank = partial(self._attend, documents=documents)
        if self.cp.size == 1:
            return attend_on_rank(q, k, v)
        if self.comm_type == "a2a":
            return ulysses_attention(q, k, v, self.cp, attend_on_rank)
        if self.comm_type == "all_gather" and cannot_be_cut(self.config, self.layer):
            # Windows, dropout, caps and sinks: one call on the gathered keys, no blocks.
            return context_attention(q, k, v, self.cp, attend_on_rank)
        if self.comm_type == "a2a+p2p":
            exchange, ring = self.cp_levels
            attend_in_ring = partial(self._attend_in_blocks, ring_attention, ring, documents)
            return ulysses_attention(q, k, v, exchange, attend_in_ring)
        block_attention = ring_attention if self.comm_type == "p2p" else all_gather_attention
        return self._attend_in_blocks(block_attention, self.cp, documents, q, k, v)

    def _attend_in_blocks(
        self,
        attention: Callable[..., Tensor],
        axis: Axis,
        documents: Documents | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Attend in blocks of the score matrix to the keys of all ranks of an axis."""
        width = q.shape[-1]
        scale = self.score_scale or width**-0.5
        if scale != width**-0.5:
            # Block kernels scale scores by width**-0.5; multiply queries by the remaining
            # factor.
            q = q * (scale * width**0.5)
        return attention(q, k, v, axis, blocks_for(q, v, self.backend), documents)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        prob = self.config.attention_dropout if self.training else 0.0
        # Tensor ranks have different heads, with or without sequence parallelism: each rank
        # draws its own mask.
        stream = self.streams.fork("tensor_parallel") if prob else nullcontext()
        with stream:
            return self.attend(
                q,
                k,
                v,
                window=self.window,
                dropout_prob=prob,
                documents=documents,
                backend=self.backend,
                **self._score_options(q),
            )

    def _split_heads(
        self,
        qkv: Tensor,
        rotary: RotaryTables | None,
        shared_keys: dict[bool, tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Float[Tensor, "S B N H"], Float[Tensor, "S B G H"], Float[Tensor, "S B G H"]]:
        """Split the GEMM's output into heads, norm and rotate them; return q, k, v.

        With ``shared_keys``, a layer with keys writes keys and values to it, and a layer
        without keys reads them from it.
        """
        H = head_dim(self.config)
        kernel = None if rotary is None else rotary_kernel(self.config)
        if rotary is not None and kernel is not None:
            rows_q, rows_k, _ = self.qkv.output_sizes[:3]
            args, constants = (*rotary, rows_q // H, rows_k // H), {}
            if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
                args = self.q_norm.weight, self.k_norm.weight, *args
                constants["epsilon"] = self.q_norm.epsilon
                constants["offset"] = float(self.q_norm.zero_centered)
            # One kernel computes split, both norms and rotation, if it supports the inputs.
            if kernel.takes(qkv, *args, **constants):
                q, k, v = kernel.launch(qkv, *args, **constants)
                if shared_keys is not None:
                    shared_keys[self.is_local] = (k, v)
                return q, k, v
        names = [part for part in self.parts if part != "gate"]
        split = qkv.split(self.qkv.output_sizes[: len(names)], dim=-1)
        parts = dict(zip(names, split, strict=True))
        q = self._norm_and_rotate(parts["q"], self.q_norm, rotary)
        if shared_keys is not None and "k" not in parts:
            return q, *shared_keys[self.is_local]
        k = self._norm_and_rotate(parts["k"], self.k_norm, rotary)
        v = parts.get("v", parts["k"]).unflatten(-1, (-1, H))  # without v, keys are values
        if self.config.value_norm:
            v = l2_normed(v, self.config.norm_epsilon)
        if shared_keys is not None:
            shared_keys[self.is_local] = (k, v)
        return q, k, v

    def _norm_and_rotate(
        self, x: Float[Tensor, "S B X"], norm: nn.Module | None, rotary: RotaryTables | None
    ) -> Float[Tensor, "S B N H"]:
        """Split queries or keys into heads, norm and rotate them."""
        config, H = self.config, head_dim(self.config)
        if norm is None:
            return self._rotate(x.unflatten(-1, (-1, H)), rotary)
        if config.qk_norm_width == "layer":
            return self._rotate(norm(x).unflatten(-1, (-1, H)), rotary)
        x = x.unflatten(-1, (-1, H))  # N*H -> N, H
        if config.qk_norm_after_rope:
            return norm(self._rotate(x, rotary))
        return self._rotate(norm(x), rotary)

    def _rotate(self, x: Tensor, rotary: RotaryTables | None) -> Tensor:
        """Rotate heads, and with ``--qk-l2-norm`` divide them by their root mean square."""
        if rotary is None:
            return x
        x = rotate(x, rotary, self.config.rotary_interleaved)
        return l2_normed(x, self.config.norm_epsilon) if self.config.qk_l2_norm else x
