"""What a GPU multiplies in, by its compute capability. Pure; standard library only."""

from typing import Literal

from mcore_parallel.precision.config import Fp8Config

Capability = tuple[int, int]
"""Major and minor, as ``torch.cuda.get_device_capability`` says; Hopper is (9, 0)."""

_FP8 = {"tensorwise": (8, 9), "delayed": (8, 9), "rowwise": (9, 0)}
_BF16 = (8, 0)


def best_format(capability: Capability | None) -> Literal["bf16", "fp16", "fp32"]:
    """Choose the format of weights and activations for a device; None: a CPU.

    bf16 from Ampere on, fp16 with a moving loss scale on tensor cores before it (Volta,
    Turing), float32 elsewhere. fp8 changes what is computed, so it is never chosen unnamed.
    """
    if capability is None or capability < (7, 0):
        return "fp32"
    return "bf16" if capability >= _BF16 else "fp16"


def bf16_problem(capability: Capability, device_name: str) -> str:
    """Return why a GPU should not train in bf16, with what to use; empty: it may."""
    if capability >= _BF16:
        return ""
    return (
        f"--bf16 needs a GPU with bf16 tensor cores (Ampere or later), and {device_name} has "
        f"none: use --{'fp16' if best_format(capability) == 'fp16' else 'precision auto'}."
    )


def fp8_problem(config: Fp8Config, capability: Capability, device_name: str) -> str:
    """Return why a GPU cannot run the fp8 recipe and which one it can; empty: it runs it."""
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
