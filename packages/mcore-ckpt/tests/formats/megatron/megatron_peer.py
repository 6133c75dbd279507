"""A program of its own: megatron-core saves tiny models on two ranks, or loads them.

    python megatron_peer.py save|load FOLDER LOCAL

Each kind of model is a folder in FOLDER; what each rank then holds goes to LOCAL, as
safetensors under the names in memory. Runs where megatron-core is installed, on the CPU.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file

KINDS = {
    "dense": {},
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2},
    "mixed": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [0, 1, 1]},
    "tied": {"qk_layernorm": True},
}
"""Of ``tied`` everything else is other than in the rest: see ``_is_llama``."""

SIZES = {
    "num_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 10,
    "ffn_hidden_size": 14,
}
PADDED = 256
WHOLE = ("norm", "router", "position_embeddings", "linear_proj.bias", "linear_fc2.bias")
"""In names of what all ranks hold alike."""


def main() -> None:
    """Start two ranks."""
    verb, folder, local = sys.argv[1:]
    Path(local).mkdir(parents=True, exist_ok=True)
    mp.spawn(_rank, (verb, Path(folder), Path(local)), nprocs=2)


def _rank(rank: int, verb: str, folder: Path, local: Path) -> None:
    # The peer asks for a GPU in two places where it needs none.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    rendezvous = f"file://{local.resolve() / ('meeting_' + verb)}"
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=rendezvous)
    os.environ.setdefault("LOCAL_RANK", str(rank))
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for number, kind in enumerate(KINDS):
        torch.manual_seed(100 * number + rank)
        model = _model(kind)
        state = {"model": model.sharded_state_dict()}
        place = folder / kind
        if verb == "save":
            _fill(model)
            place.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            state |= {"args": _arguments(kind), "iteration": 7, "checkpoint_version": 3.0}
            dist_checkpointing.save(state, str(place))
        else:
            loaded = dist_checkpointing.load(state, str(place / "release"))
            model.load_state_dict(loaded["model"])
        held = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
        save_file(
            {n: t.detach().clone() for n, t in held.items()},
            local / f"{verb}_{kind}_{rank}.safetensors",
        )
    dist.barrier()
    dist.destroy_process_group()


def _is_llama(kind: str) -> bool:
    """Whether a model has gates, RMS norms, rotary positions, a head of its own, no biases."""
    return kind != "tied"


def _model(kind: str) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        **SIZES,
        **KINDS[kind],
        tensor_model_parallel_size=2,
        use_cpu_initialization=True,
        gated_linear_unit=_is_llama(kind),
        activation_func=getattr(torch.nn.functional, "silu" if _is_llama(kind) else "gelu"),
        add_bias_linear=not _is_llama(kind),
        normalization=_norm(kind),
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
    )
    if kind == "mixed":
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = specs.get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=False,
            normalization=_norm(kind),
            qk_layernorm=config.qk_layernorm,
        )
    return GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=32,
        position_embedding_type=_positions(kind),
        share_embeddings_and_output_weights=not _is_llama(kind),
    )


def _norm(kind: str) -> str:
    return "RMSNorm" if _is_llama(kind) else "LayerNorm"


def _positions(kind: str) -> str:
    return "rope" if _is_llama(kind) else "learned_absolute"


def _fill(model: torch.nn.Module) -> None:
    """Make every weight differ, norms too; what all ranks hold alike stays alike."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter))
            if any(word in name for word in WHOLE):
                dist.broadcast(parameter, 0, group=group)


def _arguments(kind: str) -> Namespace:
    experts = KINDS[kind]
    return Namespace(
        **SIZES,
        group_query_attention=True,
        max_position_embeddings=32,
        position_embedding_type=_positions(kind),
        normalization=_norm(kind),
        norm_epsilon=1e-5,
        swiglu=_is_llama(kind),
        add_bias_linear=not _is_llama(kind),
        qk_layernorm=not _is_llama(kind),
        untie_embeddings_and_output_weights=_is_llama(kind),
        padded_vocab_size=PADDED,
        num_experts=experts.get("num_moe_experts"),
        moe_router_topk=experts.get("moe_router_topk", 2),
        moe_layer_freq=experts.get("moe_layer_freq", 1),
        moe_ffn_hidden_size=None,
    )


if __name__ == "__main__":
    main()
