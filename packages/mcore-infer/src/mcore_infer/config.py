"""Options of sampling as plain frozen data; imports the standard library only."""

from dataclasses import dataclass
from typing import Literal

from mcore_base.field_checks import check_field

Drafts = Literal["ngram", "model", "mtp"]
"""What proposes tokens."""

MAX_SEED = 2**62
"""Seeds are at most so large: others are drawn below it."""

CacheDtype = Literal["auto", "model", "fp8"]
"""Format of keys and values, see ``InferenceConfig``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How each next token is chosen, and when to stop."""

    num_tokens: int = 128
    """Tokens to write after the prompt, at most."""

    temperature: float = 1.0
    """Scores are divided by it before anything is cut off; below 1 the likely gets likelier."""

    top_k: int = 0
    """Choose among so many most likely tokens, and those as likely as the last; 0: all, 1:
    always the most likely one, whatever the temperature."""

    top_p: float = 0.0
    """Leave out tokens when those before them, likeliest first, hold more than this
    probability; 0: none. With ``top_k``, of what that leaves."""

    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest one's probability; 0:
    none."""

    top_p_decay: float = 0.0
    """Multiply ``top_p`` by it after every token; 0: it stays."""

    top_p_bound: float = 0.0
    """``top_p`` decays to this at the lowest."""

    repetition_penalty: float = 1.0
    """Scores of tokens that the prompt or the text has are divided by it where above 0, else
    multiplied; 1: none."""

    presence_penalty: float = 0.0
    """Taken from the scores of tokens that were written."""

    frequency_penalty: float = 0.0
    """Taken from the scores of tokens for each time that they were written."""

    stop_words: tuple[str, ...] = ()
    """Stop when the text's tokens end with those of one of these, which are cut off."""

    ignore_eod: bool = False
    """Write on after an end of document."""

    beam_width: int = 0
    """Search for the likeliest text with so many beams, instead of drawing one; 0: draw."""

    length_penalty: float = 1.0
    """A beam's score is its log probability over its length to this power."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"--num-tokens {self.num_tokens} must be 1 or more.")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"--temperature {self.temperature} must be above 0. Use --top-k 1 to always "
                "take the most likely token."
            )
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k} must be 0 (off) or more.")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p} must be from 0 (off) to 1.")
        self._check_extras()

    def _check_extras(self) -> None:
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"--min-p {self.min_p} must be from 0 (off) to 1.")
        if self.top_p_decay and not (self.top_p and 0 < self.top_p_decay <= 1):
            raise ValueError(
                f"--top-p-decay {self.top_p_decay} must be from 0 (off) to 1, with a --top-p."
            )
        if self.top_p_bound and not 0 < self.top_p_bound <= self.top_p:
            raise ValueError(
                f"--top-p-bound {self.top_p_bound} must be above 0 and at most --top-p "
                f"{self.top_p}."
            )
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"--repetition-penalty {self.repetition_penalty} must be above 0; 1 is none."
            )
        if "" in self.stop_words:
            raise ValueError("--stop-words holds an empty one: leave it out.")
        for name in ("presence_penalty", "frequency_penalty"):
            check_field(self, name, -100 <= getattr(self, name) <= 100, "from -100 to 100")

        self._check_beams()

    def _check_beams(self) -> None:
        if not 0 <= self.beam_width <= 128:
            raise ValueError(f"--beam-width {self.beam_width} must be from 0 (off) to 128.")
        if not -10 <= self.length_penalty <= 10:
            raise ValueError(f"--length-penalty {self.length_penalty} must be from -10 to 10.")
        if not self.beam_width:
            if self.length_penalty != 1:
                raise ValueError("--length-penalty scores beams: give a --beam-width.")
            return
        is_drawn = self.temperature != 1 or self.min_p or self.top_p or self.top_k > 1
        if is_drawn or self.has_penalties or self.stop_words:
            raise ValueError(
                f"--beam-width {self.beam_width} searches for the likeliest text: leave "
                "temperature, top-k, top-p, min-p, penalties and stop words out."
            )

    @property
    def has_penalties(self) -> bool:
        """Whether scores depend on what was written."""
        return self.repetition_penalty != 1 or bool(
            self.presence_penalty or self.frequency_penalty
        )

    @property
    def cut(self) -> "SamplingConfig":
        """Temperature and cut-off alone, for rows that can be sampled together."""
        return SamplingConfig(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceConfig:
    """Limits of the engine and the size of its cache; names are Megatron's."""

    inference_max_requests: int = 64
    """Requests that are computed together; others wait."""

    inference_max_seq_length: int = 0
    """Tokens of one prompt and its text together; 0: the model's positions, at most 8192."""

    inference_dynamic_batching_buffer_size_gb: float = 0.0
    """GiB of keys and values of this rank; 0: as much as all requests may need, within 90 % of
    the memory that the model leaves free on a GPU, less room for two of the largest steps, or
    within 2 GiB on a CPU. Requests that do not fit together wait."""

    inference_dynamic_batching_block_size: int = 64
    """Tokens in a page of the cache."""

    kv_cache_dtype: CacheDtype = "auto"
    """Format of keys and values in the cache. auto: fp8 where the checkpoint holds scales for
    it, else the model's; model: the model's; fp8: e4m3, with scales of 1 where the checkpoint
    holds none."""

    inference_dynamic_batching_max_tokens: int = 2048
    """Tokens of one step, of prompts and of writing together."""

    enable_chunked_prefill: bool = True
    """Cut prompts where a step is full; else each is computed whole."""

    enable_prefix_caching: bool = True
    """Compute equal beginnings of prompts once. Off where layers are recurrent, and with
    proposals of mtp."""

    num_speculative_tokens: int = 0
    """Tokens that are proposed for each text and step, and checked by one forward; 0: none.
    Texts stay the same, token for token. A step holds those of all requests."""

    speculative_drafts: Drafts = "ngram"
    """What proposes them: what followed the same tokens earlier in the text (ngram), a smaller
    model (model), or the model's own layer that predicts further tokens (mtp)."""

    draft_load: str = ""
    """Folder of the smaller model, of the same tokenizer."""

    def __post_init__(self) -> None:
        lowest = {
            "inference_max_requests": 1,
            "inference_max_seq_length": 0,
            "inference_dynamic_batching_buffer_size_gb": 0,
            "inference_dynamic_batching_block_size": 1,
            "inference_dynamic_batching_max_tokens": self.inference_max_requests,
            "num_speculative_tokens": 0,
        }
        for name, least in lowest.items():
            holds = least <= getattr(self, name) < float("inf")
            check_field(self, name, holds, f"{least} or more")
        rows = self.inference_max_requests * (1 + self.num_speculative_tokens)
        if rows > self.inference_dynamic_batching_max_tokens:
            raise ValueError(
                f"--num-speculative-tokens {self.num_speculative_tokens} for each of "
                f"--inference-max-requests {self.inference_max_requests} exceed "
                f"--inference-dynamic-batching-max-tokens "
                f"{self.inference_dynamic_batching_max_tokens} of a step: propose fewer."
            )
        has_draft = bool(self.num_speculative_tokens) and self.speculative_drafts == "model"
        if has_draft != bool(self.draft_load):
            raise ValueError(
                f"--draft-load {self.draft_load!r} goes with --speculative-drafts model and "
                "--num-speculative-tokens 1 or more, and they with it."
            )
        if self.speculative_drafts != "ngram" and not self.num_speculative_tokens:
            raise ValueError(
                f"--speculative-drafts {self.speculative_drafts} proposes nothing: give "
                "--num-speculative-tokens 1 or more."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Where a server listens, who may use it, and how long it waits."""

    host: str = "127.0.0.1"
    """Address to listen on. The default serves this machine alone; 0.0.0.0 serves everybody who
    reaches it, so give an --api-key too."""

    port: int = 5000
    """Port to listen on; 0: any free one."""

    api_key: str = ""
    """Bearer token that clients must send; @FILE reads it from a file; empty: none."""

    served_model_name: str = ""
    """Name of the model in replies; empty: the name of its folder."""

    chat_template: str = ""
    """File with a Jinja template; empty: the tokenizer's own, or ChatML."""

    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages whose scripts may call the server from a browser (CORS), such as
    https://chat.example; *: all."""

    max_queued_requests: int = 1024
    """Texts that run or wait; more are refused with status 503."""

    max_body_mib: float = 4.0
    """MiB of a request at most."""

    answer_timeout_s: float = 600.0
    """Seconds for a whole answer, after which it is cut off."""

    client_timeout_s: float = 30.0
    """Seconds for a client to send its request and to read each event."""

    drain_timeout_s: float = 30.0
    """Seconds after SIGTERM in which answers that have begun may end."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port {self.port} must be from 0 to 65535.")
        for name in (
            *("max_queued_requests", "max_body_mib", "answer_timeout_s"),
            *("client_timeout_s", "drain_timeout_s"),
        ):
            check_field(self, name, 0 < getattr(self, name) < float("inf"), "above 0")


def check_seed(seed: int) -> None:
    """Refuse a seed that texts cannot draw from."""
    if not -MAX_SEED <= seed <= MAX_SEED:
        raise ValueError(f"--seed {seed} must be from -2^62 to 2^62.")
