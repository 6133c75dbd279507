"""The coordinate check of muP: how far activations move in a few steps, at several widths.

With muP the change is the same at every width; without it grows, so that a learning rate good
at one width is too large at the next. `uv run python tests/docs/widths.py` trains small GPTs,
writes benchmarks/results/mup-widths.json and draws docs/mup_widths.svg.

Yang et al. 2022, Tensor Programs V, arXiv:2203.03466, appendix D.1.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.curves import line_chart

from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.mup import logits_factor, step_width
from mcore_parallel.config import DataParallelConfig
from mcore_parallel.data_parallel.ddp import DataParallel
from mcore_parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.optimizers.adamw import AdamW
from mcore_parallel.optimizers.config import AdamConfig
from mcore_parallel.optimizers.update_rule import UpdateGroup

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/mup_widths.svg"
RESULTS = ROOT / "benchmarks/results/mup-widths.json"
BASE = 32
"""Width that the learning rate is of."""
WIDTHS = (32, 64, 128, 256, 512)
LR = 1e-3


def change(width: int, *, use_mup: bool, steps: int = 4) -> tuple[float, float]:
    """Train a GPT on one batch; return how far its stream and its scores have moved.

    Both as mean absolute change from the first step to the last: of what the last norm gives,
    and of the scores of the vocabulary.
    """
    options = {"use_mup": True, "mup_base_hidden_size": BASE, "mup_base_head_dim": BASE // 4}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=4,
        ffn_hidden_size=2 * width,
        init_method_std=0.1,
        untie_embeddings_and_output_weights=True,
        **(options if use_mup else {}),
    )
    single = ParallelContext.single()
    model = GPT(config, single, vocab_size=64, seed=1)
    data_parallel = DataParallel([model], single, DataParallelConfig())

    adam = AdamW(AdamConfig())

    def group_of(named):
        tensors = [(part.name, part.shape) for part in named.layout.parts]
        return UpdateGroup(adam, width=step_width(tensors, config))

    optimizer = DistributedOptimizer(data_parallel, adam, group_of=group_of)
    tokens = torch.arange(128).view(2, 64) ** 2 % 61
    weights = torch.full((2, 64), 1 / 128)
    seen = []
    for _ in range(steps + 1):
        data_parallel.zero_grad()
        hidden, _ = model(tokens)
        scores = hidden @ model.output_weight.T * logits_factor(config)
        seen.append((hidden.detach().clone(), scores.detach().clone()))
        model.loss(hidden, tokens, weights)[0].backward()
        data_parallel.finish()
        optimizer.step(LR, 0.0)
    first, last = seen[0], seen[-1]
    stream, scores = (float((b - a).abs().mean()) for a, b in zip(first, last, strict=True))
    return stream, scores


def drawn(rows: Sequence[dict[str, float | bool]]) -> str:
    """Draw kept results: the changes over the width, with muP and without."""
    curves = {
        name: [(row["width"], row[of]) for row in rows if row["use_mup"] is use_mup]
        for use_mup in (True, False)
        for of in ("stream", "scores")
        for name in [f"{of}, {'muP' if use_mup else 'without'}"]
    }
    return line_chart(curves, "hidden size", "mean change in 4 steps", x_step=64)


if __name__ == "__main__":
    rows = []
    for use_mup in (True, False):
        for width in WIDTHS:
            stream, scores = change(width, use_mup=use_mup)
            rows.append(
                {"width": width, "use_mup": use_mup, "stream": stream, "scores": scores}
            )
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    made_by = "tests/docs/widths.py; CPU, float32"
    RESULTS.write_text(f'{{"made_by": "{made_by}", "rows": [\n  {lines}\n]}}\n')
    PICTURE.write_text(drawn(rows))
