"""The field's first program, as its guides print it, on these packages.

    python examples/first_program.py
    torchrun --nproc_per_node=2 examples/first_program.py --tensor-model-parallel-size 2

Only the import lines differ from the guides'. The options make it smaller, or shorter.
"""

import argparse
from collections.abc import Sequence

from torch.optim import Adam
from torch.utils.data import DataLoader, Subset

from mcore_data import MockGPTDataset
from mcore_models import GPTModel, TransformerConfig
from mcore_moe import MixtureOfExperts
from mcore_parallel import parallel_state


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, print and return the losses."""
    parser = argparse.ArgumentParser(description="Train a GPT on mock data, as the guides do.")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--num-attention-heads", type=int, default=12)
    parser.add_argument("--vocab-size", type=int, default=50000)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(argv)

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=1,
    )
    config = TransformerConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads,
    )
    model = GPTModel(config, vocab_size=options.vocab_size)
    dataset = MockGPTDataset(
        sequence_length=options.sequence_length, vocab_size=options.vocab_size
    )
    dataloader = DataLoader(Subset(dataset, range(4 * options.steps)), batch_size=4)
    optimizer = Adam(model.parameters())
    losses = []
    for batch in dataloader:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"loss {losses[-1]:.6f}")

    moe_layer = MixtureOfExperts(
        hidden_size=options.hidden_size,
        ffn_hidden_size=4 * options.hidden_size,
        num_experts=8,
        top_k=2,
    )
    print(f"experts: {sum(p.numel() for p in moe_layer.parameters()):,} parameters")
    return losses


if __name__ == "__main__":
    main()
