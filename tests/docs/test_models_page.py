"""The page of supported models is what the registries say, and lists every family."""

from docs.models_page import PAGE, render

from mcore_ckpt.families import MODEL_TYPES


def test_the_page_of_models_is_current_and_lists_every_family():
    text = PAGE.read_text()
    assert text == render(), "uv run python tests/docs/models_page.py"
    assert all(f"| {name} | `mcore-train" in text for name in MODEL_TYPES)
