"""What the documents show is run: Python blocks, commands, links, the table of defaults."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from docs import compatibility_page, curves, drawing, load_picture, pictures
from docs.blocks import Block, all_blocks, blocks_of, documents
from docs.defaults import PAGE, render, unlike_their_docstring
from house.rows import is_collected
from house.sources import PACKAGES, ROOT, package_sources
from warm_ranks import run_command

from mcore_train.options.parsing import parse

BLOCKS = all_blocks()
# `uv run` finds the environment that these tests already run in.
_PREFACE = 'set -eu\nuv() { [ "$1" = run ]; shift; "$@"; }\n'


def runnable(language: str) -> list[Block]:
    """Return the blocks of a language that nothing else runs, such as test_tutorials."""
    return [
        block
        for block in BLOCKS
        if block.language == language
        and not (block.run_by or block.not_run)
        and not block.document.startswith("docs/tutorials/")
    ]


@pytest.mark.parametrize("document", sorted({b.document for b in runnable("python")}))
def test_the_python_of_a_page_runs_from_top_to_bottom(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in runnable("python"):
        if block.document == document:
            exec(compile(block.code, block.place, "exec"), names)


def steps(code: str) -> list[str | list[str]]:
    """Cut a block into our commands, as words, and what is left to a shell between them."""
    found: list[str | list[str]] = []
    for line in code.replace("\\\n", " ").splitlines():
        words = line.removeprefix("uv run ")
        if words.startswith("mcore-") and not re.search(r"[|<>$;&*]", words.replace("->", "")):
            found.append(shlex.split(words))
        elif found and isinstance(found[-1], str):
            found[-1] += line + "\n"
        else:
            found.append(line + "\n")
    return found


@pytest.mark.parametrize("block", runnable("bash"), ids=lambda b: b.place)
def test_a_command_block_runs(block, tmp_path):
    """Our own commands run in warm processes, which spares each the import of torch."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "REPOSITORY": str(ROOT)}
    for step in steps(block.code):
        if isinstance(step, str):
            command = ["bash", "-c", _PREFACE + step]
            done = subprocess.run(
                command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
            )
        else:
            done = run_command(step[0].replace("-", "_"), *step[1:], env=env, cwd=tmp_path)
        assert done.returncode == 0, f"{step}\n{done.stdout}{done.stderr}"


def test_a_block_is_cut_into_commands_and_shell():
    code = "x=1\necho $x\nuv run mcore-data inspect \\\n  a b\nmcore-train --help | head -1\n"
    head, command, tail = steps(code)
    assert (head, command) == ("x=1\necho $x\n", ["mcore-data", "inspect", "a", "b"])
    assert tail == "mcore-train --help | head -1\n"


@pytest.mark.parametrize("block", runnable("toml"), ids=lambda b: b.place)
def test_a_toml_block_is_toml(block):
    assert tomllib.loads(block.code)


def test_blocks_that_other_tests_run_name_tests_that_exist():
    claimed = {block.place: block.run_by for block in BLOCKS if block.run_by}
    assert {place for place, node in claimed.items() if not is_collected(node)} == set()


def commands_not_run() -> list[tuple[str, str]]:
    """Return place and arguments of training commands that no test runs."""
    found = []
    for block in BLOCKS:
        if block.not_run and not block.document.startswith("docs/tutorials/"):
            joined = block.code.replace("\\\n", " ")
            found += [
                (block.place, match[1])
                for match in re.finditer(r"mcore[-_]train gpt (.*)", joined)
            ]
    return found


@pytest.mark.parametrize(("place", "arguments"), commands_not_run())
def test_a_training_command_that_cannot_run_here_has_known_flags(place, arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert parse(shlex.split(arguments)).batch.micro_batch_size >= 1, place


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_of_a_package_shows_a_use_that_runs(package):
    page = f"packages/mcore-{package}/README.md"
    assert [b for b in runnable("python") + runnable("bash") if b.document == page]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_of_a_package_names_its_rooms(package):
    page = (ROOT / f"packages/mcore-{package}/README.md").read_text()
    named = set(re.findall(r"`(\w+)(?:/\*)?`", page))
    rooms = {source.room.split(".")[0] for source in package_sources(package)}
    assert rooms - {"", "__main__"} - named == set()


@pytest.mark.parametrize("package", ["train", "data", "ckpt", "infer", "models"])
def test_the_help_of_each_command_ends_with_its_examples_and_pages(package, capsys):
    """The completion script has the words of all help texts: examples use no others."""
    cli = importlib.import_module(f"mcore_{package}.cli")
    assert cli.main(["--print-completion", "bash"]) == 0
    words = dict(re.findall(r'"(.*?)"\) echo "(.*?)"', capsys.readouterr().out))
    for command in cli.COMMANDS:
        assert cli.main([command, "--help"]) == 0
        text, _, end = capsys.readouterr().out.partition("examples:\n")
        assert end, f"{command} has no example in ABOUT"
        examples, _, pages = end.partition("\nsee ")
        pages, _, rest = pages.partition(" of the repository")
        assert rest == "\n", f"{command} has no page in ABOUT"
        assert [page for page in pages.split(", ") if not (ROOT / page.strip()).is_file()] == []
        assert words[command], text
        for line in examples.replace("\\\n", " ").splitlines():
            if f" {command} " in line.replace("_", "-"):
                verb = next(filter(words.get, re.findall(f"{command} [a-z]+", line)), command)
                own = line.partition(f" {command} ")[2].partition(" -- ")[0]
                flags = set(re.findall(r"--[a-z][a-z0-9-]*", own)) - {"--help"}
                assert flags <= set(words[verb].split()), line


def test_links_inside_the_repository_lead_somewhere():
    dead = [
        f"{path.name}: {target}"
        for path in documents()
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert dead == []


def test_the_table_of_defaults_is_as_its_command_writes_it():
    assert PAGE.read_text() == render(), "run `uv run python tests/docs/defaults.py`"
    assert unlike_their_docstring() == []


def test_the_table_of_versions_is_as_its_command_writes_it():
    command = "run `uv run python tests/docs/compatibility_page.py`"
    assert compatibility_page.PAGE.read_text() == compatibility_page.render(), command


def test_the_drawing_of_the_architecture_is_as_its_command_draws_it():
    command = "run `uv run python tests/docs/drawing.py`"
    assert drawing.PICTURE.read_text() == drawing.render(), command


def test_the_curves_are_those_of_the_kept_results():
    for file, draw in curves.PICTURES.items():
        drawn = (drawing.PICTURE.parent / file).read_text()
        assert drawn == draw(), "run `uv run python tests/docs/curves.py`"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_as_the_code_lays_it_out(name):
    drawn = (ROOT / "docs" / name).read_text()
    assert drawn == pictures.PICTURES[name](), "run `cd tests && python -m docs.pictures`"


def test_the_drawing_leaves_out_what_other_arrows_say():
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert drawing.direct(graph) == {("a", "b"), ("b", "c")}
    assert drawing.storeys(graph) == {"a": 2, "b": 1, "c": 0}


def test_blocks_are_found_with_what_they_say():
    text = "x\n<!-- not run: why -->\n```bash\nls\n```\n\n```python\n1\n```\n"
    first, second = blocks_of(text, "a.md")
    assert (first.place, first.language, first.code, first.not_run) == (
        "a.md:2",
        "bash",
        "ls\n",
        "why",
    )
    assert (second.language, second.not_run, second.run_by) == ("python", "", "")


@pytest.mark.parametrize("note", ["later", "not run:", "skipped: why"])
def test_a_block_cannot_excuse_itself_without_a_reason(note):
    with pytest.raises(ValueError, match="is no note on running"):
        blocks_of(f"<!-- {note} -->\n```bash\nls\n```\n", "a.md")


def test_the_load_picture_is_that_of_the_kept_result():
    assert load_picture.PICTURE.read_text() == load_picture.kept_chart(), (
        "run `uv run python tests/docs/load_picture.py`"
    )
