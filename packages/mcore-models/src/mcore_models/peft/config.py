"""``PeftConfig``: linears that get adapters, and the adapters' rank. Standard library only.

Linears are named by the logical names of their matrices without ``.weight``:
``blocks.7.attention.qkv.q``, ``blocks.7.mlp.fc1.gate``, ``blocks.7.moe.experts.3.fc2``. A
pattern matches every linear whose name contains its words in sequence, separated by dots:
``q``, ``attention``, ``blocks.7.mlp``, ``experts``, ``blocks.[0-3].*.proj``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from mcore_base.options import Because, Options, Rule, option
from mcore_models.parameter_kinds import tensor_kind

ALL_LINEAR = "all-linear"
"""Every linear of the layers except routed experts."""

ADAPTER = "adapter"
"""Name of the adapter's submodule in a linear or in a layer's experts."""

BLOCK = 64
"""Columns of a quantized base that share a float32 scale."""

OTHER_WORDS: Mapping[str, str] = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "proj",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "fc2",
    "q_a_proj": "q_down",
    "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "kv_down",
    "kv_b_proj": "kv_up",
    "linear_qkv": "qkv",
    "linear_proj": "proj",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "embed_tokens": "embedding",
    "lm_head": "head",
}
"""Our word for each name of Hugging Face and Megatron."""

TABLES: Mapping[str, tuple[str, ...]] = {
    "embedding": ("embedding.weight",),
    "head": ("head.weight", "lm_head.bias"),
}
"""Choices of --modules-to-save, and their logical tensors; a model may lack some of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig(Options):
    """Adapters that are trained while the model's weights are frozen."""

    peft: Literal["none", "lora", "dora"] = option(
        "none",
        excludes={
            "save_hf": Because(
                "which writes whole models",
                instead="convert a checkpoint (mcore-ckpt convert)",
            )
        },
    )
    """Train adapters of a frozen model: matrices of low rank (lora), or matrices of low rank
    and a magnitude of each output (dora). none: train the model itself."""

    lora_target_modules: tuple[str, ...] = option(
        (ALL_LINEAR,), part_of={"peft": ("lora", "dora")}
    )
    """Linears with adapters: patterns of words in their names, such as q v, attention.proj,
    mlp, experts or q_proj; all-linear: every linear of the layers except routed experts."""

    lora_dim: int = option(32, minimum=1, part_of={"peft": ("lora", "dora")})
    """Rank of the adapters, 1 or more."""

    lora_alpha: float = option(32.0, above=0, part_of={"peft": ("lora", "dora")})
    """The output of adapters is multiplied by --lora-alpha / --lora-dim; above 0."""

    lora_dropout: float = option(
        0.0, minimum=0, below=1, part_of={"peft": ("lora", "dora")}, shrinks_to=0.0
    )
    """Probability of dropping an element of an adapter's input, 0 to below 1."""

    modules_to_save: tuple[str, ...] = option((), part_of={"peft": ("lora", "dora")})
    """Tables that are trained in addition to the adapters and saved with them, for example for
    new tokens: embedding (embed_tokens), head (lm_head). A tied head is the embedding."""

    peft_base_bits: int = option(
        0,
        part_of={"peft": ("lora", "dora")},
        excludes={
            "fp8_format": Because("as it has no casts of quantized weights", "e4m3", "hybrid"),
            "cuda_graph_impl": Because(
                "which requires weights at fixed addresses", "full_iteration", "local"
            ),
            "sample_interval": Because("as it cannot copy quantized weights"),
        },
        shrinks_to=0,
    )
    """Bits of the frozen weights of linears with adapters, and of routed experts: 8 or 4
    (QLoRA) stores these weights quantized and dequantizes each for its GEMMs; 0: not
    quantized."""

    rules = (
        Rule(
            ("peft_base_bits",),
            lambda v: v.peft_base_bits not in (0, 4, 8),
            "--peft-base-bits {peft_base_bits} must be 4, 8 or 0.",
        ),
        Rule(
            ("lora_target_modules",),
            lambda v: not v.lora_target_modules,
            "--lora-target-modules is empty: give at least one pattern, such as all-linear.",
        ),
        Rule(
            ("modules_to_save",),
            lambda v: any(
                OTHER_WORDS.get(name, name) not in TABLES for name in v.modules_to_save
            ),
            "--modules-to-save {modules_to_save}: use embedding, head, or both.",
        ),
        Rule(
            ("modules_to_save", "is_fully_sharded"),
            lambda v: v.modules_to_save and v.is_fully_sharded,
            "--modules-to-save {modules_to_save} does not support fully sharded weights: use "
            "--use-distributed-optimizer.",
        ),
        Rule(
            ("peft_base_bits", "is_fully_sharded"),
            lambda v: v.peft_base_bits and v.is_fully_sharded,
            "--peft-base-bits {peft_base_bits} does not support fully sharded weights: use "
            "--use-distributed-optimizer.",
        ),
    )

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        return self.lora_alpha / self.lora_dim

    @property
    def tables(self) -> tuple[str, ...]:
        """Logical tensors of ``modules_to_save``; a model may lack some of them."""
        chosen = (TABLES[OTHER_WORDS.get(name, name)] for name in self.modules_to_save)
        return tuple(tensor for tensors in chosen for tensor in tensors)

    def is_trained(self, name: str) -> bool:
        """Return whether a logical tensor is trained: of an adapter or of modules_to_save."""
        return is_adapter(name) or name.removeprefix("model.") in self.tables

    def is_target(self, name: str) -> bool:
        """Return whether a linear gets an adapter."""
        return any(is_meant(pattern, name) for pattern in self.lora_target_modules)


def is_meant(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a linear, named by its matrix without ``.weight``."""
    if pattern == ALL_LINEAR:
        return ".experts." not in name
    words = name.split(".")
    pattern_words = OTHER_WORDS.get(pattern, pattern).split(".")
    count = len(pattern_words)
    return any(
        all(map(fnmatchcase, words[start : start + count], pattern_words))
        for start in range(len(words) - count + 1)
    )


def linears(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the linears that can have an adapter: names of matrices without ``.weight``."""
    return [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if "blocks" in name.split(".") and tensor_kind(name, shape) == "matrix"
    ]


def adapter_shapes(
    config: PeftConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's trained tensors: adapters and ``modules_to_save``.

    Args:
        config: targets and rank.
        shapes: of the model's logical tensors.
    """
    tables = config.tables if config.peft != "none" else ()
    trained = {name: shapes[name] for name in tables if name in shapes}
    for name in filter(config.is_target, linears(shapes) if config.peft != "none" else ()):
        rows, columns = shapes[f"{name}.weight"]
        trained |= {
            f"{name}.lora_A.weight": (config.lora_dim, columns),
            f"{name}.lora_B.weight": (rows, config.lora_dim),
        }
        if config.peft == "dora":
            trained[f"{name}.lora_magnitude_vector"] = (rows,)
    return trained


def is_adapter(name: str) -> bool:
    """Return whether a logical tensor belongs to an adapter."""
    return ADAPTER in name.split(".")


def without_target(config: PeftConfig, names: Iterable[str]) -> list[str]:
    """Return the patterns of ``lora_target_modules`` that match none of the linears."""
    names = list(names)
    return [
        pattern
        for pattern in config.lora_target_modules
        if not any(is_meant(pattern, name) for name in names)
    ]
