"""The pool of ranks: what goes wrong on a rank is seen here, and the next test still runs."""

import gc
import os
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import warm_ranks
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from warm_commands import run_forked
from warm_ranks import run_command, run_ranks

from mcore_parallel.collectives import all_reduce
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.tensor_parallel.embedding import VocabParallelEmbedding
from mcore_parallel.testing.ranks import load_function
from mcore_train.guards.gc_control import GCControl


def describe(word):
    return dist.get_rank(), dist.get_world_size(), word, torch.full((2,), dist.get_rank())


def test_results_come_back_in_rank_order_from_worlds_of_any_size():
    for size in (2, 1, 3):
        answers = run_ranks(describe, size, "hello")
        for rank, (own, world, word, tensor) in enumerate(answers):
            assert (own, world, word, tensor.tolist()) == (rank, size, "hello", [rank] * 2)


def doubled(num_groups):
    """Of a DTensor whose mesh is over the last of so many groups."""
    groups = [dist.group.WORLD, *(dist.new_group() for _ in range(num_groups))]
    mesh = DeviceMesh.from_group(groups[-1], "cpu")
    return (distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]) * 2).full_tensor().tolist()


def test_a_world_knows_no_mesh_of_an_earlier_one():
    for num_groups in (2, 0):
        assert run_ranks(doubled, 2, num_groups) == [[0.0, 2.0, 4.0, 6.0]] * 2


def fail_on_one(rank):
    if dist.get_rank() == rank:
        raise KeyError("the reason")
    axis = ParallelContext.build(ParallelConfig()).world
    all_reduce(torch.ones(1), axis)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_raises_its_traceback_here_though_its_peers_wait_for_it(rank):
    with pytest.raises(RuntimeError, match=f"rank {rank} of 2 failed") as caught:
        run_ranks(fail_on_one, 2, rank)
    assert "KeyError: 'the reason'" in str(caught.value)
    assert "in fail_on_one" in str(caught.value)
    assert [answer[0] for answer in run_ranks(describe, 2, "again")] == [0, 1]


def own_pid():
    return os.getpid()


def die(rank):
    if dist.get_rank() == rank:
        os._exit(3)
    time.sleep(600)


def test_a_rank_that_dies_is_named_and_the_next_call_works():
    with pytest.raises(RuntimeError, match="rank 1 of 2 died"):
        run_ranks(die, 2, 1)
    assert [answer[0] for answer in run_ranks(describe, 2, "again")] == [0, 1]


def hang(rank):
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier(group=dist.group.WORLD)


def test_ranks_that_hang_are_named_with_their_stacks_when_time_is_up():
    start = time.monotonic()
    run_ranks(describe, 2, "warm")
    message = r"ranks \[0, 1\] of 2 gave no answer in 0\.5 s"
    with pytest.raises(RuntimeError, match=message) as caught:
        run_ranks(hang, 2, 1, timeout_s=0.5)
    assert time.monotonic() - start < 250
    _, waiting, sleeping = str(caught.value).split("s of processor so far:")
    line = hang.__code__.co_firstlineno
    assert f"line {line + 3} in hang" in waiting
    assert "in barrier" in waiting
    assert f"line {line + 2} in hang" in sleeping
    assert [answer[0] for answer in run_ranks(describe, 2, "again")] == [0, 1]


def test_the_time_to_load_a_test_file_is_not_the_functions(tmp_path):
    path = tmp_path / "slow_to_load.py"
    path.write_text(
        f"import os, time\nif os.getpid() != {os.getpid()}:\n    time.sleep(1)\n\n\n"
        "def answer():\n    return 7\n"
    )
    answer = load_function((path.stem, str(path), "answer"))
    assert run_ranks(answer, 1, timeout_s=0.8) == [7]


def objects_set_aside():
    with GCControl(1):
        pass
    return gc.get_freeze_count()


def test_a_training_lets_the_collector_look_at_nothing_that_was_set_aside():
    counts = [objects_set_aside()]
    for is_checked in (False, True):
        counts += run_ranks(objects_set_aside, 1, check_shapes=is_checked)
    assert min(counts) > 100_000


def return_a_function():
    return lambda: None


def test_a_result_that_does_not_pickle_says_so():
    with pytest.raises(RuntimeError, match="return_a_function"):
        run_ranks(return_a_function, 1)


def test_a_function_that_ranks_cannot_find_is_refused():
    with pytest.raises(ValueError, match="must be a module-level function of a file"):
        run_ranks(lambda: None, 1)


def wrong_shape():
    VocabParallelEmbedding(4, 2)(torch.zeros(3, dtype=torch.int64))


def test_shapes_are_checked_in_the_ranks_unless_asked_not_to():
    with pytest.raises(RuntimeError, match=r"(?s)failed.*Int.*B S"):
        run_ranks(wrong_shape, 1)
    # Without the hook torch itself takes a one-dimensional transpose.
    run_ranks(wrong_shape, 1, check_shapes=False)


def rooms_known():
    return {name for name in sys.modules if name.startswith("mcore_parallel.")}


def test_ranks_that_cannot_import_say_so_and_the_next_ones_know_what_is_imported_here(
    monkeypatch,
):
    # Few packages, and no compiler, so that a server starts in a second.
    monkeypatch.setattr(warm_ranks, "OUR_PACKAGES", ("mcore_parallel",))
    monkeypatch.setattr(warm_ranks, "COMPILER", ())
    pool = warm_ranks.Pool(check_shapes=False)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "mcore_parallel.not_there", sys)
        with pytest.raises(RuntimeError, match=r"(?s)cannot start.*mcore_parallel\.not_there"):
            pool.run(own_pid, 1, (), 60.0)
    # The fork server has them: the shape hook's seconds are spent once, not by every rank.
    assert rooms_known() <= pool.run(rooms_known, 1, (), 60.0)[0]
    pool.stop()
    pool.stop()


def train_and_count_threads():
    count = len(os.listdir("/proc/self/task"))
    ctx = ParallelContext.build(ParallelConfig())
    layer = torch.nn.Linear(2, 2, bias=False)
    DataParallel([layer], ctx, DataParallelConfig())
    return count


def test_groups_of_an_earlier_test_leave_no_threads_behind():
    # Each polls a hundred times a second: after a hundred tests, for as long as these took.
    first = run_ranks(train_and_count_threads, 2)
    assert run_ranks(train_and_count_threads, 2) == first


def draw_after(seed):
    number = torch.rand(1).item()
    torch.manual_seed(seed)
    return number


def test_a_test_does_not_see_the_random_state_that_another_left():
    first = run_ranks(draw_after, 2, 1)
    assert run_ranks(draw_after, 2, 2) == first


def annotated(x: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    return x * 2


def test_tensors_pass_as_arguments_and_results():
    (answer,) = run_ranks(annotated, 1, torch.arange(3.0))
    assert answer.tolist() == [0.0, 2.0, 4.0]


@dataclass(frozen=True)
class Pair:
    """A class that only this file knows."""

    left: int
    right: int


def swapped(pair):
    return Pair(pair.right, pair.left)


def test_classes_of_a_test_file_travel_both_ways():
    assert run_ranks(swapped, 2, Pair(1, 2)) == [Pair(2, 1)] * 2


COMMAND = """
import os, sys, torch
print(__name__, sys.argv[1:], os.getcwd(), os.environ["WORD"], torch.get_num_threads())
print("complaint", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def run_loaded(command, timeout_s):
    """Run a command in a fork of the server of unchecked ranks."""
    return warm_ranks._pool(False).server().run(command, timeout_s)


def test_a_command_is_what_a_new_python_would_make_of_it(tmp_path, monkeypatch):
    code = 3
    (tmp_path / "some_command.py").write_text(COMMAND)
    monkeypatch.syspath_prepend(tmp_path)
    env = {**os.environ, "WORD": "hello", "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    warm = run_command("some_command", code, "a b", env=env, cwd=tmp_path)
    words = [sys.executable, "-m", "some_command", str(code), "a b"]
    cold = subprocess.run(
        words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert vars(warm) == vars(cold)
    loaded = run_forked("some_command", [str(code), "a b"], env, tmp_path, 60.0, run_loaded)
    assert vars(loaded) == vars(cold)
    assert warm.returncode == code
    assert f"__main__ ['{code}', 'a b'] {tmp_path} hello 1" in warm.stdout


def test_commands_draw_their_own_random_numbers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "drawing.py").write_text("import torch; print(torch.rand(1).item())")
    assert run_command("drawing").stdout != run_command("drawing").stdout


def test_a_command_that_raises_shows_its_traceback_and_one_that_hangs_is_ended(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing.py").write_text("raise KeyError('the reason')")
    done = run_command("failing")
    assert done.returncode == 1
    assert "KeyError: 'the reason'" in done.stderr
    (tmp_path / "hanging.py").write_text("import time; time.sleep(600)")
    for run in (None, run_loaded):
        with pytest.raises(subprocess.TimeoutExpired):
            run_forked("hanging", [], None, None, 0.5, run)
    (tmp_path / "killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    assert run_forked("killed", [], None, None, 60.0, run_loaded).returncode == -9
