"""Tiny checkpoints with random weights: two layers, bytes as tokens, 40 positions."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_ckpt import convert
from mcore_ckpt.save_load.saving import save
from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer.loading import load_model
from mcore_models.config import TransformerConfig
from mcore_models.description import ModelDescription
from mcore_models.gpt import GPT
from mcore_moe.config import MoEConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import named_shards

ADAPTERS = {
    "sql": (2, 6, ["q_proj", "down_proj"]),
    "chat": (3, 3, ["q_proj", "k_proj", "o_proj", "up_proj"]),
}
"""Rank, factor and linears of PEFT's adapters, by name."""

DESCRIPTION = ModelDescription(
    config=TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        max_position_embeddings=40,
        init_method_std=0.3,
    ),
    vocab_size=ByteTokenizer.vocab_size,
)


def save_random(folder, description):
    """Save a model in float64, so that layouts can be compared exactly; return its run."""
    model = GPT(
        description.config,
        ParallelContext.single(),
        vocab_size=description.vocab_size,
        moe=description.moe,
        dtype=torch.float64,
    )
    shards = {f"model.{name}": shard for name, shard in named_shards(model).items()}
    ByteTokenizer().save(folder / "tokenizer")
    save(
        folder / "run",
        7,
        shards,
        world=SINGLE,
        extra={"model": description.to_dict()},
        folders={"tokenizer": folder / "tokenizer"},
    )
    return folder / "run"


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("dense"), DESCRIPTION)


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory):
    """The same with 512 positions."""
    config = replace(DESCRIPTION.config, max_position_embeddings=512)
    return save_random(tmp_path_factory.mktemp("long"), replace(DESCRIPTION, config=config))


@pytest.fixture(scope="session")
def ungrouped_folder(tmp_path_factory):
    """The same with as many heads of keys as of queries."""
    config = replace(DESCRIPTION.config, num_query_groups=4)
    return save_random(tmp_path_factory.mktemp("heads"), replace(DESCRIPTION, config=config))


@pytest.fixture(scope="session")
def expert_folder(tmp_path_factory):
    """The same with experts that have an expert bias."""
    moe = MoEConfig(
        num_experts=4,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_layer_freq="[0,1]",
    )
    return save_random(tmp_path_factory.mktemp("experts"), replace(DESCRIPTION, moe=moe))


@pytest.fixture(scope="session")
def hybrid_folder(tmp_path_factory):
    """Mamba layers around attention, and fewer groups than tensor ranks."""
    config = replace(
        DESCRIPTION.config,
        num_layers=4,
        hybrid_override_pattern="M*M-",
        position_embedding_type="none",
        mamba_num_heads=4,
        mamba_head_dim=6,
        mamba_num_groups=1,
        mamba_state_dim=5,
        mamba_chunk_size=4,
    )
    return save_random(tmp_path_factory.mktemp("hybrid"), replace(DESCRIPTION, config=config))


@pytest.fixture(scope="session")
def adapter_folders(run_folder, tmp_path_factory):
    """A base, and folders of PEFT named sql and chat, whose base is no folder."""
    folder = tmp_path_factory.mktemp("adapters")
    convert("mcore", run_folder, "hf", folder / "base")
    ByteTokenizer().save(folder / "base" / "tokenizer")
    weights = load_file(folder / "base" / "model.safetensors")
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 3

    for name, (rank, alpha, targets) in ADAPTERS.items():
        tensors = {}
        for weight, matrix in weights.items():
            if weight.split(".")[-2] in targets:
                module = f"base_model.model.{weight.removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = drawn(rank, matrix.shape[1])
                tensors[f"{module}.lora_B.weight"] = drawn(matrix.shape[0], rank)
        table = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_dora": False}
        table |= {"target_modules": targets, "base_model_name_or_path": "someone/model"}
        (folder / name).mkdir()
        save_file(tensors, folder / name / "adapter_model.safetensors")
        (folder / name / "adapter_config.json").write_text(json.dumps(table))
    return folder


@pytest.fixture(scope="session")
def loaded(run_folder):
    return load_model(run_folder, ParallelContext.single())


@pytest.fixture(scope="session")
def model(loaded):
    return loaded.model
