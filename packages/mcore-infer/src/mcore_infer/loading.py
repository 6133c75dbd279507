"""Loads a checkpoint folder as a model in eval mode, with its tokenizer.

The checkpoint contains the model's config, so no model flags are needed. Any rank grid can load
it: each rank reads the rows of its shards.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from mcore_ckpt.formats.json_files import read_json_object
from mcore_ckpt.mapping.adapters import find_base
from mcore_ckpt.save_load.loading import describe_checkpoint, load
from mcore_ckpt.save_load.quantized_folder import opened_quantized
from mcore_ckpt.save_load.rank_agreement import gather_json
from mcore_ckpt.storage.index import ADAPTER, Index
from mcore_ckpt.storage.paths import is_hf_folder, resolve_folder
from mcore_data.datasets.t5 import decoder_start
from mcore_data.tokenizers.building import load_tokenizer
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.engine.stages import own_stage
from mcore_infer.quantization.loading import (
    is_quantized,
    pack_weights_,
    packed_paths,
    quantized_linears,
    round_inputs_,
)
from mcore_models.config import config_from_dict
from mcore_models.description import ModelDescription
from mcore_models.families import FAMILIES, Family
from mcore_models.peft.attaching import attach_adapters
from mcore_models.peft.config import PeftConfig, is_adapter
from mcore_models.peft.experts import ExpertsAdapter
from mcore_models.peft.lora import LinearAdapter
from mcore_models.peft.stacking import StackedAdapters, stacked_config
from mcore_models.protocol import LanguageModel
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.rng import RngStreams
from mcore_parallel.sharding import Shard, named_shards

_NO_ADAPTERS = PeftConfig()
_NO_FOLDERS: Mapping[str, Path] = MappingProxyType({})
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode with its description, tokenizer and ranks."""

    model: LanguageModel
    description: ModelDescription
    tokenizer: Tokenizer | None
    """None: the checkpoint has no tokenizer."""
    folder: Path
    """The step folder that was read."""
    data: Axis = SINGLE
    """Ranks with the same part of the model, one in each replica."""
    world: Axis = SINGLE
    """All ranks of all replicas."""
    in_step: Axis = SINGLE
    """Ranks whose engines compute their steps together: ``world`` if replicas share experts,
    else this rank."""
    draft: LanguageModel | None = None
    """Draft model of speculative decoding."""
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Scales of keys and values in an fp8 cache, by layer; empty: the checkpoint has none."""
    adapters: StackedAdapters | None = None
    """Adapters that requests choose by name; None: the caller gave no adapters."""
    base: Path | None = None
    """Folder of the base model, if ``folder`` has adapters; None: ``folder`` has the model."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text, in addition to the tokenizer's end of document."""
        eos = self._small_file("generation_config.json").get("eos_token_id")
        ids = eos if isinstance(eos, list) else [eos]
        eod = None if self.tokenizer is None else self.tokenizer.eod
        return tuple(i for i in ids if isinstance(i, int) and i != eod)

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """Sampling options in generation_config.json of the folder, else of its base."""
        fields = self._small_file("generation_config.json")
        sampling = {name: fields.get(name) for name in _SAMPLED}
        return {
            name: value
            for name, value in sampling.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    @property
    def start(self) -> int:
        """First token of a T5's decoder: from the folder, else from its tokenizer, else 0."""
        for name in ("generation_config.json", "config.json"):
            start = self._small_file(name).get("decoder_start_token_id")
            if isinstance(start, int):
                return start
        start = None if self.tokenizer is None else decoder_start(self.tokenizer)
        return start or 0

    def _small_file(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the folder or of its base; empty if neither has the file."""
        for folder in (self.folder, self.base):
            if folder is not None and (folder / name).is_file():
                return read_json_object(folder / name)
        return {}


def load_model(
    path: str | Path,
    ctx: ParallelContext,
    *,
    step: int = 0,
    dtype: torch.dtype | None = None,
    checksums: bool = True,
    keep_codes: bool | None = None,
    takes_t5: bool = False,
    needs_experts: bool = False,
    families: Mapping[str, Family] = FAMILIES,
    adapters: Mapping[str, Path] = _NO_FOLDERS,
) -> LoadedModel:
    """Build the model of a checkpoint, load its weights, and return it with its tokenizer.

    Communicates over ``ctx.world``, all of whose ranks make this call. Adapters are not merged;
    their base model is read from the folder from which the adapters were trained.

    Args:
        path: a run folder, a step folder of one, a Hugging Face or a Megatron folder.
        ctx: the rank grid, without context parallelism; each pipeline rank gets its stage.
        step: step of a run folder; 0: the latest.
        dtype: dtype of the computation; None: bfloat16 on a GPU; on a CPU float64 for a
            checkpoint in float64, else float32.
        checksums: verify the checksums of all bytes read.
        keep_codes: multiply with the codes of quantized weights, instead of decoding the codes
            once; None: True on a GPU. Inputs are rounded by the method in both cases.
        takes_t5: whether the model may be a T5, which only ``t5_decoding`` runs.
        needs_experts: raise ValueError for a model without experts.
        families: model families by name.
        adapters: folders of LoRA adapters of this model, by name: they are stacked, and an
            engine applies to each request the adapter that the request names.

    Raises:
        ValueError: if there is no checkpoint, the checkpoint has no model config, or the model
            cannot be split over the rank grid.
        RuntimeError: if files are missing or damaged.
    """
    check_context(ctx)
    folder = resolve_folder(path, step, takes_any=True)
    index = describe_checkpoint(folder)
    if "model" not in index.extra:
        raise ValueError(
            f"{folder} does not describe its model (no 'model' in its index): load a "
            "checkpoint that mcore-train or mcore-ckpt convert wrote."
        )
    description = ModelDescription.from_dict(index.extra["model"], families)
    if needs_experts and not description.moe.num_experts:
        raise ValueError(
            f"{folder} has a model without experts: leave out --expert-model-parallel-size "
            "and --expert-tensor-parallel-size."
        )
    adapter = index.extra.get(ADAPTER, {})
    if adapter and adapters:
        raise ValueError(f"{folder} has adapters: with --lora-modules, load their base model.")
    peft = _peft_config(adapter)
    hf_base = folder if is_hf_folder(folder) else None
    stacked_configs = {
        name: _config_of_adapter(name, path, hf_base) for name, path in adapters.items()
    }
    if stacked_configs:
        peft = stacked_config(stacked_configs)
    compute_dtype = dtype or _dtype_for(ctx.device, index)
    model = _on_meta(description, ctx, compute_dtype, families, peft, takes_t5)
    reading: dict[str, Any] = {"world": ctx.world, "checksums": checksums, "cast": True}
    with ExitStack() as stack:
        quantized, scales, kv_scales = None, {}, {}
        if is_hf_folder(folder) and is_quantized(folder):
            quantized = stack.enter_context(opened_quantized(folder))
        if quantized is not None:
            scales, kv_scales = quantized_linears(model, quantized), quantized.kv_scales()
        keeps = ctx.device.type == "cuda" if keep_codes is None else keep_codes
        packed = packed_paths(scales) if keeps else frozenset()
        _allocate(model, ctx.device, packed)
        shards = {f"model.{n}": s for n, s in named_shards(model, ctx.data_axes()).items()}
        rest = {n: s for n, s in shards.items() if not any(p.data.is_meta for p in s.pieces)}
        # Weights that stay packed are loaded later, one linear at a time. load() checks that
        # every tensor of the folder is used, so it must ignore the packed ones of all stages.
        packed_names = {
            name for names in gather_json([*shards.keys() - rest], ctx.pp) for name in names
        }
        if stacked_configs:
            rest = {name: shard for name, shard in rest.items() if not is_adapter(name)}
        if adapter.get("base"):
            rest = _without_base(folder, adapter, rest, reading)
        load(folder, rest, ignore=("optimizer.", "rng.", *packed_names), **reading)
        if quantized is not None:

            def fill(weights: Mapping[str, Shard]) -> None:
                """Load the weights of one linear whose codes stay packed."""
                named = {f"model.{name}": shard for name, shard in weights.items()}
                # Stages have different numbers of linears, so each rank reads alone: the
                # collectives of load() would not match.
                world: dict[str, Any] = {"world": SINGLE} if ctx.pp.size > 1 else {}
                load(folder, named, ignore=("model.",), **reading | world)

            round_inputs_(model, {p: s for p, s in scales.items() if p not in packed})
            pack_weights_(model, {p: scales[p] for p in packed}, fill, ctx.device)
        stacked = None
        if stacked_configs:
            stacked = StackedAdapters(model, stacked_configs, ctx.device)
            for name, config in stacked_configs.items():
                single = _on_meta(description, ctx, compute_dtype, families, config)
                _load_adapter(adapters[name], single, ctx, {**reading, "adapter_base": hf_base})
                stacked.fill(name, single)
    model.eval()
    base = resolve_folder(adapter["base"]) if adapter.get("base") else None
    tokenizer = _tokenizer_of(folder)
    if tokenizer is None and base is not None:
        tokenizer = _tokenizer_of(base)
    is_shared = description.moe.num_experts and ctx.expert_tp.size * ctx.ep.size > ctx.tp.size
    ranks = {"data": ctx.dp, "world": ctx.world, "in_step": ctx.world if is_shared else SINGLE}
    return LoadedModel(
        model,
        description,
        tokenizer,
        folder,
        kv_scales=kv_scales,
        adapters=stacked,
        base=base,
        **ranks,
    )


def empty_model(
    description: ModelDescription,
    ctx: ParallelContext,
    dtype: torch.dtype,
    families: Mapping[str, Family] = FAMILIES,
    peft: PeftConfig = _NO_ADAPTERS,
) -> LanguageModel:
    """Build a model whose weights are all zero, without communication.

    Args:
        description: config and family of the model.
        ctx: the rank grid, without context parallelism.
        dtype: dtype of the computation.
        families: model families by name.
        peft: adapters to attach to the model's linears; none by default.

    Raises:
        ValueError: if the model does not predict next tokens.
    """
    model = _on_meta(description, ctx, dtype, families, peft)
    _allocate(model, ctx.device, frozenset())
    return model


def _on_meta(
    description: ModelDescription,
    ctx: ParallelContext,
    dtype: torch.dtype,
    families: Mapping[str, Family],
    peft: PeftConfig,
    takes_t5: bool = False,
) -> LanguageModel:
    is_t5 = description.family == "t5"
    if is_t5 and ctx.pp.size > 1:
        raise ValueError("a T5 runs on one stage: use --pipeline-model-parallel-size 1.")
    model: Any = families[description.family].build(
        description.config,
        ctx,
        vocab_size=description.vocab_size,
        moe=description.moe,
        device="meta",  # no memory and no random weights: the weights are loaded later
        dtype=dtype,
        stage=own_stage(description.config, ctx.pp),
    )
    if not isinstance(model, LanguageModel) and not (is_t5 and takes_t5):
        why = "has an encoder and a decoder" if is_t5 else "does not predict next tokens"
        use = "only mcore-infer generate runs it" if is_t5 else "it cannot generate"
        raise ValueError(f"a model of the family {description.family} {why}: {use}.")
    if peft.peft != "none":
        attach_adapters(model, peft, streams=RngStreams(0, ctx))
    return model


def _allocate(model: nn.Module, device: torch.device, packed: frozenset[str]) -> None:
    """Allocate zeros for all tensors except the weights of linears that stay packed."""
    for path, module in model.named_modules():
        if path not in packed:
            module.to_empty(device=device, recurse=False)
            continue
        meta_weight = module.get_parameter("weight")
        module.register_parameter("weight", None)  # hide the weight from to_empty
        module.to_empty(device=device, recurse=False)
        module.register_parameter("weight", meta_weight)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()  # padding is part of no logical tensor, and must be zero


def _without_base(
    folder: Path,
    adapter: Mapping[str, Any],
    shards: Mapping[str, Shard],
    reading: Mapping[str, Any],
) -> dict[str, Shard]:
    """Load the base model of adapters; return the shards of the trained tensors."""
    base = {name: shard for name, shard in shards.items() if not is_adapter(name)}
    config = _peft_config(adapter)
    load(find_base(folder, adapter), base, ignore=("optimizer.", "rng.", "fp8."), **reading)
    return {name: shard for name, shard in shards.items() if config.is_trained(name)}


def _peft_config(adapter: Mapping[str, Any]) -> PeftConfig:
    return config_from_dict(PeftConfig, {n: v for n, v in adapter.items() if n != "base"})


def _config_of_adapter(name: str, folder: Path, hf_base: Path | None) -> PeftConfig:
    adapter = describe_checkpoint(folder, hf_base).extra.get(ADAPTER)
    if not adapter:
        raise ValueError(
            f"--lora-modules {name}={folder} has no adapters: give a folder of Hugging Face "
            "PEFT, or a run of --peft lora."
        )
    config = _peft_config(adapter)
    if config.modules_to_save:
        raise ValueError(
            f"--lora-modules {name}={folder} also trained the modules "
            f"{', '.join(config.modules_to_save)}, which cannot differ between requests: merge "
            "the adapter with its base model (mcore-ckpt convert)."
        )
    return config


def _load_adapter(
    folder: Path, model: nn.Module, ctx: ParallelContext, reading: Mapping[str, Any]
) -> None:
    """Allocate and load the adapters of a model whose base stays on the meta device."""
    for module in model.modules():
        if isinstance(module, LinearAdapter | ExpertsAdapter):
            module.to_empty(device=ctx.device)
    named = named_shards(model, ctx.data_axes()).items()
    shards = {f"model.{name}": shard for name, shard in named if is_adapter(name)}
    load(folder, shards, ignore=("optimizer.", "rng.", "fp8."), **reading)


def check_context(ctx: ParallelContext) -> None:
    """Raise ValueError for rank grids that cannot generate token by token."""
    if ctx.config.context_parallel_size > 1:
        raise ValueError(
            "generation does not support --context-parallel-size: set it to 1. Every "
            "checkpoint can be loaded without it."
        )
    if ctx.config.sequence_parallel:
        raise ValueError("--sequence-parallel cannot split single tokens: leave it out.")


def _dtype_for(device: torch.device, index: Index) -> torch.dtype:
    if device.type == "cuda":
        return torch.bfloat16
    saved = {e.dtype for name, e in index.tensors.items() if name.startswith("model.")}
    return torch.float64 if saved == {"F64"} else torch.float32


def _tokenizer_of(folder: Path) -> Tokenizer | None:
    if (folder / "tokenizer").is_dir():
        return load_tokenizer(folder / "tokenizer")
    names = ("tokenizer.json", "tokenizer.model")
    has_tokenizer = is_hf_folder(folder) and any((folder / name).is_file() for name in names)
    return load_tokenizer(folder) if has_tokenizer else None
