"""The site: every page is in its navigation, and the pages that commands write are current."""

import re
from collections.abc import Iterator

from docs import flags_page, site
from house.sources import ROOT

from mcore_base.command_line import help_text, list_options


def anchors(text: str) -> list[str]:
    return re.findall(r'<a id="([^"]+)"></a>', text)


def test_the_pages_of_options_are_as_their_command_writes_them():
    for path, text in flags_page.pages().items():
        assert path.read_text() == text, "run `uv run python tests/docs/flags_page.py`"
        assert len(anchors(text)) == len(set(anchors(text)))


def test_the_help_of_a_command_links_to_an_option_on_its_page():
    for program in flags_page.PROGRAMS:
        for listed in flags_page.commands(program):
            options = list_options(listed.kind)
            if not options:
                continue
            shown = help_text(listed.kind, listed.program, ["--help-all"], options, ())
            page, _, anchor = shown.rpartition("page of the repository: ")[2].partition("#")
            assert anchor in anchors((ROOT / page).read_text()), listed.program


def entries(navigation) -> Iterator[str]:
    """Yield the pages of a navigation."""
    if isinstance(navigation, str):
        yield navigation
    else:
        below = navigation.values() if isinstance(navigation, dict) else navigation
        for each in below:
            yield from entries(each)


def test_the_navigation_has_every_page_once():
    known = site.pages()
    shown = list(entries(site.navigation(known)))
    assert sorted(shown) == sorted(known)


def test_the_api_pages_have_the_public_names():
    known = site.pages()
    assert "::: mcore_moe.layer.MoELayer\n" in known["api/mcore-moe.md"]


def test_links_to_folders_lead_to_their_pages():
    page = site.for_site("README.md", "[a](packages/mcore-moe) [b](tests/house) [c](LICENSE)")
    assert page == "[a](packages/mcore-moe/README.md) b [c](LICENSE)"
