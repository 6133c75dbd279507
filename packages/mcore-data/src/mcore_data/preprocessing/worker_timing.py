"""How many workers are fastest here: the same work with each number, timed."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.preprocessing.preprocessing import preprocess

SAMPLE_DOCUMENTS = 100_000


@dataclass(frozen=True, slots=True)
class Timing:
    """What one number of workers achieved.

    Attributes:
        workers: the number.
        tokens_per_s: tokens of all keys, start of the processes included.
    """

    workers: int
    tokens_per_s: float


def time_workers(
    config: PreprocessConfig, tokenizer_config: TokenizerConfig, workers: Sequence[int]
) -> list[Timing]:
    """Preprocess the first documents with each number of workers; the outputs are removed.

    Args:
        config: the work; without ``max_documents`` the first 100 000 documents are taken.
        tokenizer_config: the tokenizer.
        workers: numbers to try.

    Returns:
        A timing for each, fastest first.
    """
    timings = []
    folder = Path(config.output_prefix).parent
    folder.mkdir(parents=True, exist_ok=True)
    for number in workers:
        with tempfile.TemporaryDirectory(dir=folder, prefix="timing-") as place:
            one = replace(
                config,
                workers=number,
                output_prefix=f"{place}/sample",
                max_documents=config.max_documents or SAMPLE_DOCUMENTS,
                find_optimal_num_workers=False,
            )
            began = time.perf_counter()
            report = preprocess(one, tokenizer_config)
            seconds = time.perf_counter() - began
        timings.append(Timing(number, sum(report.num_tokens.values()) / seconds))
    return sorted(timings, key=lambda timing: -timing.tokens_per_s)
