"""Options of ``mcore-train quickstart``, and the run of ``mcore-train gpt`` that it trains."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mcore_base.destinations import check_folder
from mcore_base.options import Options, option
from mcore_parallel.config import ParallelConfig
from mcore_train.composition import TrainConfig, compose
from mcore_train.quickstart.book import token_files
from mcore_train.resolution import Plan, resolve

VOCAB_SIZE = 2048
SEQ_LENGTH = 256
GLOBAL_BATCH_SIZE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TourConfig(Options):
    """Options of the tour from a book's text to a generated paragraph."""

    output: str = "runs/quickstart"
    """Folder for all files of the tour. A stopped tour with the same options continues in its
    folder; the files of any other tour are deleted."""
    steps: int = option(1000, minimum=20, hint="Fewer leave nothing to resume and end.")
    """Training steps of 2048 tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto: CUDA if present."""
    seed: int = option(1234, minimum=0, below=2**32)
    """Seed of the held-out chapters, the weights, the data order and the generated text."""
    num_words: int = option(300, minimum=1)
    """Words of the generated text at the end."""
    nproc: int = option(0, minimum=0)
    """Ranks to start on this host; 0: only this process, or the ranks that torchrun started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartConfig:
    """Options of the tour and of its layout."""

    tour: TourConfig = field(default_factory=TourConfig)
    parallelism: ParallelConfig = field(default_factory=ParallelConfig)


def build_tour_plan(options: QuickstartConfig, world_size: int) -> Plan:
    """Derive what the tour trains on ``world_size`` ranks; loads no torch.

    Raises:
        ConflictError: (a ValueError) with everything in which options and world disagree;
            ValueError if ``--output`` can be no folder.
    """
    check_folder("--output", options.tour.output)
    config = train_config(options, world_size)
    return resolve(config, world_size, tokenizer_vocab_size=VOCAB_SIZE)


def train_config(options: QuickstartConfig, world_size: int) -> TrainConfig:
    """Turn the tour's options into those of ``mcore-train gpt``."""
    tour, output = options.tour, Path(options.tour.output)
    parallel = options.parallelism
    paths = token_files(output / "data")
    model_ranks = (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
    )
    data_ranks = max(1, world_size // model_ranks)
    values = {
        "num_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 384,
        "max_position_embeddings": SEQ_LENGTH,
        "seq_length": SEQ_LENGTH,
        "micro_batch_size": max(1, GLOBAL_BATCH_SIZE // data_ranks),
        "global_batch_size": max(GLOBAL_BATCH_SIZE, data_ranks),
        "train_iters": tour.steps,
        "lr": 6e-3,
        "lr_decay_style": "cosine",
        "lr_warmup_fraction": 0.12,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "tokenizer_model": str(paths.tokenizer),
        "train_data_path": (str(paths.train),),
        "valid_data_path": (str(paths.held_out),),
        "eval_interval": max(1, tour.steps // 8),
        "eval_iters": 4,
        "num_workers": 0,
        "save": str(output / "checkpoint"),
        "auto_resume": True,
        "log_interval": max(1, tour.steps // 24),
        "seed": tour.seed,
        "device": tour.device,
    }
    return replace(compose(values), parallelism=parallel)
