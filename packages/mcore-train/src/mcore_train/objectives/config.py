"""Options of objectives: the objective, its frozen model, and its coefficients."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from mcore_base.options import Options, Rule, When, option

OBJECTIVES = MappingProxyType(
    {
        "pretrain": "mcore_train.objectives.objective:Objective",
        "sft": "mcore_train.objectives.objective:SupervisedFineTuning",
        "dpo": "mcore_train.objectives.dpo:DPO",
        "distill": "mcore_train.objectives.distillation:Distillation",
        "grpo": "mcore_train.objectives.grpo:GRPO",
    }
)
"""Classes by ``--objective``."""

DATA_OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "sft": {"sft": True},
        "dpo": {"preferences": True},
        "grpo": {"dataloader_type": "external"},
    }
)
"""Options that an objective turns on for its kind of data."""

_PACKING = (
    *("sft", "preferences"),
    *("reset_attention_mask", "dataloader_inter_document_masking"),
)
"""Options that put several documents into a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig(Options):
    """Objective of a run, and the frozen model that it compares with."""

    objective: str = "pretrain"
    """Loss to minimize. pretrain: cross-entropy of every token; sft: of the assistant's tokens
    in chats; dpo: direct preference optimization; distill: divergence from a teacher's
    distribution; grpo: group relative policy optimization, with rewards of texts that the model
    writes. Or a class of your own, module:Class or FILE.py:Class."""
    reference_model: str = option(
        "",
        needs=(
            When(
                "objective",
                lambda name: name not in ("pretrain", "sft"),
                "--objective dpo, grpo or distill",
            ),
        ),
    )
    """Folder of the frozen model, which is the reference of dpo and grpo and the teacher of
    distill: a run folder or a Hugging Face folder, of any depth and width and the same
    vocabulary. Empty with dpo and grpo: the model with its adapters off (--peft), or else the
    weights that the run starts from."""
    reference_cache: str = option(
        "",
        needs=(
            When(
                "objective",
                lambda name: name not in ("pretrain", "sft", "grpo"),
                "--objective dpo or distill",
            ),
        ),
    )
    """Folder with the stored results of the frozen model for each sample, written by
    mcore-train reference with the same options; the run then holds no frozen model."""

    rules = (
        Rule(
            ("reference_cache", "data_mixture_path", "dataloader_type"),
            lambda v: (
                v.reference_cache
                and (v.data_mixture_path or v.multiple_validation_sets or v.has_batch_sizes)
            ),
            "--reference-cache stores samples in a fixed order: leave out --data-mixture-path, "
            "--multiple-validation-sets and changing batch sizes.",
        ),
        Rule(
            ("objective",),
            lambda v: v.objective not in OBJECTIVES and ":" not in v.objective,
            "--objective {objective}: unknown objective; use "
            + ", ".join(OBJECTIVES)
            + ", or module:Class of your own.",
        ),
        Rule(
            ("objective", "mtp_num_layers"),
            lambda v: v.objective not in ("pretrain", "sft") and v.mtp_num_layers,
            "--objective {objective} scores only the next token: leave --mtp-num-layers out.",
        ),
        Rule(
            ("objective", "cuda_graph_impl"),
            lambda v: v.objective not in ("pretrain", "sft") and v.cuda_graph_impl != "none",
            "--objective {objective} adds tensors to each batch, which --cuda-graph-impl "
            "{cuda_graph_impl} does not record: use --cuda-graph-impl none.",
        ),
        Rule(
            ("objective", "label_smoothing", "z_loss_coeff"),
            lambda v: (
                v.objective not in ("pretrain", "sft") and (v.label_smoothing or v.z_loss_coeff)
            ),
            "--label-smoothing and --z-loss-coeff change the loss of --objective pretrain and "
            "sft, which --objective {objective} does not train: leave them out.",
        ),
        Rule(
            ("batch_invariant_mode", *_PACKING),
            lambda v: v.batch_invariant_mode and any(getattr(v, name) for name in _PACKING),
            "--batch-invariant-mode does not cover packed documents: leave it out, or --sft, "
            "--preferences, --reset-attention-mask and --dataloader-inter-document-masking.",
        ),
        Rule(
            ("objective", "reference_model", "reference_cache"),
            lambda v: v.objective == "distill" and not (v.reference_model or v.reference_cache),
            "--objective distill needs a teacher: give its folder by --reference-model, or its "
            "stored distributions by --reference-cache.",
        ),
        Rule(
            ("objective", "data_path", "preferences"),
            lambda v: v.objective == "dpo" and not v.sources,
            "--objective dpo reads pairs: give --data-path, the --output-prefix of mcore-data "
            "prepare-preferences.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOConfig(Options):
    """Options of direct preference optimization."""

    part_of: ClassVar = {"objective": "dpo"}

    dpo_beta: float = option(0.1, above=0)
    """Strength with which the trained model is kept close to the reference model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationConfig(Options):
    """Options of distillation."""

    part_of: ClassVar = {"objective": "distill"}

    distill_temperature: float = option(1.0, above=0)
    """Divisor of the logits of both models; the loss is multiplied by its square."""
    distill_weight: float = option(1.0, above=0, maximum=1)
    """Weight of the divergence from the teacher in the loss; the rest is the cross-entropy of
    the data."""
    distill_top_k: int = option(0, minimum=0)
    """Compare only the teacher's k most probable tokens and the sum of all others, instead of
    the whole vocabulary; 0: the whole vocabulary. --reference-cache stores these tokens."""

    rules = (
        Rule(
            ("distill_top_k", "reference_cache"),
            lambda v: v.reference_cache and not v.distill_top_k,
            "--reference-cache stores the teacher's most probable tokens: give their number by "
            "--distill-top-k, such as 32.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig(Options):
    """Options of group relative policy optimization."""

    part_of: ClassVar = {"objective": "grpo"}

    prompts: str = ""
    """JSONL file; each line has the key prompt, and any other keys that the reward reads."""
    reward: str = ""
    """Reward function, module:function or FILE.py:function. It is called with a prompt, a
    completion and the prompt's record, and returns a number."""
    grpo_group_size: int = option(8, minimum=2)
    """Texts that the model writes for each prompt; must divide --global-batch-size. Megatron's
    default: 2."""
    grpo_iterations: int = option(1, minimum=1)
    """Steps on the same texts before new ones are written. Megatron's default: 2."""
    grpo_max_tokens: int = option(128, minimum=1)
    """Largest number of tokens of a text."""
    grpo_temperature: float = option(1.0, above=0)
    """Sampling temperature of the texts."""
    grpo_clamp_eps_lower: float = option(0.2, above=0, below=1)
    """Clipping range of a token's probability ratio below 1. Megatron's default: 0.01."""
    grpo_clamp_eps_upper: float = option(0.2, above=0)
    """Clipping range of the ratio above 1. Megatron's default: 0.01."""
    grpo_kl_beta: float = option(0.04, minimum=0)
    """Coefficient of the divergence from the reference model; 0: no reference model. Megatron's
    default: 0.001."""

    rules = (
        Rule(
            ("objective", "prompts", "reward"),
            lambda v: v.objective == "grpo" and not (v.prompts and v.reward),
            "--objective grpo needs --prompts FILE.jsonl and --reward module:function.",
        ),
        Rule(
            ("grpo_group_size", "global_batch_size"),
            lambda v: v.global_batch_size % v.grpo_group_size or not v.global_batch_size,
            "--global-batch-size {global_batch_size} must be a multiple of --grpo-group-size "
            "{grpo_group_size}: a step has whole groups of texts.",
        ),
        Rule(
            ("grpo_group_size", "rampup_batch_size", "step_batch_size_schedule"),
            lambda v: v.has_batch_sizes,
            "--objective grpo writes one number of texts for all steps: leave "
            "--rampup-batch-size and --step-batch-size-schedule out.",
        ),
        Rule(
            ("objective", "spike_policy"),
            lambda v: v.objective == "grpo" and v.spike_policy == "rewind",
            "--spike-policy rewind would train weights of an earlier step on texts of later "
            "weights: use skip or stop with --objective grpo.",
        ),
        Rule(
            ("grpo_max_tokens", "seq_length"),
            lambda v: v.grpo_max_tokens >= v.seq_length,
            "--grpo-max-tokens {grpo_max_tokens} leaves no room for a prompt in --seq-length "
            "{seq_length}: use less.",
        ),
        Rule(
            ("grpo_group_size", "expert_model_parallel_size"),
            lambda v: v.expert_model_parallel_size > 1,
            "--objective grpo: ranks write texts of different lengths, and experts split by "
            "--expert-model-parallel-size need all ranks in each step: use 1.",
        ),
        Rule(
            ("grpo_group_size", "interval"),
            lambda v: v.interval > 0,
            "--objective grpo has no validation data: leave --eval-interval out.",
        ),
    )
