"""``--tokenize-on-the-fly``: training from text, through pairs in ``--data-cache-path``.

Megatron shuffles all documents of a run before the first sample, and needs their lengths in
tokens. To get the same samples as from preprocessed data, all texts are therefore tokenized
before training. Every rank of the run is a worker of one plan (``plan_worker.py``): all cores
of all hosts take part, a killed run continues, and a later run with the same texts uses the
existing pairs.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_base.file_lock import LockHeldError
from mcore_data.config import DataConfig, PreprocessConfig, TokenizerConfig
from mcore_data.indexed.manifest import has_files, read_manifest
from mcore_data.preprocessing.plan_worker import work_on_plan
from mcore_data.preprocessing.sources import digest, find_inputs
from mcore_data.preprocessing.tokenizing import limit_workers, output_prefixes
from mcore_data.preprocessing.work_plan import (
    SUFFIX,
    WorkPlan,
    make_plan,
    merge_plan,
    read_plan,
)
from mcore_data.tokenizers.building import build_tokenizer

log = logging.getLogger(__name__)

_UNIT_BYTES = 64 << 20
_PAUSE_S = 0.2
_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def tokenize_sources(
    config: DataConfig, tokenizer_config: TokenizerConfig, *, num_local_ranks: int = 1
) -> DataConfig:
    """Tokenize the texts of the data paths; return options whose paths are the pairs.

    All ranks call this function at the same time; each returns when all pairs exist.

    Args:
        config: options with ``tokenize_on_the_fly``; a path is a file, folder, pattern or URL,
            as ``--input`` of preprocess.
        tokenizer_config: the tokenizer.
        num_local_ranks: ranks of this host, which share its cores.

    Raises:
        FileNotFoundError: if a path names no input.
        ValueError, RuntimeError: as ``preprocess`` does; a bad record is an error.
    """
    changes: dict[str, Any] = {"tokenize_on_the_fly": False, "text_key": "text"}
    prefixes: dict[str, str] = {}
    for name in _PATHS:
        words = []
        for word in getattr(config, name):
            if not _is_number(word) and word not in prefixes:
                prefixes[word] = _tokenize(word, config, tokenizer_config, num_local_ranks)
            words.append(prefixes.get(word, word))
        changes[name] = tuple(words)
    return replace(config, **changes)


def _tokenize(
    word: str, config: DataConfig, tokenizer_config: TokenizerConfig, num_local_ranks: int
) -> str:
    """Tokenize the inputs of one word of a data path; return the prefix of their dataset."""
    began = time.monotonic()
    tokenizer = build_tokenizer(tokenizer_config)
    inputs = [(source.path, source.size, source.stamp) for source in find_inputs([word])]
    name = digest([inputs, config.text_key, tokenizer.fingerprint()])[:24]
    job = PreprocessConfig(
        input=(word,),
        output_prefix=str(Path(config.data_cache_path, name)),
        json_keys=(config.text_key,),
        append_eod=tokenizer.eod is not None,
    )
    prefix = output_prefixes(job)[config.text_key]
    if _has_dataset(prefix):
        log.info("--tokenize-on-the-fly: using %s, the tokens of %s", prefix, word)
        return str(prefix)
    plan = _once_free(lambda: _plan(job, tokenizer_config))
    workers = limit_workers(max(1, (os.cpu_count() or 1) // num_local_ranks))
    report = work_on_plan(plan, workers=workers)
    if report.failures:
        raise ValueError("; ".join(report.failures.values()))
    _once_free(lambda: _has_dataset(prefix) or merge_plan(plan))
    elapsed_s = time.monotonic() - began
    log.info(
        "--tokenize-on-the-fly: %s holds the tokens of %s; this process wrote %d tokens in "
        "%.1f s",
        *(prefix, word, report.num_tokens, elapsed_s),
    )
    return str(prefix)


def _plan(job: PreprocessConfig, tokenizer_config: TokenizerConfig) -> WorkPlan:
    """Make the plan, or read the plan of another rank or run, with this run's tokenizer.

    A continued run may have its tokenizer at another path than the plan.
    """
    path = Path(f"{job.output_prefix}{SUFFIX}")
    if path.is_file():
        return replace(read_plan(path), tokenizer=tokenizer_config)
    return make_plan(job, tokenizer_config, _UNIT_BYTES)


def _has_dataset(prefix: Path) -> bool:
    facts = read_manifest(prefix)
    return bool(facts) and has_files(prefix, facts)


def _once_free(work: Callable[[], Any]) -> Any:
    """Call a function that locks its outputs, repeatedly while another rank has the lock."""
    while True:
        try:
            return work()
        except ValueError as error:
            if not isinstance(error.__cause__, LockHeldError):
                raise
            time.sleep(_PAUSE_S)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
