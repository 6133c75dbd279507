"""A run whose copies of weights came apart ends, and says what may be gone on from."""

import pytest
from warm_ranks import run_ranks

from mcore_ckpt.storage.paths import complete_steps
from mcore_parallel.data_parallel.replica_checks import UnlikeWeightsError
from mcore_parallel.mesh import ParallelContext
from mcore_train.assembly import assemble
from mcore_train.composition import compose
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import resolve

TINY = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 6,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 40,
    "num_workers": 0,
    "make_vocab_size_divisible_by": 8,
    "check_weight_hash_across_dp_replicas_interval": 2,
}


def train_with_a_wrong_rank(wrong_rank, folder):
    """Train on two data ranks, one of which spoils a weight in its third step."""
    config = compose({**TINY, "save": folder, "save_interval": 2})
    run = assemble(resolve(config, 2), ParallelContext.build(config.parallelism))
    weight = next(p for p in run.chunks[0].parameters() if p.dim() == 2)

    def spoil(grad):
        if run.progress.iteration == 2 and run.ctx.global_rank == wrong_rank:
            weight.data[0, 0] += 1.0

    next(p for p in run.chunks[0].parameters() if p.dim() == 1).register_hook(spoil)
    try:
        return train(run, Reporter(None))
    except UnlikeWeightsError as error:
        return str(error)


def test_a_run_ends_at_the_next_comparison_and_names_the_last_step_that_was_right(tmp_path):
    for told in run_ranks(train_with_a_wrong_rank, 2, 1, str(tmp_path)):
        assert told.startswith("after iteration 4: ")
        assert "do not have the same weights any more" in told
        assert "were equal after iteration 2: continue" in told
    assert complete_steps(tmp_path) == [2]


def test_a_run_whose_copies_stay_equal_goes_on_to_its_end(tmp_path):
    assert run_ranks(train_with_a_wrong_rank, 2, -1, str(tmp_path)) == [True, True]


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match="--check-weight-hash-across-dp-replicas-interval"):
        compose({**TINY, "check_weight_hash_across_dp_replicas_interval": -1})
