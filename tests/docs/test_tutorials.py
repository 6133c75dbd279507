"""The tutorials, as a reader works through them: files saved, commands run, output compared.

Programs and our own commands run in warm processes, torchrun's ranks too. Numbers of the
output may differ from the page's by a fiftieth, as on another processor.
"""

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from docs.blocks import ROOT, all_blocks
from docs.test_documents import steps
from warm_ranks import run_command

from mcore_parallel.launch.launcher import free_port
from mcore_train.options.parsing import parse

TUTORIALS = sorted(path.name for path in (ROOT / "docs/tutorials").glob("*.md"))
FAST = {"own-model-tensor-parallel.md", "own-pipeline-stages.md"}
"""Pages of the default suite; `nox -s tutorials` runs all."""
NUMBER = re.compile(r"\d+\.\d+")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in FAST else pytest.mark.slow)
        for page in TUTORIALS
        if page != "index.md"
    ],
)
def test_a_tutorial_does_what_it_says(page, tmp_path, monkeypatch, servers):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    output = ""
    num_commands = 0
    for block in all_blocks():
        if block.document != f"docs/tutorials/{page}":
            continue
        if block.not_run:
            for words in re.findall(r"mcore_train gpt (.*)", block.code.replace("\\\n", " ")):
                parse(shlex.split(words))  # with the recipes that the page has written
        elif block.file:
            (tmp_path / block.file).write_text(block.code)
        elif block.language == "bash":
            output = "".join(run_step(step, servers) for step in steps(block.code))
            num_commands += 1
        else:
            assert block.language == "text", f"{block.place}: in which file is it saved?"
            assert NUMBER.sub("N", output).strip() == NUMBER.sub("N", block.code).strip()
            numbers = [
                [float(n) for n in NUMBER.findall(text)] for text in (output, block.code)
            ]
            assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=0.006), block.place
    assert num_commands


def test_the_index_names_each_tutorial():
    named = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/tutorials/index.md").read_text())
    assert sorted([*named, "index.md"]) == TUTORIALS


@pytest.fixture
def servers():
    """Processes that a page starts in the background; they are ended after it."""
    started = []
    yield started
    for process in started:
        process.terminate()
        process.wait(30)


def run_step(step, servers):
    """Run a command, or lines of shell; return what it prints."""
    lines = [step] if isinstance(step, list) else re.split(r"\n(?=python|torchrun|mcore)", step)
    return "".join(run_line(line, servers) for line in lines)


def run_line(line, servers):
    words = line if isinstance(line, list) else line.split()
    if words[0] == "torchrun":
        assert words[1] == "--nproc-per-node"
        return run_ranks(int(words[2]), words[3:])
    if words[0] == "python":
        return run_ranks(1, words[1:])
    if words[-1] == "&":
        command = [sys.executable, "-m", words[0].replace("-", "_"), *words[1:-1]]
        servers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        return ""
    if isinstance(line, list):
        return checked(run_command(words[0].replace("-", "_"), *words[1:]))
    command = ["bash", "-euc", line]
    return checked(subprocess.run(command, capture_output=True, text=True, check=False))


def checked(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_ranks(num_ranks, words):
    """Run a saved program on several ranks; return what they print, one after the other."""
    world = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }

    def start(rank):
        env = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        env = env if num_ranks > 1 else None
        return checked(run_command(words[0][:-3], *words[1:], env=env, is_ours=True))

    with ThreadPoolExecutor(num_ranks) as ranks:
        return "".join(ranks.map(start, range(num_ranks)))
