"""Every optimizer over the twelve layouts of ``tests/frozen``, by ``mcore-train verify``."""

from typing import Any

import pytest
from frozen.record import LAYOUTS, SIZES
from warm_ranks import run_ranks

from mcore_train.composition import FAMILY_COMMANDS, compose
from mcore_train.layout_check.small_run import build_small_run
from mcore_train.layout_check.verification import verify_on_rank
from mcore_train.resolution import resolve

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon", "muon_nesterov": True, "muon_extra_scale_factor": 0.2},
    "adamuon": {"optimizer": "muon", "muon_moment2_method": "adamuon"},
    "normuon": {"optimizer": "muon", "muon_moment2_method": "normuon"},
    "soap": {"optimizer": "soap", "soap_precondition_frequency": 2},
    "lion": {"optimizer": "lion"},
    "sgd": {"optimizer": "sgd"},
    "adafactor": {"optimizer": "adafactor"},
    "schedule_free": {"optimizer": "schedule_free", "lr_decay_style": "constant"},
    "average": {"ema_decay": 0.5},
}


@pytest.mark.parity_long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_is_certified_over_a_layout(optimizer, layout):
    command, world_size, options = LAYOUTS[layout]
    row = FAMILY_COMMANDS[command]
    config = compose(SIZES | options | OPTIMIZERS[optimizer], row.run)
    small = build_small_run(resolve(config, world_size, family=row.family), 8)
    certificate = run_ranks(verify_on_rank, small.world_size, small, True)[0]
    assert [(line.what, line.tensor) for line in certificate.lines if not line.passed] == []
    assert certificate.passed
