"""How fast a model writes one text, for the receipt."""

import time

import torch

from mcore_infer.config import SamplingConfig
from mcore_infer.engine.engine import Engine
from mcore_infer.engine.step_plans import EngineConfig, Fp8Cache
from mcore_models.protocol import LanguageModel

_FIRST = 8
"""Tokens before those that are timed: kernels are tried and steps recorded."""


def tokens_per_second(
    model: LanguageModel, num_tokens: int, fp8_cache: Fp8Cache | None = None
) -> float:
    """Time the writing of one text on an engine."""
    length = 1 + _FIRST + num_tokens
    engine = Engine(
        model,
        EngineConfig(
            max_requests=1,
            max_sequence_tokens=length,
            num_pages=-(-length // 64),
            fp8_cache=fp8_cache,
        ),
    )
    engine.add([0], SamplingConfig(num_tokens=length - 1, top_k=1))
    for _ in range(_FIRST):
        engine.step()
    _wait(engine.device)
    begin, written = time.perf_counter(), 0
    for event in engine.run():
        written += not isinstance(event, tuple)
    _wait(engine.device)
    return written / (time.perf_counter() - begin)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
