"""Lists the tensors of each rank of a TensorRT-LLM checkpoint, as ranges of logical tensors.

Names and orders are the engine's. Queries, keys and values of a rank form one matrix, in this
order. In a gated dense layer ``fc`` is the activated half and ``gate`` the linear half; experts
store the linear half first. Layers count from 0 on each stage. A router is not split and has
dtype float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.storage.files import Item
from mcore_infer.export.parts import TensorRange, build_item, full_range, shard
from mcore_infer.export.trtllm_model import RankGrid, RankSizes

_NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_layernorm",
    "attention.q_norm": "attention.q_layernorm",
    "attention.k_norm": "attention.k_layernorm",
}
_SANDWICH = {
    **_NORMS,
    "attention_post_norm": "post_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_ROUTER_DTYPE = "F32"


@dataclass(frozen=True, slots=True)
class MatrixSlice:
    """A rank's slice of one logical matrix."""

    stem: str
    """Logical name without ``.weight``."""
    rows: tuple[int, int]
    """First and one-past-last output."""
    columns: tuple[int, int] | None = None
    """First and one-past-last input; None: all."""


@runtime_checkable
class Linears(Protocol):
    """Lists the stored tensors of matrices: plain, or quantized with scales."""

    def items(self, name: str, shares: Sequence[MatrixSlice]) -> list[Item]:
        """List the tensors of a linear ``name`` with the outputs of all shares, in order."""

    def cache_items(self, name: str, stem: str) -> list[Item]:
        """List the scales of the key/value cache of an attention layer ``name``."""


@dataclass(frozen=True, slots=True)
class PlainLinears:
    """Lists matrices as plain weights in one dtype."""

    rows: Rows
    """Reads logical tensors."""
    dtype: str
    """Safetensors' name of the written dtype."""

    def items(self, name: str, shares: Sequence[MatrixSlice]) -> list[Item]:
        """List the tensor ``name.weight``."""
        parts = [TensorRange(f"{s.stem}.weight", s.rows, s.columns) for s in shares]
        shape = (num_outputs(shares), num_inputs(shares[0], self.rows))
        return [build_item(f"{name}.weight", self.dtype, shape, parts, self.rows)]

    def cache_items(self, name: str, stem: str) -> list[Item]:
        """Return an empty list: plain models have no scales of the cache."""
        del name, stem
        return []


@dataclass(frozen=True, slots=True)
class Rank:
    """Lists the tensors of one rank's file."""

    sizes: RankSizes
    """Sizes of the model."""
    grid: RankGrid
    """All ranks."""
    number: int
    """Number of this rank: stage times number of tensor ranks, plus tensor rank."""
    rows: Rows
    """Reads logical tensors."""
    dtype: str
    """Safetensors' name of the dtype of plain tensors."""
    linears: Linears
    """Writes matrices."""
    splits_vocabulary: bool
    """Whether the embedding is split over tensor ranks."""

    def items(self) -> list[Item]:
        """List the tensors of this rank's file."""
        stage, last = self.number // self.grid.tp, self.grid.pp - 1
        layers = shard(self.sizes.num_layers, stage, self.grid.pp)
        items = list(self._embedding()) if stage == 0 else []
        for local, layer in enumerate(range(*layers)):
            items += self._layer(f"transformer.layers.{local}", f"blocks.{layer}")
        return items + (list(self._head()) if stage == last else [])

    @property
    def _tp_rank(self) -> int:
        return self.number % self.grid.tp

    def _local_range(self, size: int) -> tuple[int, int]:
        return shard(size, self._tp_rank, self.grid.tp)

    def _embedding(self) -> Iterator[Item]:
        vocab, hidden = self.sizes.vocab_size, self.sizes.hidden_size
        rows = (
            self._local_range(_padded(vocab, self.grid.tp))
            if self.splits_vocabulary
            else (0, vocab)
        )
        shape = (rows[1] - rows[0], hidden)
        parts = [TensorRange("embedding.weight", rows)]
        yield build_item(
            "transformer.vocab_embedding.weight", self.dtype, shape, parts, self.rows
        )
        if "position_embedding.weight" in self.rows.entries:
            yield self._copy(
                "transformer.position_embedding.weight", "position_embedding.weight"
            )

    def _head(self) -> Iterator[Item]:
        yield from self._norm("transformer.ln_f", "final_norm")
        # A tied head is stored as a copy of the embedding, padded so that all ranks have equal
        # shapes.
        tied = "head.weight" not in self.rows.entries
        name = "embedding.weight" if tied else "head.weight"
        rows = self._local_range(_padded(self.sizes.vocab_size, self.grid.tp))
        shape = (rows[1] - rows[0], self.sizes.hidden_size)
        yield build_item(
            "lm_head.weight", self.dtype, shape, [TensorRange(name, rows)], self.rows
        )

    def _layer(self, theirs: str, ours: str) -> Iterator[Item]:
        sandwich = f"{ours}.mlp_post_norm.weight" in self.rows.entries
        for name, their_name in (_SANDWICH if sandwich else _NORMS).items():
            if f"{ours}.{name}.weight" in self.rows.entries:
                yield from self._norm(f"{theirs}.{their_name}", f"{ours}.{name}")
        yield from self._attention(f"{theirs}.attention", f"{ours}.attention")
        if self.sizes.num_experts:
            yield from self._experts(f"{theirs}.mlp", f"{ours}.moe")
        else:
            yield from self._mlp(f"{theirs}.mlp", f"{ours}.mlp")

    def _attention(self, theirs: str, ours: str) -> Iterator[Item]:
        sizes, tp = self.sizes, self.grid.tp
        queries = self._local_range(sizes.num_heads * sizes.head_dim)
        if sizes.num_kv_heads >= tp:
            keys = self._local_range(sizes.num_kv_heads * sizes.head_dim)
        else:  # several ranks store the same key/value head
            head = self._tp_rank * sizes.num_kv_heads // tp
            keys = (head * sizes.head_dim, (head + 1) * sizes.head_dim)
        shares = [
            MatrixSlice(f"{ours}.qkv.{part}", rows)
            for part, rows in (("q", queries), ("k", keys), ("v", keys))
        ]
        yield from self._by_outputs(f"{theirs}.qkv", shares)
        yield from self._by_inputs(f"{theirs}.dense", f"{ours}.proj", queries)
        yield from self.linears.cache_items(theirs, f"{ours}.qkv")

    def _mlp(self, theirs: str, ours: str) -> Iterator[Item]:
        width = self._local_range(self.sizes.ffn_size)
        halves = {"fc": "fc1.gate", "gate": "fc1.up"} if self.sizes.is_gated else {"fc": "fc1"}
        for their_name, name in halves.items():
            yield from self._by_outputs(
                f"{theirs}.{their_name}", [MatrixSlice(f"{ours}.{name}", width)]
            )
        yield from self._by_inputs(f"{theirs}.proj", f"{ours}.fc2", width)

    def _experts(self, theirs: str, ours: str) -> Iterator[Item]:
        width, sizes = self._local_range(self.sizes.ffn_size), self.sizes
        first_parts, second_parts = [], []
        for expert in range(sizes.num_experts):
            stem = f"{ours}.experts.{expert}"
            first_parts += [
                TensorRange(f"{stem}.fc1.{half}.weight", width) for half in ("up", "gate")
            ]
            second_parts.append(
                TensorRange(f"{stem}.fc2.weight", (0, sizes.hidden_size), width)
            )
        local_width, experts = width[1] - width[0], sizes.num_experts
        shape = (experts, sizes.hidden_size)
        router = [full_range(self.rows, f"{ours}.router.weight")]
        yield build_item(f"{theirs}.router.weight", _ROUTER_DTYPE, shape, router, self.rows)
        shape = (experts, 2 * local_width, sizes.hidden_size)
        yield build_item(f"{theirs}.fc.weight", self.dtype, shape, first_parts, self.rows)
        shape = (experts, sizes.hidden_size, local_width)
        yield build_item(f"{theirs}.proj.weight", self.dtype, shape, second_parts, self.rows)

    def _norm(self, theirs: str, ours: str) -> Iterator[Item]:
        yield self._copy(f"{theirs}.weight", f"{ours}.weight", self.sizes.shift)
        if f"{ours}.bias" in self.rows.entries:
            yield self._copy(f"{theirs}.bias", f"{ours}.bias")

    def _by_outputs(self, theirs: str, shares: Sequence[MatrixSlice]) -> Iterator[Item]:
        """List a linear whose outputs are split, and its bias, which is split likewise."""
        yield from self.linears.items(theirs, shares)
        if f"{shares[0].stem}.bias" in self.rows.entries:
            parts = [TensorRange(f"{share.stem}.bias", share.rows) for share in shares]
            shape = (num_outputs(shares),)
            yield build_item(f"{theirs}.bias", self.dtype, shape, parts, self.rows)

    def _by_inputs(self, theirs: str, ours: str, columns: tuple[int, int]) -> Iterator[Item]:
        """List a linear whose inputs are split, and its bias, which the engine adds once."""
        yield from self.linears.items(
            theirs, [MatrixSlice(ours, (0, self.sizes.hidden_size), columns)]
        )
        if f"{ours}.bias" in self.rows.entries:
            yield self._copy(f"{theirs}.bias", f"{ours}.bias")

    def _copy(self, theirs: str, ours: str, shift: float = 0.0) -> Item:
        shape = self.rows.entries[ours].shape
        return build_item(
            theirs, self.dtype, shape, [full_range(self.rows, ours, shift)], self.rows
        )


def num_outputs(shares: Sequence[MatrixSlice]) -> int:
    """Count the outputs of all shares."""
    return sum(share.rows[1] - share.rows[0] for share in shares)


def num_inputs(share: MatrixSlice, rows: Rows) -> int:
    """Count the inputs of a share."""
    columns = share.columns or (0, rows.entries[f"{share.stem}.weight"].shape[1])
    return columns[1] - columns[0]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
