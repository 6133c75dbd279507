"""mcore-moe alone: experts inside a plain torch module, also under DDP and torch.compile.

The programs of the guide to experts run here too.
"""

import re
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mcore_moe import MixtureOfExperts, MoEConfig, MoELayer, __version__
from mcore_parallel.launch.launcher import free_port

assert __version__[0].isdigit(), __version__
torch.manual_seed(0)


class Block(nn.Module):
    """A plain torch module of somebody else's model."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 16)
        self.experts = MixtureOfExperts(
            hidden_size=16, ffn_hidden_size=32, num_experts=4, top_k=2
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(torch.tanh(self.inside(x)))


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return every gradient of a scalar of the model, by parameter."""
    model.zero_grad()
    model(x).square().mean().backward()
    found = {
        name.removeprefix("module."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert any("router" in name and grad.abs().max() > 0 for name, grad in found.items())
    return found


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, grad in one.items():
        torch.testing.assert_close(other[name], grad, rtol=1e-5, atol=1e-6, msg=name)


layer = MoELayer(16, 32, MoEConfig(num_experts=4, moe_aux_loss_coeff=0.01))
y, aux = layer(torch.randn(6, 16))
assert y.shape == (6, 16)
assert aux.item() > 0

model = Block()
x = torch.randn(2, 5, 16)
plain = gradients(model, x)

dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
)
check_equal(plain, gradients(DistributedDataParallel(model), x))
dist.destroy_process_group()

# Dynamo warns of what it does itself, such as asking a hidden tensor for its gradient.
warnings.filterwarnings("ignore", module=r"torch\.")
model.compile(backend="aot_eager")
check_equal(plain, gradients(model, x))

guide = Path(__file__).resolve().parents[2] / "docs/experts.md"
for code in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL):
    exec(compile(code, str(guide), "exec"), globals())
