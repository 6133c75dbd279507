"""Builds the datasets of a plan, with as many samples as the run uses."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_data.config import DataConfig
from mcore_data.datasets.from_flags import build_gpt_datasets, build_valid_sets
from mcore_data.datasets.sentence_datasets import build_sentence_datasets
from mcore_data.indexed.index_format import CorruptDatasetError
from mcore_data.indexed.manifest import is_of_other_tokenizer
from mcore_data.preprocessing.on_the_fly import tokenize_sources
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_data.tracing.data_plan import describe_sources
from mcore_data.tracing.tracing import prefixes
from mcore_parallel.launch import launcher
from mcore_train.composition import BertTrainConfig, T5TrainConfig
from mcore_train.resolution import Plan

log = logging.getLogger(__name__)

Dataset = Any
"""Map-style: ``len`` and numpy samples by index; with ``--dataloader-type external`` batches
of tensors (``BatchSource``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasets:
    """Map-style datasets of one run; None: no such data."""

    train: Dataset = None
    valid: Dataset = None
    test: Dataset = None
    valid_sets: Mapping[str, Dataset] = field(default_factory=dict)
    """Validation sets that are scored separately, instead of ``valid``."""
    sources: Sequence[Mapping[str, Any]] = ()
    """Descriptions of the files of the training data; empty for data of the caller."""
    config: DataConfig | None = None
    """Data options, with the tokenized pairs instead of their texts; None for data of the
    caller."""


def load_datasets(plan: Plan, tokenizer: Tokenizer | None) -> Datasets:
    """Build the datasets of a plan, with as many samples of each as the run uses.

    Raises:
        ValueError: if a dataset is damaged or too small, or there is none to validate on.
        FileNotFoundError: if a dataset does not exist.
    """
    config = plan.config
    valid = num_samples(plan)[1]
    data = config.data
    if data.dataloader_type == "external":
        raise ValueError(
            "--dataloader-type external takes its batches from a program: call assemble(plan, "
            "ctx, datasets=Datasets(train=batches)), or use single or cyclic."
        )
    if data.mock_data:
        data = replace(data, mock_vocab_size=plan.vocab_size)
    if data.tokenize_on_the_fly:
        ranks = launcher.read_environment().local_world_size
        data = tokenize_sources(data, config.tokenizer, num_local_ranks=ranks)
    common: dict[str, Any] = {
        "sequence_length": config.batch.seq_length,
        "seed": config.run.seed,
    }
    evaluates = config.evaluation.interval > 0
    valid_sets = {}
    try:
        common["only"] = ("train", "valid", "test") if evaluates else ("train",)
        common["num_samples"] = num_samples(plan)
        if plan.family.dataset == "gpt":
            built = build_gpt_datasets(
                data,
                tokenizer,
                fim=config.fim,
                samples_before=plan.ramp.samples_before,
                **common,
            )
        else:
            built = _build_sentences(plan, data, tokenizer, common)
        if data.multiple_validation_sets and evaluates:
            valid_sets = build_valid_sets(
                data,
                tokenizer,
                sequence_length=config.batch.seq_length,
                seed=config.run.seed,
                num_samples=valid,
            )
    except CorruptDatasetError as error:
        # Files that the user named: reported as bad input, without a traceback.
        raise ValueError(str(error)) from error
    if tokenizer is not None:
        _warn_of_other_tokenizers([*built, *valid_sets.values()], tokenizer)
    if built[0] is None:
        raise ValueError("there is no data to train on: check --split and --data-path.")
    if evaluates and built[1] is None and not valid_sets:
        raise ValueError(
            "--eval-interval has no data to validate on: give --valid-data-path, or a --split "
            "with a second part."
        )
    _check_lengths(plan, built[0], valid_sets or {"": built[1]})
    train, valid, test = built
    if config.objective.reference_cache:
        from mcore_train.objectives.reference_cache import annotate_datasets

        train, valid, test = annotate_datasets(plan, built)
    return Datasets(
        train=train,
        valid=valid,
        test=test,
        valid_sets=valid_sets,
        sources=describe_sources(built[0]) if plan.family.dataset == "gpt" else (),
        config=data,
    )


def _build_sentences(
    plan: Plan, data: DataConfig, tokenizer: Tokenizer | None, common: dict[str, Any]
) -> Any:
    """Build the samples of models with an encoder."""
    config, kind = plan.config, plan.family.dataset
    if isinstance(config, T5TrainConfig):
        common["decoder_sequence_length"] = config.batch.decoder_seq_length
    else:
        assert isinstance(config, BertTrainConfig)
        common["has_pairs"] = "binary" in config.model.bert_heads
    assert kind != "gpt"
    return build_sentence_datasets(kind, data, tokenizer, config.masking, **common)


def num_samples(plan: Plan) -> tuple[int, int, int]:
    """Return the number of train, valid and test samples for which a run's data are built.

    ``--train-samples`` includes samples that do not fill a step, so that the order of the data
    does not depend on the batch size.
    """
    options = plan.config.evaluation
    test = options.eval_iters * plan.global_batch_size if options.interval else 0
    train = plan.config.batch.train_samples or plan.train_samples
    return train, 0 if plan.config.data.full_validation else test, test


def _warn_of_other_tokenizers(datasets: Sequence[Dataset], tokenizer: Tokenizer) -> None:
    """Warn if stored data were encoded by another tokenizer than the run's."""
    stored = {
        source.prefix
        for dataset in datasets
        if dataset is not None
        for source in prefixes(dataset)
        if getattr(source, "prefix", "")
    }
    if not stored:
        return
    fingerprint = tokenizer.fingerprint()
    others = sorted(each for each in stored if is_of_other_tokenizer(each, fingerprint))
    if others:
        log.warning(
            "by its manifest, %s was encoded by another tokenizer than this run's, so ids may "
            "mean other texts. Check --tokenizer-type and --tokenizer-model.",
            ", ".join(others),
        )


def _check_lengths(plan: Plan, train: Dataset, valid_sets: Mapping[str, Dataset]) -> None:
    """Refuse datasets that end before the run does, as several without weights can."""
    if plan.config.data.dataloader_type == "cyclic":
        return
    needed, valid, _ = num_samples(plan)
    if len(train) < needed:
        raise ValueError(
            f"the training data have {len(train)} samples, and the run takes {needed}: several "
            "datasets without weights are each used once. Give weights, --dataloader-type "
            "cyclic, or fewer --train-iters."
        )
    for name, dataset in valid_sets.items():
        if dataset is not None and len(dataset) < valid:
            raise ValueError(
                f"the validation data{name and f' {name}'} have {len(dataset)} samples, and a "
                f"validation takes {valid}: give fewer --eval-iters, or --full-validation."
            )
