"""Hugging Face folders of quantized weights, opened for their codes and scales.

``foreign_loading`` dequantizes such a folder while loading; this module serves models that
multiply with the codes themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint
from mcore_ckpt.formats.quantization import MatrixPart, WidenedRows
from mcore_ckpt.formats.quantized_layouts import KV_SCALES, QuantLayout
from mcore_ckpt.formats.sources import opened


class QuantizedFolder:
    """Layouts and scales of logical matrices in a Hugging Face folder of quantized weights."""

    def __init__(self, source: OpenCheckpoint, widened: WidenedRows) -> None:
        self._widened = widened
        self._places = {
            name: (link, number)
            for link in source.links
            for number, name in enumerate(link.ours)
        }

    def is_quantized(self, name: str) -> bool:
        """Whether a logical tensor is stored as codes."""
        return self._widened.is_quantized(self._places[name][0].theirs)

    def layout(self, name: str) -> QuantLayout:
        """Return the layout of a logical matrix stored as codes."""
        return self._widened.layout(self._places[name][0].theirs)

    def part(self, name: str, begin: int, stop: int) -> MatrixPart:
        """Return scales and layout of rows ``begin`` to ``stop`` of a logical matrix."""
        link, number = self._places[name]
        assert link.is_plain, f"{link.theirs} is not stored by rows"
        first = link.rows(self._widened.entries[link.theirs].shape)[number][0]
        return self._widened.part(link.theirs, first + begin, first + stop)

    def kv_scales(self) -> dict[int, tuple[float, float]]:
        """Read the scales of keys and values in an fp8 cache, by layer."""
        stored, scales_by_layer = self._widened.kv_scales(), {}
        for name, (link, _) in self._places.items():
            layer, _, rest = name.removeprefix("blocks.").partition(".")
            if rest != "attention.qkv.k.weight":
                continue
            prefix = link.theirs.removesuffix("k_proj.weight")
            if f"{prefix}{KV_SCALES[0]}" in stored:
                k, v = (stored[f"{prefix}{suffix}"].item() for suffix in KV_SCALES)
                scales_by_layer[int(layer)] = (k, v)
        return scales_by_layer


@contextmanager
def opened_quantized(folder: Path) -> Iterator[QuantizedFolder | None]:
    """Open a Hugging Face folder for its codes and scales; yield None if it has no codes.

    Raises:
        ValueError: as ``opened_foreign``.
        CheckpointError: as ``opened_foreign``.
    """
    with opened("hf", folder) as source:
        widened = source.theirs
        yield QuantizedFolder(source, widened) if isinstance(widened, WidenedRows) else None
