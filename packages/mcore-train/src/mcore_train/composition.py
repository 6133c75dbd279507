"""``TrainConfig``: all options of a run, as one config object of each package that owns them.

The fields of all parts form one flat name space, the command line's; no two parts may have a
field of the same name. Only the standard library and the ``config`` modules of other packages
are imported, so that nothing here loads torch.
"""

import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

from mcore_base.options import idle_options, types_of
from mcore_ckpt.config import LocalConfig, RetentionConfig, StrictnessConfig
from mcore_data.config import DataConfig, FIMConfig, MaskingConfig, TokenizerConfig
from mcore_models.config import KernelConfig, RecomputeConfig, TransformerConfig
from mcore_models.encoder_config import BertConfig, T5Config
from mcore_models.families import BERT_FAMILY, GPT_FAMILY, T5_FAMILY, Family
from mcore_models.peft.config import PeftConfig
from mcore_models.qk_clip.config import QKClipConfig
from mcore_moe.config import MoEConfig
from mcore_parallel.config import DataParallelConfig, ParallelConfig
from mcore_parallel.offloading.config import OffloadConfig
from mcore_parallel.optimizers.config import (
    AdafactorConfig,
    AdamConfig,
    LionConfig,
    MainWeightsConfig,
    MuonConfig,
    ScheduleFreeConfig,
    SGDConfig,
    SoapConfig,
)
from mcore_parallel.pipeline_parallel.config import PipelineConfig
from mcore_parallel.precision.config import Fp8Config
from mcore_train.config import (
    BatchConfig,
    EvalConfig,
    LaunchConfig,
    LoadConfig,
    LogConfig,
    MemoryConfig,
    OptimizerConfig,
    ParameterRatesConfig,
    PrecisionConfig,
    ProfileConfig,
    RunConfig,
    SampleConfig,
    SaveConfig,
    ScheduleConfig,
    SpikeConfig,
    T5BatchConfig,
    VerifyConfig,
    WatchConfig,
)
from mcore_train.objectives.config import (
    DATA_OPTIONS,
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    ObjectiveConfig,
)
from mcore_train.resiliency.config import FaultToleranceConfig, InProcessConfig

Config = TypeVar("Config", bound="TrainConfig")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A training run: its model, batches, optimizer, layout, data and files."""

    model: TransformerConfig
    experts: MoEConfig = field(default_factory=MoEConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    qk_clipping: QKClipConfig = field(default_factory=QKClipConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    sgd: SGDConfig = field(default_factory=SGDConfig)
    lion: LionConfig = field(default_factory=LionConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)
    soap: SoapConfig = field(default_factory=SoapConfig)
    adafactor: AdafactorConfig = field(default_factory=AdafactorConfig)
    schedule_free: ScheduleFreeConfig = field(default_factory=ScheduleFreeConfig)
    parameter_rates: ParameterRatesConfig = field(default_factory=ParameterRatesConfig)
    main_weights: MainWeightsConfig = field(default_factory=MainWeightsConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    recomputation: RecomputeConfig = field(default_factory=RecomputeConfig)
    offloading: OffloadConfig = field(default_factory=OffloadConfig)
    parallelism: ParallelConfig = field(default_factory=ParallelConfig)
    data_parallelism: DataParallelConfig = field(default_factory=DataParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    fim: FIMConfig = field(default_factory=FIMConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    samples: SampleConfig = field(default_factory=SampleConfig)
    saving: SaveConfig = field(default_factory=SaveConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    local_saving: LocalConfig = field(default_factory=LocalConfig)
    loading: LoadConfig = field(default_factory=LoadConfig)
    strictness: StrictnessConfig = field(default_factory=StrictnessConfig)
    logging: LogConfig = field(default_factory=LogConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    profiling: ProfileConfig = field(default_factory=ProfileConfig)
    run: RunConfig = field(default_factory=RunConfig)
    watching: WatchConfig = field(default_factory=WatchConfig)
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    in_process: InProcessConfig = field(default_factory=InProcessConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedConfig(TrainConfig):
    """All options of a run, and those of its verification."""

    verification: VerifyConfig = field(default_factory=VerifyConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class BertTrainConfig(TrainConfig):
    """A training run of a BERT."""

    model: BertConfig
    masking: MaskingConfig = field(default_factory=MaskingConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class T5TrainConfig(TrainConfig):
    """A training run of a T5."""

    model: T5Config
    batch: T5BatchConfig = field(default_factory=T5BatchConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedT5Config(T5TrainConfig):
    """All options of a run of a T5, and those of its verification."""

    verification: VerifyConfig = field(default_factory=VerifyConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedBertConfig(BertTrainConfig):
    """All options of a run of a BERT, and those of its verification."""

    verification: VerifyConfig = field(default_factory=VerifyConfig)


Verified = VerifiedConfig | VerifiedBertConfig | VerifiedT5Config
"""Options of a verification."""


@dataclass(frozen=True, slots=True)
class Command:
    """Model family and options of ``mcore-train NAME``."""

    summary: str
    """For the program's help."""
    family: Family
    run: type[TrainConfig]
    verified: type[VerifiedConfig | VerifiedBertConfig | VerifiedT5Config]
    """The options of ``run`` and those of ``mcore-train verify``."""
    beginning: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of this command, which recipes and flags override."""
    needs: str = ""
    """A required option and a description of its value, as errors print them; empty: none."""


FAMILY_COMMANDS: Mapping[str, Command] = {
    "gpt": Command(
        "train a GPT: dense or mixture of experts, any layout",
        GPT_FAMILY,
        TrainConfig,
        VerifiedConfig,
    ),
    "mamba": Command(
        "train Mamba-2 layers, alone or in a hybrid stack",
        GPT_FAMILY,
        TrainConfig,
        VerifiedConfig,
        {"position_embedding_type": "none"},  # layers with a state need no positions
        "--hybrid-override-pattern, one letter a layer, such as M*M-",
    ),
    "bert": Command(
        "train a BERT on hidden tokens and the order of sentences",
        BERT_FAMILY,
        BertTrainConfig,
        VerifiedBertConfig,
    ),
    "t5": Command(
        "train a T5 on spans cut out of texts", T5_FAMILY, T5TrainConfig, VerifiedT5Config
    ),
}
"""Training commands by name; mamba trains a GPT with Mamba-2 layers."""


@cache
def field_types(config_type: type = TrainConfig) -> Mapping[str, Any]:
    """Map every field of all parts to its type, in the order of the help text.

    Raises:
        AssertionError: if two parts own a field of one name.
    """
    types_by_name: dict[str, Any] = {}
    for part in types_of(config_type).values():
        kinds = types_of(part)
        for name in (each.name for each in fields(part)):
            assert name not in types_by_name, f"two parts of {config_type.__name__} own {name}"
            types_by_name[name] = kinds[name]
    return types_by_name


def flag_names(config_type: type = TrainConfig) -> set[str]:
    """List every flag of a command, with the ``--no-`` form of switches."""
    names = set()
    for name, kind in field_types(config_type).items():
        dashed = name.replace("_", "-")
        names.add(f"--{dashed}")
        if kind is bool:
            names.add(f"--no-{dashed}")
    return names


def parts(config: object) -> list[Any]:
    """Return the parts of a run's config, such as its ``BatchConfig``."""
    return [getattr(config, part.name) for part in fields(config)]  # pyrefly: ignore


def without_idle_options(config: Config, kept: Collection[str] = ()) -> Config:
    """Return the config with options of unused features at their defaults, except ``kept``."""
    types = [type(part) for part in parts(config)]
    idle = idle_options(flat(config), types) - set(kept)
    changed = {}
    for part in fields(config):
        value = getattr(config, part.name)
        defaults = {f.name: f.default for f in fields(value) if f.name in idle}
        if any(getattr(value, name) != default for name, default in defaults.items()):
            changed[part.name] = replace(value, **defaults)
    return replace(config, **changed)


def flat(config: object) -> dict[str, Any]:
    """Flatten the parts of a config into one table, field to value."""
    table = {}
    for part in fields(config):  # pyrefly: ignore
        value = getattr(config, part.name)
        assert is_dataclass(value)
        table |= {f.name: getattr(value, f.name) for f in fields(value)}
    return table


def compose(
    values: Mapping[str, Any], config_type: type[TrainConfig] = TrainConfig
) -> TrainConfig:
    """Build a config from a flat table; fields that it lacks keep their defaults.

    Raises:
        ValueError: for a name that no part owns, and from the checks of the parts.
    """
    known = field_types(config_type)
    values = {**values, **DATA_OPTIONS.get(values.get("objective", ""), {})}
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"no option is called {unknown[0]}.")
    parts = {}
    for part_name, part in types_of(config_type).items():
        names = {f.name for f in fields(part)}
        parts[part_name] = part(**{n: _as(known[n], values[n]) for n in names & set(values)})
    return config_type(**parts)


def _as(kind: Any, value: Any) -> Any:
    """Convert a JSON or TOML value to the type of a field: lists become tuples."""
    is_tuple = isinstance(kind, types.GenericAlias) and kind.__origin__ is tuple
    if is_tuple and isinstance(value, list):
        return tuple(value)
    return float(value) if kind is float and isinstance(value, int) else value
