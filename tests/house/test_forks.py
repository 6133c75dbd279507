"""The children that tests fork compute, and end, whatever their parent did before."""

import time

import pytest
import torch
from forks import exit_code, fork


@pytest.fixture
def threads():
    """Torch with two threads, which a fork leaves behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.full((1_000_000,), 1.0)
    yield
    torch.set_num_threads(before)


def test_a_child_computes_though_its_parent_has_threads(threads):
    assert (
        exit_code(fork(lambda: int(torch.full((1_000_000,), 1.0).sum().item() != 1e6)), 20) == 0
    )


def test_a_child_that_does_not_end_is_ended():
    with pytest.raises(AssertionError, match="did not end in 0 s"):
        exit_code(fork(lambda: time.sleep(600)), 0.1)


def test_a_child_that_fails_says_so(capfd):
    assert exit_code(fork(lambda: {}["absent"])) == 1
    assert "KeyError: 'absent'" in capfd.readouterr().err
