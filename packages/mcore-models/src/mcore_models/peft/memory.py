"""Memory of a rank that trains adapters: weights of the base, training state of adapters."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from mcore_models.flops import RankBytes
from mcore_models.peft.config import BLOCK, PeftConfig, adapter_shapes, linears
from mcore_parallel.offloading.config import OffloadConfig

Shapes = Mapping[str, tuple[int, ...]]


def trained_bytes(
    estimate: Callable[[Shapes, OffloadConfig, int], RankBytes],
    shapes: Shapes,
    config: PeftConfig,
    offload: OffloadConfig,
    *,
    layers: int,
    weight_bytes: int,
) -> RankBytes:
    """Estimate the rank that needs most, with gradients and optimizer state of adapters only.

    Args:
        estimate: ``rank_bytes`` for a model with given tensors, offloading and
            ``widened_bytes``.
        shapes: of the model's tensors.
        config: adapters and their base.
        offload: state in host memory.
        layers: layers of a pipeline rank.
        weight_bytes: bytes of a parameter that is not quantized.
    """
    adapters = adapter_shapes(config, shapes)
    if not adapters:
        return estimate(shapes, offload, 0)
    of_base = replace(
        offload,
        optimizer_cpu_offload=False,
        optimizer_offload_fraction=1.0,
        optimizer_offload_dir="",
    )
    of_adapters = replace(offload, cpu_offloading=False, cpu_offloading_num_layers=0)
    saved = widened = 0
    if tables := {name: shapes[name] for name in config.tables if name in shapes}:
        saved = estimate(tables, OffloadConfig(), 0).weights  # counted in both estimates
    if config.peft_base_bits:
        rounded = {
            f"{name}.weight": shapes[f"{name}.weight"]
            for name in linears(shapes)
            if config.is_target(name) or ".experts." in name
        }
        wide = estimate(rounded, OffloadConfig(), 0).weights
        held = (config.peft_base_bits / 8 + 4 / BLOCK) / weight_bytes
        # At most one layer's weights are dequantized at a time.
        saved, widened = saved + int(wide * (1 - held)), wide // layers
    frozen, trained = estimate(shapes, of_base, widened), estimate(adapters, of_adapters, 0)
    return replace(
        trained,
        weights=frozen.weights + trained.weights - saved,
        activations=frozen.activations,
        host=frozen.host + trained.host,
    )
