"""Reads and writes adapter folders of Hugging Face PEFT.

``adapter_model.safetensors`` holds ``base_model.model.<module>.lora_A.weight``, ``lora_B`` and
for DoRA ``.lora_magnitude_vector``; ``adapter_config.json`` has rank, factor and base. The rows
of B and of magnitudes are those of the module's weight, so that the base's rules apply to them.
In PEFT all parts of a fused module share one A; in mcore each part has a separate A.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.json_files import json_bytes, read_json_object
from mcore_ckpt.mapping.adapters import MAGNITUDE, A, B, adapter_name, group_adapters
from mcore_ckpt.mapping.row_streams import HeldRows, Rows
from mcore_ckpt.mapping.rules import Link
from mcore_ckpt.mapping.views import RenamedRows, their_items
from mcore_ckpt.storage.files import DTYPE_NAMES, Item, cut_slabs, write_file
from mcore_ckpt.storage.paths import PEFT_CONFIG

TENSORS = "adapter_model.safetensors"
_BEFORE = "base_model.model."
_TRAINED = ".modules_to_save."
_TABLES = {"embedding.weight": "embedding", "head.weight": "head", "lm_head.bias": "head"}
"""Choice of --modules-to-save for each tensor that a run may train in addition to adapters."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "eva")
_UNKNOWN = {
    "target_parameters": "adapters of stacked experts",
    "bias": "trained biases",
    "lora_bias": "biases of adapters",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "repeated layers",
    "megatron_config": "adapters that Megatron split",
    "use_qalora": "adapters of quantized groups",
    "alora_invocation_tokens": "adapters that begin at a token",
}


@dataclass(frozen=True, slots=True)
class PeftAdapters:
    """Adapters of a PEFT folder under logical names."""

    rows: HeldRows
    config: dict[str, Any]
    """Rank, factor and targets, as in the index of an mcore step of adapters; without the
    base."""
    replaced: HeldRows
    """Tensors that were trained as a whole (``modules_to_save``); tables with new tokens are
    longer than the base's."""

    def check_tables(self, base: Rows) -> None:
        """Raise ValueError for replaced tensors that a run cannot load onto the base."""
        for name, entry in self.replaced.entries.items():
            if name not in _TABLES or entry.shape != base.entries[name].shape:
                raise ValueError(
                    f"the adapters replace {name} by a tensor of shape {list(entry.shape)} "
                    "(modules_to_save), which cannot be loaded: merge them with their base "
                    "first (mcore-ckpt convert hf-to-mcore)."
                )


def base_folder(folder: Path) -> Path:
    """Return the folder of the base model; ValueError if it is not on this machine."""
    name = _config(folder).get("base_model_name_or_path") or ""
    for candidate in (Path(name), folder / name):
        if name and candidate.is_dir():
            return candidate
    raise ValueError(
        f"{folder} holds adapters of {name or 'an unnamed model'}, which is not a folder on "
        f"this machine: write the path of the base into {PEFT_CONFIG} "
        "(base_model_name_or_path)."
    )


def read_adapters(folder: Path, links: Sequence[Link]) -> PeftAdapters:
    """Read the adapters of a folder.

    Raises:
        ValueError: if the folder uses an unsupported feature of PEFT, or modules that the base
            lacks.
        CheckpointError: if the file holds other tensors than adapters.
    """
    config = _checked(folder)
    by_name = {link.theirs: link for link in links}
    modules, replaced = _modules(folder, by_name)
    unknown = sorted(modules.keys() - {name.removesuffix(".weight") for name in by_name})
    if unknown:
        raise ValueError(
            f"{folder} has an adapter of {unknown[0]}, which is not a linear of the model in "
            f"{config['base_model_name_or_path']}: give the base that it was trained on."
        )
    _check_tied_head(folder, config, links)
    rank = max(kinds[A].shape[0] for kinds in modules.values())
    scales = {name: _scale(config, name, kinds[A].shape[0]) for name, kinds in modules.items()}
    scale = max(set(scales.values()), key=list(scales.values()).count)
    tensors: dict[str, Tensor] = {}
    for name, kinds in modules.items():
        link = replace(by_name[f"{name}.weight"], transposed=False)
        down, up = kinds[A], kinds[B]
        if scales[name] != scale:
            up = up * (scales[name] / scale)
        # Zero rows of A and columns of B extend all adapters to the largest rank.
        down = torch.nn.functional.pad(down, (0, 0, 0, rank - down.shape[0]))
        up = torch.nn.functional.pad(up, (0, rank - up.shape[1]))
        for weight, rows in _ours(link, up).items():
            tensors[adapter_name(weight, A)] = down
            tensors[adapter_name(weight, B)] = rows
        if MAGNITUDE in kinds:
            for weight, rows in _ours(link, kinds[MAGNITUDE]).items():
                tensors[adapter_name(weight, MAGNITUDE)] = rows
    weights = [weight for link in links for weight in link.ours]
    tables = sorted({_TABLES[name] for name in replaced if name in _TABLES})
    return PeftAdapters(
        HeldRows(tensors),
        {
            "peft": "dora" if config.get("use_dora") else "lora",
            "lora_dim": rank,
            "lora_alpha": scale * rank,
            "lora_dropout": config.get("lora_dropout", 0.0),
            "lora_target_modules": _patterns(group_adapters(tensors), weights),
            **({"modules_to_save": tables} if tables else {}),
        },
        HeldRows(replaced),
    )


def write_adapters(
    folder: Path,
    adapters: Mapping[str, Tensor],
    links: Sequence[Link],
    config: Mapping[str, Any],
    copies: Mapping[str, str],
) -> None:
    """Write a folder that PEFT reads.

    Args:
        folder: folder to write into.
        adapters: tensors of adapters and tables of --modules-to-save, by logical name.
        links: links of the base model.
        config: rank, factor and base.
        copies: originals of tied tensors of the base, by the name of the copy.

    Raises:
        ValueError: if routed experts have adapters, which PEFT stacks, or only some parts of a
            fused module have adapters.
    """
    by_weight = group_adapters(adapters)
    if any(".experts." in weight for weight in by_weight):
        raise ValueError(
            "PEFT has no format for adapters of routed experts that every version reads: merge "
            "them instead (convert mcore-to-hf)."
        )
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    saved: list[str] = []
    for link in links:
        if link.ours[0] in adapters:
            names = [link.theirs, *(copy for copy, of in copies.items() if of == link.theirs)]
            table = _theirs(link, {link.ours[0]: adapters[link.ours[0]]})
            # safetensors refuses shared memory: a tied head is written as a copy.
            tensors |= {f"{_BEFORE}{name}": table.clone() for name in names}
            saved += [name.rpartition(".")[0].rpartition(".")[2] for name in names]
        kinds = [by_weight.get(weight) for weight in link.ours]
        if not any(kinds):
            continue
        name = link.theirs.removesuffix(".weight")
        module = _joined(link, kinds, adapters, config["lora_dim"])
        ranks[name] = module[A].shape[0]
        tensors |= {f"{_BEFORE}{name}.{kind}": t for kind, t in module.items()}
    items = [
        Item(n, DTYPE_NAMES[t.dtype], tuple(t.shape), partial(cut_slabs, t))
        for n, t in tensors.items()
    ]
    write_file(folder / TENSORS, items, metadata={"format": "pt"})
    rank, alpha = config["lora_dim"], config["lora_alpha"]
    other_ranks = {
        name: rank_of_module for name, rank_of_module in ranks.items() if rank_of_module != rank
    }
    names = [link.theirs.removesuffix(".weight") for link in links]
    table = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config["base"],
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": config.get("lora_dropout", 0.0),
        "target_modules": _short(list(ranks), list(names)),
        "rank_pattern": other_ranks,
        "alpha_pattern": {
            name: alpha * rank_of_module / rank for name, rank_of_module in other_ranks.items()
        },
        "use_dora": config["peft"] == "dora",
        "use_rslora": False,
        "fan_in_fan_out": any(link.transposed for link in links),
        "bias": "none",
        "modules_to_save": sorted(set(saved)) or None,
        "ensure_weight_tying": bool(saved and copies),
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (folder / PEFT_CONFIG).write_bytes(json_bytes(table))


def _joined(
    link: Link,
    kinds: Sequence[Mapping[str, str] | None],
    adapters: Mapping[str, Tensor],
    rank: int,
) -> dict[str, Tensor]:
    """Join the adapters of a fused module's parts: A stacked, B block-diagonal."""
    present = [kind_names for kind_names in kinds if kind_names is not None]
    if len(present) < len(kinds):
        raise ValueError(
            f"{link.theirs} fuses {', '.join(link.ours)}, and only some of them have adapters, "
            "but PEFT has one adapter for all: merge them instead (convert mcore-to-hf)."
        )
    width = rank * len(present)
    parts, magnitudes = {}, {}
    for number, (weight, kind_names) in enumerate(zip(link.ours, present, strict=True)):
        up = adapters[kind_names[B]]
        first_column = number * rank
        parts[weight] = torch.nn.functional.pad(up, (first_column, width - first_column - rank))
        if MAGNITUDE in kind_names:
            magnitudes[weight] = adapters[kind_names[MAGNITUDE]]
    joined = {
        A: torch.cat([adapters[kind_names[A]] for kind_names in present]),
        B: _theirs(link, parts),
    }
    return joined | ({MAGNITUDE: _theirs(link, magnitudes)} if magnitudes else {})


def _theirs(link: Link, ours: Mapping[str, Tensor]) -> Tensor:
    (item,) = their_items([replace(link, transposed=False)], HeldRows(ours))
    return torch.cat(list(item.slabs())).contiguous()


def _ours(link: Link, theirs: Tensor) -> dict[str, Tensor]:
    rows: Rows = RenamedRows([link], HeldRows({link.theirs: theirs}))
    return {name: rows.rows(name, 0, entry.shape[0]) for name, entry in rows.entries.items()}


def _config(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / PEFT_CONFIG)


def _checked(folder: Path) -> dict[str, Any]:
    config = _config(folder)
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{folder} holds adapters with peft_type {config.get('peft_type')}: give LORA."
        )
    for name, what in _UNKNOWN.items():
        if config.get(name) not in (None, False, "none", [], {}):
            raise ValueError(f"{folder} has {what} ({name}), which are not supported here.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"{folder} was trained with init_lora_weights={start!r}, which changed the base "
            "too: convert it to plain LoRA with PEFT."
        )
    return config


def _modules(
    folder: Path, links: Mapping[str, Link]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Read the tensors of adapters, and the tensors that replace the base's.

    Args:
        folder: folder of the adapters.
        links: links of the base, by foreign name.

    Returns:
        Tensors of adapters by foreign module and kind; replaced tensors by logical name.
    """
    file = folder / TENSORS
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no {TENSORS}: save the adapters as safetensors.")
    modules: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {error}.") from None

    def link_of(name: str) -> Link | None:
        return links.get(name.removeprefix(_BEFORE).replace(_TRAINED, "."))

    # Visit tensors of the base first. Among them, trained modules come last, as they override
    # the copies that PEFT saves of resized tables.
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (link_of(item[0]) is None, _TRAINED in item[0])
    ):
        kind = next((k for k in (A, B, MAGNITUDE) if name.endswith(f".{k}")), None)
        if ".original_module." in name:
            continue
        if link := link_of(name):
            replaced |= _ours(link, tensor)
            continue
        if kind is None and any(torch.equal(tensor, table) for table in replaced.values()):
            continue  # the copy of a tied table
        if kind is None or not name.startswith(_BEFORE):
            raise CheckpointError(
                f"{file} holds {name}, which is neither a matrix or magnitude of a linear's "
                "adapter nor a tensor of the base."
            )
        module = name.removeprefix(_BEFORE).removesuffix(f".{kind}")
        modules.setdefault(module, {})[kind] = tensor
    for name, kinds in modules.items():
        if A not in kinds or B not in kinds:
            raise CheckpointError(f"{file} is damaged: the adapter of {name} lacks {A} or {B}.")
    if not modules:
        raise CheckpointError(f"{file} holds no adapters.")
    return modules, replaced


def _check_tied_head(folder: Path, config: Mapping[str, Any], links: Sequence[Link]) -> None:
    """Raise ValueError if only the embedding of a tied base was trained.

    Without ``ensure_weight_tying``, PEFT computes the head with the rows of the base then.
    """
    theirs = {name: link.theirs.removesuffix(".weight") for link in links for name in link.ours}
    if config.get("ensure_weight_tying") or "head.weight" in theirs:
        return
    saved = set(config.get("modules_to_save") or ())
    embedding = theirs.get("embedding.weight", "").rpartition(".")[2]
    # Other names than the base's modules are those of the tied head, which was trained too.
    if embedding in saved and saved <= {name.rpartition(".")[2] for name in theirs.values()}:
        raise ValueError(
            f"{folder} trained {embedding} (modules_to_save) without the head that its base "
            "ties to it, which is not supported here: train with ensure_weight_tying, or merge "
            "the adapters with PEFT (merge_and_unload)."
        )


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = value
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _patterns(adapted: Iterable[str], weights: Iterable[str]) -> list[str]:
    """Return the names of adapted linears, without the layer's number if all layers agree."""
    return _short([_stem(weight) for weight in adapted], [_stem(weight) for weight in weights])


def _short(adapted: Sequence[str], names: Sequence[str]) -> list[str]:
    chosen = set(adapted)
    patterns = set()
    for name in adapted:
        end = _behind_number(name)
        same_suffix = {other for other in names if other == end or other.endswith(f".{end}")}
        patterns.add(end if same_suffix <= chosen else name)
    return sorted(patterns)


def _behind_number(name: str) -> str:
    words = name.split(".")
    positions = [position for position, word in enumerate(words) if word.isdecimal()]
    return ".".join(words[positions[-1] + 1 :]) if positions else name


def _stem(weight: str) -> str:
    return weight.removesuffix(".weight")
