"""Options that do something only beside others, and so nothing where those are off.

One table. What a layer or a kernel could do with an option is checked by its own package;
here stand the switches that turn whole groups of options on.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from mcore_base.field_checks import flag
from mcore_data.config import FILES, WITHOUT_FILES
from mcore_models.logical_tensors import is_gated
from mcore_moe.config import MoEConfig
from mcore_train.composition import TrainConfig, flat, optimizer_parts

Config = TypeVar("Config", bound=TrainConfig)


@dataclass(frozen=True, slots=True)
class Switch:
    """What a group of options needs."""

    flags: str
    """As a message names it."""
    is_on: Callable[[TrainConfig], object]
    options: tuple[str, ...]


def _letters(config: TrainConfig, letters: str) -> bool:
    return bool(set(config.model.hybrid_override_pattern) & set(letters))


SWITCHES = (
    Switch(
        "--num-experts",
        lambda c: c.experts.num_experts,
        tuple(field.name for field in fields(MoEConfig) if field.name != "num_experts"),
    ),
    Switch(
        "--multi-latent-attention",
        lambda c: c.model.multi_latent_attention,
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    ),
    Switch(
        "M or P in --hybrid-override-pattern",
        lambda c: _letters(c, "MP"),
        (
            *("mamba_state_dim", "mamba_head_dim", "mamba_num_heads", "mamba_num_groups"),
            *("mamba_conv_kernel", "mamba_conv_bias", "mamba_proj_bias", "mamba_norm"),
            *("mamba_chunk_size", "mamba_dt_limit", "mamba_dt_min"),
            *("mamba_dt_max", "mamba_dt_init_floor"),
        ),
    ),
    Switch(
        "G in --hybrid-override-pattern",
        lambda c: _letters(c, "G"),
        (
            *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
            *("linear_value_head_dim", "linear_conv_kernel_dim"),
        ),
    ),
    Switch(
        "--rope-type yarn, dynamic or longrope",
        lambda c: c.model.rope_type != "rope",
        ("rotary_scaling_factor", "original_max_position_embeddings"),
    ),
    Switch(
        "--rope-type yarn",
        lambda c: c.model.rope_type == "yarn",
        (
            *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
            "yarn_correction_range_round_to_int",
        ),
    ),
    Switch(
        "--rope-type yarn or longrope",
        lambda c: c.model.rope_type in ("yarn", "longrope"),
        ("rope_attention_factor",),
    ),
    Switch(
        "--use-rope-scaling",
        lambda c: c.model.use_rope_scaling,
        (
            *("rope_scaling_factor", "rope_scaling_low_freq_factor"),
            *("rope_scaling_high_freq_factor", "rope_scaling_original_max_position_embeddings"),
        ),
    ),
    Switch(
        "--attention-temperature-span",
        lambda c: c.model.attention_temperature_span,
        ("attention_temperature_scale", "attention_temperature_layers"),
    ),
    Switch("--qk-layernorm", lambda c: c.model.qk_layernorm, ("qk_norm_width",)),
    Switch(
        "a gate (--swiglu)",
        lambda c: is_gated(c.model),
        ("activation_func_clamp_value", "glu_linear_offset"),
    ),
    Switch("--mtp-num-layers", lambda c: c.model.mtp_num_layers, ("mtp_loss_scaling_factor",)),
    Switch(
        "--peft lora or dora",
        lambda c: c.peft.peft != "none",
        ("lora_target_modules", "lora_dim", "lora_alpha", "lora_dropout", "peft_base_bits"),
    ),
    *(
        Switch(
            f"--optimizer {name}",
            lambda c, name=name: c.optimizer.optimizer == name,
            tuple(field.name for field in fields(part)),
        )
        for name, part in optimizer_parts().items()
    ),
    Switch(
        "--weight-decay-incr-style linear or cosine",
        lambda c: c.optimizer.weight_decay_incr_style != "constant",
        ("start_weight_decay", "end_weight_decay"),
    ),
    Switch(
        "--lr-decay-style WSD",
        lambda c: c.schedule.lr_decay_style == "WSD",
        ("lr_wsd_decay_style",),
    ),
    Switch(
        "--optimizer-cpu-offload",
        lambda c: c.offloading.optimizer_cpu_offload,
        ("optimizer_offload_fraction",),
    ),
    Switch(
        "--cuda-graph-impl full_iteration or local",
        lambda c: c.run.cuda_graph_impl != "none",
        ("cuda_graph_warmup_steps",),
    ),
    Switch(
        "--tokenizer-type TikTokenizer",
        lambda c: c.tokenizer.tokenizer_type == "TikTokenizer",
        ("tiktoken_pattern", "tiktoken_num_special_tokens"),
    ),
    Switch(
        "--tokenizer-type of one that reads files",
        lambda c: c.tokenizer.tokenizer_type not in WITHOUT_FILES,
        FILES,
    ),
    Switch("--mock-data", lambda c: c.data.mock_data, ("mock_vocab_size",)),
    Switch(
        "--fim-data",
        lambda c: c.fim.fim_data,
        (
            *("fim_rate", "fim_spm_rate", "fim_prefix_token", "fim_middle_token"),
            *("fim_suffix_token", "fim_pad_token"),
        ),
    ),
    Switch(
        "--sample-interval",
        lambda c: c.samples.sample_interval,
        ("sample_prompts", "sample_num_tokens", "sample_temperature"),
    ),
    Switch("--async-save", lambda c: c.saving.async_save, ("async_save_timeout_minutes",)),
    Switch(
        "--save", lambda c: c.saving.save, ("auto_resume", "save_retain_last", "tensorboard")
    ),
)
"""Every group, by what turns it on."""


def find_idle_options(config: TrainConfig) -> Iterator[str]:
    """Name the options that differ from their defaults and have no effect, a line a switch."""
    for switch, names in idle_options(config):
        have, them = ("have", "them") if len(names) > 1 else ("has", "it")
        yield (
            f"{' and '.join(map(flag, names))} {have} no effect without {switch.flags}: give "
            f"that, or leave {them} out."
        )


def idle_options(config: TrainConfig) -> Iterator[tuple[Switch, list[str]]]:
    """Yield the switches that are off, with the fields of theirs that are not at defaults."""
    values, defaults = flat(config), _defaults(config)
    for switch in SWITCHES:
        names = [name for name in switch.options if values[name] != defaults[name]]
        if names and not switch.is_on(config):
            yield switch, names


def without_idle_options(config: Config, kept: Collection[str] = ()) -> Config:
    """Return the same run with defaults in the place of what has no effect, less ``kept``."""
    idle = {name for _, names in idle_options(config) for name in names} - set(kept)
    defaults = _defaults(config)
    parts = {}
    for part in fields(config):
        value = getattr(config, part.name)
        own = {field.name: defaults[field.name] for field in fields(value)}
        changes = {name: default for name, default in own.items() if name in idle}
        parts |= {part.name: replace(value, **changes)} if changes else {}
    return replace(config, **parts)


def _defaults(config: TrainConfig) -> dict[str, object]:
    parts = [getattr(config, part.name) for part in fields(config)]
    return {field.name: field.default for part in parts for field in fields(part)}
