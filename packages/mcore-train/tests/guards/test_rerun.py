"""A suspicious step is computed again: errors of a moment are mended, broken devices named."""

import math

import pytest
import torch
from warm_ranks import run_ranks

from mcore_parallel.data_parallel.replica_checks import UnlikeWeightsError
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear
from mcore_train.assembly import assemble
from mcore_train.cli import exit_code
from mcore_train.composition import compose
from mcore_train.diagnosis.rules import FAULTS, recognize
from mcore_train.guards.nan_guard import NonFiniteError
from mcore_train.guards.rerun import BrokenDeviceError
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter
from mcore_train.resolution import resolve

TINY = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 3,
    "train_iters": 4,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 40,
    "num_workers": 0,
    "make_vocab_size_divisible_by": 8,
    "hidden_dropout": 0.1,
    "rerun_on_mismatch": True,
}


def spoil_gradients(model, spoil):
    """Let a function change the gradient of what the first split linear computes."""
    linear = next(m for m in model.modules() if isinstance(m, ColumnParallelLinear))

    def watch(_module, _arguments, output):
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(spoil)

    linear.register_forward_hook(watch)


def train_with_an_error(error, ranks, times, changes):
    """Train on data ranks, some of which compute a gradient wrongly before the last 3 steps.

    What is not finite is found at any step; a spike needs 16 norms before it.

    Args:
        error: added to a gradient.
        ranks: that err.
        times: how often each errs; None: always.
        changes: options.
    """
    num_sound = 17 if math.isfinite(error) else 2
    config = compose({**TINY, "train_iters": num_sound + 3, **changes})
    run = assemble(resolve(config, 3), ParallelContext.build(config.parallelism))
    done = []

    def spoil(grad):
        is_wrong = run.progress.iteration >= num_sound and run.ctx.global_rank in ranks
        if is_wrong and (times is None or len(done) < times):
            done.append(1)
            return grad + error
        return grad

    spoil_gradients(run.chunks[0], spoil)
    try:
        train(run, Reporter(None))
    except (BrokenDeviceError, NonFiniteError) as caught:
        return type(caught).__name__, str(caught)
    return [p.detach().clone() for p in run.chunks[0].parameters()]


def sound_and_mended(error, changes):
    runs = ((), None), ((1,), 1)
    return [train_with_an_error(error, *erring, changes) for erring in runs]


@pytest.mark.parametrize(
    ("error", "changes"), [(1e4, {}), (math.nan, {"use_distributed_optimizer": True})]
)
def test_an_error_that_happens_once_leaves_the_weights_of_a_sound_run(error, changes):
    for sound, mended in run_ranks(sound_and_mended, 3, error, changes):
        assert all(map(torch.equal, sound, mended))


@pytest.mark.parametrize("error", [math.nan, 1e4])
def test_a_rank_that_always_errs_is_named_on_all_ranks(error):
    for name, told in run_ranks(train_with_an_error, 3, error, (1,), None, {}):
        assert name == "BrokenDeviceError"
        assert "broken device: rank 1 on " in told
        assert "leave the host out" in told
        found = recognize(f"mcore_train.guards.rerun.BrokenDeviceError: {told}")
        assert (found.rule.fault, found.rank) == ("hardware", 1)


def test_where_all_replicas_agree_the_result_is_that_of_the_data():
    for name, _ in run_ranks(train_with_an_error, 3, math.nan, (0, 1, 2), None, {}):
        assert name == "NonFiniteError"
    # A spike that is computed alike by all is trained on.
    weights = run_ranks(train_with_an_error, 3, 1e4, (0, 1, 2), None, {})
    assert all(isinstance(each, list) for each in weights)


def come_apart(is_broken):
    config = compose({**TINY, "check_weight_hash_across_dp_replicas_interval": 2})
    run = assemble(resolve(config, 3), ParallelContext.build(config.parallelism))
    weight = next(p for p in run.chunks[0].parameters() if p.dim() == 2)

    def spoil(grad):
        if run.ctx.global_rank == 2 and run.progress.iteration >= 2:
            if run.progress.iteration == 2:
                weight.data[0, 0] += 1.0
            return grad * 1.01 if is_broken else grad
        return grad

    spoil_gradients(run.chunks[0], spoil)
    with pytest.raises((BrokenDeviceError, UnlikeWeightsError)) as caught:
        train(run, Reporter(None))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("is_broken", [True, False])
def test_unlike_weights_are_traced_to_a_broken_device_or_to_an_error_of_a_moment(is_broken):
    for name, told in run_ranks(come_apart, 3, is_broken):
        assert name == ("BrokenDeviceError" if is_broken else "UnlikeWeightsError")
        assert "do not have the same weights any more" in told
        assert ("rank 2 on" in told) == is_broken
        assert ("a link had a transient error" in told) != is_broken


@pytest.mark.parametrize("conflict", [{"num_experts": 2}, {"fp16": True}])
def test_what_cannot_be_computed_again_is_refused(conflict):
    with pytest.raises(ValueError, match="--rerun-on-mismatch"):
        resolve(compose({**TINY, **conflict}), 1)


def test_what_a_run_finds_out_about_itself_is_its_exit_code():
    errors = {
        17: NonFiniteError(3, math.nan),
        30: BrokenDeviceError("broken device: rank 1 on n1", [1]),
        39: UnlikeWeightsError("weights differ"),
    }
    assert {code: exit_code(error) for code, error in errors.items()} == {
        17: 17,
        30: 30,
        39: 39,
    }
    assert [FAULTS[name].exit_code for name in ("nan", "hardware", "replicas")] == [17, 30, 39]
