"""Lightning attention against its recurrence, written out token by token."""

import torch
import torch.nn.functional as F

from mcore_models.config import TransformerConfig
from mcore_models.layers.block_inputs import BlockInputs
from mcore_models.layers.layer_setup import LayerSetup
from mcore_models.layers.recurrent.lightning import LightningAttention, lightning_slopes
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.rng import RngStreams


def plain(layer, x, slopes, starts):
    """Return the layer's output for ``x`` of one rank, by the recurrence, token by token."""
    *qkv, z = (x @ layer.in_proj.weight.T).chunk(4, -1)
    heads = slopes.shape[0]
    q, k, v = (F.silu(part).unflatten(-1, (heads, -1)) for part in qkv)
    state, outputs = torch.zeros_like(torch.einsum("bnh,bnk->bnhk", v[0], k[0])), []
    for t in range(x.shape[0]):
        state = state * (~starts[t])[:, None, None, None]
        written = torch.einsum("bnh,bnk->bnhk", v[t], k[t])
        state = (-slopes).exp()[:, None, None] * state + written
        outputs.append(torch.einsum("bnhk,bnk->bnh", state, q[t]).flatten(-2))
    y = torch.stack(outputs)
    normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * layer.norm.weight
    return (normed * z.sigmoid()) @ layer.out_proj.weight.T


def test_lightning_attention_of_packed_documents_is_its_recurrence():
    config = TransformerConfig(
        num_layers=3, hidden_size=10, num_attention_heads=3, kv_channels=4
    )
    setup = LayerSetup(
        config=config,
        ctx=ParallelContext.single(),
        layer=1,
        streams=RngStreams(0, ParallelContext.single()),
        dtype=torch.float64,
    )
    layer = LightningAttention(setup)
    torch.manual_seed(1)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(150, 2, 10, dtype=torch.float64, requires_grad=True)
    documents = Documents(((0, 7, 127, 150), (0, 150)))
    starts = torch.zeros(150, 2, dtype=torch.bool)
    starts[[0, 7, 127], 0] = True
    slopes = lightning_slopes(config, 1)
    expected = plain(layer, x, slopes, starts)
    found = layer(x, inputs=BlockInputs(documents=documents))
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(x)
    torch.testing.assert_close(
        torch.autograd.grad((found * weights).sum(), x),
        torch.autograd.grad((expected * weights).sum(), x),
    )


def test_decay_rates_are_a_series_over_heads_that_falls_over_layers_to_almost_zero():
    config = TransformerConfig(num_layers=5, hidden_size=12, num_attention_heads=3)
    layers = torch.stack([lightning_slopes(config, layer) for layer in range(6)])
    torch.testing.assert_close(layers[0, 1] / layers[0, 0], layers[0, 2] / layers[0, 1])
    torch.testing.assert_close(layers[0, 2].item(), 2**-8 * (1 + 1e-5))
    torch.testing.assert_close(
        layers[:5, 0] / layers[0, 0], torch.linspace(1, 0, 5).double(), rtol=0, atol=2e-5
    )
    # Layer 5 is one of multi-token prediction: its state decays too.
    assert (layers > 0).all()
