"""A program of its own: megatron-core's optimizer under many layouts, saved in two forms.

    python megatron_layouts_peer.py save|load FOLDER LOCAL

Four ranks. ``save`` updates models by random gradients and saves each into FOLDER/KIND as
``buckets`` (dp_reshardable) and ``named`` (fully_reshardable): the same state twice. ``load``
loads FOLDER/KIND into models with other weights. What each rank's optimizer then holds goes
to LOCAL/VERB_KIND_RANK.safetensors. Nothing is computed forward, so no GPU is missed.
"""

import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_optimizer_peer import SCHEDULE, AsIfCuda, join
from safetensors.torch import save_file

WORLD, VOCAB_SIZE, STEPS = 4, 128, 2
SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 10,
    "ffn_hidden_size": 14,
}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2}


@dataclass(frozen=True)
class Kind:
    """A model, and how its ranks share it."""

    degrees: dict[str, int]
    num_layers: int = 2
    is_llama: bool = True
    experts: dict[str, object] | None = None
    dtype: torch.dtype = torch.bfloat16
    bucket_size: int | None = None


KINDS = {
    "tp2": Kind({"tensor_model_parallel_size": 2}, bucket_size=900),
    "vpp2": Kind(
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        num_layers=4,
        is_llama=False,
    ),
    "ep2": Kind(
        {"expert_model_parallel_size": 2},
        experts={**EXPERTS, "qk_layernorm": True},
        bucket_size=1500,
    ),
    "pp2_ep2": Kind(
        {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
        num_layers=3,
        experts={
            **EXPERTS,
            "moe_layer_freq": [0, 1, 1],
            "moe_shared_expert_intermediate_size": 12,
            "num_layers_in_first_pipeline_stage": 2,
        },
    ),
    "experts_fp32": Kind(
        {"tensor_model_parallel_size": 2},
        experts={**EXPERTS, "moe_shared_expert_intermediate_size": 12},
        dtype=torch.float32,
    ),
}


def main() -> None:
    """Start the ranks."""
    verb, folder, local = sys.argv[1:]
    mp.spawn(_rank, (verb, Path(folder), Path(local)), nprocs=WORLD)


def _rank(rank: int, verb: str, folder: Path, local: Path) -> None:
    join(rank, WORLD, local.resolve() / f"meeting_layouts_{verb}")
    from megatron.core import parallel_state

    for number, (name, kind) in enumerate(KINDS.items()):
        degrees = dict(kind.degrees)
        if "expert_model_parallel_size" in degrees:
            degrees["expert_tensor_parallel_size"] = 1
        with AsIfCuda():
            parallel_state.initialize_model_parallel(**degrees)
            torch.manual_seed(number + (1000 if verb == "load" else 0))
            held = _run(kind, verb, folder / name)
            parallel_state.destroy_model_parallel()
        save_file(held, local / f"{verb}_{name}_{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def _run(kind: Kind, verb: str, place: Path) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    chunks, optimizer = _model_and_optimizer(kind)

    def state(form: str, is_loading: bool) -> dict:
        metadata = {"chained_optim_avoid_prefix": True, "distrib_optim_sharding_type": form}
        whole = {
            f"model{number if len(chunks) > 1 else ''}": chunk.module.sharded_state_dict(
                metadata=metadata
            )
            for number, chunk in enumerate(chunks)
        }
        whole["optimizer"] = optimizer.sharded_state_dict(whole, is_loading, metadata=metadata)
        return whole

    for step in range(STEPS if verb == "save" else 1):
        _update(chunks, optimizer, step)
    if verb == "save":
        for word, form in (("buckets", "dp_reshardable"), ("named", "fully_reshardable")):
            (place / word).mkdir(parents=True, exist_ok=True)
            dist.barrier()
            scheduler = OptimizerParamScheduler(optimizer, **SCHEDULE).state_dict()
            more = {"args": _arguments(kind), "iteration": STEPS, "checkpoint_version": 3.0}
            whole = state(form, False) | more | {"opt_param_scheduler": scheduler}
            dist_checkpointing.save(whole, str(place / word))
        return _held(chunks, optimizer)
    step = int((place / "latest_checkpointed_iteration.txt").read_text())
    there = str(place / f"iter_{step:07d}")
    loaded = dist_checkpointing.load(state("fully_reshardable", True), there)
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded[f"model{number if len(chunks) > 1 else ''}"])
    optimizer.load_state_dict(loaded["optimizer"])
    return _held(chunks, optimizer)


def _update(chunks: list, optimizer: object, step: int) -> None:
    """Update by gradients that are the same wherever the weights are."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    first = dist.get_process_group_ranks(group)[0]
    for number, chunk in enumerate(chunks):
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            if getattr(parameter, "shared_embedding", False):
                seed = torch.Generator().manual_seed(77 + step)
                gradient = torch.randn(parameter.shape, generator=seed)
            else:
                gradient = torch.randn(parameter.shape) + number
            if not getattr(parameter, "tensor_model_parallel", False):
                dist.broadcast(gradient, first, group=group)
            parameter.main_grad.copy_(gradient)
    optimizer.step()


def _held(chunks: list, optimizer: object) -> dict[str, torch.Tensor]:
    """Copy what the optimizer has here of each weight: its main weight and moments."""
    names = {
        parameter: f"{number}.{name}"
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.module.named_parameters()
    }
    found = {}
    for one in optimizer.chained_optimizers:
        for parameter in one.model_param_group_index_map:
            state = one._get_main_param_and_optimizer_states(parameter)
            found |= {
                f"{names[parameter]}.{word}": tensor.detach().clone()
                for word, tensor in state.items()
                if word != "step"
            }
    return found


def _model_and_optimizer(kind: Kind) -> tuple:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = _config(kind)
    reducing = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        bucket_size=kind.bucket_size,
        overlap_grad_reduce=kind.bucket_size is not None,
    )
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        bf16=kind.dtype == torch.bfloat16,
        params_dtype=kind.dtype,
        use_distributed_optimizer=True,
        clip_grad=1.0,
    )
    count = kind.degrees.get("virtual_pipeline_model_parallel_size", 1)
    models = []
    for number in range(count):
        stage = number if count > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        models.append(_model(kind, config, first, last, stage))
    wrapped = [DistributedDataParallel(config, reducing, model) for model in models]
    return wrapped, get_megatron_optimizer(options, wrapped)


def _config(kind: Kind) -> object:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        **SIZES,
        **kind.degrees,
        **(kind.experts or {}),
        expert_tensor_parallel_size=1 if "expert_model_parallel_size" in kind.degrees else None,
        num_layers=kind.num_layers,
        use_cpu_initialization=True,
        gated_linear_unit=kind.is_llama,
        activation_func=getattr(torch.nn.functional, "silu" if kind.is_llama else "gelu"),
        add_bias_linear=not kind.is_llama,
        normalization="RMSNorm" if kind.is_llama else "LayerNorm",
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        bf16=kind.dtype == torch.bfloat16,
        params_dtype=kind.dtype,
        pipeline_dtype=kind.dtype,
    )


def _model(
    kind: Kind, config: object, first: bool, last: bool, stage: int | None
) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    norm = "RMSNorm" if kind.is_llama else "LayerNorm"
    if kind.experts:
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = specs.get_gpt_layer_local_spec(normalization=norm)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=16,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope" if kind.is_llama else "learned_absolute",
        share_embeddings_and_output_weights=not kind.is_llama,
        vp_stage=stage,
    ).to(kind.dtype)


def _arguments(kind: Kind) -> Namespace:
    experts = kind.experts or {}
    return Namespace(
        **SIZES,
        **{"tensor_model_parallel_size": 1, "expert_tensor_parallel_size": 1, **kind.degrees},
        num_layers=kind.num_layers,
        group_query_attention=True,
        max_position_embeddings=16,
        position_embedding_type="rope" if kind.is_llama else "learned_absolute",
        normalization="RMSNorm" if kind.is_llama else "LayerNorm",
        norm_epsilon=1e-5,
        swiglu=kind.is_llama,
        add_bias_linear=not kind.is_llama,
        untie_embeddings_and_output_weights=kind.is_llama,
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=VOCAB_SIZE,
        num_experts=experts.get("num_moe_experts"),
        moe_router_topk=experts.get("moe_router_topk", 2),
        moe_layer_freq=experts.get("moe_layer_freq", 1),
        moe_shared_expert_intermediate_size=experts.get("moe_shared_expert_intermediate_size"),
        moe_ffn_hidden_size=None,
        qk_layernorm=experts.get("qk_layernorm", False),
        consumed_train_samples=8,
    )


if __name__ == "__main__":
    main()
