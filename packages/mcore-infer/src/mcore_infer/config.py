"""Options of sampling as plain frozen data; imports the standard library only."""

from dataclasses import dataclass
from typing import Literal

from mcore_base.options import ON, Options, Rule, option

Drafts = Literal["ngram", "model", "mtp"]
"""What proposes tokens."""

MAX_SEED = 2**62
"""Seeds are at most so large: others are drawn below it."""

CacheDtype = Literal["auto", "model", "fp8"]
"""Format of keys and values, see ``InferenceConfig``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig(Options):
    """How each next token is chosen, and when to stop."""

    num_tokens: int = option(128, minimum=1)
    """Tokens to write after the prompt, at most."""

    temperature: float = option(
        1.0, above=0, hint="Use --top-k 1 to always take the most likely token."
    )
    """Scores are divided by it before anything is cut off; below 1 the likely gets likelier."""

    top_k: int = option(0, minimum=0, zero="off")
    """Choose among so many most likely tokens, and those as likely as the last; 0: all, 1:
    always the most likely one, whatever the temperature."""

    top_p: float = option(0.0, minimum=0, maximum=1, zero="off")
    """Leave out tokens when those before them, likeliest first, hold more than this
    probability; 0: none. With ``top_k``, of what that leaves."""

    min_p: float = option(0.0, minimum=0, maximum=1, zero="off")
    """Leave out tokens less likely than this share of the likeliest one's probability; 0:
    none."""

    top_p_decay: float = option(0.0, minimum=0, maximum=1, zero="off", needs={"top_p": ON})
    """Multiply ``top_p`` by it after every token; 0: it stays."""

    top_p_bound: float = option(0.0, minimum=0)
    """``top_p`` decays to this at the lowest."""

    repetition_penalty: float = option(1.0, above=0, hint="1 is none.")
    """Scores of tokens that the prompt or the text has are divided by it where above 0, else
    multiplied; 1: none."""

    presence_penalty: float = option(0.0, minimum=-100, maximum=100)
    """Taken from the scores of tokens that were written."""

    frequency_penalty: float = option(0.0, minimum=-100, maximum=100)
    """Taken from the scores of tokens for each time that they were written."""

    stop_words: tuple[str, ...] = ()
    """Stop when the text's tokens end with those of one of these, which are cut off."""

    ignore_eod: bool = False
    """Write on after an end of document."""

    beam_width: int = option(0, minimum=0, maximum=128, zero="off")
    """Search for the likeliest text with so many beams, instead of drawing one; 0: draw."""

    length_penalty: float = option(1.0, minimum=-10, maximum=10, needs={"beam_width": ON})
    """A beam's score is its log probability over its length to this power."""

    rules = (
        Rule(
            ("top_p_bound", "top_p"),
            lambda v: v.top_p_bound > v.top_p,
            "--top-p-bound {top_p_bound} must be above 0 and at most --top-p {top_p}.",
        ),
        Rule(
            ("stop_words",),
            lambda v: "" in v.stop_words,
            "--stop-words holds an empty one: leave it out.",
        ),
        Rule(
            ("beam_width", "temperature", "top_k", "top_p", "min_p", "stop_words"),
            lambda v: (
                v.beam_width
                and (
                    (v.temperature != 1 or v.min_p or v.top_p or v.top_k > 1)
                    or (v.has_penalties or v.stop_words)
                )
            ),
            "--beam-width {beam_width} searches for the likeliest text: leave temperature, "
            "top-k, top-p, min-p, penalties and stop words out.",
        ),
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
class InferenceConfig(Options):
    """Limits of the engine and the size of its cache; names are Megatron's."""

    inference_max_requests: int = option(64, minimum=1)
    """Requests that are computed together; others wait."""

    inference_max_seq_length: int = option(0, minimum=0)
    """Tokens of one prompt and its text together; 0: the model's positions, at most 8192."""

    inference_dynamic_batching_buffer_size_gb: float = option(0.0, minimum=0)
    """GiB of keys and values of this rank; 0: as much as all requests may need, within 90 % of
    the memory that the model leaves free on a GPU, less room for two of the largest steps, or
    within 2 GiB on a CPU. Requests that do not fit together wait."""

    inference_dynamic_batching_block_size: int = option(64, minimum=1)
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

    num_speculative_tokens: int = option(0, minimum=0)
    """Tokens that are proposed for each text and step, and checked by one forward; 0: none.
    Texts stay the same, token for token. A step holds those of all requests."""

    speculative_drafts: Drafts = option("ngram", needs={"num_speculative_tokens": ON})
    """What proposes them: what followed the same tokens earlier in the text (ngram), a smaller
    model (model), or the model's own layer that predicts further tokens (mtp)."""

    draft_load: str = ""
    """Folder of the smaller model, of the same tokenizer."""

    rules = (
        Rule(
            ("inference_dynamic_batching_max_tokens", "inference_max_requests"),
            lambda v: v.inference_dynamic_batching_max_tokens < v.inference_max_requests,
            "--inference-dynamic-batching-max-tokens {inference_dynamic_batching_max_tokens} "
            "must be at least --inference-max-requests {inference_max_requests}.",
        ),
        Rule(
            ("num_speculative_tokens", "inference_max_requests"),
            lambda v: (
                v.num_speculative_tokens
                and v.inference_max_requests * (1 + v.num_speculative_tokens)
                > v.inference_dynamic_batching_max_tokens
            ),
            "--num-speculative-tokens {num_speculative_tokens} for each of "
            "--inference-max-requests {inference_max_requests} exceed "
            "--inference-dynamic-batching-max-tokens {inference_dynamic_batching_max_tokens} "
            "of a step: propose fewer.",
        ),
        Rule(
            ("draft_load", "speculative_drafts", "num_speculative_tokens"),
            lambda v: (
                (bool(v.num_speculative_tokens) and v.speculative_drafts == "model")
                != bool(v.draft_load)
            ),
            "--draft-load {draft_load!r} goes with --speculative-drafts model and "
            "--num-speculative-tokens 1 or more, and they with it.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig(Options):
    """Where a server listens, who may use it, and how long it waits."""

    host: str = "127.0.0.1"
    """Address to listen on. The default serves this machine alone; 0.0.0.0 serves everybody who
    reaches it, so give an --api-key too."""

    port: int = option(5000, minimum=0, below=65536)
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

    max_queued_requests: int = option(1024, above=0)
    """Texts that run or wait; more are refused with status 503."""

    max_body_mib: float = option(4.0, above=0)
    """MiB of a request at most."""

    answer_timeout_s: float = option(600.0, above=0)
    """Seconds for a whole answer, after which it is cut off."""

    client_timeout_s: float = option(30.0, above=0)
    """Seconds for a client to send its request and to read each event."""

    drain_timeout_s: float = option(30.0, above=0)
    """Seconds after SIGTERM in which answers that have begun may end."""


def check_seed(seed: int) -> None:
    """Refuse a seed that texts cannot draw from."""
    if not -MAX_SEED <= seed <= MAX_SEED:
        raise ValueError(f"--seed {seed} must be from -2^62 to 2^62.")
