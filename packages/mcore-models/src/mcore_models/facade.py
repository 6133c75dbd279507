"""The plain front: a GPT that takes a batch and gives its loss, for a hand-written loop.

The layout comes from ``parallel_state``; without it the model is on one rank. Gradients are
made whole in backward itself, so any torch optimizer may step right after it. For speed,
pipelines and long runs there is ``GPT`` with the trainer.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_moe.config import MoEConfig
from mcore_parallel.collectives import all_reduce, reduce_from
from mcore_parallel.facade import current_context
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import NamedParameter, named_parameters

_NO_EXPERTS = MoEConfig()


class GPTModel(nn.Module):
    """A batch to its mean loss.

    The same weights and, for the same batches, the same losses on any number of tensor and
    expert ranks. Data ranks may be given different batches; the loss is the mean over all.

    Attributes:
        gpt: the ``GPT``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        moe: MoEConfig = _NO_EXPERTS,
        seed: int = 1234,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Build the model on this rank's device, by the layout of ``parallel_state``.

        Args:
            config: shape and numerics of the layers.
            vocab_size: true number of tokens.
            moe: experts, none by default.
            seed: of the initial weights, equal on all ranks.
            dtype: of the parameters.

        Raises:
            ValueError: if the model does not fit the layout, or the layout needs the trainer.
            RuntimeError: if the world has several ranks and no layout is set.
        """
        super().__init__()
        ctx = current_context()
        for axis, flag in ((ctx.pp, "pipeline_model"), (ctx.cp, "context")):
            if axis.size > 1:
                raise ValueError(
                    f"{flag}_parallel_size {axis.size} needs the trainer (mcore-train gpt), "
                    "which schedules micro-batches and cuts sequences: GPTModel takes whole "
                    "batches. Use tensor, expert or data ranks here."
                )
        self.gpt = GPT(config, ctx, vocab_size=vocab_size, moe=moe, seed=seed, dtype=dtype)
        self._ctx = ctx
        for named in named_parameters(self.gpt):
            if named.parameter.requires_grad:
                named.parameter.register_hook(_Finaliser(named, ctx))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean loss over the valid tokens of all data ranks.

        All-reduces the count and the loss over the data ranks. Auxiliary losses of experts
        are in it while training.

        Args:
            batch: ``tokens`` and ``labels`` ``[B, S]`` int64, ``loss_mask`` ``[B, S]`` of 0
                and 1, as ``MockGPTDataset`` gives; on any device.

        Returns:
            Scalar, float32 or wider, equal on all ranks.
        """
        device, data = self._ctx.device, self._ctx.dp
        tokens, labels, mask = (
            batch[name].to(device) for name in ("tokens", "labels", "loss_mask")
        )
        hidden, aux = self.gpt(tokens)
        losses = self.gpt.token_losses(hidden, labels)
        mask = mask.to(losses.dtype)
        count = all_reduce(mask.sum(), data).clamp(min=1)
        # Token losses are equal over the tensor ranks; auxiliary losses are shares of a sum.
        aux = reduce_from(aux, self._ctx.axis("tp"))
        return reduce_from((losses * mask).sum() / count + aux / data.size, data)


class _Finaliser:
    """Gradient hook that sums what other ranks hold of one parameter's gradient.

    It acts on each backward's own gradient, before that is added to ``.grad``, so that
    accumulation over several backward passes stays right.
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
