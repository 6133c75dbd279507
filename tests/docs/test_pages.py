"""What the pages say without a command: messages, topics and advice that must stay true."""

import re

import pytest
from docs import performance_page
from docs.blocks import ROOT
from house.rows import COVERAGE, read_rows, topics
from house.sources import all_sources

TROUBLES = (ROOT / "docs/troubleshooting.md").read_text()


def spoken() -> str:
    """Return the text of all wheels, with strings that go over several lines in one piece."""
    return "\n".join(re.sub(r'"\s*\n\s*f?"', "", source.text) for source in all_sources())


def quoted(page: str) -> list[str]:
    """Return the messages of a page's first table."""
    table = page.split("| message |")[1].split("\n\n", maxsplit=1)[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


@pytest.mark.parametrize("message", quoted(TROUBLES))
def test_a_message_that_is_explained_is_one_that_a_command_says(message):
    assert message in spoken()


def test_the_page_of_troubles_quotes_messages():
    assert len(quoted(TROUBLES)) >= 10


def test_the_roadmap_has_each_topic_that_rows_are_still_open_for():
    page = (ROOT / "docs/scope.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \| .+ \|$", page, re.MULTILINE))
    still_open = {row["open"] for row in read_rows(COVERAGE) if "open" in row}
    assert still_open <= listed <= topics()


def test_the_performance_page_has_the_measured_results():
    page = performance_page.PAGE.read_text()
    assert page == performance_page.render(), "run tests/docs/performance_page.py"
    for path, draw in performance_page.PICTURES.items():
        assert path.read_text() == draw(), "run tests/docs/performance_page.py"
    # By the formula of the page: Llama-3-8B, 32 layers of 4096 channels, 8192 tokens.
    run = next(run for run in performance_page.measured_runs() if run.model == "Llama-3-8B")
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    flops = 3 * (2 * matrices + 32 * 2 * 8192 * 4096)
    assert run.tokens_per_s * flops / 989e12 == pytest.approx(run.mfu, rel=0.005)


def test_the_comparison_has_a_case_for_each_other_trainer():
    page = (ROOT / "docs/comparison.md").read_text()
    cases = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    chosen = " ".join(cases[2:])  # not the head of the table
    for name in ("FSDP2", "Accelerate", "LitGPT", "DeepSpeed", "torchtitan", "Megatron-Core"):
        assert name in chosen, f"no case in docs/comparison.md is one for {name}"
    assert "docs/comparison.md" in (ROOT / "README.md").read_text()


def test_what_is_left_out_is_said():
    left_out = (ROOT / "docs/scope.md").read_text().split("## Left out")[1].split("##")[0]
    assert "RETRO" in left_out
    assert "private image registry" in left_out


def test_contributors_are_told_how_to_add_a_dependency_and_mend_the_lock():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for words in ("uv add --package", "uv lock", "On a conflict in `uv.lock`"):
        assert words in page


def test_the_skill_says_what_it_is_for_and_when():
    head = re.match(r"---\nname: ([a-z-]+)\ndescription: (.+)\n---\n",
                    (ROOT / "SKILL.md").read_text())  # fmt: skip
    assert head is not None
    assert len(head[1]) <= 64
    assert len(head[2]) <= 1024
    assert "Use when" in head[2]
