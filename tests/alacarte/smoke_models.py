"""mcore-models alone: a small GPT learns a sequence by heart on one rank."""

import torch

from mcore_models import GPT, TransformerConfig, __version__
from mcore_parallel import ParallelContext

assert __version__[0].isdigit(), __version__

config = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2
)
model = GPT(config, ParallelContext.single(), vocab_size=50)
tokens = torch.arange(9)[None] * 5 % 50
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for _ in range(30):
    hidden, _aux = model(tokens[:, :-1])
    loss = model.token_losses(hidden, tokens[:, 1:]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.1 < 3.0 < losses[0], losses
