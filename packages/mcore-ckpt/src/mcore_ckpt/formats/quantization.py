"""Recognizes a folder's quantization, and dequantizes its matrices while reading."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mcore_ckpt.formats.compressed_forms import UnifiedRows, layout_named_by
from mcore_ckpt.formats.json_files import read_json_object
from mcore_ckpt.formats.quantized_layouts import (
    INPUT_SCALE,
    KV_SCALES,
    PRE_QUANT_SCALE,
    SCALES,
    WEIGHT_SCALE,
    WEIGHT_SCALE_2,
    QuantLayout,
    Scales,
)
from mcore_ckpt.formats.quantized_plans import QuantPlan, read_plan
from mcore_ckpt.formats.recognition import QUANT_CONFIG
from mcore_ckpt.mapping.low_bits import decode, stored, unpack
from mcore_ckpt.mapping.packed_words import ByInputs, ByOutputs, PackedRows, Scheme
from mcore_ckpt.mapping.row_streams import Rows
from mcore_ckpt.mapping.views import DequantizedTensors, ScaledTensors, UnpackedMxfp4
from mcore_ckpt.storage.files import DTYPES
from mcore_ckpt.storage.index import TensorEntry

_WEIGHT = ".weight"


Widen = Callable[[Rows], Rows]
"""Converts a folder's tensors to a view with floating-point matrices."""


def take_quantization(
    config: Mapping[str, Any], folder: Path
) -> tuple[dict[str, Any], str, Widen | None]:
    """Split a config.json into the model's fields and its quantization.

    Args:
        config: fields of config.json; hf_quant_config.json in ``folder`` overrides them.
        folder: folder of the weights.

    Returns:
        The fields without the quantization; the name of the method, for messages; the view that
        dequantizes. Fields of an unsupported method remain, so that families refuse them.

    Raises:
        ValueError: if the method is supported, but not with these parameters.
    """
    how = config.get("quantization_config")
    how = how if isinstance(how, dict) else {}
    bare = {name: value for name, value in config.items() if name != "quantization_config"}
    unified = _unified(how, folder)
    if unified is not None:
        plan = read_plan(unified)
        return bare, plan.algo, partial(WidenedRows, plan=plan)
    method = how.get("quant_method")
    words = (method, how.get("checkpoint_format") or how.get("format"))
    name = " ".join(dict.fromkeys(str(word) for word in words if word))
    if method == "mxfp4":
        return bare, name, UnpackedMxfp4
    if schemes := packed_schemes(how):
        return bare, name, partial(_packed, how=how, schemes=schemes)
    if method == "bitsandbytes":
        from mcore_ckpt.formats.bitsandbytes import BitsAndBytesRows

        return bare, name, BitsAndBytesRows
    block = how.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and method == "fp8":
        return bare, name, partial(DequantizedTensors, block=(block[0], block[1]))
    if method == "fp8" and block is None:
        return bare, name, ScaledTensors
    return dict(config), name, None


def packed_schemes(how: dict[str, Any]) -> tuple[Scheme, ...]:
    """Return the schemes of packed matrices of a ``quantization_config``; may be empty.

    Raises:
        ValueError: if the method is supported, but not with these parameters.
    """
    method = how.get("quant_method")
    if method == "gptq":
        bits, form = how.get("bits"), how.get("checkpoint_format", "gptq")
        if bits not in (4, 8) or form not in ("gptq", "gptq_v2"):
            raise ValueError(
                f"quantization_config has GPTQ with bits {bits} and checkpoint_format "
                f"{form!r}: only 4 and 8 bits, gptq and gptq_v2 are supported."
            )
        offset = 1 if form == "gptq" else 0
        return (ByInputs(bits=bits, group_size=how.get("group_size", -1), zero_offset=offset),)
    if method == "awq":
        bits, version = how.get("bits", how.get("w_bit")), how.get("version", "gemm")
        if bits != 4 or str(version).lower() != "gemm":
            raise ValueError(
                f"quantization_config has AWQ with bits {bits} and version {version!r}: only 4 "
                "bits, gemm are supported."
            )
        size = how.get("group_size", how.get("q_group_size", 128))
        return (ByInputs(bits=4, group_size=size, packs_outputs=True),)
    if method != "compressed-tensors":
        return ()
    groups = (how.get("config_groups") or {}).values()
    schemes = tuple(dict.fromkeys(_compressed(how, group) for group in groups))
    if len({scheme.mark for scheme in schemes}) < len(schemes):
        raise ValueError(
            "quantization_config of compressed-tensors stores modules in several formats under "
            "one name, which is not supported."
        )
    return schemes


def _compressed(how: dict[str, Any], group: dict[str, Any]) -> ByOutputs:
    weights = group.get("weights") or {}
    form = group.get("format") or how.get("format")
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    size = weights.get("group_size") or 0
    blocks = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "group": (1, size),
        "tensor_group": (1, size),
        "block": tuple(weights.get("block_structure") or (128, 128)),
    }
    forms = {
        "float-quantized": (8,),
        "int-quantized": (8,),
        "naive-quantized": (8,),
        "pack-quantized": (4, 8),
        "nvfp4-pack-quantized": (4,),
        "mxfp4-pack-quantized": (4,),
    }
    if (
        not isinstance(bits, int)
        or bits not in forms.get(str(form), ())
        or (strategy not in blocks)
    ):
        raise ValueError(
            f"quantization_config has compressed-tensors in the format {form!r} with {bits} "
            f"bits by {strategy!r}: only {', '.join(forms)} with 8 or 4 bits, by "
            f"{', '.join(blocks)}, are supported."
        )
    symmetric = bool(weights.get("symmetric", True))
    if not symmetric and form != "pack-quantized":
        raise ValueError(f"{form} of compressed-tensors with zero points is not supported.")
    tall, across = blocks[strategy]
    return ByOutputs(form=str(form), bits=bits, block=(tall, across), symmetric=symmetric)


def _unified(how: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    file = folder / QUANT_CONFIG
    if file.is_file():
        return read_json_object(file)
    return how if how.get("quant_method") == "modelopt" else None


def _packed(theirs: Rows, how: dict[str, Any], schemes: tuple[Scheme, ...]) -> Rows:
    """Return a view that dequantizes; codes stay readable if there is a unified layout."""
    layout = layout_named_by(how)
    if layout is not None and UnifiedRows.reads(theirs, layout):
        unified = UnifiedRows(theirs, layout)
        return WidenedRows(unified, unified.plan)
    return PackedRows(theirs, schemes, (".k_scale", ".v_scale"))


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Layout and scales of some rows of a quantized matrix."""

    layout: QuantLayout
    """Layout of the matrix."""
    scales: Float[Tensor, "f d"]
    """Factors of codes, float32: a row for each group of rows (the first group may begin before
    the part), a column for each group of columns; ``[1, 1]`` if all codes share a factor."""
    input_scale: Tensor | None
    """Factor of the codes of inputs; None: inputs are scaled dynamically."""
    pre_quant_scale: Float[Tensor, " D"] | None
    """Factors of inputs before they are rounded."""

    def full_scales(self, begin: int, stop: int, columns: int) -> Float[Tensor, "F D"]:
        """Return the factor of each code in rows ``begin`` to ``stop``."""
        high, wide = (
            n or size for n, size in zip(self.layout.group, (stop, columns), strict=True)
        )
        rows = self.scales.repeat_interleave(high, 0)
        first = begin // high * high if self.layout.group[0] else 0
        rows = rows[begin - first : stop - first]
        return rows.repeat_interleave(wide, 1)[:, :columns]


class WidenedRows:
    """Dequantizes folders of the unified layout to float32; hides the scale tensors.

    ``M.weight`` is ``codes * weight_scale * weight_scale_2 * pre_quant_scale``: the weight of a
    linear whose inputs are not rounded.
    """

    def __init__(self, under: Rows, plan: QuantPlan) -> None:
        """Check that the tensors match the plan; values are read later.

        Raises:
            ValueError: if a matrix is quantized although the plan excludes it or vice versa, a
                scale is missing or has no weight, or shapes do not fit.
        """
        self._under, self.plan = under, plan
        self.entries: dict[str, TensorEntry] = {}
        for name, entry in under.entries.items():
            module, _, kind = name.rpartition(".")
            if kind in SCALES:
                if f"{module}.{WEIGHT_SCALE}" not in under.entries:
                    raise ValueError(
                        f"{name} is a scale without a quantized weight: the folder is damaged."
                    )
            elif name.endswith(KV_SCALES):
                continue
            elif f"{module}.{WEIGHT_SCALE}" in under.entries and kind == "weight":
                self.entries[name] = self._quantized(module, entry)
            else:
                self._check_left(name, entry)
                self.entries[name] = entry
        self._check_cache()

    @property
    def stored(self) -> Rows:
        """Tensors of the folder as stored: codes and scales."""
        return self._under

    def _quantized(self, module: str, entry: TensorEntry) -> TensorEntry:
        layout, entries = self.plan.of(module), self._under.entries
        is_missing = self.plan.layers and module not in self.plan.layers
        if is_missing or self.plan.excludes(module):
            raise ValueError(f"{module} is quantized, although the config excludes it.")
        shape = layout.shape_of(entry.shape)
        for kind, (dtype, wanted) in layout.tensors(shape).items():
            stored_entry = entries.get(f"{module}.{kind}")
            if (
                stored_entry is None
                and kind == PRE_QUANT_SCALE
                and layout.pre_quant_scale == "some"
            ):
                continue
            if stored_entry is None or not _fits(stored_entry, dtype, wanted):
                actual = (
                    "absent"
                    if stored_entry is None
                    else f"{stored_entry.dtype} {list(stored_entry.shape)}"
                )
                raise ValueError(
                    f"{module}.{kind} must be {dtype} {list(wanted)} for {layout.algo}, and is "
                    f"{actual}."
                )
        return TensorEntry(shape, "F32", ())

    def _check_left(self, name: str, entry: TensorEntry) -> None:
        module = name.removesuffix(_WEIGHT)
        if name == module or len(entry.shape) != 2 or "embed" in name:
            return
        if not self.plan.excludes(module):
            raise ValueError(
                f"{name} is not quantized, although the config does not exclude it: add its "
                f"{WEIGHT_SCALE}, or {module} to exclude_modules."
            )

    def _check_cache(self) -> None:
        if not self.plan.kv_cache:
            return
        present = self._under.entries
        for name in present:
            for kind in KV_SCALES:
                projection, _, scale = kind.partition(".")
                if name.endswith(f"{projection}{_WEIGHT}"):
                    wanted = f"{name.removesuffix(_WEIGHT)}.{scale}"
                    if wanted not in present:
                        raise ValueError(
                            f"{wanted} is missing, although the config states that keys and "
                            "values are kept in fp8."
                        )

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows, times their scales."""
        if not self.is_quantized(name):
            return self._under.rows(name, begin, stop)
        layout, (_, columns) = self.layout(name), self.entries[name].shape
        tall = stored(layout.code)[1][0]
        packed = self._under.rows(name, begin // tall, -(-stop // tall))
        codes = unpack(packed, layout.code)[begin % tall :][: stop - begin]
        part = self.part(name, begin, stop)
        wide = decode(codes, layout.code) * part.full_scales(begin, stop, columns)
        return wide if part.pre_quant_scale is None else wide * part.pre_quant_scale

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor is stored as codes."""
        return f"{name.removesuffix(_WEIGHT)}.{WEIGHT_SCALE}" in self._under.entries

    def layout(self, name: str) -> QuantLayout:
        """Return the layout of a quantized tensor."""
        return self.plan.of(name.removesuffix(_WEIGHT))

    def part(self, name: str, begin: int, stop: int) -> MatrixPart:
        """Return scales and layout of some rows of a quantized matrix."""
        module, layout = name.removesuffix(_WEIGHT), self.layout(name)
        high = layout.group[0]
        rows = (begin // high, -(-stop // high)) if high else (0, 1)
        first = self._under.rows(f"{module}.{WEIGHT_SCALE}", *rows)
        second = self._scalar(module, WEIGHT_SCALE_2)
        return MatrixPart(
            layout,
            layout.wide_scales(Scales(first if high else first.view(()), second)),
            self._scalar(module, INPUT_SCALE),
            self._vector(module, PRE_QUANT_SCALE),
        )

    def _scalar(self, module: str, kind: str) -> Tensor | None:
        name = f"{module}.{kind}"
        if name not in self._under.entries:
            return None
        return self._under.rows(name, 0, 1).float().view(())

    def _vector(self, module: str, kind: str) -> Tensor | None:
        name = f"{module}.{kind}"
        entry = self._under.entries.get(name)
        return None if entry is None else self._under.rows(name, 0, entry.shape[0]).float()

    def kv_scales(self) -> dict[str, Tensor]:
        """Read the scales of the key/value cache, by name of the tensor."""
        names = [name for name in self._under.entries if name.endswith(KV_SCALES)]
        return {name: self._under.rows(name, 0, 1).float().view(()) for name in names}


def _fits(entry: TensorEntry, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has the required dtype and shape.

    A single number may have any number of dimensions, scales of blocks may have shape
    ``[F/rows, D/columns]``, and F32 may be any floating-point dtype.
    """
    is_float = dtype == "F32" and DTYPES[entry.dtype].is_floating_point
    has_shape = entry.shape == shape or prod(entry.shape) == prod(shape) == 1
    has_shape |= len(shape) == 4 and entry.shape == shape[::2]
    return has_shape and (entry.dtype == dtype or is_float)
