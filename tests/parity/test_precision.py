"""One rank in the formats that people train in, against itself in float64."""

import pytest
import torch
from parity.case import DENSE, build_case, trained


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1.6e-2)]
)
def test_a_narrower_format_stays_close_and_continues_bitwise(dense, tmp_path, dtype, tolerance):
    oracle = dense["one"]
    found = trained(1, "dense", "one", str(tmp_path), dtype)
    assert found.losses[0] == pytest.approx(oracle.losses[0], rel=tolerance)
    assert found.grad_norm == pytest.approx(oracle.grad_norm, rel=3 * tolerance)
    assert found.resumed == found.final


def test_main_gradients_and_moments_of_bfloat16_weights_are_float32(tmp_path):
    run = build_case(DENSE["one"], dtype=torch.bfloat16)
    assert {shard.dtype for shard in run.data_parallel.grad_shards().values()} == {
        torch.float32
    }
    state = run.optimizer.named_shards()
    assert {shard.dtype for shard in state.values()} == {torch.float32}
    assert any(name.startswith("main.") for name in state)
