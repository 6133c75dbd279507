"""Runs a target of a Dockerfile without a container engine; needs root and an overlay mount.

``python tests/e2e/run_dockerfile.py FILE TARGET FOLDER [--build-arg NAME=VALUE ...]`` runs the
steps in a chroot over this machine's own root, whose changes go into FOLDER: the base image is
this machine, so the steps are shown to work with its Python, not with the named image's. After
the last step ``--then COMMAND`` runs in the result. Knows ARG, COPY, ENV, FROM, RUN, SHELL,
WORKDIR; CMD is not run.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SKIPPED = (".git", ".venv", ".nox", "__pycache__", ".pytest_cache", "golden-runs")


@dataclass
class Stage:
    """A stage of a Dockerfile: its base, and its instructions as word and rest."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages(text: str) -> dict[str, Stage]:
    """Read the stages of a Dockerfile by name, the ARGs above them under the empty name."""
    found = {"": Stage("")}
    current = found[""]
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = found[name or str(len(found))] = Stage(base)
        else:
            current.steps.append((word, rest.strip()))
    return found


class Chroot:
    """This machine's root with changes in a folder.

    Args:
        folder: gets ``upper``, what the steps changed; replaced.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("upper", "work", "root"):
            (folder / name).mkdir(parents=True)

    def run(self, command: list[str], env: dict[str, str], cwd: str) -> None:
        """Run a command inside; its mounts end with it."""
        root = f"{self.folder}/root"
        layers = f"lowerdir=/,upperdir={self.folder}/upper,workdir={self.folder}/work"
        script = (
            f"mount -t overlay overlay -o {layers} {root} && "
            f"mount --rbind /proc {root}/proc && mount --rbind /dev {root}/dev && "
            f'exec chroot {root} env --ignore-environment --chdir="$1" "${{@:2}}"'
        )
        words = [f"{name}={value}" for name, value in env.items()]
        subprocess.run(
            ["unshare", "--mount", "bash", "-euc", script, "bash", cwd, *words, *command],
            check=True,
        )


def build(file: Path, target: str, folder: Path, arguments: dict[str, str], then: str) -> None:
    """Run the steps of a target's stages, those that it copies from first."""
    parsed = stages(file.read_text())
    arguments = dict(rest.split("=", 1) for _, rest in parsed[""].steps) | arguments
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"}
    env["PIP_BREAK_SYSTEM_PACKAGES"] = "1"  # Debian's Python guards itself, images' do not
    # How this machine reaches package indices.
    env |= {
        k: v for k, v in os.environ.items() if re.match(r"(UV_|PIP_|SSL_|.*_CA_|.*PROXY)", k)
    }
    results: dict[str, Chroot] = {}

    def run_stage(name: str) -> Chroot:
        chroot = results[name] = Chroot(folder / name)
        here, shell, cwd = dict(env), ["/bin/sh", "-c"], "/"
        for word, rest in parsed[name].steps:
            print(f"== {name}: {word} {rest[:100]}", flush=True)
            if word == "ARG":
                key, _, default = rest.partition("=")
                here[key] = arguments.get(key, default)
            elif word == "ENV":
                for key, value in (pair.split("=", 1) for pair in shlex.split(rest)):
                    here[key] = re.sub(r"\$(\w+)", lambda m: here.get(m[1], ""), value)
            elif word == "SHELL":
                shell = [item.strip(' "') for item in rest.strip("[]").split(",")]
            elif word == "WORKDIR":
                cwd = rest
                chroot.run(["mkdir", "-p", cwd], here, "/")
            elif word == "COPY":
                *options, source, place = rest.split()
                origin = next((o.split("=")[1] for o in options if "--from=" in o), "")
                inner = place if place.startswith("/") else cwd
                to = Path(f"{chroot.folder}/upper{inner}")
                below = ROOT / source
                if origin:
                    below = (results.get(origin) or run_stage(origin)).folder / f"upper{source}"
                shutil.copytree(
                    below, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*SKIPPED)
                )
            elif word == "RUN":
                chroot.run([*shell, rest], here, cwd)
            elif word != "CMD":
                raise ValueError(f"{file}: {word} is not known here")
        if name == target and then:
            print(f"== {name}: {then}", flush=True)
            chroot.run([*shell, then], here, cwd)
        return chroot

    run_stage(target)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--build-arg", action="append", default=[])
    parser.add_argument("--then", default="")
    words = parser.parse_args()
    arguments = dict(pair.split("=", 1) for pair in words.build_arg)
    build(words.file, words.target, words.folder.resolve(), arguments, words.then)


if __name__ == "__main__":
    main()
