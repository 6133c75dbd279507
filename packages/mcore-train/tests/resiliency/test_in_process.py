"""What a failed attempt leaves behind in its process."""

import weakref

import torch

from mcore_train.resiliency.in_process import clear_frames


def fail_while_handling_another_error(freed):
    def read_past_the_end():
        logits = torch.zeros(4)
        freed.append(weakref.ref(logits))
        raise KeyError

    weights = torch.zeros(4)
    freed.append(weakref.ref(weights))
    try:
        read_past_the_end()
    except KeyError:
        raise RuntimeError("a fault") from None


def test_an_error_that_is_kept_holds_no_tensors_of_the_attempt():
    kept, freed = None, []
    try:
        fail_while_handling_another_error(freed)
    except RuntimeError as error:
        kept = error
    assert all(ref() is not None for ref in freed)
    clear_frames(kept)
    assert [ref() for ref in freed] == [None, None]
