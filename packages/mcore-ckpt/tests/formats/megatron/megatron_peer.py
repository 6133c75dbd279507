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
from torch import Tensor

KINDS = {
    "dense": {},
    "experts": {"num_moe_experts": 4, "moe_router_topk": 2},
    "mixed": {"num_moe_experts": 4, "moe_router_topk": 2, "moe_layer_freq": [0, 1, 1]},
    "tied": {"qk_layernorm": True},
    "latent": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_layer_freq": [0, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": 14,
        "moe_ffn_hidden_size": 14,
        "qk_layernorm": True,
        "layernorm_epsilon": 1e-6,
        "q_lora_rank": 8,
        "kv_lora_rank": 6,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 7,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
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
OF_HEADS = ("num_query_groups", "kv_channels")
PADDED = 256
WHOLE = (
    "norm",
    "router",
    "_down_proj",
    "position_embeddings",
    "linear_proj.bias",
    "linear_fc2.bias",
)
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
        if verb == "save" and kind == "latent":
            save_file({"logits": _logits(model)}, local / f"logits_{rank}.safetensors")
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
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    is_latent = kind == "latent"
    sizes = {n: v for n, v in SIZES.items() if not (is_latent and n in OF_HEADS)}
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        **sizes,
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
    if kind in ("mixed", "latent"):
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        for layer in spec.layer_specs if is_latent else ():
            layer.submodules.self_attention.submodules.core_attention = PlainAttention
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


class PlainAttention(torch.nn.Module):
    """Attention of latent heads on a CPU, where megatron-core has none."""

    def __init__(self, *_: object, softmax_scale: float, **__: object) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
        """Mix values causally, ``[S, B, N, H]`` to ``[S, B, N*H]``."""
        scores = torch.einsum("sbnh,zbnh->bnsz", q, k) * self.scale
        later = torch.ones(scores.shape[-2:]).triu(1).bool()
        shares = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("bnsz,zbnh->sbnh", shares, v).flatten(2)


def _logits(model: torch.nn.Module) -> torch.Tensor:
    """Return this rank's slice of the scores of some tokens, ``[B, S, v]``."""
    tokens = torch.arange(2 * 15).view(2, 15) * 7 % PADDED
    positions = torch.arange(15).expand(2, 15)
    mask = torch.ones(15, 15).triu(1).bool()[None, None]
    with torch.no_grad():
        return model.eval()(tokens, positions, mask).contiguous()


def _norm(kind: str) -> str:
    return "RMSNorm" if _is_llama(kind) else "LayerNorm"


def _positions(kind: str) -> str:
    return "rope" if _is_llama(kind) else "learned_absolute"


def _fill(model: torch.nn.Module) -> None:
    """Make every weight differ, norms too; what all ranks hold alike stays alike."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    with torch.no_grad():
        everything = [*model.named_parameters(), *model.named_buffers()]
        for name, parameter in everything:
            if parameter.dtype != torch.float32 or name.endswith("tokens_per_expert"):
                continue
            parameter.copy_(torch.randn_like(parameter))
            if any(word in name for word in WHOLE):
                dist.broadcast(parameter, 0, group=group)


def _arguments(kind: str) -> Namespace:
    experts = KINDS[kind]
    given = {
        **SIZES,
        "moe_ffn_hidden_size": None,
        "moe_router_topk": 2,
        "moe_layer_freq": 1,
        "qk_layernorm": not _is_llama(kind),
        "norm_epsilon": 1e-5,
        **experts,
    }
    given["norm_epsilon"] = given.pop("layernorm_epsilon", given["norm_epsilon"])
    return Namespace(
        **{n: v for n, v in given.items() if n != "num_moe_experts"},
        group_query_attention=True,
        multi_latent_attention=kind == "latent",
        max_position_embeddings=32,
        position_embedding_type=_positions(kind),
        normalization=_norm(kind),
        swiglu=_is_llama(kind),
        add_bias_linear=not _is_llama(kind),
        untie_embeddings_and_output_weights=_is_llama(kind),
        padded_vocab_size=PADDED,
        num_experts=experts.get("num_moe_experts"),
    )


if __name__ == "__main__":
    main()
