"""Chooses the matrices of a model to quantize, with the names of their tensors in the folder.

A fused matrix is multiplied in one GEMM: queries, keys and values; a gate with its
up-projection; the same pair of one expert. Its members are tensors of the Hugging Face folder,
which share per-tensor scales and the statistics of their input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from mcore_ckpt.formats.quantized_layouts import QuantLayout
from mcore_ckpt.mapping.rules import Link
from mcore_models.layers.attention import Attention
from mcore_models.layers.block import TransformerBlock
from mcore_models.layers.norm import LayerNorm, RMSNorm
from mcore_models.logical_tensors import head_dim, num_kv_heads
from mcore_moe.experts.experts import Experts
from mcore_parallel.sharding import Part, named_shards
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

_WEIGHT = ".weight"
_WHY = {
    "head": "computes logits: its errors affect every token",
    "router": "chooses experts: an error could choose other experts",
    "embedding": "is looked up, not multiplied",
}


class Member(NamedTuple):
    """One tensor of the folder within a fused matrix."""

    module: str
    """Name of the tensor without ``.weight``."""
    begin: int
    """First row of the member in the fused matrix."""
    end: int
    """One past the last row of the member."""


@dataclass(frozen=True)
class FusedMatrix:
    """A matrix that is quantized as a unit."""

    path: str
    """Path of the linear in the model; for experts also the number of the expert."""
    layer: int
    """Global number of the block; -1: outside of blocks."""
    weight: Tensor
    """``[F, D]``; writing to it changes the model."""
    members: tuple[Member, ...]
    norm: RMSNorm | LayerNorm | None
    """The norm whose output is the input of this matrix and of no other; None: no such norm."""
    value_heads: tuple[int, int] = (0, 0)
    """Number of value heads and channels of each, if the input is attention's output; else
    (0, 0)."""

    def shared(self, tops: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
        """Make numbers of input channels equal for all query heads that share a value head.

        Takes the largest number of these heads, so that a scale of the inputs can be folded
        into the rows of ``v_proj``. Other matrices' numbers do not change.
        """
        if not self.value_heads[0]:
            return tops
        num_heads, size = self.value_heads
        heads = tops.view(num_heads, -1, size)
        return heads.amax(1, keepdim=True).expand_as(heads).flatten()


@dataclass(frozen=True)
class Selection:
    """The matrices to quantize, and the modules that are left out."""

    matrices: tuple[FusedMatrix, ...]
    left: Mapping[str, str]
    """Modules of the folder that are not quantized, and why."""


def select(
    model: nn.Module,
    links: Sequence[Link],
    layout: QuantLayout,
    exclude: Sequence[str] = (),
    *,
    whole_blocks: bool = False,
) -> Selection:
    """Choose the matrices to quantize: all linears of the blocks, including experts.

    Args:
        model: complete model on one rank.
        links: pairs of the folder's tensors and the model's.
        layout: format of the codes and scales.
        exclude: patterns of the folder's modules, or of fused matrices, to leave out.
        whole_blocks: leave out matrices that blocks of several rows do not divide.

    Raises:
        ValueError: if a pattern matches no module.
    """
    links_by_name = {name: link for link in links for name in link.ours}
    chosen, left = [], {}
    for fused in _fused(model, links_by_name):
        names = [member.module for member in fused.members]
        shapes = [(end - begin, fused.weight.shape[1]) for _, begin, end in fused.members]
        reason = next(filter(None, map(layout.problem, shapes)), "")
        if whole_blocks and not reason:
            reason = next(filter(None, (_cut_block(shape, layout) for shape in shapes)), "")
        if any(fnmatchcase(n, p) for n in (*names, fused.path) for p in exclude):
            reason = "was excluded"
        if not names:
            continue
        if reason:
            left |= dict.fromkeys(names, reason)
        else:
            chosen.append(fused)
    quantized = {member.module for fused in chosen for member in fused.members}
    shapes = {name: shard.shape for name, shard in named_shards(model).items()}
    for link in links:
        module = link.theirs.removesuffix(_WEIGHT)
        if module == link.theirs or len(shapes[link.ours[0]]) != 2 or module in quantized:
            continue
        left.setdefault(module, _reason(link))
    for pattern in exclude:
        if not any(fnmatchcase(n, pattern) for n in (*left, *(f.path for f in chosen))):
            raise ValueError(
                f"--exclude-modules {pattern} matches no module of this model: correct the "
                "pattern, or leave it out."
            )
    return Selection(tuple(chosen), left)


def _cut_block(shape: Sequence[int], layout: QuantLayout) -> str:
    """Return the reason if a size is not a multiple of the block size; empty: no reason."""
    if layout.group[0] > 1:
        for count, size, what in zip(shape, layout.group, ("outputs", "inputs"), strict=True):
            if count % size:
                return f"{count} {what} are not a multiple of {size}, as vLLM requires"
    return ""


def _reason(link: Link) -> str:
    words = {word for name in link.ours for word in name.split(".")}
    reason = next((_WHY[word] for word in _WHY if word in words), "")
    if not reason and not link.is_plain:
        return "is stored transposed or interleaved in this family"
    return reason or "is not a linear that engines quantize"


def _fused(model: nn.Module, links_by_name: Mapping[str, Link]) -> list[FusedMatrix]:
    matrices = []
    for path, module in model.named_modules():
        layer = int(path.split(".")[1]) if path.startswith("blocks.") else -1
        norm = _norm_before(model, path)
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            parts = module.layouts()["weight"].parts
            members = _members(path, parts, links_by_name)
            heads = _value_heads(model, path)
            weight = module.weight.detach()
            matrices.append(FusedMatrix(path, layer, weight, members, norm, heads))
        elif isinstance(module, Experts):
            for name in ("fc1_weight", "fc2_weight"):
                stacked, parts = getattr(module, name).detach(), module.layouts()[name].parts
                for expert in range(stacked.shape[0]):
                    expert_parts = [p for p in parts if p.local_offsets[0] == expert]
                    members = _members(path, expert_parts, links_by_name)
                    expert_path = f"{path}.{expert}.{name.removesuffix('_weight')}"
                    weight = stacked[expert]
                    matrices.append(FusedMatrix(expert_path, layer, weight, members, None))
    return matrices


def _members(
    path: str, parts: Sequence[Part], links_by_name: Mapping[str, Link]
) -> tuple[Member, ...]:
    """Return the folder's tensors that form a weight's rows.

    Empty if a part of the weight is not the rows of one tensor of the folder.
    """
    members: list[Member] = []
    for part in parts:
        name = f"{path}.{part.name}" if part.name else f"{path}{_WEIGHT}"
        link = links_by_name.get(name)
        if link is None or not link.is_plain or not link.theirs.endswith(_WEIGHT):
            return ()
        begin = part.local_offsets[-2]
        end = begin + part.lengths[-2]
        module = link.theirs.removesuffix(_WEIGHT)
        # Adjacent parts of one tensor are one member.
        if members and members[-1].module == module and members[-1].end == begin:
            members[-1] = Member(module, members[-1].begin, end)
        else:
            members.append(Member(module, begin, end))
    return tuple(members)


def _value_heads(model: nn.Module, path: str) -> tuple[int, int]:
    """Return number and size of value heads in a linear's inputs; (0, 0): other inputs."""
    block_path, _, name = path.rpartition(".")
    mixer = model.get_submodule(block_path)
    if name != "proj" or not isinstance(mixer, Attention):
        return (0, 0)
    return num_kv_heads(mixer.config), head_dim(mixer.config)


def _norm_before(model: nn.Module, path: str) -> RMSNorm | LayerNorm | None:
    """Return the norm whose output only this linear reads; None: no such norm with a weight."""
    block_path, _, name = path.rpartition(".")
    block_path, _, mixer = block_path.rpartition(".")
    feeds = {"attention": "qkv", "mlp": "fc1"}
    if feeds.get(mixer) != name:
        return None
    block = model.get_submodule(block_path)
    if type(block) is not TransformerBlock:
        return None
    before = block.norms[block.mixers.index(mixer)][0]
    norm = block.get_submodule(before) if before else None
    if not isinstance(norm, (RMSNorm, LayerNorm)) or norm.weight is None:
        return None
    return norm
