"""The page of recipes for known models: layouts, the planner's predictions and the reasons.

``uv run python tests/docs/recipes_page.py`` writes docs/recipes.md from recipes/known.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.sources import ROOT

from mcore_models.presets import find_preset
from mcore_train.composition import FAMILY_COMMANDS, Command, TrainConfig
from mcore_train.options.parsing import parse
from mcore_train.planning.command import make_plan
from mcore_train.planning.config import PlanConfig
from mcore_train.planning.memory import GIB
from mcore_train.planning.search import Row, parameters
from mcore_train.planning.system import SYSTEMS

PAGE = ROOT / "docs/recipes.md"
FOLDER = ROOT / "recipes/known"
PRETRAIN = ROOT / "recipes/run/pretrain.toml"
PRODUCTION = ("llama-3.1-405b", "nemotron-4-340b", "deepseek-v3")
DOCUMENTS = (
    *("llama-2-7b", "llama-2-13b", "llama-3-70b", "mixtral-8x7b", "gpt3-175b", "gpt-462b"),
    *("bert-345m", "t5-220m"),
)
"""Models of the founding documents; all others are models of today."""
LAYOUT = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "micro_batch_size"),
    *("pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "recompute_granularity"),
    *("recompute_modules", "optimizer_cpu_offload", "moe_token_dispatcher_type"),
    *("cuda_graph_impl", "data_parallel_sharding_strategy", "use_distributed_optimizer"),
    *("seq_length", "global_batch_size", "bf16"),
)
"""Options that the planner may not choose: those of the recipe, given or left out."""
PUBLISHED = {
    "llama-3.1-405b": (
        "tensor 8, pipeline 16, data 64; 430 TFLOP/s a GPU, 43 % MFU",
        "arXiv:2407.21783, table 4",
    ),
    "nemotron-4-340b": (
        "tensor 8, pipeline 12, data 64; 8.0 s a step, which is 192 tokens/s a GPU, 41 % MFU",
        "arXiv:2406.11704, table 2",
    ),
    "deepseek-v3": (
        "pipeline 16, expert 64, fp8; 14.8 T tokens in 2.664 M H800 hours: 1 543 tokens/s each",
        "arXiv:2412.19437, table 1",
    ),
}
"""What the authors measured, on the same number of GPUs, and where they wrote it."""
RATES = {
    "llama-3.1-405b": "rate and a batch of 16 M tokens: arXiv:2407.21783, section 3.4.1",
    "nemotron-4-340b": "batch: the last of arXiv:2406.11704; the rate is ours",
    "deepseek-v3": (
        "peak, end and the last batch: arXiv:2412.19437, section 4.2, whose final steps go on "
        "to 7.3e-6"
    ),
    "llama-2-7b": "rate and a batch of 4 M tokens: arXiv:2307.09288, section 2.2 and table 1",
    "llama-2-13b": "rate and a batch of 4 M tokens: arXiv:2307.09288, section 2.2 and table 1",
    "llama-3-70b": "peak: arXiv:2407.21783, table 3; end and batch are ours",
    "gpt3-175b": "peak and a batch of 3.2 M tokens: arXiv:2005.14165, table 2.1",
    "gpt-462b": "ours",
    "bert-345m": "peak and batch: arXiv:1909.08053, section 4; the end is ours",
    "t5-220m": "rate: Megatron-LM's example of this size; the batch is ours, its own is 512",
    "deepseek-v2-lite": (
        "peak: arXiv:2405.04434, appendix B; end and batch are ours, the paper has 4608"
    ),
    "llama-3.1-70b": "peak: arXiv:2407.21783, table 3; end and batch are ours",
    "llama-3.1-8b": "peak: arXiv:2407.21783, table 3; end and batch are ours",
    "mamba2-2.7b": (
        "five times the peak of a 2.7 B model in arXiv:2005.14165, table 2.1, ending at 1e-5: "
        "arXiv:2312.00752, appendix E.2.1"
    ),
    "nemotron-h-8b": (
        "batch: NVIDIA's recipe in Megatron-Bridge; the rate is not checked against the paper "
        "(arXiv:2504.03624), and NeMo's recipe has 3e-4"
    ),
    "olmo-2-13b": (
        "batch and end: the authors' files of both stages (OLMo, configs/official-1124); "
        "the second begins with 9e-5 where a cosine to a tenth has ended, which makes the peak "
        "9e-4, but the file of the first has 3e-4; not checked against the paper "
        "(arXiv:2501.00656)"
    ),
}
"""Where rates and batches come from, of each recipe that has a rate or names a source."""
_HEAD = """# Recipes for known models

Written by `uv run python tests/docs/recipes_page.py` from the files of `recipes/known`. Each
names a model of `mcore-models list`, a batch, and a layout for one cluster with its reason.
Optimizer, schedule and precision are those of `recipes/run/pretrain.toml` where a recipe has no
values of the model's authors. Data is yours, or random tokens.

Look at a recipe, without a GPU, and then start it on each host (here with 8 GPUs):

<!-- run by: tests/docs/test_recipes.py::test_the_commands_of_the_page_run -->
```bash
mcore-train plan --recipe recipes/known/llama-3.1-8b.toml --gpus 8 --gpu h100
mcore-train gpt --recipe recipes/run/pretrain.toml recipes/known/llama-3.1-8b.toml \\
    --mock-data --train-iters 1000 --dry-run --world-size 8
```

<!-- not run: needs a host of 8 GPUs -->
```bash
torchrun --nproc-per-node 8 -m mcore_train gpt \\
    --recipe recipes/run/pretrain.toml recipes/known/llama-3.1-8b.toml \\
    --data-path corpus_text_document --tokenizer-model tokenizer --train-iters 1000 --save run
```

`mcore-train launch` writes the jobs of several hosts ([on a cluster](cluster.md)). For another
number of GPUs take `--model NAME` and [plan](planning.md) again. tokens/s, MFU, time and memory
are **predicted** by the planner, whose errors are [measured](planner.md); what was
measured on GPUs is [here](performance.md). A test resolves each recipe as a run of that many
ranks would: groups, stages, schedule, weights and the tensors of a checkpoint.
"""
_BESIDE = """
The authors' figures on as many GPUs, H100 but for DeepSeek's. They count FLOPs in ways of their
own, so that tokens/s compare better than MFU. We ran none of the three at this size.
"""
_SOURCES = """
## Sources of rates and batches

A recipe that is not here has the rate of `recipes/run/pretrain.toml` and a batch of our choice.

| model | rate | sequences | source |
| --- | --- | --- | --- |
"""
_TABLE = """
| model | parameters | GPUs | layout | tokens/s/GPU | MFU | step | GiB of a GPU |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Recipe:
    """One file of recipes/known."""

    path: Path

    @property
    def name(self) -> str:
        """The name of the file, which is that of its model."""
        return self.path.stem

    @cached_property
    def comment(self) -> list[str]:
        """The comment on top, a paragraph each."""
        lines = self.path.read_text().splitlines()
        block = "\n".join(line[2:] for line in lines[: lines.index(self._first)])
        return block.strip().split("\n\n")

    @property
    def _first(self) -> str:
        return f'model = "{self.name}"'

    @cached_property
    def head(self) -> re.Match[str]:
        """The first line: title, GPUs and their kind."""
        found = re.fullmatch(r"(.+) on (\d+) x (\w+)\.", self.comment[0])
        assert found is not None, f"{self.path} begins with: # TITLE on GPUS x KIND."
        return found

    @property
    def num_gpus(self) -> int:
        """Ranks of the run."""
        return int(self.head[2])

    @property
    def command(self) -> Command:
        """The command that trains the model."""
        return FAMILY_COMMANDS[self.program]

    @property
    def program(self) -> str:
        """The name of that command."""
        return find_preset(self.name).family

    @cached_property
    def config(self) -> TrainConfig:
        """The run, with random tokens."""
        words = ["--recipe", str(PRETRAIN), str(self.path), "--mock-data"]
        program = f"mcore-train {self.program}"
        return parse([*words, "--train-iters", "1000"], program, self.command.run)

    @cached_property
    def row(self) -> Row:
        """The planner's prediction."""
        system = SYSTEMS[self.head[3]]
        given = {*LAYOUT, *tomllib.loads(self.path.read_text()).get("pipeline", {})}
        options = PlanConfig(gpus=self.num_gpus, top=1)
        plan = make_plan(self.config, self.program, sorted(given), options, system)
        return plan.search.rows[0]


def recipes() -> list[Recipe]:
    """Read all recipes: production first, then the documents' models and those of today."""
    names = [path.stem for path in sorted(FOLDER.glob("*.toml"))]
    first = (*PRODUCTION, *DOCUMENTS)
    order = [*first, *(name for name in names if name not in first)]
    return [Recipe(FOLDER / f"{name}.toml") for name in order]


def small_world(recipe: Recipe, most: int = 256) -> tuple[TrainConfig, int]:
    """Return a recipe on fewer data ranks with as many micro-batches each, and its ranks."""
    factor = 1
    while recipe.num_gpus // factor > most:
        factor *= 2
    batch = recipe.config.batch
    smaller = replace(batch, global_batch_size=batch.global_batch_size // factor)
    return replace(recipe.config, batch=smaller), recipe.num_gpus // factor


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _table(chosen: Sequence[Recipe]) -> str:
    rows = []
    for recipe in chosen:
        row, config = recipe.row, recipe.config
        count = parameters(config, recipe.command.family, config.tokenizer.vocab_size)
        rows.append(
            f"| [{recipe.head[1]}](../recipes/known/{recipe.path.name}) | {count / 1e9:,.1f} B "
            f"| {recipe.num_gpus:,} {recipe.head[3].upper()} | {row.name} "
            f"| {row.tokens_per_s:,.0f} | {row.mfu:.0%} | {_seconds(row.step.total)} "
            f"| {row.memory.total / GIB:.0f} |\n"
        )
    return _TABLE + "".join(rows)


def _reasons(chosen: Sequence[Recipe]) -> Iterator[str]:
    for recipe in chosen:
        yield f"\n### {recipe.head[1]}\n"
        for paragraph in recipe.comment[1:]:
            yield f"\n{paragraph}\n"


def _published() -> Iterator[str]:
    yield "\n| model | published | source | predicted here |\n| --- | --- | --- | --- |\n"
    for recipe in recipes():
        if recipe.name in PUBLISHED:
            text, source = PUBLISHED[recipe.name]
            yield (
                f"| {recipe.head[1]} | {text} | {source} | {recipe.row.tokens_per_s:,.0f} "
                f"tokens/s a GPU, {recipe.row.mfu:.0%} MFU |\n"
            )


def _sources() -> Iterator[str]:
    for recipe in recipes():
        if recipe.name in RATES:
            optimizer, batch = recipe.config.optimizer, recipe.config.batch
            yield (
                f"| {recipe.head[1]} | {optimizer.lr:g} to {optimizer.min_lr:g} "
                f"| {batch.global_batch_size:,} of {batch.seq_length:,} "
                f"| {RATES[recipe.name]} |\n"
            )


def render() -> str:
    """Return the text of the page."""
    known = recipes()
    production = [each for each in known if each.name in PRODUCTION]
    documents = [each for each in known if each.name in DOCUMENTS]
    today = [each for each in known if each.name not in (*PRODUCTION, *DOCUMENTS)]
    parts = [_HEAD, "\n## Production configurations\n", _table(production)]
    parts += [
        _BESIDE,
        *_published(),
        *_reasons(production),
        "\n## Models of the founding documents\n",
        _table(documents),
        *_reasons(documents),
        "\n## Models of today\n",
        _table(today),
        *_reasons(today),
        _SOURCES,
        *_sources(),
    ]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
