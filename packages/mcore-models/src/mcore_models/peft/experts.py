"""LoRA of routed experts: each expert has its own A and B, in grouped GEMMs.

Adapters are split like the experts: over ``ep`` by experts, over ``expert_tp`` by the rows of B
for the first matrix and by the columns of A for the second.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from mcore_models.peft.config import PeftConfig
from mcore_models.peft.lora import A_NAME, B_NAME
from mcore_moe.experts.experts import Experts
from mcore_moe.experts.grouped_gemm import grouped_linear, sequential_linear
from mcore_parallel.mesh import SINGLE, Axis
from mcore_parallel.rng import RngStreams, StreamDropout
from mcore_parallel.sharding import ParamLayout, Part


class ExpertsAdapter(nn.Module):
    """Adapters of a layer's experts on this rank.

    Attributes:
        fc1_A: ``[e, n r, D]``, A of each adapted output, or None.
        fc1_B: ``[e, n F/expert_tp, r]``, or None.
        fc2_A: ``[e, r, F/expert_tp]``, or None.
        fc2_B: ``[e, D, r]``, or None.
        is_on: whether the outputs are added, see ``adapters_off``.
    """

    def __init__(
        self,
        experts: Experts,
        is_adapted: Sequence[bool],
        config: PeftConfig,
        *,
        streams: RngStreams,
    ) -> None:
        """Allocate matrices of zeros.

        Args:
            experts: the experts; no reference is stored.
            is_adapted: for gate and up-projection (or the first matrix), then for the second
                matrix, whether it has an adapter; at least one is true.
            config: rank, factor, dropout.
            streams: of dropout.
        """
        super().__init__()
        self.rank, self.scale = config.lora_dim, config.scale
        self.is_on = True
        self.ep, self.expert_tp = experts.ep, experts.expert_tp
        self.first, self.has_second = tuple(is_adapted[:-1]), is_adapted[-1]
        self.names = ("fc1.gate", "fc1.up") if experts.network.gated else ("fc1",)
        self.sizes = experts.hidden_size, experts.ffn_hidden_size
        self.dropout = StreamDropout(config.lora_dropout, streams, "expert")
        self.linear = grouped_linear if experts.grouped else sequential_linear
        weight = experts.fc2_weight
        self.num_experts, D, self.width = weight.shape

        def allocate(count: int, *shape: int) -> nn.Parameter | None:
            factory_kwargs = {"device": weight.device, "dtype": weight.dtype}
            full = (self.num_experts, *shape)
            return nn.Parameter(torch.zeros(full, **factory_kwargs)) if count else None

        n = sum(self.first)
        self.fc1_A = allocate(n, n * self.rank, D)
        self.fc1_B = allocate(n, n * self.width, self.rank)
        self.fc2_A = allocate(self.has_second, self.rank, self.width)
        self.fc2_B = allocate(self.has_second, D, self.rank)

    def add_fc1(
        self,
        hidden: Float[Tensor, "R F"],
        rows: Float[Tensor, "R D"],
        offsets: Int[Tensor, " E"],
    ) -> Float[Tensor, "R F"]:
        """Return the first matrices' outputs plus the adapters'; no communication.

        Args:
            hidden: outputs of the first matrices.
            rows: inputs of the first matrices, sorted by expert.
            offsets: first row of each expert, and the end of the last expert's rows.
        """
        if self.fc1_A is None or self.fc1_B is None:
            return hidden
        narrow = self.linear(self.dropout(rows), self.fc1_A, offsets)
        return hidden + self.scale * self.linear(narrow, self._wide_b(self.fc1_B), offsets)

    def add_fc2(
        self, y: Float[Tensor, "R D"], active: Float[Tensor, "R F"], offsets: Int[Tensor, " E"]
    ) -> Float[Tensor, "R D"]:
        """Return the second matrices' outputs plus the adapters', a part of a sum."""
        if self.fc2_A is None or self.fc2_B is None:
            return y
        narrow = self.linear(self.dropout(active), self.fc2_A, offsets)
        return y + self.scale * self.linear(narrow, self.fc2_B, offsets)

    def _wide_b(self, up: Tensor) -> Float[Tensor, "e F R"]:
        """Return a block-diagonal B: gate and up each multiply the output of their own A."""
        pieces, n = iter(up.split(self.width, dim=1)), sum(self.first)
        before, rows = 0, []
        for has in self.first:
            if has:
                after = (n - 1) * self.rank - before
                rows.append(F.pad(next(pieces), (before, after)))
                before += self.rank
            else:
                rows.append(up.new_zeros(self.num_experts, self.width, n * self.rank))
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def layouts(self) -> dict[str, ParamLayout]:
        """Return the sharding of the matrices expert by expert."""
        D, width = self.sizes
        begin, e_tp = self.expert_tp.rank * self.width, self.expert_tp
        parts: dict[str, list[Part]] = {"fc1_A": [], "fc1_B": [], "fc2_A": [], "fc2_B": []}
        named = [name for name, has in zip(self.names, self.first, strict=True) if has]
        for i in range(self.num_experts):
            expert = self.ep.rank * self.num_experts + i
            for n, name in enumerate(named):
                # Each rank of expert_tp computes the gradient of its own rows of B only.
                parts["fc1_A"].append(
                    self._part(f"{expert}.{name}.{A_NAME}", (self.rank, D), i, n, e_tp)
                )
                box = (begin, 0), (i, n * self.width, 0), (1, self.width, self.rank)
                parts["fc1_B"].append(
                    Part(f"{expert}.{name}.{B_NAME}", (width, self.rank), *box)
                )
            if self.has_second:
                box = (0, begin), (i, 0, 0), (1, self.rank, self.width)
                parts["fc2_A"].append(Part(f"{expert}.fc2.{A_NAME}", (self.rank, width), *box))
                # B's input on a rank is a part of a sum, so B's gradient is too.
                parts["fc2_B"].append(
                    self._part(f"{expert}.fc2.{B_NAME}", (D, self.rank), i, 0, e_tp)
                )
        return {name: ParamLayout(tuple(p), data="expert") for name, p in parts.items() if p}

    def _part(
        self, name: str, shape: tuple[int, int], expert: int, number: int, axis: Axis = SINGLE
    ) -> Part:
        """Return the part of a matrix replicated over an axis, with partial gradients."""
        local = expert, number * shape[0], 0
        return Part(name, shape, (0, 0), local, (1, *shape), replicas=axis, partial=axis)

    def extra_repr(self) -> str:
        """Return the text of the adapters in ``print(model)``."""
        return f"{self.num_experts} experts, rank={self.rank}, scale={self.scale}"
