"""Writes quantized folders of compressed-tensors, which vLLM and transformers load.

``mcore_ckpt.formats.compressed_forms`` describes the formats. The formats do not store scales
of inputs; ``folded_scales`` multiplies such scales into the previous layer.
"""

from collections.abc import Container, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mcore_ckpt.conversion.targets import Watch
from mcore_ckpt.families.common.fields import settings
from mcore_ckpt.formats.compressed_forms import CompressedForm, form_of, numbers
from mcore_ckpt.formats.hf_folder import write_hf_folder
from mcore_ckpt.formats.open_checkpoint import OpenCheckpoint
from mcore_ckpt.formats.quantization import WidenedRows
from mcore_ckpt.formats.quantized_layouts import (
    INPUT_SCALE,
    LAYOUTS,
    PRE_QUANT_SCALE,
    SCALES,
    WEIGHT_SCALE,
    WEIGHT_SCALE_2,
    QuantLayout,
)
from mcore_ckpt.mapping.low_bits import unpack
from mcore_ckpt.mapping.row_streams import Rows, row_groups, slabs
from mcore_ckpt.storage.files import Item
from mcore_ckpt.storage.index import TensorEntry
from mcore_infer.quantization.unified_folder import hf_config, quantized, write_tokenizer
from mcore_models.logical_tensors import head_dim, is_gated, num_kv_heads

_VERSION = "0.13.0"
"""First release of compressed-tensors that reads every format that this module writes."""


def _form_of(layout: QuantLayout) -> CompressedForm:
    form = form_of(layout)
    if form is None:
        supported = ", ".join(each.algo for each in LAYOUTS.values() if form_of(each))
        raise ValueError(
            f"--format compressed-tensors has no format for {layout.algo}, only for "
            f"{supported}. Use --format hf-quant."
        )
    return form


def write_compressed_tensors(
    folder: Path, source: OpenCheckpoint, max_shard_bytes: int, watch: Watch
) -> str:
    """Write a quantized source as a folder of compressed-tensors; return the folder's format.

    Args:
        folder: an empty folder.
        source: opened quantized folder.
        max_shard_bytes: limit of the bytes of tensors in one file.
        watch: called once with all tensors.

    Raises:
        ValueError: if the source is not quantized, compressed-tensors has no format for its
            layout, or the scales of inputs cannot be folded.
    """
    widened = quantized(source, "compressed-tensors")
    if widened.plan.layers:
        raise ValueError(
            "--format compressed-tensors has one layout for all modules, but this folder has "
            f"several ({widened.plan.algo}). Use --format hf-quant."
        )
    form = _form_of(widened.plan.layout)
    shift = float(source.description["config"].get("apply_layernorm_1p", False))
    stored = _FoldedTensors(widened.stored, folded_scales(widened, source.description), shift)
    items: list[Item] = []
    unquantized = ["lm_head"]
    for name, entry in stored.entries.items():
        module, _, kind = name.rpartition(".")
        if kind in SCALES:
            continue
        if kind in ("k_scale", "v_scale"):
            attention = module.rpartition(".")[0]
            items.append(_scale(f"{attention}.{kind}", stored, name, (1,)))
        elif widened.is_quantized(name) and kind == "weight":
            items += _module_items(module, widened, stored, form)
        else:
            items.append(_copy(name, stored))
            is_linear = kind == "weight" and len(entry.shape) == 2 and "embed" not in name
            if is_linear and module not in unquantized:
                unquantized.append(module)
    config = hf_config(source)
    config["quantization_config"] = _config(form, unquantized, kv_cache=widened.plan.kv_cache)
    write_hf_folder(folder, config, watch(items), max_shard_bytes)
    write_tokenizer(folder, source)
    return form.format


def _config(form: CompressedForm, ignore: list[str], *, kv_cache: bool) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": dict(form.weights),
        "input_activations": None if form.inputs is None else dict(form.inputs),
        "output_activations": None,
        "format": form.format,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form.format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": numbers(8, "float", "tensor") if kv_cache else None,
        "version": _VERSION,
    }


def _module_items(
    module: str, widened: WidenedRows, stored: Rows, form: CompressedForm
) -> list[Item]:
    """List the tensors that store one quantized matrix."""
    shape = widened.entries[f"{module}.weight"].shape
    code, name = widened.plan.layout.code, f"{module}.weight"
    scale = f"{module}.{WEIGHT_SCALE}"
    if form.format in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        items = [_copy(name, stored, f"{module}.weight_packed"), _copy(scale, stored)]
        if form.format == "mxfp4-pack-quantized":
            return items
        for ours, theirs in ((WEIGHT_SCALE_2, "weight"), (INPUT_SCALE, "input")):
            name = f"{module}.{theirs}_global_scale"
            items.append(_scale(name, stored, f"{module}.{ours}", (1,), inverse=True))
        return items
    scales = {
        "tensor": (1,),
        "channel": (shape[0], 1),
        "block": widened.plan.layout.scale_shape(shape)[::2],
    }.get(form.weights["strategy"], stored.entries[scale].shape)
    if form.format == "pack-quantized":
        per_word = 32 // form.weights["num_bits"]
        width = -(-shape[1] // per_word)
        pack = partial(_words, stored, name, shape, code)
        items = [
            Item(f"{module}.weight_packed", "I32", (shape[0], width), pack),
            Item(f"{module}.weight_shape", "I64", (2,), partial(_shape, shape)),
        ]
    else:
        items = [_copy(name, stored)]
    items.append(_scale(scale, stored, scale, scales))
    if f"{module}.{INPUT_SCALE}" in stored.entries:
        inputs = f"{module}.{INPUT_SCALE}"
        items.append(_scale(inputs, stored, inputs, (1,)))
    return items


def _copy(name: str, stored: Rows, new: str = "") -> Item:
    shape = stored.entries[name].shape
    return Item(new or name, stored.entries[name].dtype, shape, partial(slabs, stored, name))


def _scale(
    name: str, stored: Rows, old: str, shape: tuple[int, ...], *, inverse: bool = False
) -> Item:
    """Return the item of a scale, reshaped and in float32."""
    return Item(name, "F32", shape, partial(_reshaped, stored, old, inverse))


def _reshaped(stored: Rows, name: str, inverse: bool) -> Iterator[Tensor]:
    for slab in slabs(stored, name):
        wide = slab.float().contiguous()
        yield wide.reciprocal() if inverse else wide


def _shape(shape: tuple[int, ...]) -> Iterator[Tensor]:
    yield torch.tensor(shape, dtype=torch.int64)


def _words(stored: Rows, name: str, shape: tuple[int, ...], code: Any) -> Iterator[Tensor]:
    """Yield codes packed into 32-bit words along the inputs, the first code lowest."""
    outputs_per_row = 2 if code == "int4" else 1
    bits = 4 if code == "int4" else 8
    # The format stores signed codes plus an offset, as unsigned numbers.
    per_word, offset = 32 // bits, 1 << (bits - 1)
    for begin, stop in row_groups((shape[0] // outputs_per_row, outputs_per_row * shape[1])):
        codes = unpack(stored.rows(name, begin, stop), code).to(torch.int64) + offset
        codes = torch.nn.functional.pad(codes, (0, -shape[1] % per_word))
        shifts = bits * torch.arange(per_word)
        words = (codes.unflatten(1, (-1, per_word)) << shifts).sum(-1)
        yield words.to(torch.uint32).view(torch.int32)


class _FoldedTensors:
    """Reads a folder's tensors, and multiplies some by a factor for each row, in float32.

    Gains of norms are stored minus ``shift``.
    """

    def __init__(self, stored: Rows, factors: Mapping[str, Tensor], shift: float) -> None:
        self._stored, self._factors, self._shift = stored, factors, shift
        self.entries = {
            name: TensorEntry(entry.shape, "F32", ()) if name in factors else entry
            for name, entry in stored.entries.items()
        }

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Read rows, multiplied by their factors."""
        values = self._stored.rows(name, begin, stop)
        if name not in self._factors:
            return values
        factor = self._factors[name][begin:stop]
        if name.endswith(".weight"):
            return (values.float() + self._shift) * factor - self._shift
        return values.float() * factor.view(-1, *[1] * (values.dim() - 1))


_AFTER_NORM = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}


def folded_scales(
    widened: WidenedRows, description: Mapping[str, Any]
) -> dict[str, Float[Tensor, " F"]]:
    """Convert the scales of inputs to factors on rows of tensors of the previous layers.

    Returns:
        A factor for each row, by the name of the tensor: a gain, a ``weight_scale`` or a bias.

    Raises:
        ValueError: if a scale cannot be folded into the previous layer.
    """
    factors: dict[str, Tensor] = {}
    for name, entry in widened.stored.entries.items():
        module, _, kind = name.rpartition(".")
        if kind != PRE_QUANT_SCALE:
            continue
        scale = widened.stored.rows(name, 0, entry.shape[0]).float()
        if bool((scale == 1).all()):
            continue
        names, has_cache = widened.stored.entries, widened.plan.kv_cache
        target, why = layer_before(module, names, description, kv_cache=has_cache)
        if why:
            raise _refusal(name, why)
        factor = _factor(module, target, scale, description)
        if target in factors and not torch.equal(factors[target], factor):
            raise _refusal(name, "another linear after the same norm has a different scale")
        factors[target] = factor
        bias = f"{target.rpartition('.')[0]}.bias"
        if bias in widened.stored.entries:
            factors[bias] = factor
    return factors


def layer_before(
    module: str, names: Container[str], description: Mapping[str, Any], *, kv_cache: bool
) -> tuple[str, str]:
    """Return the tensor into whose rows the scale of a module's inputs can be folded.

    Args:
        module: module of a Hugging Face folder.
        names: the folder's tensors, including scales of quantized modules.
        description: description of the model.
        kv_cache: whether the folder has scales of a cache, which a factor on values would
            make wrong.

    Returns:
        Name of a gain or of a ``weight_scale``, and an empty text; or an empty name and the
        reason.
    """
    layer, _, inside = module.rpartition(".self_attn.")
    part = "self_attn"
    if not layer:
        layer, _, inside = module.rpartition(".mlp.")
        part = "mlp"
    norm = f"{layer}.{_AFTER_NORM.get(f'{part}.{inside}')}.weight"
    config = settings(description)
    has_own_norm = config.norm_placement == "pre" and config.parallel_residual == "off"
    if norm in names and has_own_norm:
        return norm, ""
    is_plain_gate = is_gated(config) and not (
        config.activation_func_clamp_value or config.glu_linear_offset
    )
    if part == "mlp" and inside.endswith("down_proj") and is_plain_gate:  # also of experts
        target = f"{module.removesuffix('down_proj')}up_proj.{WEIGHT_SCALE}"
    elif inside == "o_proj" and not kv_cache:
        target = f"{layer}.self_attn.v_proj.{WEIGHT_SCALE}"
    else:
        return "", "no previous layer can apply it"
    return (target, "") if target in names else ("", "the previous layer is not quantized")


def _factor(
    module: str, target: str, scale: Tensor, description: Mapping[str, Any]
) -> Float[Tensor, " F"]:
    """Return the factor on the rows of a target tensor, from the scale of a module's inputs.

    Query heads of one value head read the same values, so that their scales must be equal.
    """
    if not target.endswith(f"v_proj.{WEIGHT_SCALE}"):
        return scale
    config = settings(description)
    heads = scale.view(num_kv_heads(config), -1, head_dim(config))
    if not torch.equal(heads, heads[:, :1].expand_as(heads)):
        raise _refusal(module, "query heads of one value head have different scales")
    return heads[:, 0].reshape(-1)


def _refusal(name: str, why: str) -> ValueError:
    return ValueError(
        f"{name} is a scale of inputs, which --format compressed-tensors does not store, and "
        f"cannot be folded into the previous layer: {why}. Use --format hf-quant, or quantize "
        "with another --method."
    )
