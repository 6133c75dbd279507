"""Recognizing a folder, and what opening a plain one leaves unimported."""

import ast
from pathlib import Path

import pytest

import mcore_ckpt
from mcore_ckpt.formats.recognition import (
    folder_format,
    has_text_tower,
    is_quantized,
    is_state_spaces_release,
    other_head,
)

_ROOT = Path(mcore_ckpt.__file__).parents[1]


def imported_with(module: str, found: set[str] | None = None) -> set[str]:
    """Return the modules of mcore-ckpt that importing one of them executes."""
    found = set() if found is None else found
    path = _ROOT / (module.replace(".", "/") + ".py")
    if module in found or not path.is_file():
        return found
    found.add(module)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:  # not inside functions
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in (node.module, *(f"{node.module}.{one.name}" for one in node.names)):
                if name.startswith("mcore_ckpt."):
                    imported_with(name, found)
    return found


def test_a_plain_folder_imports_nothing_of_other_formats_families_or_quantization():
    found = set()
    for module in ("save_load.loading", "save_load.foreign_loading", "formats.hf_checkpoint"):
        found |= imported_with(f"mcore_ckpt.{module}")
    assert "mcore_ckpt.formats.hf_folder" in found
    unused = (
        "megatron",
        "recurrent",
        "encoders",
        "quantiz",
        "packed",
        "mxfp4",
        "peft",
        "pickle",
    )
    assert [name for name in found if any(word in name for word in unused)] == []


def test_a_step_of_ours_loads_without_hugging_face_code():
    found = imported_with("mcore_ckpt.save_load.loading")
    assert not [name for name in found if name.startswith("mcore_ckpt.formats")]


def test_a_folder_is_recognized_by_its_files(tmp_path):
    files = {
        "mcore": "index.json",
        "megatron": "metadata.json",
        "dcp": ".metadata",
        "hf": "config.json",
        "": "notes.txt",
    }
    for form, name in files.items():
        folder = tmp_path / (form or "none")
        folder.mkdir()
        (folder / name).touch()
        assert folder_format(folder) == form
    (tmp_path / "none" / "mp_rank_00").mkdir()
    (tmp_path / "none" / "mp_rank_00" / "model_optim_rng.pt").touch()
    assert folder_format(tmp_path / "none") == "megatron"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LlamaForCausalLM", None),
        ("LlamaModel", "Model"),
        ("LlamaForSequenceClassification", "ForSequenceClassification"),
        ("BertForTokenClassification", "ForTokenClassification"),
        ("GPT2LMHeadModel", None),
    ],
)
def test_a_class_without_the_head_of_next_tokens_is_recognized(name, kind):
    found = other_head({"architectures": [name]})
    assert (found and found["kind"]) == kind


def test_what_a_config_adds_to_a_plain_model_is_recognized(tmp_path):
    assert has_text_tower({"model_type": "gemma3"})
    assert is_state_spaces_release({"ssm_cfg": {}})
    assert is_quantized({"quantization_config": {"quant_method": "awq"}}, tmp_path)
    plain = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert not has_text_tower(plain)
    assert not is_state_spaces_release(plain)
    assert not is_quantized(plain, tmp_path)
    (tmp_path / "hf_quant_config.json").touch()
    assert is_quantized(plain, tmp_path)
