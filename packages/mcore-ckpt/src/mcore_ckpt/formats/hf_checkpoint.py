"""Opens Hugging Face folders: a model of any known family, or PEFT adapters with their base.

The family reads a plain folder (head for next tokens, no quantization) directly.
``recognition`` recognizes other folders; the modules that handle these are imported only for
folders that need them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_ckpt.conversion.options import ConvertOptions
from mcore_ckpt.families import find_family, inference_fields, stored_model, unknown_fields
from mcore_ckpt.families.common.fields import CARRIED
from mcore_ckpt.families.common.shapes import check_counts
from mcore_ckpt.formats.hf_folder import not_carried, read_hf_folder, small_files
from mcore_ckpt.formats.open_checkpoint import (
    OpenCheckpoint,
    cast_rows,
    link_tensors,
    open_rows,
)
from mcore_ckpt.formats.recognition import (
    FUSED_EXPERTS,
    has_text_tower,
    is_quantized,
    is_state_spaces_release,
    other_head,
)
from mcore_ckpt.mapping.row_streams import Rows, Source
from mcore_ckpt.mapping.rules import Link, expand, unstacked
from mcore_ckpt.storage.files import Reader


@contextmanager
def open_hf(path: Path, options: ConvertOptions) -> Iterator[OpenCheckpoint]:
    """Open a folder with config.json and weights; see ``sources.opened``."""
    folder = read_hf_folder(path)
    config, tensors = dict(folder.config), folder.tensors
    if is_state_spaces_release(config):
        from mcore_ckpt.families.recurrent.mamba2 import released

        config = released(config)
    if has_text_tower(config):
        from mcore_ckpt.formats.text_towers import text_tower

        config, tensors = text_tower(config, tensors)
    check_counts(config, (entry.shape for entry in tensors.values()), "config.json")
    carried = config  # families do not read the fields of quantization and heads, removed below
    quantization, widen = "", None
    if is_quantized(config, folder.path):
        from mcore_ckpt.formats.quantization import take_quantization

        config, quantization, widen = take_quantization(config, folder.path)
    head: dict[str, Any] = {}
    head_tensors = {}
    if other_head(config) is not None:
        from mcore_ckpt.formats.model_heads import take_head_off

        bare = take_head_off(config, tensors)
        config, tensors, head_tensors, head = bare.config, bare.tensors, bare.head, bare.record
    unread = unknown_fields(config) if options.keep_unknown_config_fields else {}
    known = {name: value for name, value in config.items() if name not in unread}
    description, tensors = stored_model(known, tensors)
    family = find_family(known["model_type"])
    table = family.table(description)
    if any(name.endswith(FUSED_EXPERTS) for name in tensors):
        from mcore_ckpt.formats.state_dicts import with_fused_experts

        table = with_fused_experts(table)
    tensors = unstacked(tensors, expand(table))
    tokenizer, generation = small_files(folder.path)
    names = (*CARRIED, *inference_fields(family))
    fields = {name: carried[name] for name in names if name in carried}
    hf: dict[str, Any] = {"model_type": known["model_type"], "config": fields | unread}
    with Reader(folder.path) as reader:
        if head:
            from mcore_ckpt.formats.model_heads import with_tensors

            hf["head"] = with_tensors(head, Source(reader, head_tensors))
        theirs: Rows = Source(reader, tensors)
        yield link_tensors(
            table,
            theirs if widen is None else widen(theirs),
            description,
            options,
            hf=hf,
            tokenizer=tokenizer,
            generation=generation,
            not_carried=not_carried(folder),
            quantization=quantization,
        )


@contextmanager
def open_peft(path: Path, options: ConvertOptions) -> Iterator[OpenCheckpoint]:
    """Open a folder of PEFT adapters as a model: the base with the adapters merged."""
    from mcore_ckpt.formats.peft_folder import base_folder, read_adapters
    from mcore_ckpt.mapping.adapters import MergedTensors

    with open_hf(base_folder(path), ConvertOptions()) as base:
        adapters = read_adapters(path, base.links)
        merged = MergedTensors(base.ours, adapters.rows, adapters.config, adapters.replaced)
        theirs = cast_rows(merged, options)
        links = [Link((name,), name) for name in theirs.entries]
        tokenizer, _ = small_files(path)
        # Adapters with new tokens have a longer table of embeddings than the base.
        rows = theirs.entries["embedding.weight"].shape[0]
        yield open_rows(
            base.description | {"vocab_size": rows},
            links,
            theirs,
            options,
            hf=base.hf,
            tokenizer=tokenizer or base.tokenizer,
            generation=base.generation,
            not_carried=base.not_carried,
        )
