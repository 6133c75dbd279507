"""Reads golden cases and the recipes that run them from YAML files of one folder.

A case is a folder ``test_cases/MODEL/CASE``. Its ``model_config.yaml`` extends those of the
parent folders; each file has options of all lanes, and under ``LANES`` the changes of single
lanes. A recipe, ``recipes/LANE/NAME.yaml``, names the cases of a lane, their ranks and limits;
``products`` multiplies its lists. Names of keys are Megatron's.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG = "model_config.yaml"
BROKEN = "-broken"
"""Suffix of a scope whose jobs are listed but not run."""
STEPS = 100
"""Steps of a complete golden run."""
RECORDED = (1, 2, 3, 4, *range(10, STEPS + 1, 10))
"""Steps whose numbers are recorded; the smoke tier runs the first four."""
CLASSES = ("exact", "approximate", "statistical")
METRICS = ("loss", "grad_norm", "skipped_steps", "checkpoint", "step_ms", "peak_gib")


@dataclass(frozen=True, slots=True)
class Tier:
    """Number of steps, and scope of the jobs."""

    steps: int
    scope: str


TIERS: Mapping[str, Tier] = {
    "smoke": Tier(4, "mr-github"),
    "golden": Tier(STEPS, "mr-github"),
    "slim": Tier(STEPS, "mr-github-slim"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One golden run on one lane."""

    name: str
    """MODEL/CASE."""
    folder: Path
    command: str
    """Command of mcore-train: gpt, mamba, bert or t5."""
    words: tuple[str, ...]
    """Options of the command."""
    env: Mapping[str, str]
    test_type: str
    """regular, or ckpt-resume: stopped half-way and continued."""
    metrics: Mapping[str, str]
    """Class of comparison by metric."""

    def golden_file(self, lane: str) -> Path:
        """Return the file with the recorded values of a lane."""
        return self.folder / f"golden_values_{lane}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One row of an expanded recipe."""

    name: str
    model: str
    test_case: str
    platforms: str
    """Lane of the job."""
    scope: str
    build: str = "mcore"
    environment: str = "dev"
    """Image, dev or lts."""
    nodes: int = 1
    gpus: int = 1
    """Ranks of a host; processes on a CPU lane."""
    n_repeat: int = 1
    time_limit: float = 300.0
    """Time limit of one repetition, in seconds."""
    script_setup: str = ""
    script: str = ""
    """Command that a scheduler runs for this job."""
    maintainers: tuple[str, ...] = ()
    loggers: tuple[str, ...] = field(default=("stdout",))

    @property
    def case_name(self) -> str:
        """The job's case, MODEL/CASE."""
        return f"{self.model}/{self.test_case}"


def read_jobs(root: Path, lane: str) -> list[Job]:
    """Expand all recipes of a lane.

    Raises:
        FileNotFoundError: if the lane has no recipe.
        ValueError: if a recipe is malformed or names a case that does not exist, or if a case
            has values of this lane and no recipe runs it.
    """
    folder = root / "recipes" / lane
    files = sorted(folder.glob("*.yaml"))
    if not files:
        lanes = sorted(path.name for path in (root / "recipes").glob("*"))
        raise FileNotFoundError(
            f"--lane {lane} has no recipes in {folder}: use one of {', '.join(lanes)}."
        )
    jobs = [job for file in files for job in expand_recipe(read_yaml(file), file)]
    running = {job.case_name for job in jobs}
    faults = [
        f"{folder}: no case {name}"
        for name in sorted(running)
        if not (root / "test_cases" / name / CONFIG).is_file()
    ]
    for path in sorted((root / "test_cases").glob(f"*/*/golden_values_{lane}.json")):
        name = f"{path.parent.parent.name}/{path.parent.name}"
        if name not in running:
            faults.append(
                f"{name} has {path.name}, and no recipe in {folder} runs it any more. Add it "
                "to a recipe, or delete its values."
            )
    if faults:
        raise ValueError("\n".join(faults))
    return jobs


def expand_recipe(recipe: Mapping[str, Any], file: Path) -> list[Job]:
    """Return a job for every combination of the lists in a recipe's ``products``.

    Raises:
        ValueError: if type, format or a key is unknown.
    """
    if recipe.get("type") != "basic" or recipe.get("format_version") != 1:
        raise ValueError(f"{file}: type basic and format_version 1 are required.")
    shared: dict[str, Any] = {
        "maintainers": tuple(recipe.get("maintainers", ())),
        "loggers": tuple(recipe.get("loggers", ("stdout",))),
        **recipe["spec"],
    }
    jobs = []
    for row in _rows(recipe["products"]):
        fields: dict[str, Any] = shared | row
        if unknown := sorted(set(fields) - set(Job.__dataclass_fields__)):
            raise ValueError(f"{file}: unknown key {unknown[0]} of a job.")
        for key in ("name", "script_setup", "script"):
            fields[key] = str(fields.get(key, "")).format(**fields)
        jobs.append(Job(**fields))
    return jobs


def _rows(products: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each combination of the values of a product and of its nested products."""
    for product in products:
        fields = {key: value for key, value in product.items() if key != "products"}
        lists = [value if isinstance(value, list) else [value] for value in fields.values()]
        for values in itertools.product(*lists):
            row = dict(zip(fields, values, strict=True))
            for inner in _rows(product["products"]) if "products" in product else ({},):
                yield row | inner


def read_case(root: Path, name: str, lane: str) -> Case:
    """Read a case with the options of a lane.

    Raises:
        ValueError: if a key, metric, class or type of test is unknown.
    """
    top = root / "test_cases"
    folder = top / name
    config: dict[str, Any] = {"COMMAND": "", "TEST_TYPE": "regular"}
    tables: dict[str, dict[str, Any]] = {"MODEL_ARGS": {}, "ENV_VARS": {}, "METRICS": {}}
    for level in (top, folder.parent, folder):
        if not (level / CONFIG).is_file():
            continue
        shared = read_yaml(level / CONFIG)
        for part in (shared, shared.get("LANES", {}).get(lane, {})):
            for key, value in part.items():
                if key in tables:
                    tables[key] |= value
                elif key in config:
                    config[key] = value
                elif key != "LANES":
                    raise ValueError(f"{level / CONFIG}: unknown key {key}.")
    metrics = {name: kind for name, kind in tables["METRICS"].items() if kind is not None}
    for metric, kind in metrics.items():
        if metric not in METRICS or kind not in CLASSES:
            raise ValueError(
                f"{folder / CONFIG}: METRICS {metric}: {kind} must be one of "
                f"{', '.join(METRICS)}: one of {', '.join(CLASSES)}."
            )
    if config["TEST_TYPE"] not in ("regular", "ckpt-resume"):
        raise ValueError(f"{folder / CONFIG}: TEST_TYPE must be regular or ckpt-resume.")
    return Case(
        name=name,
        folder=folder,
        command=config["COMMAND"],
        words=tuple(_words(tables["MODEL_ARGS"])),
        env={key: str(value) for key, value in tables["ENV_VARS"].items()},
        test_type=config["TEST_TYPE"],
        metrics=metrics,
    )


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options as words; ``true`` and ``false`` are switches, null omits the option."""
    for flag, value in options.items():
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        elif value is not None:
            yield flag
            yield from map(str, value if isinstance(value, list) else [value])


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        ValueError: if pyyaml is missing, or the file is not a mapping.
    """
    try:
        import yaml
    except ImportError:
        raise ValueError(
            "golden runs read YAML: pip install 'mcore-train[dev]', which brings pyyaml."
        ) from None
    content = yaml.safe_load(path.read_text()) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping.")
    return content
