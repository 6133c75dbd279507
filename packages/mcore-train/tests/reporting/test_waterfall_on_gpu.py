import io
import json

import pytest
import torch
from rich.console import Console

from mcore_train.assembly import assemble
from mcore_train.composition import compose
from mcore_train.loop import train
from mcore_train.reporting.log import Reporter
from mcore_train.reporting.waterfall import AXES, PARTS
from mcore_train.resolution import resolve
from mcore_train.running import joined_world

pytestmark = pytest.mark.gpu

SIZES = {
    "num_layers": 4,
    "hidden_size": 4096,  # so wide that the device has work ahead on a slow host too
    "num_attention_heads": 32,
    "seq_length": 4096,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 8,
    "lr": 1e-4,
    "bf16": True,
    "mock_data": True,
    "vocab_size": 32000,
    "log_interval": 1,
    "waterfall_interval": 2,
    "layer_statistics_interval": 4,
}


def test_the_parts_add_up_on_a_device_too(tmp_path):
    plan = resolve(compose(SIZES), 1)
    path = tmp_path / "metrics.jsonl"
    with (
        joined_world(plan) as ctx,
        Reporter(Console(file=io.StringIO()), metrics_file=path, with_lines=False) as reporter,
    ):
        train(assemble(plan, ctx), reporter)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    fall = [row for row in rows if row["kind"] == "waterfall"][-1]
    names = [*PARTS, *(f"exposed_{axis}" for axis in AXES)]
    assert sum(fall[f"{name}_ms"] for name in names) == pytest.approx(fall["step_ms"], rel=0.01)
    assert fall["compute_ms"] > 0.5 * fall["step_ms"]
    (trained,) = [
        row for row in rows if row["kind"] == "train" and row["iteration"] == fall["iteration"]
    ]
    assert fall["step_ms"] == pytest.approx(trained["step_ms"], rel=0.2)
    layers = [row for row in rows if row["kind"] == "layers"][-1]
    assert layers["gradient_norm"] > 0
    assert torch.cuda.is_available()
