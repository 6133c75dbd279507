"""Reads and writes the quantization configs of Hugging Face folders.

``hf_quant_config.json`` has the algorithm, the modules that are not quantized and, if modules
differ, the layout of each; ``quantization_config`` of config.json has the same in another form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from mcore_ckpt.formats.quantized_layouts import QuantLayout, find_layout

MIXED = "MIXED_PRECISION"
"""``quant_algo`` of a folder whose modules differ; ``quantized_layers`` lists them."""

_BITS = {"e4m3": (8, "float"), "e2m1": (4, "float"), "int8": (8, "int"), "int4": (4, "int")}


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantPlan:
    """Layouts of the quantized modules of a folder."""

    layout: QuantLayout
    """Layout of all modules that are not excluded and not in ``layers``."""
    layers: Mapping[str, QuantLayout] = field(default_factory=dict)
    """Layout of each module that is not excluded, if modules differ (``MIXED_PRECISION``)."""
    exclude_modules: tuple[str, ...] = ()
    """Patterns of modules that are not quantized."""
    kv_cache: bool = False
    """Whether the folder has scales of an fp8 key/value cache."""

    def excludes(self, module: str) -> bool:
        """Whether a module, named without ``.weight``, is not quantized."""
        return any(fnmatchcase(module, pattern) for pattern in self.exclude_modules)

    @property
    def algo(self) -> str:
        """``quant_algo`` of the folder."""
        return MIXED if self.layers else self.layout.algo

    def of(self, module: str) -> QuantLayout:
        """Return the layout of a quantized module, named without ``.weight``."""
        return self.layers.get(module, self.layout)

    def hf_quant_config(self, producer: Mapping[str, str]) -> dict[str, Any]:
        """Return the content of hf_quant_config.json, in its nested form.

        Args:
            producer: name and version of the writing program.
        """
        quantization: dict[str, Any] = {
            "quant_algo": self.algo,
            "kv_cache_quant_algo": "FP8" if self.kv_cache else None,
        }
        if self.layers:
            layers = {module: _config_entries(layout) for module, layout in self.layers.items()}
            quantization["quantized_layers"] = layers
        else:
            quantization |= _config_entries(self.layout)
        quantization["exclude_modules"] = list(self.exclude_modules)
        return {"producer": dict(producer), "quantization": quantization}

    def quantization_config(self, producer: Mapping[str, str]) -> dict[str, Any]:
        """Return ``quantization_config`` of config.json, in its flat form."""
        targets: dict[str, list[str]] = {}
        layouts = {layout.algo: layout for layout in self.layers.values()}
        for module, layout in self.layers.items():
            targets.setdefault(layout.algo, []).append(module)
        groups = [(layouts[algo], modules) for algo, modules in targets.items()]
        config: dict[str, Any] = {
            "config_groups": {
                f"group_{number}": {**_numbers_of(layout), "targets": modules}
                for number, (layout, modules) in enumerate(
                    groups or [(self.layout, ["Linear"])]
                )
            },
            "ignore": list(self.exclude_modules),
            "quant_algo": self.algo,
            "producer": dict(producer),
            "quant_method": "modelopt",
        }
        if self.layers:
            layers = {module: _config_entries(layout) for module, layout in self.layers.items()}
            config["quantized_layers"] = layers
        if self.kv_cache:
            config["kv_cache_scheme"] = _numbers("e4m3", dynamic=False)
        return config


def read_plan(config: Mapping[str, Any]) -> QuantPlan:
    """Return the plan in a hf_quant_config.json or ``quantization_config``, nested or flat.

    Raises:
        ValueError: if an algorithm, a group size or a cache format is not supported.
    """
    nested = config.get("quantization")
    layers = _layers(nested if isinstance(nested, Mapping) else config)
    if isinstance(nested, Mapping):
        return QuantPlan(
            layout=_main_layout(nested, nested.get("group_size") or 0, layers),
            layers=layers,
            exclude_modules=tuple(nested.get("exclude_modules") or ()),
            kv_cache=_is_fp8_cache(nested.get("kv_cache_quant_algo")),
        )
    groups = config.get("config_groups") or {}
    sizes = {(g.get("weights") or {}).get("group_size") or 0 for g in groups.values()}
    if len(sizes) > 1 and not layers:
        raise ValueError(f"quantization_config has groups of several sizes: {sorted(sizes)}.")
    return QuantPlan(
        layout=_main_layout(config, max(sizes, default=0), layers),
        layers=layers,
        exclude_modules=tuple(config.get("ignore") or config.get("exclude_modules") or ()),
        kv_cache=bool(config.get("kv_cache_scheme"))
        or _is_fp8_cache(config.get("kv_cache_quant_algo")),
    )


def _layers(config: Mapping[str, Any]) -> dict[str, QuantLayout]:
    """Read the layouts of single modules."""
    if config.get("quant_algo") != MIXED:
        return {}
    listed: Mapping[str, Mapping[str, Any]] = config.get("quantized_layers") or {}
    if not listed:
        raise ValueError(
            f"quant_algo {MIXED} needs quantized_layers, the layout of each module."
        )
    return {
        module: find_layout(str(one.get("quant_algo")), one.get("group_size") or 0)
        for module, one in listed.items()
    }


def _main_layout(
    config: Mapping[str, Any], group_size: int, layers: Mapping[str, QuantLayout]
) -> QuantLayout:
    if layers:
        return next(iter(layers.values()))
    return find_layout(str(config.get("quant_algo")), group_size)


def _is_fp8_cache(algo: object) -> bool:
    if algo not in (None, "", "FP8"):
        raise ValueError(f"kv_cache_quant_algo {algo!r} is not supported, only FP8.")
    return algo == "FP8"


def _config_entries(layout: QuantLayout) -> dict[str, Any]:
    """Return the entries of hf_quant_config.json for a layout."""
    config: dict[str, Any] = {"quant_algo": layout.algo}
    if layout.group[1]:
        config["group_size"] = layout.group[1]
    if layout.code == "int4":
        config["has_zero_point"] = False
        config["pre_quant_scale"] = bool(layout.pre_quant_scale)
    return config


def _numbers(code: str, *, dynamic: bool, group: int = 0) -> dict[str, Any]:
    num_bits, kind = _BITS[code]
    config: dict[str, Any] = {"dynamic": dynamic, "num_bits": num_bits, "type": kind}
    return config | ({"group_size": group} if group else {})


def _numbers_of(layout: QuantLayout) -> dict[str, Any]:
    """Return the number formats of weights and inputs for ``quantization_config``."""
    group = {"weights": _numbers(layout.code, dynamic=False, group=layout.group[1])}
    if layout.inputs:
        width = layout.group[1] if layout.inputs == "e2m1" else 0
        group["input_activations"] = _numbers(
            layout.inputs, dynamic=not layout.input_scale, group=width
        )
    return group
