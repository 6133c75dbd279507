"""What a step computes, as plain data, and the limits of steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_infer.config import Drafts


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step."""

    max_requests: int = 64
    """Requests that are computed together; each has a slot."""

    max_tokens: int = 2048
    """Tokens of one step, of prompts and of writing together; at least ``max_requests``."""

    max_sequence_tokens: int = 2048
    """Prompt and new tokens of one request."""

    chunked_prefill: bool = True
    """Cut prompts where a step is full; else a prompt is computed whole, in a step of its own
    size where it exceeds ``max_tokens``."""

    prefix_cache: bool = True
    """Share the pages of equal beginnings. Not for models with a recurrent state."""

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise ValueError(f"--inference-max-requests {self.max_requests} must be 1 or more.")
        if self.max_tokens < self.max_requests:
            raise ValueError(
                f"--inference-dynamic-batching-max-tokens {self.max_tokens} must be at least "
                f"--inference-max-requests {self.max_requests}: each request that writes takes "
                "a token of every step."
            )


Scales = tuple[float, float]
"""Of keys and of values."""


@dataclass(frozen=True, slots=True)
class Fp8Cache:
    """Keys and values are kept in e4m3."""

    scales: Mapping[int, Scales] = field(default_factory=dict)
    """What multiplies their codes, by global number of the layer; others have 1."""

    def of(self, layer: int) -> Scales:
        """Return the scales of a layer."""
        return self.scales.get(layer, (1.0, 1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(SchedulerConfig):
    """Limits of an engine and the size of its cache."""

    num_pages: int = 0
    """Pages of the key/value cache; 0: as many as fit, at most what all requests may need.
    Requests that do not fit together wait."""

    cache_bytes: int = 0
    """Memory of this rank in which the pages must fit, where their number is 0; 0: what is free
    once the largest step has run, or 2 GiB on a CPU."""

    page_tokens: int = 64
    """Tokens in a page."""

    num_speculative_tokens: int = 0
    """Tokens that are proposed for each request in a step."""

    speculative_drafts: Drafts = "ngram"
    """What proposes them, see ``InferenceConfig``."""

    fp8_cache: Fp8Cache | None = None
    """Keep keys and values in fp8; None: in the model's dtype."""

    records_graphs: bool = True
    """Record steps as CUDA graphs where the model and the device allow it. While one is
    recorded, no other thread of the process may use the device."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one request that a step computes."""

    request: int
    """Number that the caller gave."""
    slot: int
    """Row of per-request memory, below ``max_requests``; kept while the request runs."""
    begin: int
    """Position of the first token."""
    tokens: tuple[int, ...]
    """To be computed; their keys and values go behind those of earlier tokens. ``(-1,)``: the
    one that a step in flight chooses."""
    pages: tuple[int, ...]
    """Of the whole request up to the last of these tokens; those out of every window are
    ``-1``."""
    wants_token: bool
    """Whether the step chooses the token after the last of these."""
    num_drafts: int = 0
    """The last so many are proposals; the step also chooses the token after each one before."""

    @property
    def is_writing(self) -> bool:
        """Whether the step chooses the token after each of these."""
        return self.wants_token and len(self.tokens) == 1 + self.num_drafts


@dataclass(frozen=True, slots=True)
class Step:
    """What is computed together."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(len(chunk.tokens) for chunk in self.chunks)
