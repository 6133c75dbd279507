"""A slow rank, a slow link and slow data are named with rank and host, within two reports."""

import io
import socket
import time

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from warm_ranks import run_ranks

from mcore_parallel.mesh import ParallelContext
from mcore_train import loop
from mcore_train.assembly import assemble
from mcore_train.batches.micro_batches import train_batches
from mcore_train.composition import compose
from mcore_train.guards import stragglers
from mcore_train.guards.stragglers import SlowRanks, StragglerWatch, scores
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter, read_metrics
from mcore_train.resolution import resolve

TINY = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 8,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 40,
    "num_workers": 0,
    "make_vocab_size_divisible_by": 8,
    "log_straggler": True,
    "straggler_interval": 4,
    "straggler_threshold": 0.5,
}
DELAY_S = 0.04


def delayed(function, delay_s):
    """Return a function that sleeps before it calls another."""

    def call(*arguments, **options):
        time.sleep(delay_s)
        return function(*arguments, **options)

    return call


def train_with_a_slow(what, slow_ranks, metrics, delay_s):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stragglers, "MAX_SHARE", 1.0)  # the interval stays: steps are tiny
        made = []
        begin = StragglerWatch.__init__
        patch.setattr(
            StragglerWatch, "__init__", lambda self, *a: (made.append(self), begin(self, *a))[1]
        )
        config = compose(TINY)
        run = assemble(resolve(config, 4), ParallelContext.build(config.parallelism))
        is_slow = run.ctx.global_rank in slow_ranks
        planted_s = 3 * delay_s * is_slow
        wait = delayed(lambda batch: batch, planted_s)
        # Every rank takes some time for a step, so that the sampler has something to see.
        run.chunks[0].register_forward_pre_hook(lambda *_: time.sleep(delay_s / 2))
        if what == "step":
            run.chunks[0].register_forward_pre_hook(
                lambda *_: time.sleep(4 * delay_s * is_slow)
            )
        if what == "data":
            patch.setattr(loop, "train_batches", lambda run: map(wait, train_batches(run)))
        if what == "link":
            patch.setattr(dist, "batch_isend_irecv", delayed(dist.batch_isend_irecv, planted_s))
        if what == "gemm":
            patch.setattr(
                torch.Tensor, "__matmul__", delayed(torch.Tensor.__matmul__, planted_s)
            )
        console = Console(file=io.StringIO()) if run.ctx.global_rank == 0 else None
        with Reporter(console, metrics_file=metrics) as reporter:
            train(run, reporter)
        return [
            (each.rank, each.kind, each.host, str(each)) for each in made[0].slow_ranks.found
        ]


@pytest.mark.parametrize(
    ("what", "slow", "told"),
    [
        ("step", [2], "computes its part of a step at 0."),
        ("data", [1], "gets its batches at 0."),
        ("link", [2, 3], "exchanges messages at 0."),
        ("gemm", [0], "multiplies matrices at 0."),
    ],
)
def test_what_is_slow_is_named_with_its_host_after_two_reports(what, slow, told, tmp_path):
    """Times are real: on a host that is busy with other work longer delays count."""
    for attempt, delay_s in enumerate((DELAY_S, 2 * DELAY_S, 4 * DELAY_S)):
        try:
            check_that_a_slow_one_is_named(what, slow, told, tmp_path / str(attempt), delay_s)
        except AssertionError:
            if delay_s == 4 * DELAY_S:
                raise
        else:
            return


def check_that_a_slow_one_is_named(what, slow, told, metrics, delay_s):
    for found in run_ranks(train_with_a_slow, 4, what, slow, metrics, delay_s):
        mine = [each for each in found if each[1] == what]
        assert [rank for rank, *_ in mine] == slow
        assert all(host == socket.gethostname() for _, _, host, _ in mine)
        assert told in mine[0][3]
    rows = [row for row in read_metrics(metrics) if row["kind"] == "stragglers"]
    assert [row["iteration"] for row in rows] == [4, 8]
    assert rows[-1][f"{what}_lowest_rank"] in slow
    assert rows[-1][f"{what}_lowest_score"] < 0.5


def test_scores_are_shares_of_the_median_and_a_rank_without_a_rate_is_usual():
    found = scores({"link": [4.0, 4.0, 1.0, float("nan")], "gemm": [float("nan")] * 4})
    assert found == {"link": [1.0, 1.0, 0.25, 1.0], "gemm": [1.0] * 4}


def test_a_rank_is_named_only_if_two_reports_of_one_kind_in_a_row_are_low(caplog):
    ranks = SlowRanks(["host0", "host1"], 0.7)
    for step, by_rank in ((3, [1.0, 0.6]), (4, [1.0, 0.8]), (5, [0.6, 1.0]), (6, [1.0, 0.5])):
        ranks.add(step, {"step": by_rank})
        ranks.add(step, {"gemm": [1.0, 0.5 if step == 4 else 1.0]})
        assert ranks.found == []
    assert not caplog.records
    ranks.add(7, {"step": [1.0, 0.4]})
    (warning,) = caplog.messages
    assert warning == (
        "rank 1 on host1 computes its part of a step at 0.40 of the usual rate, since step 6"
    )
    ranks.add(8, {"gemm": [1.0, 1.0]})
    assert [(each.rank, each.kind) for each in ranks.found] == [(1, "step")]
    ranks.add(8, {"step": [1.0, 1.0]})
    assert ranks.found == []


def lengthened(share):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stragglers, "MAX_SHARE", share)
        config = compose({**TINY, "straggler_interval": 1})
        run = assemble(resolve(config, 2), ParallelContext.build(config.parallelism))
        watch = StragglerWatch(run.ctx, config.watching, Reporter(None))
        for number in range(1, 4):
            with watch.step(number):
                time.sleep(0.01)
        return watch.interval


def test_reports_become_rarer_until_they_cost_little():
    first, other = run_ranks(lengthened, 2, 0.003)
    assert first == other > 1
    assert run_ranks(lengthened, 2, 1e9) == [1, 1]
