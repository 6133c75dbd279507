"""Result of a verification: errors and tolerances by quantity, as a table and as JSON.

The error of a tensor is defined in ``mcore_parallel.testing.layout_comparison``, for logits,
gradients and weight updates alike. A weight whose exact gradient is zero (the bias of keys with
learned positions) gets rounding errors as its gradient, which AdamW divides by their own size:
the error of such an update is relative to the largest update of the model.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan, nan
from statistics import fmean

import torch
from torch import Tensor

from mcore_models.peft.lora import MAGNITUDE_NAME
from mcore_parallel.testing.layout_comparison import EXACT, LEAST_SCALE, tensor_errors
from mcore_train.layout_check.trial import Trial

BANDS: dict[torch.dtype, float] = {
    torch.float32: 1e-5,
    torch.bfloat16: 1.6e-2,
    torch.float16: 2e-3,
}
"""Tolerances of the formats of training. If one rank's own worst tensor is further off than
half of that, the tolerance is twice its error, which rounding causes and not the layout."""
MEAN_ROOM, SCALE_ROOM = 1.25, 2.0
"""Largest ratio of a layout's means over tensors to one rank's, with GEMMs in few bits.

Correct layouts of tensor, context, pipeline, data and expert ranks in float32 had ratios of at
most 1.0; 1.0 was a pipeline, which rounds the same numbers as one rank.
"""
VANISHING = 1e-12
"""Share of the model's largest gradient below which a gradient is only rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One comparison of a quantity, for one class of tensors."""

    what: str
    """Quantity: ``gradient``, ``weights after steps``, ``loss``, ..."""
    tensor: str
    """Class of tensors, ``blocks.*.mlp.fc1.gate.weight``; empty for a single number."""
    worst: str
    """Tensor of the class with the largest error."""
    error: float
    tolerance: float
    """Largest error that passes; 0: equal to the last bit."""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """All comparisons of a layout, and a list of what was not compared."""

    layout: str
    dtype: str
    lines: tuple[Line, ...]
    unchecked: tuple[str, ...]
    seconds: float
    shared: str = ""
    """Options that the one rank shares with the layout."""
    stopped: str = ""
    """Why the comparison stopped early; empty: it did not."""

    @property
    def passed(self) -> bool:
        """Whether the comparison ended, has lines, and all of them passed."""
        return not self.stopped and bool(self.lines) and all(line.passed for line in self.lines)

    def to_json(self) -> str:
        """Write the certificate as JSON, errors and tolerances as numbers."""
        table = asdict(self) | {"passed": self.passed}
        return json.dumps(table, indent=1) + "\n"


def compare_trials(trial: Trial, oracle: Trial, tolerance: float = EXACT) -> list[Line]:
    """Compare a trial in float64 with one rank's, by quantity and tensor class."""
    lines = [
        *_initial_lines(trial, oracle, tolerance),
        *_tensor_lines("logits", trial.logits, oracle.logits, tolerance),
        _number("loss", trial.losses, oracle.losses, tolerance),
        _number("expert loss", [trial.aux_loss], [oracle.aux_loss], tolerance),
        _number("gradient norm", [trial.grad_norm], [oracle.grad_norm], tolerance),
        *_tensor_lines("gradient", trial.gradients, oracle.gradients, tolerance),
        *_tensor_lines(
            *("weights after steps", trial.updates, oracle.updates, tolerance),
            vanishing(oracle.gradients),
        ),
    ]
    for what, found, expected in (
        ("log", trial.reported, oracle.reported),
        ("validation", trial.validation, oracle.validation),
    ):
        lines += [
            _number(f"{what}: {name}", [found.get(name, nan)], [number], tolerance)
            for name, number in expected.items()
        ]
    return [*lines, *_continued(trial)]


def compare_rounded(
    trial: Trial, alone: Sequence[Trial], oracle: Trial, band: float, *, few_bits: bool = False
) -> list[Line]:
    """Return the lines that compare a trial in the run's own format with float64 on one rank.

    GEMMs in few bits differ by more: a last bit of the run's format decides to which of two
    neighbours a number near their middle is rounded, which changes the numbers of later layers.
    The largest error of a tensor then hides faults, so the errors over all tensors are compared
    with one rank's too.

    Args:
        trial: of the layout.
        alone: trials of one rank in the same format; with GEMMs in few bits, also some with
            weights a last bit off, so that numbers round differently. Their largest error
            measures rounding.
        oracle: trial of one rank in float64.
        band: tolerance of the format, see ``BANDS``.
        few_bits: whether GEMMs are in fewer bits than the format.
    """
    # Weights after steps are left out: AdamW's first steps are signs, which rounding flips.
    rounding: dict[str, float] = {}
    for line in (line for lone in alone for line in _rounded(lone, oracle, band)):
        rounding[line.what] = max(line.error, rounding.get(line.what, 0.0))
    lines = [
        replace(line, tolerance=2 * rounding[line.what])
        for line in _rounded(trial, oracle, band)
    ]
    if few_bits:
        lines += _over_all("logits", trial.logits, [a.logits for a in alone], oracle.logits)
        gradients = [lone.gradients for lone in alone]
        lines += _over_all("gradient", trial.gradients, gradients, oracle.gradients)
    lines = [replace(line, tolerance=max(band, line.tolerance)) for line in lines]
    return [*lines, *_continued(trial)]


def _continued(trial: Trial) -> list[Line]:
    return [_bitwise("continued run", trial.resumed != trial.final)] if trial.saved else []


def _rounded(trial: Trial, oracle: Trial, band: float) -> list[Line]:
    return [
        *_tensor_lines("logits", trial.logits, oracle.logits, band),
        _number("loss", trial.losses[:1], oracle.losses[:1], band),
        _number("expert loss", [trial.aux_loss], [oracle.aux_loss], band),
        _number("gradient norm", [trial.grad_norm], [oracle.grad_norm], band),
        *_tensor_lines("gradient", trial.gradients, oracle.gradients, band),
    ]


def vanishing(gradients: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of tensors whose gradients are only rounding errors."""
    sizes = {name: float(g.abs().max()) for name, g in gradients.items() if g.numel()}
    bound = VANISHING * max(sizes.values(), default=0.0)
    return frozenset(name for name, size in sizes.items() if size <= bound)


def tensor_class(name: str) -> str:
    """Return the class of a logical tensor: its name without layer and expert numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _initial_lines(trial: Trial, oracle: Trial, tolerance: float) -> list[Line]:
    """Compare initial weights bit by bit; DoRA magnitudes, which are sums, by tolerance."""
    sums = {n: w for n, w in oracle.initial.items() if n.endswith(MAGNITUDE_NAME)}
    exact = {n: w for n, w in oracle.initial.items() if n not in sums}
    lines = [_bitwise("initial weights", _different(trial.initial, exact))]
    return lines + _tensor_lines(
        "initial weights", {n: trial.initial[n] for n in sums}, sums, tolerance
    )


def _tensor_lines(
    what: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerance: float,
    noisy: Collection[str] = (),
) -> list[Line]:
    worst: dict[str, tuple[str, float]] = {}
    for name, error in tensor_errors(found, expected, noisy).items():
        kind = tensor_class(name)
        if kind not in worst or not error <= worst[kind][1]:
            worst[kind] = (name, error)
    return [
        Line(what=what, tensor=kind, worst=name, error=error, tolerance=tolerance)
        for kind, (name, error) in worst.items()
    ]


def _over_all(
    what: str,
    found: Mapping[str, Tensor],
    alone: Iterable[Mapping[str, Tensor]],
    expected: Mapping[str, Tensor],
) -> list[Line]:
    """Compare all tensors together: mean distance, mean scale error, largest scale error."""
    others = [_distances(lone, expected) for lone in alone]
    distances, scales = _distances(found, expected)
    lines = []
    for number, (quantity, errors, ratio) in enumerate(
        (("mean distance", distances, MEAN_ROOM), ("mean scale", scales, SCALE_ROOM))
    ):
        allowed = ratio * max(fmean(other[number].values()) for other in others)
        error = fmean(errors.values())
        lines.append(
            Line(
                what=f"{what}, {quantity}", tensor="", worst="", error=error, tolerance=allowed
            )
        )
    worst = max(scales, key=lambda name: (isnan(scales[name]), scales[name]))
    allowed = SCALE_ROOM * max(max(other[1].values()) for other in others)
    lines.append(
        Line(
            what=f"{what}, scale",
            tensor="",
            worst=worst,
            error=scales[worst],
            tolerance=allowed,
        )
    )
    return lines


def _distances(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return |a - b| / |b| of every tensor, and the distance from 1 of a's best multiple of b.

    Rounding changes the second number far less than the first; a wrong factor or a missing part
    of a sum changes both. Norms of b have the floor of ``tensor_errors``.
    """
    wide = {name: tensor.double().flatten() for name, tensor in expected.items()}
    sizes = {name: float(b.square().mean().sqrt()) for name, b in wide.items() if b.numel()}
    smallest = LEAST_SCALE * max(sizes.values(), default=0.0)
    distances, scales = {}, {}
    for name, size in sizes.items():
        b = wide[name]
        difference = found[name].double().flatten() - b
        square = b.numel() * max(size, smallest) ** 2 or 1.0
        distances[name] = float(difference @ difference / square) ** 0.5
        scales[name] = abs(float(difference @ b / square))
    return distances, scales


def _number(
    what: str, found: Iterable[float], expected: Iterable[float], tolerance: float
) -> Line:
    errors = [
        abs(a - b) / abs(b) if b else abs(a) for a, b in zip(found, expected, strict=True)
    ]
    # max() alone would ignore a NaN.
    error = max(errors, key=lambda error: (isnan(error), error), default=0.0)
    return Line(what=what, tensor="", worst="", error=error, tolerance=tolerance)


def _bitwise(what: str, differs: str | bool) -> Line:
    worst = differs if isinstance(differs, str) else ""
    return Line(what=what, tensor="", worst=worst, error=float(bool(differs)), tolerance=0.0)


def _different(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor whose bits differ; empty: none differs."""
    names = (n for n in expected if n not in found or not torch.equal(found[n], expected[n]))
    return next(names, "")


def draw(certificate: Certificate, *, quiet: bool = False) -> str:
    """Return the table: one row per tensor class, failures marked, and the unchecked parts."""
    rows = [("what", "tensors", "worst error", "tolerance", "")]
    for line in certificate.lines:
        exact = line.tolerance == 0
        rows.append(
            (
                line.what,
                line.tensor,
                ("differs" if line.error else "same bits") if exact else f"{line.error:.1e}",
                "" if exact else f"{line.tolerance:.1e}",
                "ok" if line.passed else f"FAILED {line.worst}".rstrip(),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row[:4], widths, strict=True)), row[4]])
        for row in rows
    ]
    if quiet:
        table = [line for line in table if "FAILED" in line]
    verdict = "computes what one rank computes" if certificate.passed else "is WRONG"
    layout = f"{certificate.layout}, {certificate.dtype}"
    shared = ["", f"shared by the one rank: {certificate.shared}"] if certificate.shared else []
    unchecked = ["", "not checked here:", *(f"  - {n}" for n in certificate.unchecked), ""]
    return "\n".join(
        [
            *(row.rstrip() for row in table),
            *([] if quiet else shared + unchecked),
            f"This layout ({layout}) {verdict} ({certificate.seconds:.0f} s).",
        ]
    )
