"""Memory of the rank of a run that needs most, with or without adapters of a frozen base."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_models.flops import RankBytes, rank_bytes
from mcore_models.memory_changes import OptimizerChoice
from mcore_models.peft.config import BLOCK, adapter_shapes, linears
from mcore_parallel.offloading.config import OffloadConfig

Shapes = Mapping[str, tuple[int, ...]]


def run_bytes(
    run: Any,
    shapes: Shapes,
    *,
    optimizer: OptimizerChoice,
    layers: int,
    **sizes: int,
) -> RankBytes:
    """Estimate the memory of the rank of a run that needs most.

    With adapters, only the adapters have gradients and optimizer state.

    Args:
        run: any object with the fields of ``TrainConfig``: ``model``, ``experts``,
            ``parallelism``, ``offloading``, ``peft`` and others.
        shapes: of the model's tensors.
        optimizer: determines the state of weights and matrices.
        layers: layers of a pipeline rank.
        sizes: ``vocab_size``, ``world_size``, ``seq_length``, ``decoder_seq_length``,
            ``micro_batch_size``, ``num_microbatches`` and ``weight_bytes`` of ``rank_bytes``.
    """

    def estimate(shapes: Shapes, offload: OffloadConfig, widened_bytes: int) -> RankBytes:
        return rank_bytes(
            run.model,
            parallel=run.parallelism,
            moe=run.experts,
            recomputing=run.recomputation,
            data_parallel=run.data_parallelism,
            optimizer=optimizer,
            main_weights=run.main_weights,
            offload=offload,
            pipeline=run.pipeline,
            fp8=run.fp8,
            widened_bytes=widened_bytes,
            shapes_of=lambda *_: dict(shapes),
            **sizes,
        )

    config, offload = run.peft, run.offloading
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
        # Both estimates below count these tables: subtract their weights once.
        saved = estimate(tables, OffloadConfig(), 0).weights
    if config.peft_base_bits:
        quantized = {
            f"{name}.weight": shapes[f"{name}.weight"]
            for name in linears(shapes)
            if config.is_target(name) or ".experts." in name
        }
        wide = estimate(quantized, OffloadConfig(), 0).weights
        # Share of the bytes that codes and scales (float32, one for each block) need.
        stored_share = (config.peft_base_bits / 8 + 4 / BLOCK) / sizes["weight_bytes"]
        # At most one layer's weights are dequantized at a time.
        saved, widened = saved + int(wide * (1 - stored_share)), wide // layers
    frozen, trained = estimate(shapes, of_base, widened), estimate(adapters, of_adapters, 0)
    return replace(
        trained,
        weights=frozen.weights + trained.weights - saved,
        activations=frozen.activations,
        host=frozen.host + trained.host,
    )
