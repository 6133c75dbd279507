"""Options of sampling, engine and server as frozen dataclasses; does not import torch."""

from dataclasses import dataclass
from typing import Literal

from mcore_base.options import ON, Options, Rule, option

Drafts = Literal["ngram", "model", "mtp"]
"""Source of proposed tokens."""

MAX_SEED = 2**62
"""Largest seed; a request without a seed draws one below it."""

CacheDtype = Literal["auto", "model", "fp8"]
"""Format of keys and values, see ``InferenceConfig``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig(Options):
    """How each next token is chosen, and when to stop."""

    num_tokens: int = option(128, minimum=1)
    """Most tokens to write after the prompt."""

    temperature: float = option(
        1.0, above=0, hint="Use --top-k 1 to always take the most likely token."
    )
    """Divides the logits before tokens are cut off; below 1 likely tokens get likelier."""

    top_k: int = option(0, minimum=0, zero="off")
    """Choose among this many likeliest tokens, and those that tie with the last; 0: all; 1:
    always the likeliest, at any temperature."""

    top_p: float = option(0.0, minimum=0, maximum=1, zero="off")
    """Leave out a token if the likelier ones have more than this probability together; 0: leave
    out none. Applies to the tokens that ``top_k`` leaves."""

    min_p: float = option(0.0, minimum=0, maximum=1, zero="off")
    """Leave out tokens whose probability is below this share of the largest; 0: leave out
    none."""

    top_p_decay: float = option(0.0, minimum=0, maximum=1, zero="off", needs={"top_p": ON})
    """Factor on ``top_p`` after every token; 0: ``top_p`` is constant."""

    top_p_bound: float = option(0.0, minimum=0)
    """Smallest value that ``top_p`` decays to."""

    repetition_penalty: float = option(1.0, above=0, hint="1 is none.")
    """Divides positive logits, and multiplies negative ones, of tokens that the prompt or the
    text has; 1: no penalty."""

    presence_penalty: float = option(0.0, minimum=-100, maximum=100)
    """Subtracted from the logits of tokens in the text."""

    frequency_penalty: float = option(0.0, minimum=-100, maximum=100)
    """Subtracted from a token's logit for each time that the text has it."""

    stop_words: tuple[str, ...] = ()
    """Stop when the text's tokens end with the tokens of one of these words, which are cut
    off."""

    ignore_eod: bool = False
    """Continue after an end of document."""

    beam_width: int = option(0, minimum=0, maximum=128, zero="off")
    """Beams of a search for the likeliest text; 0: draw a text instead."""

    length_penalty: float = option(1.0, minimum=-10, maximum=10, needs={"beam_width": ON})
    """Power of the length that divides a beam's log probability."""

    rules = (
        Rule(
            ("top_p_bound", "top_p"),
            lambda v: v.top_p_bound > v.top_p,
            "--top-p-bound {top_p_bound} must be above 0 and at most --top-p {top_p}.",
        ),
        Rule(
            ("stop_words",),
            lambda v: "" in v.stop_words,
            "--stop-words has an empty word: leave it out.",
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
        """Whether logits depend on the tokens of prompt and text."""
        return self.repetition_penalty != 1 or bool(
            self.presence_penalty or self.frequency_penalty
        )

    @property
    def cut(self) -> "SamplingConfig":
        """Temperature and cut-off only: rows with equal values are sampled together."""
        return SamplingConfig(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceConfig(Options):
    """Limits of the engine and the size of its cache; names are Megatron's."""

    inference_max_requests: int = option(64, minimum=1)
    """Most requests that run together; others wait."""

    inference_max_seq_length: int = option(0, minimum=0)
    """Most tokens of one prompt and its text together; 0: the model's positions, at most
    8192."""

    inference_dynamic_batching_buffer_size_gb: float = option(0.0, minimum=0)
    """GiB of keys and values of this rank; 0: as much as all requests may need, but at most 90
    % of the memory that the model and two of the largest steps leave free on a GPU, or 2 GiB on
    a CPU. Requests that do not fit together wait."""

    inference_dynamic_batching_block_size: int = option(64, minimum=1)
    """Tokens in a page of the cache."""

    kv_cache_dtype: CacheDtype = "auto"
    """Format of keys and values in the cache. auto: fp8 if the checkpoint has scales for it,
    else the model's; model: the model's; fp8: e4m3, with scales of 1 if the checkpoint has
    none."""

    inference_dynamic_batching_max_tokens: int = 2048
    """Most tokens of one step, of prompts and of new tokens together."""

    enable_chunked_prefill: bool = True
    """Cut prompts that do not fit into a step; without it a prompt must fit into one step."""

    enable_prefix_caching: bool = True
    """Compute equal prefixes of prompts once. Has no effect with recurrent layers, and with
    --speculative-drafts mtp."""

    num_speculative_tokens: int = option(0, minimum=0)
    """Tokens to propose for each text and step, verified by one forward; 0: none. Texts stay
    the same, token for token. The proposals of all requests must fit into a step."""

    speculative_drafts: Drafts = option("ngram", needs={"num_speculative_tokens": ON})
    """Source of the proposals: the tokens after an earlier occurrence of the last tokens
    (ngram), a smaller model (model), or the model's multi-token prediction layer (mtp)."""

    draft_load: str = ""
    """Folder of the smaller model, which has the same tokenizer."""

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
            "--draft-load {draft_load!r} and --speculative-drafts model with "
            "--num-speculative-tokens 1 or more need each other: give all three, or neither "
            "--draft-load nor model.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig(Options):
    """Address, access control and timeouts of a server."""

    host: str = "127.0.0.1"
    """Address to listen on. The default serves this machine only; 0.0.0.0 serves every host
    that reaches it, so give an --api-key too."""

    port: int = option(5000, minimum=0, below=65536)
    """Port to listen on; 0: any free port."""

    api_key: str = ""
    """Bearer token that clients must send; @FILE reads it from a file; empty: no token is
    needed."""

    served_model_name: str = ""
    """Name of the model in replies; empty: the name of its folder."""

    lora_modules: tuple[str, ...] = ()
    """Adapters of the model, each as NAME=FOLDER, which requests choose by their model's name:
    folders of Hugging Face PEFT, or runs of --peft lora."""

    chat_template: str = ""
    """File with a Jinja template; empty: the tokenizer's template, or ChatML."""

    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages whose scripts may call the server from a browser (CORS), such as
    https://chat.example; *: all."""

    max_queued_requests: int = option(1024, above=0)
    """Most texts that run or wait; more are refused with status 503."""

    max_body_mib: float = option(4.0, above=0)
    """Largest body of a request in MiB."""

    answer_timeout_s: float = option(600.0, above=0)
    """Most seconds from a request to the end of its answer."""

    client_timeout_s: float = option(30.0, above=0)
    """Most seconds for a client to send its request, and to read each event."""

    drain_timeout_s: float = option(30.0, above=0)
    """Most seconds after SIGTERM for the answers that have begun."""

    rules = (
        Rule(
            ("lora_modules",),
            lambda v: not all(all(module.partition("=")) for module in v.lora_modules),
            "--lora-modules takes NAME=FOLDER, such as sql=adapters/sql.",
        ),
        Rule(
            ("lora_modules",),
            lambda v: len(v.adapter_folders) < sum("=" in module for module in v.lora_modules),
            "--lora-modules gives two adapters the same name: give each a different name.",
        ),
    )

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of the adapters, by name."""
        return dict(module.split("=", 1) for module in self.lora_modules if "=" in module)


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed outside the range of the random number generators."""
    if not -MAX_SEED <= seed <= MAX_SEED:
        raise ValueError(f"--seed {seed} must be from -2^62 to 2^62.")
