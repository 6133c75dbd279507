"""Layers in other people's models: under autocast, DDP, FSDP2 and ``torch.compile``.

Each layer is compared to itself, plain and in float32. Under autocast it may differ by what
bfloat16 rounds; its parameters and their gradients stay float32.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from warm_ranks import run_ranks

from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.layers.mlp import MLP
from mcore_models.layers.norm import LayerNorm, RMSNorm
from mcore_moe import ExpertNetwork, MixtureOfExperts, MoEConfig, MoELayer
from mcore_parallel import ParallelContext
from mcore_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mcore_parallel.tensor_parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

B, S, D, V = 2, 8, 16, 24
EXPERTS = MoEConfig(
    num_experts=4,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.1,
    moe_shared_expert_intermediate_size=8,
    moe_shared_expert_gate=True,
)


class Wrapped(nn.Module):
    """A layer of ours between two of torch's; gives one number."""

    def __init__(self, layer):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.layer = layer
        self.last = nn.LayerNorm(D)

    def forward(self, x):
        y = self.layer(self.first(x))
        aux = 0.0
        if isinstance(y, tuple):
            y, aux = y
        if y.shape[-1] == D:
            y = self.last(y)
        else:
            y = y * self.last.weight.sum() + self.last.bias.sum()
        return y.float().square().mean() + aux


class Vocabulary(nn.Module):
    """Embedding, head and loss of a language model, with a layer of torch's between."""

    def __init__(self):
        super().__init__()
        self.embedding = VocabParallelEmbedding(V, D, init_std=1.0)
        self.middle = nn.Linear(D, D)
        self.head = VocabParallelHead(D, V, init_std=0.5)

    def forward(self, ids):
        logits = self.head(self.middle(self.embedding(ids)))  # [S, B, V]
        return vocab_parallel_cross_entropy(logits, ids.t(), vocab_size=V).mean()


class Language(nn.Module):
    """A whole GPT, with its fused head and loss."""

    def __init__(self, **options):
        super().__init__()
        config = TransformerConfig(
            num_layers=2,
            hidden_size=D,
            num_attention_heads=4,
            num_query_groups=2,
            max_position_embeddings=S,
            init_method_std=0.3,
            **options,
        )
        self.gpt = GPT(config, ParallelContext.single(), vocab_size=V, device="cpu")

    def forward(self, ids):
        hidden, _ = self.gpt(ids)
        return self.gpt.token_losses(hidden, ids.roll(-1, 1)).mean()


class LanguageHead(Language):
    """The same through ``loss``, whose gradient must be 1."""

    def forward(self, ids):
        hidden, _ = self.gpt(ids)
        return self.gpt.loss(
            hidden, ids.roll(-1, 1), torch.full(ids.shape, 1 / ids.numel(), device=ids.device)
        )[0]


BUILDERS = {
    "experts": lambda: Wrapped(MixtureOfExperts(D, 32, 4)),
    "experts in turn, with biases": lambda: Wrapped(
        Flat(MoELayer(D, 32, EXPERTS, ExpertNetwork(bias=True, init_std=0.3)))
    ),
    "linears": lambda: Wrapped(
        nn.Sequential(
            ColumnParallelLinear(D, 32, bias=True, init_std=0.3),
            RowParallelLinear(32, D, bias=True, init_std=0.3),
        )
    ),
    "mlp": lambda: Wrapped(MLP(D, 32, ExpertNetwork(init_std=0.3))),
    "mlp, activation made again": lambda: Wrapped(
        MLP(D, 32, ExpertNetwork(init_std=0.3, recompute_activation=True))
    ),
    "norms": lambda: Wrapped(nn.Sequential(RMSNorm(D), nn.Linear(D, D), LayerNorm(D))),
    "vocabulary": Vocabulary,
    "gpt": lambda: Language(qk_layernorm=True),
    "gpt with its head": LanguageHead,
}
OF_IDS = {"vocabulary", "gpt", "gpt with its head"}
COMPILED = {"experts", "vocabulary", "gpt"}
"""All others are a part of one of these, or make their activation again."""
DEFAULT = {"experts", "gpt"}
"""In the default suite: the others are parts of these, or nearly these."""


class Flat(nn.Module):
    """A ``MoELayer`` on tokens of any shape."""

    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    def forward(self, x):
        y, aux = self.moe(x.flatten(0, 1))
        return y.view(x.shape), aux


def build(name, device="cpu"):
    torch.manual_seed(0)
    return BUILDERS[name]().to(device)


def inputs(name, rank, device="cpu"):
    generator = torch.Generator().manual_seed(rank)
    if name in OF_IDS:
        return torch.randint(V, (B, S), generator=generator).to(device)
    return torch.randn(S, B, D, generator=generator).to(device)


def gradients(model, x, autocast, device="cpu"):
    with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
        loss = model(x)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    prefixes = "module.", "_orig_mod."
    for prefix in (*prefixes, *prefixes):
        grads = {name.removeprefix(prefix): grad for name, grad in grads.items()}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return {n: g.float() for n, g in whole.items()}


def check_close(got, want, tolerance, what):
    assert got.keys() == want.keys(), what
    largest = max(grad.abs().max() for grad in want.values())
    for name, grad in want.items():
        scale = max(grad.abs().max(), 0.05 * largest)
        assert (got[name] - grad).abs().max() <= tolerance * scale, f"{what}: {name}"


def check_wrappers(name):
    """Gradients under every wrapper are the mean over two ranks of plain ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = [gradients(build(name), inputs(name, r), autocast=False) for r in range(size)]
    mean = {key: sum(grads[key] for grads in plain) / size for key in plain[0]}
    mesh = init_device_mesh("cpu", (size,))
    for autocast in (False, True):
        tolerance = 0.1 if autocast else 1e-5
        for wrapper in ("plain", "compile", "ddp", "fsdp"):
            if wrapper == "compile" and (name not in COMPILED or not autocast or rank):
                continue  # without autocast each package compiles its own; one rank is enough
            model = build(name)
            if wrapper == "compile":
                torch._dynamo.reset()
                model.compile(backend="aot_eager")
            elif wrapper == "ddp":
                model = DistributedDataParallel(model)
            elif wrapper == "fsdp":
                fully_shard(model, mesh=mesh)
            got = gradients(model, inputs(name, rank), autocast)
            want = plain[rank] if wrapper in ("plain", "compile") else mean
            check_close(got, want, tolerance, f"{name}, {wrapper}, autocast {autocast}")
            for parameter in model.parameters():
                assert parameter.dtype == torch.float32


@pytest.mark.parametrize(
    "name",
    [
        name if name in DEFAULT else pytest.param(name, marks=pytest.mark.parity_long)
        for name in BUILDERS
    ],
)
def test_a_layer_works_under_autocast_and_every_wrapper(name):
    run_ranks(check_wrappers, 2, name, check_shapes=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUILDERS)
def test_a_layer_works_under_autocast_on_a_gpu(name):
    want = gradients(build(name), inputs(name, 0), autocast=False)
    x = inputs(name, 0, "cuda")
    for autocast in (False, True):
        got = gradients(build(name, "cuda"), x, autocast, "cuda")
        got = {key: grad.cpu() for key, grad in got.items()}
        check_close(got, want, 0.1 if autocast else 1e-3, f"{name}, autocast {autocast}")
