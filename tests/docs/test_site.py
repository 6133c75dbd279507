"""The site: every page is in its navigation, and the pages that commands write are current."""

import re

from docs import flags_page
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
            page, _, anchor = shown.rpartition("page: ")[2].partition("#")
            assert anchor in anchors((ROOT / page).read_text()), listed.program
