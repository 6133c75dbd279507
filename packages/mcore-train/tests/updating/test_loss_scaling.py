"""Loss scaling under --fp16: how the factor moves, and what a skipped step leaves alone."""

import pytest
import torch

from mcore_train.config import PrecisionConfig
from mcore_train.updating.loss_scaling import LossScaler


def scaler_of(**options):
    return LossScaler(PrecisionConfig(fp16=True, **options), torch.device("cpu"))


def scales(scaler, steps):
    found = []
    for is_finite in steps:
        scaler.update(is_finite=is_finite)
        found.append(scaler.value)
    return found


def test_overflows_halve_the_scale_once_patience_ends_and_a_good_stretch_doubles_it():
    scaler = scaler_of(initial_loss_scale=64.0, loss_scale_window=3, hysteresis=2)
    assert scales(scaler, [False, False, False]) == [64.0, 32.0, 16.0]
    # The window gives the patience back.
    assert scales(scaler, [True, True, True, False, False]) == [16.0, 16.0, 32.0, 32.0, 16.0]
    assert scales(scaler, [True, True, False, True, True, True])[-1] == 16.0
    assert float(scaler.scale) == scaler.value


def test_the_scale_has_a_least_value_below_which_no_step_is_skipped():
    scaler = scaler_of(initial_loss_scale=4.0, min_loss_scale=2.0, hysteresis=1)
    assert scaler.update(is_finite=False)
    assert scaler.value == 2.0
    assert not scaler.update(is_finite=False)
    assert not scaler_of(loss_scale=8.0).update(is_finite=False)


def test_a_scale_goes_on_from_its_state():
    one, other = (scaler_of(loss_scale_window=4) for _ in range(2))
    steps = [True, False, True, True, False, True, True, True, True, False]
    scales(one, steps[:5])
    other.set_state(one.state())
    assert scales(one, steps[5:]) == scales(other, steps[5:])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fp16": True, "bf16": True}, "exclude each other"),
        ({"hysteresis": 3}, "no effect without --fp16"),
        ({"fp16": True, "loss_scale": 8.0, "hysteresis": 3}, "no effect with --loss-scale 8"),
        ({"fp16": True, "min_loss_scale": 0.0}, "above 0"),
        ({"fp16": True, "loss_scale_window": 0}, "must be 1 or more"),
    ],
)
def test_options_that_contradict_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        PrecisionConfig(**options)
