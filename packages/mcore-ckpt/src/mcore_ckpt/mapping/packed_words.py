"""Dequantizes matrices packed into 32-bit words by GPTQ, AWQ and compressed-tensors.

A scheme lists the tensors that encode ``M.weight`` and dequantizes rows of the matrix to
float32. Codes are unsigned; a zero point is the code of 0. ``PackedRows`` presents a folder
with all such matrices dequantized.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mcore_ckpt.mapping.low_bits import decode, unpack
from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.storage.index import TensorEntry

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of columns 0 to 7, in the order of AutoAWQ's kernels."""


@runtime_checkable
class Scheme(Protocol):
    """Encoding of a matrix ``[F, D]`` in several tensors of a module."""

    @property
    def mark(self) -> str:
        """Name within a module that identifies the scheme."""

    @property
    def names(self) -> Sequence[str]:
        """Names within a module that belong to the matrix, ``mark`` included."""

    def shape(self, under: Rows, module: str) -> tuple[int, int]:
        """Return ``[F, D]``.

        Raises:
            ValueError: if a tensor is missing or has another shape.
        """

    def rows(self, under: Rows, module: str, begin: int, stop: int) -> Float[Tensor, "rows D"]:
        """Read rows, float32."""


class PackedRows:
    """Rows of a folder with each packed matrix presented as one ``M.weight``."""

    def __init__(
        self, under: Rows, schemes: Sequence[Scheme], kept: Sequence[str] = ()
    ) -> None:
        """Match the tensors of each module with the first scheme whose mark it has.

        Args:
            under: tensors of the folder.
            schemes: schemes that its config names.
            kept: suffixes of other names to hide, such as scales of a cache.

        Raises:
            ValueError: if a matrix lacks tensors of its scheme or they have other shapes, or
                no matrix is packed.
        """
        self._under = under
        self._found: dict[str, Scheme] = {}
        hidden: set[str] = {n for n in under.entries if n.endswith(tuple(kept))}
        for name in under.entries:
            module, _, kind = name.rpartition(".")
            for scheme in schemes:
                if kind == scheme.mark and f"{module}.weight" not in self._found:
                    self._found[f"{module}.weight"] = scheme
                    hidden |= {f"{module}.{one}" for one in scheme.names}
        if not self._found:
            marks = ", ".join(dict.fromkeys(scheme.mark for scheme in schemes))
            raise ValueError(
                f"quantization_config names packed weights ({marks}), but the folder has none."
            )
        self.entries: dict[str, TensorEntry] = {
            name: entry for name, entry in under.entries.items() if name not in hidden
        }
        for name, scheme in self._found.items():
            shape = scheme.shape(under, name.removesuffix(".weight"))
            self.entries[name] = TensorEntry(shape, "F32", ())

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows; packed matrices are dequantized."""
        scheme = self._found.get(name)
        if scheme is None:
            return self._under.rows(name, begin, stop)
        return scheme.rows(self._under, name.removesuffix(".weight"), begin, stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class ByInputs:
    """GPTQ's and AWQ's form: ``qweight``, ``qzeros`` and ``scales`` with inputs as rows.

    GPTQ packs eight inputs into a word and may list the group of each input in ``g_idx``; AWQ
    packs eight outputs in an interleaved order. Reading any rows reads the complete matrix.

    Reference:
        Frantar et al. 2022, GPTQ. arXiv:2210.17323. Lin et al. 2023, AWQ. arXiv:2306.00978.
    """

    bits: int
    """Bits of a code: 4 or 8; AWQ has 4."""
    group_size: int
    """Inputs that share a scale; -1: all."""
    packs_outputs: bool = False
    """Whether words hold outputs (AWQ) instead of inputs (GPTQ)."""
    zero_offset: int = 0
    """Added to stored zero points: 1 in GPTQ's first format, 0 in its second and in AWQ."""
    mark: str = field(default="qweight", init=False)
    """As in ``Scheme``."""
    names: Sequence[str] = field(default=("qweight", "qzeros", "scales", "g_idx"), init=False)
    """As in ``Scheme``."""

    def shape(self, under: Rows, module: str) -> tuple[int, int]:
        """Return ``[F, D]``; see ``Scheme``."""
        per_word = 32 // self.bits
        first, second = _entry(under, module, "qweight", "I32").shape
        inputs = first if self.packs_outputs else first * per_word
        outputs = second * per_word if self.packs_outputs else second
        groups = -(-inputs // (self.group_size if self.group_size > 0 else inputs))
        _expect(under, module, "scales", "", (groups, outputs))
        _expect(under, module, "qzeros", "I32", (groups, outputs // per_word))
        if not self.packs_outputs:
            _expect(under, module, "g_idx", "I32", (inputs,), optional=True)
        return outputs, inputs

    def rows(self, under: Rows, module: str, begin: int, stop: int) -> Float[Tensor, "rows D"]:
        """Read rows ``begin`` to ``stop``; see ``Scheme``."""
        _, inputs = self.shape(under, module)
        words, zeros, scales = (
            _all_rows(under, f"{module}.{n}") for n in ("qweight", "qzeros", "scales")
        )
        if self.packs_outputs:
            # AWQ: words are packed along outputs, in an interleaved order.
            codes = word_codes(words, 4)[:, :, list(_AWQ_ORDER)].flatten(1)
            zero = word_codes(zeros, 4)[:, :, list(_AWQ_ORDER)].flatten(1)
        else:
            # GPTQ: words are packed along inputs; those of zeros along outputs.
            codes = word_codes(words, self.bits).transpose(1, 2).flatten(0, 1)  # [D, F]
            zero = word_codes(zeros, self.bits).flatten(1)
        zero = zero + self.zero_offset
        group = torch.arange(inputs) // (self.group_size if self.group_size > 0 else inputs)
        if f"{module}.g_idx" in under.entries:
            group = _all_rows(under, f"{module}.g_idx").long()
        part = slice(begin, stop)
        wide = (codes[:, part] - zero[group][:, part]) * scales.float()[group][:, part]
        return wide.t().contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class ByOutputs:
    """compressed-tensors' form: ``weight_scale``, and codes with outputs as rows.

    Scales are per tensor ``[1]``, per output ``[F, 1]``, per group ``[F, D/g]``, or per block;
    NVFP4 has a second scale for the tensor, which is a divisor.
    """

    form: str
    """``format`` of the config."""
    bits: int
    """Bits of a code."""
    block: tuple[int, int]
    """Rows and columns that share a scale; 0: all of them."""
    symmetric: bool = True
    """Whether the middle code means 0; else ``weight_zero_point`` has the code of 0."""

    @property
    def mark(self) -> str:
        """As in ``Scheme``."""
        return "weight_packed" if "pack" in self.form else "weight_scale"

    @property
    def names(self) -> Sequence[str]:
        """As in ``Scheme``."""
        codes = "weight_packed" if "pack" in self.form else "weight"
        more = ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
        return codes, "weight_scale", *more, "input_scale", "input_global_scale"

    def shape(self, under: Rows, module: str) -> tuple[int, int]:
        """Return ``[F, D]``; see ``Scheme``."""
        if f"{module}.weight_g_idx" in under.entries:
            raise ValueError(
                f"{module} was quantized in the order of activations (weight_g_idx), which is "
                "not supported."
            )
        if self.form == "pack-quantized":
            rows, columns = map(int, _all_rows(under, f"{module}.weight_shape").tolist())
            words = -(-columns * self.bits // 32)
            _expect(under, module, "weight_packed", "I32", (rows, words))
            if not self.symmetric:
                tall = -(-rows * self.bits // 32)
                _expect(
                    under,
                    module,
                    "weight_zero_point",
                    "I32",
                    (tall, self._grid(rows, columns)[1]),
                )
        elif self.form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            rows, half = _entry(under, module, "weight_packed", "U8").shape
            columns = 2 * half
            if self.form == "nvfp4-pack-quantized":
                _expect(under, module, "weight_global_scale", "", (1,))
        else:
            rows, columns = _entry(under, module, "weight", "").shape
        _expect(under, module, "weight_scale", "", self._scale_shape(rows, columns))
        return rows, columns

    def _grid(self, rows: int, columns: int) -> tuple[int, int]:
        tall, across = self.block
        return -(-rows // (tall or rows)), -(-columns // (across or columns))

    def _scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (1,) if self.block == (0, 0) else self._grid(rows, columns)

    def rows(self, under: Rows, module: str, begin: int, stop: int) -> Float[Tensor, "rows D"]:
        """Read rows ``begin`` to ``stop``; see ``Scheme``."""
        rows, columns = self.shape(under, module)
        tall, across = self.block[0] or rows, self.block[1] or columns
        scale = (
            _all_rows(under, f"{module}.weight_scale").float().view(self._grid(rows, columns))
        )

        def spread(grid: Tensor) -> Tensor:
            low, high = begin // tall, -(-stop // tall)
            # [low:high]: rows of the grid whose scales apply to rows begin to stop.
            wide = grid[low:high].repeat_interleave(tall, 0)[begin - low * tall :][
                : stop - begin
            ]
            return wide.repeat_interleave(across, 1)[:, :columns]

        if self.form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            packed = under.rows(f"{module}.weight_packed", begin, stop)
            if self.form == "nvfp4-pack-quantized":
                scale = scale / _all_rows(under, f"{module}.weight_global_scale").float()
            else:  # exponents of two, biased by 127
                scale = torch.exp2(scale - 127)
            return decode(unpack(packed, "e2m1"), "e2m1") * spread(scale)
        if self.form != "pack-quantized":
            return under.rows(f"{module}.weight", begin, stop).float() * spread(scale)
        words = under.rows(f"{module}.weight_packed", begin, stop)
        codes = word_codes(words, self.bits).flatten(1)[:, :columns]
        zero: Tensor | int = 1 << (self.bits - 1)
        if not self.symmetric:
            packed = word_codes(_all_rows(under, f"{module}.weight_zero_point"), self.bits)
            zero = spread(packed.transpose(1, 2).flatten(0, 1)[:rows])
        return (codes - zero) * spread(scale)


def word_codes(words: Int[Tensor, "a b"], bits: int) -> Int[Tensor, "a b n"]:
    """Unpack words into unsigned codes, low bits first."""
    places = bits * torch.arange(32 // bits, dtype=torch.int32)
    return (words[..., None] >> places) & ((1 << bits) - 1)


def _all_rows(under: Rows, name: str) -> Tensor:
    return under.rows(name, 0, under.entries[name].shape[0])


def _entry(under: Rows, module: str, name: str, dtype: str) -> TensorEntry:
    entry = under.entries.get(f"{module}.{name}")
    if entry is None or len(entry.shape) != 2 or (dtype and entry.dtype != dtype):
        actual = "absent" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise ValueError(
            f"{module}.{name} must be a matrix{f' of {dtype}' * bool(dtype)}: it is {actual}."
        )
    return entry


def _expect(
    under: Rows,
    module: str,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    *,
    optional: bool = False,
) -> None:
    entry = under.entries.get(f"{module}.{name}")
    if entry is None and optional:
        return
    if entry is None or entry.shape != shape or (dtype and entry.dtype != dtype):
        actual = "absent" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise ValueError(f"{module}.{name} must be of shape {list(shape)}, and is {actual}.")
