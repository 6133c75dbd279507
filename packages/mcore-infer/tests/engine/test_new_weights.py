"""An engine whose weights come from training, in memory, while its requests run."""

import pytest
import torch
from warm_ranks import run_ranks

from mcore_ckpt import transfer_weights
from mcore_infer import Engine, EngineConfig, SamplingConfig, generate, load_model
from mcore_models.gpt import GPT
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.pipeline_parallel.stages import split_layers
from mcore_parallel.sharding import named_shards

PROMPTS = [[10, 20, 30, 80, 90, 100, 110], [40, 41], [10, 20, 30, 80, 90]]
GREEDY = SamplingConfig(num_tokens=9, top_k=1)
CONFIG = EngineConfig(max_sequence_tokens=40, num_pages=64, page_tokens=2)


def trained(like, ctx):
    """A model of the same sizes as training might have left it."""
    stage = split_layers(like.config.num_layers, ctx.pp.size)[ctx.pp.rank]
    sizes = {"vocab_size": like.vocab_size, "dtype": torch.float64}
    return GPT(like.config, ctx, stage=stage, seed=5, **sizes).eval()


def written_across_a_change(folder):
    """Ranks 0 and 1 train over two stages; 2 and 3 write with split matrices."""
    whole = ParallelContext.build(ParallelConfig())
    if whole.world.rank < 2:
        with pytest.raises(ValueError, match=r"ranks \[2, 3\] leave out rank"):
            ParallelContext.build(ParallelConfig(), ranks=(2, 3))
        ctx = ParallelContext.build(
            ParallelConfig(pipeline_model_parallel_size=2), ranks=(0, 1)
        )
        like = load_model(folder, ParallelContext.single()).model
        held = named_shards(trained(like, ctx), ctx.data_axes())
        for _ in range(2):
            transfer_weights(held, {}, world=whole.world)
        return None
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=2), ranks=(2, 3))
    found = []
    for runs_ahead in (False, True):
        model = load_model(folder, ctx).model
        wanted = named_shards(model, ctx.data_axes())
        engine = Engine(model, CONFIG)
        engine.runs_ahead = runs_ahead
        engine.add(PROMPTS[0], GREEDY)
        list(engine.run())  # leaves pages that others share
        numbers = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:2]]
        for _ in range(3):
            engine.step()
        transfer_weights({}, wanted, world=whole.world)
        engine.weights_changed()
        numbers.append(engine.add(PROMPTS[2], GREEDY))
        results = dict(event for event in engine.run() if isinstance(event, tuple))
        found.append([list(results[number].ids) for number in numbers])
    return found


def test_requests_go_on_with_weights_that_other_ranks_have_trained(run_folder, model):
    """As whole texts would: nothing that earlier weights computed is read again."""
    new = trained(model, ParallelContext.single())

    def texts(num_old):
        olds = [generate(model, [p], GREEDY)[0].ids[:num_old] for p in PROMPTS[:2]] + [()]
        found = []
        for prompt, old in zip(PROMPTS, olds, strict=True):
            rest = SamplingConfig(num_tokens=9 - len(old), top_k=1)
            found.append([*old, *generate(new, [[*prompt, *old]], rest)[0].ids])
        return found

    _, _, *writers = run_ranks(written_across_a_change, 4, run_folder)
    assert texts(3) != texts(0)
    assert texts(3)[2] != list(generate(model, [PROMPTS[2]], GREEDY)[0].ids)
    for alone, ahead in writers:
        assert alone == texts(3)
        assert ahead == texts(4)  # a step had begun
