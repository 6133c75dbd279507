"""Which number formats a GPU supports, by its compute capability; no torch."""

from typing import Literal

from mcore_parallel.precision.config import Fp8Config

Capability = tuple[int, int]
"""Major and minor of ``torch.cuda.get_device_capability``; Hopper is (9, 0)."""

_FP8 = {"tensorwise": (8, 9), "delayed": (8, 9), "rowwise": (9, 0)}
_BF16 = (8, 0)


def best_format(capability: Capability | None) -> Literal["bf16", "fp16", "fp32"]:
    """Choose the format of weights and activations for a device; None: a CPU.

    bf16 from Ampere on, fp16 with a dynamic loss scale on older tensor cores (Volta, Turing),
    float32 elsewhere. Never fp8, which changes the results: the user must ask for it.
    """
    if capability is None or capability < (7, 0):
        return "fp32"
    return "bf16" if capability >= _BF16 else "fp16"


def bf16_problem(capability: Capability, device_name: str) -> str:
    """Return why a GPU should not train in bf16 and what to use instead; empty: it can."""
    if capability >= _BF16:
        return ""
    return (
        f"--bf16 needs a GPU with bf16 tensor cores (Ampere or later), and {device_name} has "
        f"none: use --{'fp16' if best_format(capability) == 'fp16' else 'precision auto'}."
    )


def fp8_problem(config: Fp8Config, capability: Capability, device_name: str) -> str:
    """Return why a GPU cannot run the fp8 recipe and what to use instead; empty: it can."""
    if config.fp8_recipe == "blockwise" and capability[0] != 9:
        return (
            f"--fp8-recipe blockwise runs on Hopper only, and this is {device_name}: use "
            "tensorwise."
        )
    if capability < _FP8.get(config.fp8_recipe, (9, 0)):
        return (
            f"--fp8-format {config.fp8_format} with --fp8-recipe {config.fp8_recipe} needs a "
            "GPU with fp8 tensor cores (Ada or later; Hopper or later for rowwise), and "
            f"{device_name} has none: leave it out."
        )
    return ""
