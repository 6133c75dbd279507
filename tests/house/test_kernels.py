"""Optional kernels: a sentence on what a new one lacks; the shape hook leaves them alone."""

import inspect
from collections.abc import Collection
from importlib import import_module

import pytest
import torch
from house.sources import ROOT, all_sources
from kernel_samples import all_kernels

pytest.importorskip("triton")

MODULES = sorted(
    source.name.removesuffix(".py").replace("/", ".")
    for source in all_sources()
    if "@triton.jit" in source.text
)
CHOICE = "packages/mcore-models/src/mcore_models/kernels/choice.py"
CHOSEN_BY = dict.fromkeys(("rotary_split", "norm_rotary_split"), "rotary_kernel")
"""Function by which the choice finds a kernel."""
AT_FIRST_USE = {
    "add_scaled_matmul": "tried by the dtypes of a step's gradients",
    "cast_rows": "experts in fp8 alone",
    "round_to_pages": "serving alone, and kernel and torch write equal bytes",
    "symmetric_product": "agreed on where Muon is chosen, in mcore_train.assembly",
    "widen_levels": "the base of adapters, whose weights no rank shares",
}
"""Kernels that ranks need not agree on before the first step, and why."""


def kernel_faults(
    name: str,
    parameters: Collection[str],
    reference: Collection[str],
    num_samples: int,
    is_chosen: bool,
) -> list[str]:
    """Say what an optional kernel lacks.

    Args:
        name: of the decorated function.
        parameters: names of its parameters, in order.
        reference: names of the reference's.
        num_samples: calls that its samples give without a kind.
        is_chosen: whether ``kernels/choice.py`` lists it.
    """
    found = []
    if list(parameters) != list(reference):
        found.append(
            f"{name} takes {', '.join(parameters)} and its reference "
            f"{', '.join(reference)}: give both one signature."
        )
    if not num_samples:
        found.append(
            f"{name} has no samples, so nothing is compared: yield a Sample for a device alone."
        )
    if not is_chosen:
        found.append(
            f"ranks do not agree on {name} before they train: add it to {CHOICE}, or say in "
            "AT_FIRST_USE of tests/house/test_kernels.py why they need not."
        )
    return found


def test_a_kernel_has_a_reference_of_its_signature_samples_and_a_place_in_the_choice():
    choice, found = (ROOT / CHOICE).read_text(), []
    for place, kernel in all_kernels().items():
        name = place.partition(":")[2]
        if kernel.packages != ("triton",):
            continue
        samples = list(kernel.samples(torch.device("cpu")))
        for sample in samples:
            kernel.reference(*sample.args, **sample.kwargs)
        takes = list(inspect.signature(kernel.launch).parameters)
        expected = list(inspect.signature(kernel.reference).parameters)
        is_chosen = CHOSEN_BY.get(name, name) in choice or name in AT_FIRST_USE
        found += kernel_faults(place, takes, expected, len(samples), is_chosen)
    assert not found, "\n".join(found)


def test_what_a_kernel_lacks_is_said_in_one_sentence():
    found = kernel_faults("doubled", ["x", "factor"], ["x"], 0, is_chosen=False)
    assert [line.partition(":")[0].partition(",")[0] for line in found] == [
        "doubled takes x",
        "doubled has no samples",
        "ranks do not agree on doubled before they train",
    ]


@pytest.mark.parametrize("name", MODULES)
def test_the_shape_hook_leaves_jit_functions_as_they_are_written(name):
    from triton.runtime import JITFunction

    module = import_module(name)
    found = {k: v for k, v in vars(module).items() if isinstance(v, JITFunction)}
    kernels = {k: v for k, v in found.items() if v.fn.__module__ == name}  # not imported ones
    assert kernels
    # A wrapped function has the wrapper's globals, in which there is no `tl`.
    homes = {k: vars(import_module(v.fn.__module__)) for k, v in kernels.items()}
    strange = [k for k, v in kernels.items() if v.fn.__globals__ is not homes[k]]
    assert not strange, f"put @no_type_check under @triton.jit of {strange} in {name}"
