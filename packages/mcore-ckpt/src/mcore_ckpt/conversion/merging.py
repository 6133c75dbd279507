"""Merges checkpoints of one model: means, arcs between two, sums of the changes of fine-tuning.

Tensors are merged one at a time, in float32 (float64 for float64 weights), under logical names,
so that the folders may have different formats. Means and task arithmetic stream rows; slerp and
TIES hold one tensor of each model in memory. Slerp's angle and TIES' threshold are those of a
tensor, not of all weights together.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_base.stores import as_path
from mcore_ckpt.conversion.conversion import write_release
from mcore_ckpt.conversion.inspection import find_format
from mcore_ckpt.conversion.options import ConvertOptions, MergeOptions
from mcore_ckpt.conversion.resharding import check_alike
from mcore_ckpt.conversion.targets import write_hf
from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint
from mcore_ckpt.formats.sources import opened
from mcore_ckpt.mapping.row_streams import Progress, Rows, with_progress
from mcore_ckpt.storage.files import DTYPES
from mcore_ckpt.storage.outputs import atomic_dir, check_place, check_room, check_run_folder

Merge = Callable[[list[Tensor]], Tensor]
"""Merges equal parts of one tensor: those of the base, if there is a base, and of each
model."""

_PARALLEL = 0.9995
"""Cosine above which slerp is a weighted mean, as the sine of the angle is nearly 0."""


def merge(
    folders: Sequence[str | Path],
    output: str | Path,
    options: MergeOptions,
    *,
    on_progress: Progress | None = None,
) -> Path:
    """Merge the weights of several checkpoints of one model into a new one.

    Args:
        folders: checkpoints of any format.
        output: a new Hugging Face folder if the base (without a base: the first checkpoint) is
            a Hugging Face folder, else a run folder that gets a release.
        options: method and factors.
        on_progress: called for each slab written.

    Returns:
        The folder written.

    Raises:
        ValueError: if folders, base and factors do not fit the method, or the models differ.
        CheckpointError: if files are damaged, or the output exists already.
    """
    weights = _weights(len(folders), options)
    sources = [*([options.base] if options.base else []), *folders]
    formats = [find_format(source)[0] for source in sources]
    output = as_path(output)
    check_place(output, *map(as_path, sources))
    if formats[0] != "hf":
        check_run_folder(output)
    with ExitStack() as stack:
        checkpoints = [
            stack.enter_context(opened(form, source))
            for form, source in zip(formats, sources, strict=True)
        ]
        first = checkpoints[0]
        for source, other in zip(sources[1:], checkpoints[1:], strict=True):
            check_alike(Path(sources[0]), first.ours.entries, Path(source), other.ours.entries)
        merged = MergedRows(
            [one.ours for one in checkpoints], merge_function(weights, options), options.method
        )
        result: OpenCheckpoint = replace(first, ours=merged, state=None, quantization="")

        def watch(items: Sequence) -> list:
            check_room(output, sum(item.num_bytes for item in items))
            return with_progress(items, on_progress)

        if formats[0] == "hf":
            with atomic_dir(output) as folder:
                write_hf(folder, result, ConvertOptions(), watch)
        else:
            write_release(result, output, watch, None)
    return output


def _weights(count: int, options: MergeOptions) -> list[float]:
    """Return a factor for each model; 1 for all if ``--weights`` is empty."""
    weights = list(options.weights)
    if weights and len(weights) != count:
        raise ValueError(
            f"--weights has {len(weights)} numbers for {count} checkpoints: give one for each."
        )
    if options.method == "slerp" and count != 2:
        raise ValueError(f"--method slerp merges two models: give 2 checkpoints, not {count}.")
    if count < (1 if options.base else 2):
        raise ValueError(f"{count} checkpoints cannot be merged: give two or more.")
    return weights or [1.0] * count


def merge_function(weights: Sequence[float], options: MergeOptions) -> Merge:
    """Return the function that merges equal parts of the models' tensors.

    Args:
        weights: a factor for each model.
        options: method and its parameters.
    """
    functions: dict[str, Merge] = {
        "linear": partial(linear, weights=weights),
        "slerp": partial(slerp, share=weights[-1] / sum(weights)),
        "task_arithmetic": partial(task_arithmetic, weights=weights, scale=options.scale),
        "ties": partial(ties, weights=weights, scale=options.scale, density=options.density),
    }
    return functions[options.method]


def linear(
    models: Sequence[Float[Tensor, "..."]], *, weights: Sequence[float]
) -> Float[Tensor, "..."]:
    """Return the weighted mean of the models.

    Reference:
        Wortsman et al. 2022, Model soups, arXiv:2203.05482, section 2.
    """
    total = torch.zeros_like(models[0])
    for weight, model in zip(weights, models, strict=True):
        total += weight * model
    return total / sum(weights)


def slerp(models: Sequence[Float[Tensor, "..."]], *, share: float) -> Float[Tensor, "..."]:
    """Return the point at ``share`` of the arc from one tensor to another.

    Reference:
        Shoemake 1985, Animating Rotation with Quaternion Curves, section 3.3.
    """
    one, other = models
    size = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    cosine = (one * other).sum() / size if size > 0 else torch.ones(())
    if cosine.abs() > _PARALLEL:
        return torch.lerp(one, other, share)
    angle = torch.acos(cosine)
    parts = torch.sin((1 - share) * angle) * one + torch.sin(share * angle) * other
    return parts / torch.sin(angle)


def task_arithmetic(
    models: Sequence[Float[Tensor, "..."]], *, weights: Sequence[float], scale: float
) -> Float[Tensor, "..."]:
    """Return the base (first) plus the weighted sum of the models' differences from it.

    Reference:
        Ilharco et al. 2023, Editing Models with Task Arithmetic, arXiv:2212.04089.
    """
    base, *tuned = models
    changes = sum(weight * (one - base) for weight, one in zip(weights, tuned, strict=True))
    return base + scale * changes


def ties(
    models: Sequence[Float[Tensor, "..."]],
    *,
    weights: Sequence[float],
    scale: float,
    density: float,
) -> Float[Tensor, "..."]:
    """Return the base (first) plus the mean of the largest changes of the prevailing sign.

    Each model's changes of largest magnitude are kept. For each element, the sign of the sum
    over models prevails, and the changes with this sign are averaged.

    Reference:
        Yadav et al. 2023, TIES-Merging, arXiv:2306.01708, section 4, algorithm 1.
    """
    base, *tuned = models
    kept = torch.stack([_largest(one - base, density) for one in tuned])
    factors = torch.tensor(weights, dtype=base.dtype).view(-1, *(1,) * base.dim())
    sign = (factors * kept).sum(0).sign()
    agrees = (kept.sign() == sign) & (sign != 0)
    total = (factors * kept * agrees).sum(0)
    count = (factors * agrees).sum(0)
    return base + scale * torch.where(count > 0, total / count.clamp(min=1e-30), 0.0)


def _largest(change: Tensor, density: float) -> Tensor:
    """Return a tensor with all elements but those of largest magnitude set to zero."""
    size = change.abs().flatten()
    count = max(1, round(density * len(size)))
    chosen = torch.zeros_like(size, dtype=torch.bool)
    chosen[size.topk(count).indices] = True
    return change * chosen.view(change.shape)


class MergedRows:
    """Rows of the merged model."""

    def __init__(self, models: Sequence[Rows], merge: Merge, method: str) -> None:
        """List the merged tensors; values are read later.

        Args:
            models: the base, if there is a base, and the models, with the same tensors.
            merge: merges equal parts of their tensors.
            method: name of the method; slerp and ties merge whole tensors.
        """
        self._models, self._merge = models, merge
        self._is_whole = method in ("slerp", "ties")
        self._held: tuple[str, Tensor] = ("", torch.empty(0))
        self.entries = {
            name: replace(entry, chunks=()) for name, entry in models[0].entries.items()
        }

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows of the models and merge them.

        Raises:
            ValueError: if whole numbers differ.
        """
        entry = self.entries[name]
        if not self._is_whole or not entry.shape:
            return self._merged(name, begin, stop)
        if self._held[0] != name:
            self._held = (name, self._merged(name, 0, entry.shape[0]))
        return self._held[1][begin:stop]

    def _merged(self, name: str, begin: int, stop: int) -> Tensor:
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        parts = [model.rows(name, begin, stop) for model in self._models]
        if not dtype.is_floating_point or not prod(entry.shape):
            if any(not torch.equal(part, parts[0]) for part in parts):
                raise ValueError(f"{name} holds integers that differ, which cannot be merged.")
            return parts[0]
        wide = torch.promote_types(dtype, torch.float32)
        return self._merge([part.to(wide) for part in parts]).to(dtype)
