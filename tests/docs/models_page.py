"""The page of supported models, from the registries of families, presets and exports.

``uv run python tests/docs/models_page.py`` writes docs/models.md.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.sources import ROOT

from mcore_ckpt.families import MODEL_TYPES, find_family
from mcore_ckpt.formats.megatron import names as megatron_names
from mcore_ckpt.formats.recognition import TOWERS
from mcore_infer.export.trtllm_model import check_model
from mcore_models.presets import presets

PAGE = ROOT / "docs/models.md"
CONFIGS = ROOT / "packages/mcore-ckpt/tests/families/test_shape_check.py"
INTRODUCTION = """\
# Supported models

Written by `tests/docs/models_page.py` from the registries: each row is a `model_type` of a
config.json. Every family is converted from and to Hugging Face's folders bit for bit, and
compared with transformers in logits and gradients (`convert --check` repeats the comparison of
logits with your weights). A model of another family that has the same layers can be written as
a row: [a new family](../CONTRIBUTING.md#a-new-family).

- **trains**: the command; every option of layouts and precision applies.
- **Megatron**: weights are converted from and to Megatron's checkpoints; some: not of each
  variant.
- **serves**: `mcore-infer` generates and serves; an encoder is trained and converted only.
- **quantizes**: `mcore-infer quantize` writes [its formats](quantization.md), for vLLM too.
- **TensorRT-LLM**: `mcore-infer export --format trtllm` writes its checkpoint.
- **sizes**: presets of `--model`.

Folders of every family quantized in fp8, MXFP4, NVFP4, by GPTQ, AWQ, bitsandbytes or
compressed-tensors are [read](deployment.md). Of models that see, the text model is read:
{towers}.

"""


LEFT_OUT = """
## Not supported, and why

Parts of supported models:

- `deepseek_v32`: the indexer, which selects the keys of sparse attention, is converted and
  used, in training too, but not trained: the model trains on the keys that a frozen indexer
  selects. The indexer's loss (arXiv:2512.02556, equations 3 and 4) compares its scores with
  the attention weights of all heads, which fused kernels do not return. Without a kernel of
  its own, backward would store tokens x tokens x 64 products a layer: 4 GiB for 4,096 tokens,
  4 TiB for the 131,072 of its published training. transformers 5.23 does not have this loss.
- `gemma3n_text`: the first residual stream is the one that layers transform, and all layers are
  equally wide, as released. Training does not bound the coefficients of AltUp
  (`altup_coef_clip`, 120, copied). A layer that reads another layer's keys is on the same
  pipeline stage.
  `mcore-train verify` over data ranks ends in WRONG: after the steps some weights differ by up
  to 4e-10, where 1e-10 is allowed. All gradients agree to 1e-14; the cause is not found yet.
- `kimi_linear`: its delta rule runs in plain torch, also on a GPU; other recurrent layers
  have kernels in Triton.
- `minimax`: mcore rotates half of each head (`rotary_dim`), as the releases do; transformers
  5.23 rotates whole heads, so `--check` reports different logits. An export has no tensors of
  decays, which transformers stores and the config determines.
  Folders in the form of the first releases (`model_type` `minimax_text_01` or `minimax_m1`)
  are refused: convert those in the form of transformers.
- `phimoe`: training chooses experts as inference does. The release sampled them, with a
  gradient of its own (SparseMixer). Beyond the original context mcore rotates by the long
  factors, as the release does; transformers 5.23 stays with the short ones.
- `modernbert`: the model with its head of masked tokens, without dropout; no other heads.
"""


def render() -> str:
    """Return the page."""
    towers = ", ".join(f"{name} ({' or '.join(kinds)})" for name, kinds in TOWERS.items())
    lines = [
        "| family | trains | Megatron | serves | quantizes | TensorRT-LLM | sizes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    sizes = _sizes()
    for name, small in sorted(descriptions()):
        kind, published = _kind(small), sizes.get(name, {})
        models = [small, *published.values()]
        writes = kind in ("gpt", "mamba")
        cells = (
            f"`mcore-train {kind}`",
            _share(_converts_to_megatron(model) for model in models),
            "yes" if writes else "generates" if kind == "t5" else "",
            _share([writes]),
            _share(_exports(name, model) for model in models),
            ", ".join(published),
        )
        cells = (name, *cells)
        lines.append(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|")
    return INTRODUCTION.format(towers=towers) + "\n".join(lines) + "\n" + LEFT_OUT


def descriptions() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each family and a small model of it."""
    spec = spec_from_file_location("test_shape_check", CONFIGS)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in MODEL_TYPES:
        yield name, module.described(name)


def _kind(description: Mapping[str, Any]) -> str:
    if description["family"] != "gpt":
        return description["family"]
    return "mamba" if description["config"].get("hybrid_override_pattern") else "gpt"


def _converts_to_megatron(description: Mapping[str, Any]) -> bool:
    try:
        megatron_names.table(description, description["vocab_size"])
    except ValueError:
        return False
    return True


def _exports(name: str, description: Mapping[str, Any]) -> bool:
    try:
        check_model(name, description)
    except ValueError:
        return False
    return True


def _sizes() -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return the presets of each family: that of the most similar name which can express it."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, preset in presets().items():
        description = preset.model.to_dict()
        if name == "tiny":
            continue
        fitting = []
        for model_type in MODEL_TYPES:
            try:
                find_family(model_type).to_theirs(description)
            except ValueError:
                continue
            fitting.append(model_type)
        if fitting:
            nearest = max(fitting, key=lambda model_type: _likeness(model_type, name))
            found.setdefault(nearest, {})[name] = description
    return found


def _likeness(model_type: str, preset: str) -> float:
    one, other = (re.sub(r"[^a-z0-9]", "", name.lower()) for name in (model_type, preset))
    return SequenceMatcher(None, one, other[: len(one) + 2]).ratio()


def _share(answers: Iterable[bool]) -> str:
    found = set(answers)
    return "some" if len(found) == 2 else "yes" if found == {True} else ""


if __name__ == "__main__":
    PAGE.write_text(render())
