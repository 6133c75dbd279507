"""A family of models that is defined outside of the packages: a class and a table entry."""

import torch
from torch import nn
from warm_ranks import run_ranks

from mcore_models.config import TransformerConfig
from mcore_models.families import Family
from mcore_models.layers.mlp import MLP
from mcore_models.logical_tensors import ffn_size
from mcore_models.protocol import LanguageModel
from mcore_moe import ExpertNetwork
from mcore_parallel.pipeline_parallel.stages import Stage
from mcore_parallel.sharding import named_shards
from mcore_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mcore_parallel.tensor_parallel.embedding import (
    VocabParallelEmbedding,
    VocabParallelHead,
    padded_vocab,
)
from mcore_train.composition import compose
from mcore_train.layout_check.small_run import build_small_run
from mcore_train.layout_check.verification import verify_on_rank
from mcore_train.resolution import resolve


class BagOfWords(LanguageModel):
    """Each layer reads the mean of the tokens so far: no attention, positions or norms."""

    def __init__(self, config, ctx, *, vocab_size, stage=None, seed=1234, **options):
        super().__init__()
        self.config, self.vocab_size, self.tp = config, vocab_size, ctx.tp
        self.stage = stage or Stage(0, range(config.num_layers), True, True)
        placed = {"axis": ctx.tp, **{name: options[name] for name in ("device", "dtype")}}
        self.padded = padded_vocab(vocab_size, config.make_vocab_size_divisible_by, ctx.tp.size)
        sizes = {"padded_vocab_size": self.padded, "init_std": 0.0, **placed}
        network = ExpertNetwork(init_std=0.0)
        if self.stage.has_embedding:
            self.embedding = VocabParallelEmbedding(vocab_size, config.hidden_size, **sizes)
        self.blocks = nn.ModuleDict(
            {
                str(layer): MLP(config.hidden_size, ffn_size(config), network, **placed)
                for layer in self.stage.layers
            }
        )
        if self.stage.has_loss:
            self.head = VocabParallelHead(config.hidden_size, vocab_size, **sizes)
        if seed is not None:
            self.initialize(named_shards(self), seed)

    def forward(self, x, positions=None, state=None, documents=None):
        if self.stage.has_embedding:
            x = self.embedding(x)
        count = torch.arange(1, len(x) + 1, device=x.device, dtype=x.dtype).view(-1, 1, 1)
        for block in self.blocks.values():
            x = x + block(x.cumsum(0) / count)
        return x, x.new_zeros(())

    def logits(self, hidden):
        return self.head(hidden)

    def token_losses(self, hidden, labels):
        return vocab_parallel_cross_entropy(
            self.logits(hidden),
            labels.t(),
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded,
            axis=self.tp,
        ).t()

    def loss(self, hidden, labels, weights):
        losses = self.token_losses(hidden, labels)
        return (losses * weights).sum(), losses.detach()


def flops_per_token(config: TransformerConfig, padded_vocab_size, seq_length, moe):
    layer = 3 * config.hidden_size * ffn_size(config)
    return 6 * (config.num_layers * layer + padded_vocab_size * config.hidden_size)


def layout_problems(config, parallel, moe, seq_length):
    if parallel.sequence_parallel or parallel.context_parallel_size > 1:
        return ["a bag of words needs whole sequences: leave --sequence-parallel out."]
    return []


BAG_OF_WORDS = Family(
    name="bag-of-words",
    model=BagOfWords,
    flops_per_token=flops_per_token,
    layout_problems=layout_problems,
)
FLAGS = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "mock_data": True,
    "train_iters": 10,
    "lr": 1e-3,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "use_distributed_optimizer": True,
}


def verify_family(small):
    return verify_on_rank(small)  # found by this file, which a rank reads before the family


def test_a_family_from_outside_trains_and_is_saved_under_any_layout_as_on_one_rank():
    small = build_small_run(resolve(compose(FLAGS), 4, family=BAG_OF_WORDS), 4)
    assert small.family is BAG_OF_WORDS
    certificate = run_ranks(verify_family, 4, small)[0]
    assert certificate.layout == "4 ranks: tp2 pp2"
    assert certificate.passed, [line for line in certificate.lines if not line.passed]
    checked = {line.what for line in certificate.lines}
    assert checked >= {"logits", "gradient", "weights after steps"}
    assert checked >= {"continued run", "checkpoint on one rank"}
