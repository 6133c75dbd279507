"""Mixed precision: chooses the bits of each matrix by measured errors within one budget.

Every matrix starts with the fewest bits. Then, while the budget allows it, more bits go to the
matrix where they remove the most squared error per bit of memory. The error is the relative
error of the matrix's output, computed from second moments of its inputs.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mcore_ckpt.formats.quantized_layouts import QuantLayout, find_layout
from mcore_infer.quantization.matrices import FusedMatrix
from mcore_infer.quantization.methods import round_to_nearest
from mcore_infer.quantization.observing import InputStatistics

_WIDE_BITS = 16.0


class Candidate(NamedTuple):
    """A method and a layout that a matrix may get."""

    method: str
    """Name in ``METHODS``."""
    layout: QuantLayout


def check_budget(matrices: Sequence[FusedMatrix], budget: float, group_size: int = 0) -> None:
    """Raise ValueError for a budget below the fewest bits, before calibration.

    Args:
        matrices: matrices to quantize.
        budget: bits of a weight on average, scales included.
        group_size: see ``choose_candidates``.
    """
    candidates, bits = _choices(group_size)
    sizes = [matrix.weight.numel() for matrix in matrices]
    errors = [
        [
            *(
                math.inf if _problem(matrix, candidate.layout) else 0.0
                for candidate in candidates
            ),
            0.0,
        ]
        for matrix in matrices
    ]
    allocate(errors, sizes, bits, budget)


def choose_candidates(
    matrices: Sequence[FusedMatrix],
    seen: Mapping[str, InputStatistics],
    budget: float,
    group_size: int = 0,
) -> dict[str, Candidate]:
    """Choose four bits, fp8 or no rounding for each matrix.

    Args:
        matrices: matrices to choose for.
        seen: statistics of the inputs of each matrix, by path.
        budget: bits of a weight on average, scales included.
        group_size: inputs that share a scale of four-bit codes; 0: 128.

    Returns:
        Candidates by path; matrices that stay in 16 bits are left out.
    """
    candidates, bits = _choices(group_size)
    errors = [
        [
            *(_error(matrix, candidate.layout, seen[matrix.path]) for candidate in candidates),
            0.0,
        ]
        for matrix in matrices
    ]
    sizes = [matrix.weight.numel() for matrix in matrices]
    chosen = allocate(errors, sizes, bits, budget)
    pairs = zip(matrices, chosen, strict=True)
    return {matrix.path: candidates[i] for matrix, i in pairs if i < len(candidates)}


def _choices(group_size: int) -> tuple[list[Candidate], list[float]]:
    """Return the candidates, and the bits of a weight for each and for no rounding."""
    candidates = [
        Candidate("gptq", find_layout("W4A16_AWQ", group_size)),
        Candidate("fp8", find_layout("FP8")),
    ]
    bits = [4 + 32 / candidates[0].layout.group[1], 8.0, _WIDE_BITS]
    if bits[0] >= bits[1]:
        raise ValueError(
            f"--group-size {group_size} makes four-bit codes and scales as large as fp8: use "
            "16 or more."
        )
    return candidates, bits


def _problem(matrix: FusedMatrix, layout: QuantLayout) -> bool:
    """Whether a layout cannot represent a matrix."""
    rows = [(end - begin, matrix.weight.shape[1]) for _, begin, end in matrix.members]
    return any(layout.problem(shape) for shape in rows)


def _error(matrix: FusedMatrix, layout: QuantLayout, seen: InputStatistics) -> float:
    if _problem(matrix, layout):
        return math.inf
    weight = matrix.weight.float()
    error = round_to_nearest(matrix, layout).wide - weight
    if seen.num_rows:
        return seen.output_error(weight, error)
    return (error.norm() / weight.norm().clamp(min=1e-30)).item()


def allocate(
    errors: Sequence[Sequence[float]],
    sizes: Sequence[int],
    bits: Sequence[float],
    budget: float,
) -> list[int]:
    """Choose an option for each matrix, greedily reducing the sum of squared errors.

    Args:
        errors: error of each matrix under each option; infinite: the option is not possible.
        sizes: number of weights of each matrix.
        bits: bits of a weight under each option, ascending.
        budget: bits of a weight on average.

    Raises:
        ValueError: if the fewest bits of all matrices exceed the budget.
    """
    chosen = [next(i for i, e in enumerate(row) if e < math.inf) for row in errors]
    free_bits = budget * sum(sizes)
    free_bits -= sum(size * bits[i] for size, i in zip(sizes, chosen, strict=True))
    if free_bits < 0:
        fewest = budget - free_bits / sum(sizes)
        raise ValueError(
            f"--budget {budget:g} is below {fewest:.3g}, the fewest bits for this model: give "
            "more."
        )
    while True:
        best, gain = -1, 0.0
        for number, (row, size) in enumerate(zip(errors, sizes, strict=True)):
            option = chosen[number]
            if option + 1 == len(bits):
                continue
            cost = size * (bits[option + 1] - bits[option])
            if cost > free_bits:
                continue
            # Squared error removed per bit of memory.
            benefit = (row[option] ** 2 - row[option + 1] ** 2) / cost
            if benefit > gain:
                best, gain = number, benefit
        if best < 0:
            return chosen
        option = chosen[best]
        free_bits -= sizes[best] * (bits[option + 1] - bits[option])
        chosen[best] += 1
