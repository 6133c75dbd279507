"""The command ``mcore-infer generate``: text from prompts."""

from typing import TYPE_CHECKING, Annotated, Any

from mcore_base.command_line import file_text
from mcore_base.options import Rule, rules
from mcore_infer.commands.opening import ModelOptions, opened
from mcore_infer.config import InferenceConfig, SamplingConfig, check_seed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mcore_data.tokenizers.protocol import Tokenizer
    from mcore_infer.loading import LoadedModel
    from mcore_infer.writing.grammars import Structure
    from mcore_infer.writing.sequence import NewToken


_ONE_BEAM = Rule(
    ("num_samples", "beam_width"),
    lambda v: v.num_samples > 1 and v.beam_width,
    "--num-samples {num_samples}: --beam-width returns one text. Leave one of them out.",
)
_ONE_STRUCTURE = Rule(
    ("json_schema", "regex"),
    lambda v: v.json_schema and v.regex,
    "--json-schema and --regex exclude each other: leave one out.",
)


def generate(
    model: ModelOptions,
    sampling: SamplingConfig,
    engine: InferenceConfig,
    prompt: tuple[str, ...] = ("",),
    num_samples: Annotated[int, rules(minimum=1), _ONE_BEAM] = 1,
    seed: int = 1234,
    json_schema: str = "",
    regex: Annotated[str, _ONE_STRUCTURE] = "",
) -> int:
    """Continue a prompt; the text streams to standard output. A T5 writes an answer.

    Replicas, ranks beyond those of one model, share the prompts.

    Args:
        model: model, device and ranks.
        sampling: how tokens are chosen.
        engine: limits of the engine.
        prompt: Start of the text; several prompts run together. An empty prompt begins a
            document.
        num_samples: Texts for each prompt, each with its own seed.
        seed: Seed of the random numbers; text i uses seed + i.
        json_schema: Texts are JSON of this schema; @FILE reads it from a file, {} allows any.
        regex: Texts match this expression from start to end.
    """
    structure = _structure(json_schema, regex)
    check_seed(seed)
    with opened(model, draft=engine.draft_load, takes_t5=True) as (loaded, tokenizer, is_first):
        from mcore_ckpt.save_load.rank_agreement import gather_json
        from mcore_infer.generation import prompt_ids
        from mcore_infer.writing.token_text import TextStream

        beginnings = [text for text in prompt for _ in range(num_samples)]
        texts = [TextStream(tokenizer) for _ in beginnings]
        prompts = [prompt_ids(tokenizer, text) for text in beginnings]
        tokens = _written(loaded, tokenizer, prompts, sampling, engine, seed, structure)
        if loaded.description.family == "t5":
            beginnings = [""] * len(beginnings)  # the answer does not repeat the prompt
        pieces: list[list[str]] = [[] for _ in beginnings]
        is_one = len(beginnings) == 1
        is_streamed = is_first and is_one
        for number, token in enumerate(tokens):
            if is_streamed and not number:
                # The first token proves that all checks passed: print the prompt only now.
                print(beginnings[0], end="", flush=True)
            piece = texts[token.row].add(token.id)
            pieces[token.row].append(piece)
            if is_streamed:
                print(piece, end="", flush=True)
        if is_streamed:
            print(texts[0].rest() if any(pieces) else beginnings[0])
        if is_one:
            return 0
        complete = ["".join(p) + text.rest() for text, p in zip(texts, pieces, strict=True)]
        by_replica = gather_json(complete, loaded.data)
        for i, beginning in enumerate(beginnings if is_first else ()):
            print(f"{beginning}{by_replica[i % len(by_replica)][i]}\n")
    return 0


def _written(
    loaded: "LoadedModel",
    tokenizer: "Tokenizer",
    prompts: "Sequence[Sequence[int]]",
    sampling: SamplingConfig,
    engine: InferenceConfig,
    seed: int,
    structure: "Structure | None",
) -> "Iterator[NewToken]":
    from mcore_infer.generation import stop_ids, stream_texts
    from mcore_infer.t5_decoding import answer_texts
    from mcore_infer.writing.structured import Grammars

    ends: dict[str, Any] = {
        "eod": None if sampling.ignore_eod else tokenizer.eod,
        "stop": stop_ids(tokenizer, sampling, loaded.ends),
    }
    if loaded.description.family == "t5":
        if structure or sampling.beam_width or engine.draft_load:
            raise ValueError(
                "a T5 does not support --json-schema, --regex, --beam-width and --draft-load: "
                "leave them out."
            )
        if loaded.data.size > 1:
            raise ValueError(
                f"a T5 does not run on {loaded.data.size} replicas: start only the ranks of "
                "one model."
            )
        start = loaded.start
        return answer_texts(loaded.model, prompts, sampling, start=start, seed=seed, **ends)
    return stream_texts(
        loaded.model,
        prompts,
        sampling,
        engine,
        seed=seed,
        draft=loaded.draft,
        structure=structure,
        grammars=Grammars(tokenizer, loaded.model.vocab_size, loaded.ends),
        kv_scales=loaded.kv_scales,
        replicas=loaded.data,
        in_step=loaded.in_step,
        **ends,
    )


def _structure(json_schema: str, regex: str) -> "Structure | None":
    if not json_schema and not regex:
        return None
    from mcore_infer.writing.grammars import Structure

    if regex:
        return Structure("regex", regex)
    if json_schema.startswith("@"):
        json_schema = file_text("--json-schema", json_schema[1:])
    return Structure("json_schema", json_schema)
