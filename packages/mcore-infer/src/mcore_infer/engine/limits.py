"""Limits of an engine, and size and format of its cache; imports the standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_infer.config import Drafts


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of the requests and tokens of one step."""

    max_requests: int = 64
    """Most requests in one step; each has a slot."""

    max_tokens: int = 2048
    """Most tokens in one step, prompts and new tokens together; at least ``max_requests``."""

    max_sequence_tokens: int = 2048
    """Most tokens of one request, prompt and new tokens together."""

    chunked_prefill: bool = True
    """Cut prompts that do not fit into a step; otherwise a prompt must fit into one step."""

    prefix_cache: bool = True
    """Share the pages of equal prefixes. Not for models with a recurrent state."""

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise ValueError(f"--inference-max-requests {self.max_requests} must be 1 or more.")
        if self.max_tokens < self.max_requests:
            raise ValueError(
                f"--inference-dynamic-batching-max-tokens {self.max_tokens} must be at least "
                f"--inference-max-requests {self.max_requests}: every running request writes "
                "one token a step. Raise the former or lower the latter."
            )


Scales = tuple[float, float]
"""Factors on the codes of keys and of values."""


@dataclass(frozen=True, slots=True)
class Fp8Cache:
    """Format of a cache with keys and values in e4m3: the scales of its layers."""

    scales: Mapping[int, Scales] = field(default_factory=dict)
    """Scales by global number of the layer; other layers have scales of 1."""

    def of(self, layer: int) -> Scales:
        """Return the scales of a layer."""
        return self.scales.get(layer, (1.0, 1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(SchedulerConfig):
    """Limits of an engine and the size of its cache."""

    num_pages: int = 0
    """Pages of the key/value cache; 0: as many as fit, at most the number that all requests
    may need. Requests that do not fit together wait."""

    cache_bytes: int = 0
    """Bytes for the pages of this rank, used if ``num_pages`` is 0; 0: the memory that is free
    after the largest step, or 2 GiB on a CPU."""

    page_tokens: int = 64
    """Tokens in a page."""

    num_speculative_tokens: int = 0
    """Proposed tokens for each request and step."""

    speculative_drafts: Drafts = "ngram"
    """Source of proposals, see ``InferenceConfig``."""

    fp8_cache: Fp8Cache | None = None
    """Cache keys and values in fp8; None: in the model's dtype."""

    records_graphs: bool = True
    """Record steps as CUDA graphs where the model and the device allow it. While one is
    recorded, no other thread of the process may use the device."""
