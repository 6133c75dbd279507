"""Token embedding and output head, with the vocabulary split over the tensor ranks.

Each rank holds an equal, consecutive range of rows. The vocabulary is padded to a multiple of
the ranks; padding rows are zero, get no gradient and do not belong to the logical tensor.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_parallel.autograd.functions import OnceDifferentiable
from mcore_parallel.autograd.grad_slot import overwrites, slot_of
from mcore_parallel.collectives import reduce_from, reduce_scatter_to
from mcore_parallel.kernels.embedding import add_rows_
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.rng import reset_weight_
from mcore_parallel.sharding import ParamLayout, sliced_layout
from mcore_parallel.tensor_parallel.linear_autograd import column_parallel


def padded_vocab(vocab_size: int, divisor: int, tp: int) -> int:
    """Round a vocabulary up so that each of ``tp`` ranks holds a multiple of ``divisor`` rows.

    >>> padded_vocab(50257, 128, 2)
    50432
    """
    multiple = divisor * tp
    return -(-vocab_size // multiple) * multiple


class _VocabTable(nn.Module):
    """A table whose rows are split over an axis; base of the embedding and the head."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        padded_vocab_size: int = 0,
        axis: Axis = SINGLE,
        sequence_parallel: bool = False,
        tied: Axis = SINGLE,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate this rank's rows and initialise them.

        Args:
            vocab_size: number of tokens, without padding.
            hidden_size: features of each token.
            padded_vocab_size: rows over all ranks; 0: the next multiple of ``axis.size``.
            axis: ranks that split the rows.
            sequence_parallel: whether hidden states are split along dimension 0 over ``axis``.
            tied: pipeline ranks that hold a copy of the table (``ctx.embedding_ends``). The
                copies have one logical name and equal initial values, and their gradients are
                summed. The last stage passes its ``weight`` to ``linear_cross_entropy``.
            init_std: standard deviation of the initial weights; 0.0 fills with zeros and draws
                nothing.
            device: device of the table.
            dtype: dtype of the table.

        Raises:
            ValueError: if ``padded_vocab_size`` is too small or not a multiple of the axis.
        """
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.padded_vocab_size = _check_padded(vocab_size, padded_vocab_size, axis)
        self.axis = axis
        self.sequence_parallel = sequence_parallel and axis.size > 1
        self.tied = tied
        self.init_std = init_std
        rows = self.padded_vocab_size // axis.size
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialise the table by seed and logical name, padding with zeros.

        Args:
            seed: None draws a seed from torch's default CPU generator, which must then have
                equal state on all ranks of the axis.
        """
        reset_weight_(self, std=self.init_std, seed=seed)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the layout of the table by parameter name, see ``sharding``."""
        shape = (self.vocab_size, self.hidden_size)
        layout = sliced_layout("", shape, 0, self.axis, tuple(self.weight.shape))
        return {"weight": ParamLayout(layout.parts, tied=self.tied)}

    def extra_repr(self) -> str:
        """Describe the layer for ``print(model)``."""
        return (
            f"vocab_size={self.vocab_size} padded to {self.padded_vocab_size}, "
            f"hidden_size={self.hidden_size}, axis={self.axis.name}:{self.axis.size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


class VocabParallelEmbedding(_VocabTable):
    """Token embedding: looks up rows of a table that is split by rows over an axis.

    Attributes:
        weight: this rank's rows, ``[padded_vocab_size / axis.size, hidden_size]``.
        padded_vocab_size: rows over all ranks.
    """

    def forward(self, ids: Int[Tensor, "B S"]) -> Float[Tensor, "s B D"]:
        """Return the tokens' rows: ``[S, B, D]``, or ``[S/axis, B, D]`` if sequence parallel.

        Forward all-reduces and backward does not communicate; under sequence parallelism
        forward reduce-scatters and backward all-gathers.

        Raises:
            ValueError: if an id on the CPU is not in the vocabulary. On a GPU, where a check
                would synchronise, such an id gives zeros (several ranks) or a device-side
                assertion (one rank).
        """
        check_range(ids, self.vocab_size, "token ids")
        ids = ids.t()  # [B, S] -> [S, B]
        if self.axis.size == 1:
            return _look_up(ids, self.weight)
        # Each token has its row on one rank; the other ranks add zeros.
        local = ids - self.axis.rank * self.weight.shape[0]
        rows = _look_up(local, self.weight, others_are_zero=True)
        if self.sequence_parallel:
            return reduce_scatter_to(rows, self.axis)
        return reduce_from(rows, self.axis)


class VocabParallelHead(_VocabTable):
    """Output head: logits of hidden states, with the vocabulary split over an axis.

    Attributes:
        weight: this rank's rows, ``[padded_vocab_size / axis.size, hidden_size]``.
        padded_vocab_size: rows over all ranks; an argument of
            ``vocab_parallel_cross_entropy``.
    """

    def __init__(self, hidden_size: int, vocab_size: int, **options: Any) -> None:
        """Allocate this rank's rows; ``options`` are those of ``VocabParallelEmbedding``."""
        super().__init__(vocab_size, hidden_size, **options)
        overwrites(self.weight)

    def forward(
        self, x: Float[Tensor, "s *B D"], weight: Float[Tensor, "v D"] | None = None
    ) -> Float[Tensor, "S *B v"]:
        """Return this rank's columns of the logits; padding columns are 0.

        Communicates as ``linear_autograd.column_parallel``.

        Args:
            x: hidden states; under sequence parallelism this rank's slice of dimension 0.
            weight: replaces the layer's own weight, for example by a tied embedding's.
        """
        weight = self.weight if weight is None else weight
        return column_parallel(x, weight, None, self.axis, self.sequence_parallel)


def _look_up(
    ids: Int[Tensor, "S B"], weight: Float[Tensor, "v D"], *, others_are_zero: bool = False
) -> Float[Tensor, "S B D"]:
    """Return rows by id; with ``others_are_zero``, zeros for an id outside the rows.

    If the table has a main gradient, backward adds to it directly.
    """
    if weight.requires_grad and slot_of(weight) is not None:
        return _LookUp.apply(ids, weight, others_are_zero)
    return _look_up_plain(ids, weight, others_are_zero)


def _look_up_plain(ids: Tensor, weight: Tensor, others_are_zero: bool) -> Tensor:
    if not others_are_zero:
        return F.embedding(ids, weight)
    is_row = (ids >= 0) & (ids < weight.shape[0])
    rows = F.embedding(ids.where(is_row, 0), weight)
    return rows.where(is_row.unsqueeze(-1), 0.0)


class _LookUp(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, others_are_zero: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.slot = slot_of(weight)
        return _look_up_plain(ids, weight, others_are_zero)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        add_rows_(ctx.slot.main, ids.flatten(), grad.flatten(0, -2))
        ctx.slot.ready()
        return None, None, None


def check_range(ids: Int[Tensor, "..."], size: int, what: str) -> None:
    """Raise unless ``0 <= ids < size``; checks nothing on a GPU or in compiled code.

    Reading ids of a GPU on the host would synchronise.
    """
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or ids.numel() == 0:
        return
    low, high = ids.aminmax()
    if low < 0 or high >= size:
        raise ValueError(
            f"{what} lie in {int(low)} to {int(high)}, outside the vocabulary 0 to {size - 1}: "
            "use the tokenizer that the model was built for, or raise its vocabulary size"
        )


def _check_padded(vocab_size: int, padded_vocab_size: int, axis: Axis) -> int:
    padded_vocab_size = padded_vocab_size or padded_vocab(vocab_size, 1, axis.size)
    if padded_vocab_size < vocab_size or padded_vocab_size % axis.size:
        raise ValueError(
            f"padded vocabulary {padded_vocab_size} must be at least the vocabulary "
            f"{vocab_size} and a multiple of the {axis.size} ranks of axis {axis.name}: use "
            f"{padded_vocab(vocab_size, 1, axis.size)} or leave it 0"
        )
    return padded_vocab_size
