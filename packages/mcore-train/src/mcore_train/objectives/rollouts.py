"""Generates texts with the model in training, scores them, and builds batches of them.

All ranks generate: each has an engine in a serving layout, to which ``EngineSync`` pushes the
weights, and continues its share of the prompts. All ranks gather all texts and rewards, and
each data rank takes its rows. Another engine can be used by a function of type ``WriteTexts``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_data.datasets.chat_records import encode_records
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_models.protocol import MicroBatch, TrainableModel
from mcore_parallel.pipeline_parallel.runner import Payload
from mcore_train.assembly import Run
from mcore_train.checkpoints.adapter_bases import model_shards
from mcore_train.losses import place
from mcore_train.objectives.objective import answer_log_probs, load_named

ADVANTAGES, REWARDS, TOKEN_SHARES = "advantages", "rewards", "token_shares"
"""Entries ``[B, S]``, 0 outside of the written tokens: the text's advantage, its reward, and 1
/ (number of its tokens)."""
OLD_LOG_PROBS = "old_log_probs"
"""Entry ``[B, S]``: log-probabilities by the weights that wrote the texts; only if texts are
used for several steps."""
_STD_FLOOR = 1e-4
"""Added to a group's standard deviation, as trl does: a group of equal rewards has none."""


WriteTexts = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""Called by all ranks together with token ids of prompts and a seed, equal on all ranks; text i
draws from ``seed + i``. Returns the written tokens of each prompt, equal on all ranks."""


class EngineTexts:
    """Generates texts with an engine of mcore-infer on all ranks of the run.

    The engine and its weights stay in memory between rounds; ``EngineSync`` pushes new weights
    to the engine, which needs a second copy of them.
    """

    def __init__(self, run: Run) -> None:
        """Build the engine in a serving layout; all ranks call it together."""
        # Imported here, since these modules import mcore_infer.
        from mcore_infer.generation import build_offline_engine
        from mcore_train.sample_texts import ServingCopy
        from mcore_train.weight_sync.engine_sync import EngineSync

        serving = ServingCopy(run)
        self.run, self.replicas = run, serving.ctx.dp
        self.share = -(-run.plan.global_batch_size // self.replicas.size)
        lengths = [run.plan.config.batch.seq_length] * self.share
        self.engine = build_offline_engine(serving.empty_model(), lengths)
        weights = partial(model_shards, run)
        self.sync = EngineSync(run.ctx.world, weights=weights, engine=self.engine)

    def __call__(self, prompts: Sequence[Sequence[int]], seed: int) -> list[list[int]]:
        """Return the tokens that the current weights generate; gathers over the world."""
        from mcore_infer.config import SamplingConfig  # imports mcore_infer

        self.sync.push()
        options, tokenizer = self.run.plan.config.grpo, self.run.tokenizer
        sampling = SamplingConfig(
            num_tokens=options.grpo_max_tokens, temperature=options.grpo_temperature
        )
        first = self.replicas.rank * self.share
        assert tokenizer is not None
        rows = {
            self.engine.add(prompt, sampling, seed=seed + i, eod=tokenizer.eod): i
            for i, prompt in enumerate(prompts[first : first + self.share], first)
        }
        results = (event for event in self.engine.run() if isinstance(event, tuple))
        written = [(rows[number], list(text.ids)) for number, text in results]
        texts: dict[int, list[int]] = {}
        for of_rank in gather_json(written, self.run.ctx.world):
            # Tensor ranks of a replica wrote the same text: the first one's counts.
            texts = {**dict(of_rank), **texts}
        return [texts[i] for i in range(len(prompts))]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, the tokens that the model wrote after it, their reward and advantage."""

    prompt: list[int]
    written: list[int]
    reward: float
    advantage: float


def rollout_steps(run: Run, write: WriteTexts | None = None) -> Iterator[list[MicroBatch]]:
    """Generate texts and yield this rank's micro-batches of them, step by step, endlessly.

    Args:
        run: its weights generate the texts; its ``progress`` selects the prompts.
        write: generates the texts; None: ``EngineTexts``.

    Raises:
        ValueError: if prompts or reward cannot be read, or a prompt leaves no room for a text.
    """
    options, tokenizer = run.plan.config.grpo, run.tokenizer
    if tokenizer is None:
        raise ValueError("--objective grpo reads texts: give --tokenizer-model.")
    reward = load_named(options.reward, "--reward")
    records = read_prompts(options.prompts)
    prompts = [tokenizer.encode(record["prompt"]) for record in records]
    room = run.plan.config.batch.seq_length - options.grpo_max_tokens
    if too_long := [i + 1 for i, ids in enumerate(prompts) if not 0 < len(ids) <= room]:
        raise ValueError(
            f"--prompts {options.prompts}, line {too_long[0]}: the prompt must have 1 to "
            f"{room} tokens, --seq-length less --grpo-max-tokens."
        )
    write = write or EngineTexts(run)
    group = options.grpo_group_size
    while True:
        consumed = run.progress.consumed_train_samples
        size = run.plan.ramp.size_at(consumed)
        # A round of updates has one batch of texts: prompts follow those of the round before.
        first = consumed // options.grpo_iterations // group
        chosen = [(first + i // group) % len(prompts) for i in range(size)]
        seed = run.plan.config.run.seed + consumed
        with run.ctx.clock.span("compute"):
            written = write([prompts[i] for i in chosen], seed)
        texts = score_texts(
            [prompts[i] for i in chosen],
            written,
            [records[i] for i in chosen],
            reward,
            tokenizer,
            run,
        )
        batches = run.annotate(_micro_batches(run, texts))
        if options.grpo_iterations > 1:
            batches = _with_log_probs(run, batches)
        for _ in range(options.grpo_iterations):
            yield batches


def read_prompts(path: str) -> list[dict[str, Any]]:
    """Read the records of a JSONL file, each with a ``prompt``.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for lines without a prompt, or if there are none.
    """

    def check(record: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(record.get("prompt"), str):
            raise ValueError(f"no prompt as a text (keys: {', '.join(record) or 'none'})")
        return record

    return list(encode_records(path, check, flag="--prompts"))


def score_texts(
    prompts: Sequence[list[int]],
    written: Sequence[list[int]],
    records: Sequence[Mapping[str, Any]],
    reward: Callable[[str, str, Mapping[str, Any]], float],
    tokenizer: Tokenizer,
    run: Run,
) -> list[Text]:
    """Score each text by the user's function, with advantages; all ranks call it together.

    Every rank scores a share, so that a slow function is called once for each text.
    """
    world = run.ctx.world
    mine = []
    for i in range(world.rank, len(written), world.size):
        completion = tokenizer.decode(written[i], skip_special_tokens=True)
        mine.append((i, float(reward(records[i]["prompt"], completion, records[i]))))
    rewards = dict(item for share in gather_json(mine, world) for item in share)
    values = torch.tensor([rewards[i] for i in range(len(written))], dtype=torch.float64)
    advantages = group_advantages(values, run.plan.config.grpo.grpo_group_size)
    numbers = zip(values.tolist(), advantages.tolist(), strict=True)
    return [
        Text(prompt, ids, value, advantage)
        for prompt, ids, (value, advantage) in zip(prompts, written, numbers, strict=True)
    ]


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return each reward less its group's mean, over the group's standard deviation."""
    groups = rewards.view(-1, group_size)
    spread = groups.std(1, keepdim=True) + _STD_FLOOR
    return ((groups - groups.mean(1, keepdim=True)) / spread).flatten()


def _micro_batches(run: Run, texts: Sequence[Text]) -> list[MicroBatch]:
    """Return this data rank's micro-batches, with one text in each row."""
    size, dp = run.plan.config.batch.micro_batch_size, run.ctx.dp
    count = len(texts) // (size * dp.size)
    batches = []
    for number in range(count):
        begin = (number * dp.size + dp.rank) * size
        rows = [_row(text, run.plan.config.batch.seq_length) for text in texts[begin:][:size]]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        batches.append(place(batch, run.ctx, entries=run.entries, read=run.read_entries))
    return batches


def _row(text: Text, length: int) -> dict[str, Tensor]:
    """Return a row of a prompt and its text; the zeros after them are not attended to."""
    ids = torch.tensor(text.prompt + text.written)
    begin, end = len(text.prompt) - 1, len(ids) - 1  # positions whose labels were written
    mask = torch.zeros(length)
    mask[begin:end] = 1.0
    tokens, labels = (torch.zeros(length, dtype=torch.int64) for _ in range(2))
    tokens[:end], labels[:end] = ids[:-1], ids[1:]
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": mask,
        ADVANTAGES: mask * text.advantage,
        REWARDS: mask * text.reward,
        TOKEN_SHARES: mask / max(1, len(text.written)),
    }


def _with_log_probs(run: Run, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Add the texts' log-probabilities by the current weights; one forward pass."""
    annotated = list(batches)

    def keep(model: TrainableModel, output: Payload, microbatch: int) -> None:
        old = answer_log_probs(model, output, batches[microbatch])
        entries = {**batches[microbatch].entries, OLD_LOG_PROBS: old}
        annotated[microbatch] = replace(batches[microbatch], entries=entries)

    for chunk in run.chunks:
        chunk.eval()
    with torch.no_grad(), run.keeping_casts():
        run.pipeline.forward(batches, keep)
    for chunk in run.chunks:
        chunk.train()
    return annotated
