"""Writes pairs from the records of another engine: datatrove, Ray Data, or any iterator.

The engine filters, deduplicates and schedules; here the records are tokenized, verified and
stored like those of a file. datatrove and Ray are imported only if they are used, and the
classes here are pickled to their workers.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.indexed.merging import merge_pairs
from mcore_data.indexed.output_lock import make_parent_folder
from mcore_data.preprocessing.blocks import BLOCK_BYTES, InputSource
from mcore_data.preprocessing.sources import Corpus, Part, digest
from mcore_data.preprocessing.tokenizing import (
    PreprocessReport,
    build_tools,
    output_prefixes,
    preprocess_corpus,
)


def write_records(
    records: Iterable[Mapping[str, Any]],
    config: PreprocessConfig,
    tokenizer_config: TokenizerConfig,
    *,
    name: str = "records",
    part: tuple[int, int] = (0, 1),
) -> PreprocessReport:
    """Tokenize records into one pair for each key, in the order of the iterator.

    An earlier pair at the output prefix is replaced, since an iterator cannot be continued.

    Args:
        records: values of JSON types by key.
        config: output prefix and options; its ``input`` is not used.
        tokenizer_config: the tokenizer.
        name: name of the input in the manifest; the same for all parts.
        part: number of this part, from 0, and number of all parts. ``merge`` joins the parts in
            order, and raises an error if one is missing.

    Raises:
        ValueError, ImportError, BadRecordError, RuntimeError: as ``preprocess`` does.
    """
    number, num_parts = part
    part_of_corpus = (
        Part(number, num_parts, digest([name, num_parts])) if num_parts > 1 else None
    )
    source = InputSource(
        path=f"{name} {number} of {num_parts}",
        kind="lines",
        size=0,
        stamp=f"{time.time_ns()}",
        is_stream=True,
        lines=(json.dumps(record).encode() + b"\n" for record in records),
    )
    config = replace(config, input=(source.path,), overwrite=True)
    make_parent_folder(config.output_prefix)
    tools = build_tools(config, tokenizer_config)
    return preprocess_corpus(
        config, Corpus([source], part=part_of_corpus), tools, None, BLOCK_BYTES
    )


@dataclass(frozen=True, slots=True)
class DatatroveWriter:
    """Last step of a datatrove pipeline, which writes each rank's documents as a part.

    A record has ``text``, ``id`` and ``metadata``, so ``keep_keys`` may have id and
    metadata.url. When all ranks are done, ``mcore-data merge`` joins the pairs
    ``<output_prefix>_<rank>_text_document`` of all ranks.

    Attributes:
        config: output prefix and options.
        tokenizer: type and files of the tokenizer.
    """

    config: PreprocessConfig
    tokenizer: TokenizerConfig

    def __call__(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> None:
        """Write all documents of a rank."""
        config = replace(self.config, output_prefix=f"{self.config.output_prefix}_{rank:05d}")
        records = ({"text": d.text, "id": d.id, "metadata": d.metadata} for d in data)
        part = rank, world_size
        write_records(records, config, self.tokenizer, name="datatrove rank", part=part)


def ray_data_sink(config: PreprocessConfig, tokenizer: TokenizerConfig) -> Any:
    """Return a sink for ``Dataset.write_datasink`` of Ray Data.

    Each write task writes a pair ``<output_prefix>.tasks/<task>_<key>_document`` to a file
    system that all hosts share. At the end the pairs are joined to a logical dataset at the
    output prefix, in the order of tasks. Ray Data keeps the order of rows if
    ``DataContext.execution_options.preserve_order`` is set.

    Args:
        config: output prefix and options.
        tokenizer: type and files of the tokenizer.

    Raises:
        ImportError: if Ray is not installed.
    """
    try:
        from ray.data import Datasink  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ImportError("Ray Data needs: pip install 'mcore-data[ray,arrow]'.") from None

    class Sink(Datasink):
        def write(self, blocks: Iterable[Any], ctx: Any) -> int:
            records = (row for block in blocks for row in block.to_pylist())
            name = f"Ray task {ctx.task_idx},"
            write_records(records, _of_task(config, ctx.task_idx), tokenizer, name=name)
            return ctx.task_idx

        def on_write_complete(self, write_result: Any) -> None:
            tasks = sorted(write_result.write_returns)
            for key, prefix in output_prefixes(config).items():
                pairs = [output_prefixes(_of_task(config, task))[key] for task in tasks]
                merge_pairs(pairs, prefix, overwrite=config.overwrite, logical=True)

    return Sink()


def _of_task(config: PreprocessConfig, task: int) -> PreprocessConfig:
    return replace(config, output_prefix=f"{config.output_prefix}.tasks/{task:05d}")
