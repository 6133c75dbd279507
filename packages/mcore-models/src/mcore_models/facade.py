"""``GPTModel``: a GPT that maps a batch to its loss, for hand-written training loops.

The layout comes from ``parallel_state``; without a layout the model is on one rank. Backward
reduces gradients over ranks, so any torch optimizer may step directly after it. For speed,
pipelines and long runs use ``GPT`` with the trainer.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_models.building.initialization import initialize_
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.layers.block import build_block
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import NO_PARTS, Execution, LayerSetup, Parts
from mcore_models.layers.mtp import PredictionLayer, shifted
from mcore_models.layers.residual import Residual
from mcore_models.layers.rope import build_rotary
from mcore_models.protocol import MicroBatch
from mcore_moe.config import MoEConfig
from mcore_parallel.collectives import all_reduce, reduce_from
from mcore_parallel.facade import current_context, current_fp8
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.fp8 import WeightCasts, layer_gemms
from mcore_parallel.rng import RngStreams
from mcore_parallel.sharding import NamedParameter, named_parameters, named_shards

_NO_EXPERTS = MoEConfig()


class GPTModel(nn.Module):
    """Computes the mean loss of a batch.

    Weights and losses are the same on any number of tensor and expert ranks. Data ranks may get
    different batches; the loss is the mean over the tokens of all data ranks.

    Attributes:
        gpt: the ``GPT``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        moe: MoEConfig = _NO_EXPERTS,
        parts: Parts = NO_PARTS,
        seed: int = 1234,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Build the model on this rank's device, by the layout of ``parallel_state``.

        GEMMs are in fp8 after ``parallel_state.set_fp8_training_enabled``.

        Args:
            config: shape and numerics of the layers.
            vocab_size: true number of tokens.
            moe: experts, none by default.
            parts: builders of replacements for mixers, see ``TransformerBlock``.
            seed: of the initial weights, equal on all ranks.
            dtype: of the parameters.

        Raises:
            ValueError: if the model does not fit the layout, or the layout has pipeline or
                context ranks.
            RuntimeError: if the world has several ranks and no layout is set.
        """
        super().__init__()
        ctx = current_context()
        for axis, flag in ((ctx.pp, "pipeline_model"), (ctx.cp, "context")):
            if axis.size > 1:
                raise ValueError(
                    f"{flag}_parallel_size {axis.size} needs the trainer (mcore-train gpt), "
                    "which schedules micro-batches and splits sequences: GPTModel takes "
                    "complete batches. Use tensor, expert or data ranks with GPTModel."
                )
        depths = config.num_layers, config.mtp_num_layers
        gemms = layer_gemms(current_fp8(), ctx, depths[0], WeightCasts(), None, depths[1])
        self.gpt = GPT(
            config,
            ctx,
            vocab_size=vocab_size,
            moe=moe,
            seed=seed,
            execution=Execution(gemms=gemms, parts=parts),
            dtype=dtype,
        )
        self._ctx = ctx
        for named in named_parameters(self.gpt):
            if named.parameter.requires_grad:
                named.parameter.register_hook(_Finaliser(named, ctx))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean loss over the valid tokens of all data ranks.

        All-reduces the count and the loss over the data ranks. In training the loss includes
        the auxiliary losses of experts.

        Args:
            batch: ``tokens`` and ``labels`` ``[B, S]`` int64, ``loss_mask`` ``[B, S]`` of 0
                and 1, as in ``MockGPTDataset``; on any device.

        Returns:
            Scalar, float32 or wider, equal on all ranks.
        """
        device, data = self._ctx.device, self._ctx.dp
        tokens, labels, mask = (
            batch[name].to(device) for name in ("tokens", "labels", "loss_mask")
        )
        rows = {"tokens": tokens, "labels": labels, "loss_mask": mask}
        prepared = MicroBatch(self.gpt.prepare(rows))
        output, aux = self.gpt.run_stage(prepared, None)
        masks = self.gpt.loss_masks(prepared)
        # Token losses are equal over the tensor ranks; auxiliary losses are shares of a sum.
        total = reduce_from(aux, self._ctx.axis("tp")) / data.size
        for name, losses in self.gpt.unreduced_losses(output, prepared).items():
            loss_mask = masks[name].to(losses.dtype)
            count = all_reduce(loss_mask.sum(), data).clamp(min=1)
            loss_sum = (losses * loss_mask).sum()
            total = total + self.gpt.loss_coefficients[name] * loss_sum / count
        return reduce_from(total, data)


class MultiTokenPrediction(nn.Module):
    """Layers that predict further tokens for any model, with that model's embedding and head.

    Plain torch, replicated on every rank: train the layers under DDP or FSDP like the model.
    ``GPT`` has the same layers with ``mtp_num_layers``, split like the model.

    Attributes:
        layers: one ``PredictionLayer`` for each further token.
    """

    def __init__(
        self,
        hidden_size: int,
        num_predictions: int,
        *,
        num_attention_heads: int = 0,
        seed: int = 1234,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Build and fill the layers.

        Args:
            hidden_size: D, of the model.
            num_predictions: further tokens, after the next one that the model predicts.
            num_attention_heads: heads of each layer; 0: one for every 64 channels.
            seed: of the initial weights, equal on all ranks.
            dtype: of the parameters.

        Raises:
            ValueError: if there are no predictions, or heads do not divide the channels.
        """
        super().__init__()
        if num_predictions < 1:
            raise ValueError(f"num_predictions {num_predictions} must be 1 or more.")
        self.config = TransformerConfig(
            num_layers=1,
            hidden_size=hidden_size,
            num_attention_heads=num_attention_heads or max(1, hidden_size // 64),
        )
        ctx = ParallelContext.single()
        streams = RngStreams(seed, ctx)
        setup = LayerSetup(config=self.config, ctx=ctx, layer=0, streams=streams, dtype=dtype)
        self.layers = nn.ModuleList(
            PredictionLayer(self.config, ctx, build_block(setup), dtype=dtype)
            for _ in range(num_predictions)
        )
        initialize_(named_shards(self), self.config, seed)

    def forward(
        self,
        hidden: Float[Tensor, "B S D"],
        tokens: Int[Tensor, "B S"],
        embedding: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, ""]:
        """Compute the mean loss over all further tokens in the rows.

        Args:
            hidden: of the model, after its final norm: position i predicts token i + 1.
            tokens: input tokens of the model.
            embedding: of the model: ids ``[B, S]`` to ``[B, S, D]``.
            head: of the model: ``[B, S, D]`` to logits ``[B, S, V]``.

        Returns:
            The mean over predictions of their mean cross-entropies; add it to the model's
            loss times a factor such as 0.1.

        Raises:
            ValueError: if rows are too short for the furthest prediction.
        """
        length = tokens.shape[1]
        if length < len(self.layers) + 2:
            raise ValueError(
                f"rows of {length} tokens have no token {len(self.layers) + 1} positions "
                f"ahead: use rows of {len(self.layers) + 2} tokens or more."
            )
        positions = torch.arange(length, device=tokens.device)
        inputs = BlockInputs(rotary=build_rotary(self.config, positions, hidden.dtype))

        def run(block: nn.Module, x: Tensor) -> Residual:
            return block(Residual.begin(x), inputs)

        losses = []
        x = hidden.transpose(0, 1)  # [B, S, D] -> [S, B, D]
        for depth, layer in enumerate(self.layers, 1):
            embedded = embedding(shifted(tokens, depth)).transpose(0, 1)
            x, _ = layer(x, embedded, run)
            logits = head(x[: length - depth - 1].transpose(0, 1)).flatten(0, 1)
            losses.append(F.cross_entropy(logits, tokens[:, depth + 1 :].flatten()))
        return torch.stack(losses).mean()


class _Finaliser:
    """Gradient hook that sums a parameter's gradient over the ranks that hold parts of the sum.

    The hook gets the gradient of each backward pass before autograd adds it to ``.grad``, so
    accumulation over several backward passes is correct.
    """

    def __init__(self, named: NamedParameter, ctx: ParallelContext) -> None:
        self.named, self.data = named, ctx.data_axes()[named.layout.data]

    def __call__(self, grad: Tensor) -> Tensor:
        parts = [part for part in self.named.layout.parts if part.partial.size > 1]
        if parts:
            grad = grad.clone()
        for part in parts:
            view = part.view(grad)
            view.copy_(all_reduce(view, part.partial))
        return all_reduce(grad, self.data)
