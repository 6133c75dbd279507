"""Reinforcement learning in one loop: push weights, generate, keep the best texts, train.

    OMP_NUM_THREADS=1 python examples/weight_sync_loop.py
    torchrun --nproc_per_node=2 examples/weight_sync_loop.py --use-distributed-optimizer

Every rank trains its part and has an engine with the whole model. A text's reward is its share
of even tokens, which a random model writes half of the time; training on the best quarter of
the texts (expert iteration, Anthony et al. 2017, arXiv:1705.08439) raises it. Both sides run in
the batch-invariant mode, so that the log probabilities of a text are equal to the bit.
"""

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mcore_infer import Engine, EngineConfig, SamplingConfig
from mcore_infer.loading import empty_model
from mcore_models import use_batch_invariant_kernels
from mcore_models.description import ModelDescription
from mcore_models.protocol import LABELS, LOSS_MASK, TOKENS, MicroBatch
from mcore_parallel import ParallelConfig, ParallelContext, all_reduce, initialize
from mcore_train import EngineSync, Run, assemble, compose, resolve, train_step
from mcore_train.checkpoints.adapter_bases import model_description, model_shards

LENGTH, BATCH, VOCABULARY = 12, 4, 64
SIZES = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 2 * LENGTH,
    "seq_length": LENGTH,
    "micro_batch_size": BATCH,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCABULARY - 1,
    "num_workers": 0,
    "train_samples": 0,
    "train_iters": 100,
    "lr": 2e-2,
    "batch_invariant_mode": True,
}


def main(argv: Sequence[str] | None = None) -> list[tuple[float, int]]:
    """Run the loop; return the mean reward of every iteration.

    Returns:
        Mean reward, and the number of log probabilities that differ from the trainer's.
    """
    parser = argparse.ArgumentParser(description="Train on the best texts of an engine.")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    options = parser.parse_args(argv)
    device = initialize()
    whole = ParallelContext.build(ParallelConfig(), device)
    world_size = whole.world.size
    changes = {
        "use_distributed_optimizer": options.use_distributed_optimizer,
        "global_batch_size": BATCH * world_size,
    }
    plan = resolve(compose({**SIZES, **changes}), world_size)
    run = assemble(plan, ParallelContext.build(plan.config.parallelism, device))
    engine = build_engine(run)
    sync = EngineSync(whole.world, weights=partial(model_shards, run), engine=engine)
    rewards: list[tuple[float, int]] = []
    for iteration in range(options.iterations):
        version = sync.push()
        texts, log_probs = write(engine, seed=1000 * iteration + whole.world.rank)
        reward = (texts[:, 1:] % 2 == 0).float().mean(1)
        differing = (trainer_log_probs(run, texts) != log_probs).sum()
        best = texts[reward.topk(BATCH).indices]
        train_step(run, [as_batch(best)], plan.config.optimizer.lr, 0.0)
        sums = torch.stack([reward.double().mean(), differing.double()])
        mean, num_differing = all_reduce(sums, whole.world).tolist()
        rewards.append((mean / world_size, int(num_differing)))
        if whole.world.rank == 0:
            print(
                f"weights {version} | reward {rewards[-1][0]:.3f} | log probabilities that "
                f"differ from the trainer's: {rewards[-1][1]}"
            )
    run.ctx.destroy()
    whole.destroy()
    return rewards


def build_engine(run: Run) -> Engine:
    """Build an engine of the whole model, which waits for its first weights."""
    description = ModelDescription.from_dict(model_description(run.plan))
    model = empty_model(description, ParallelContext.single(run.ctx.device), run.dtype)
    use_batch_invariant_kernels(model)
    return Engine(model.eval(), EngineConfig(max_requests=4 * BATCH, max_sequence_tokens=32))


def write(engine: Engine, seed: int) -> tuple[Tensor, Tensor]:
    """Return texts of one prompt, and log probabilities of their tokens after the first."""
    sampling = SamplingConfig(num_tokens=LENGTH)
    for number in range(4 * BATCH):
        engine.add([0], sampling, seed=seed * 4 * BATCH + number)
    results = sorted(event for event in engine.run() if isinstance(event, tuple))
    assert all(text.weights_versions == (engine.weights_version,) for _, text in results)
    texts = torch.tensor([[0, *text.ids] for _, text in results])
    return texts, torch.tensor([text.log_probs for _, text in results])


def as_batch(texts: Tensor) -> MicroBatch:
    """Return texts as a micro-batch in which every token after the first counts."""
    tokens, labels = texts[:, :-1], texts[:, 1:]
    mask = torch.ones_like(labels, dtype=torch.float32)
    return MicroBatch({TOKENS: tokens, LABELS: labels, LOSS_MASK: mask})


def trainer_log_probs(run: Run, texts: Tensor) -> Tensor:
    """Return the log probabilities that the trained model gives to texts."""
    (model,) = run.chunks
    with torch.no_grad():
        hidden, _ = model(texts[:, :-1])
        return -model.token_losses(hidden, texts[:, 1:])


if __name__ == "__main__":
    main()
