"""The run of ``mcore-train gpt`` that ``mcore-train quickstart`` trains."""

from dataclasses import replace
from pathlib import Path

from mcore_base.destinations import check_folder
from mcore_train.composition import TrainConfig, compose
from mcore_train.quickstart.book import token_files
from mcore_train.quickstart.options import QuickstartConfig
from mcore_train.resolution import Plan, resolve

VOCAB_SIZE = 2048
SEQ_LENGTH = 256
GLOBAL_BATCH_SIZE = 8


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
