"""``mcore-train golden``: runs golden cases, compares their values, records new values."""

import fnmatch
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from mcore_base.command_line import HELP_FLAGS
from mcore_base.command_line import parse as parse_options
from mcore_train.golden.cases import BROKEN, TIERS, Case, read_case, read_jobs
from mcore_train.golden.values import Comparison, read_golden, record
from mcore_train.golden.values import compare as compare_case

PROGRAM = "mcore-train golden"
RUN_FILE = "run.json"
RESULTS = "results.json"


def golden(words: Sequence[str]) -> int:
    """Run one verb of ``mcore-train golden``."""
    verb, rest = (words[0], list(words[1:])) if words else ("--help", [])
    if verb in HELP_FLAGS:
        print(_USAGE)
        return 0
    if verb not in VERBS:
        raise ValueError(f"unknown verb {verb}: {PROGRAM} has {', '.join(VERBS)}.")
    return parse_options(VERBS[verb], f"{PROGRAM} {verb}", rest)


_USAGE = """usage: mcore-train golden VERB [OPTIONS]

Short trainings whose losses, gradient norms and checkpoints are recorded.

verbs:
  list            the jobs of a lane's recipes
  run             train the cases of a lane and compare their values
  compare OUTPUT  compare the values of an earlier run again
  update OUTPUT   show how much the values of a run moved; record them with --reason

examples:
  mcore-train golden run --tier smoke
  mcore-train golden run --case 'moe/*' --output runs/golden
  mcore-train golden update runs/golden --reason "router in float32"

mcore-train golden VERB --help shows a verb's options."""


def list_jobs(
    lane: str = "cpu", root: str = "tests/functional_tests", as_json: bool = False
) -> int:
    """Print the jobs of a lane's recipes, with the command of each job.

    Args:
        lane: folder of recipes, such as cpu or h100.
        root: folder of recipes and test_cases.
        as_json: print one JSON list.
    """
    jobs = read_jobs(Path(root), lane)
    if as_json:
        print(json.dumps([asdict(job) for job in jobs]))
        return 0
    for job in jobs:
        print(f"{job.case_name} {job.scope} {job.nodes * job.gpus} ranks: {job.script}")
    return 0


def run(
    lane: str = "cpu",
    tier: Literal["smoke", "golden", "slim"] = "golden",
    scope: str = "",
    environment: Literal["dev", "lts"] = "dev",
    case: tuple[str, ...] = (),
    n_repeat: int = 0,
    output: str = "golden-runs",
    root: str = "tests/functional_tests",
) -> int:
    """Train the cases of a lane in sequence, and compare their values with recorded ones.

    Exit codes: 0 if every case ran and agrees, 1 otherwise.

    Args:
        lane: folder of recipes and name of the values, such as cpu or h100.
        tier: smoke: 4 steps; golden: 100 steps; slim: 100 steps of a few cases.
        scope: scope of the recipes' jobs; empty: the scope of the tier.
        environment: image of this run; jobs of the other image are left out.
        case: patterns of cases, such as moe/*; empty: all cases.
        n_repeat: runs of each case; 0: the number in its recipe.
        output: folder for values and logs; files of earlier runs are replaced.
        root: folder of recipes and test_cases.
    """
    from mcore_train.golden.ranks import run_case

    scope = scope or TIERS[tier].scope
    jobs = [
        job
        for job in read_jobs(Path(root), lane)
        if (job.scope, job.environment) == (scope, environment)
        and (not case or any(fnmatch.fnmatch(job.case_name, pattern) for pattern in case))
    ]
    if not jobs or scope.endswith(BROKEN):
        raise ValueError(
            f"--lane {lane} has no job to run with --scope {scope}, --environment "
            f"{environment} and --case {' '.join(case) or '*'}."
        )
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    names = [job.case_name for job in jobs]
    selection = {"lane": lane, "tier": tier, "root": root, "cases": names}
    (folder / RUN_FILE).write_text(json.dumps(selection, indent=1))
    cases = [(job, read_case(Path(root), job.case_name, lane)) for job in jobs]
    started_s, num_faults = time.monotonic(), 0
    for job, each in cases:
        case_folder = folder / each.name
        case_folder.mkdir(parents=True, exist_ok=True)
        (case_folder / RESULTS).unlink(missing_ok=True)
        case_s, results = time.monotonic(), []
        try:
            for repetition in range(1, (n_repeat or job.n_repeat) + 1):
                run_folder = case_folder / str(repetition)
                results.append(run_case(each, job, TIERS[tier].steps, run_folder))
        except (RuntimeError, TimeoutError) as error:
            (case_folder / RESULTS).write_text(json.dumps({"fault": str(error)}))
        else:
            (case_folder / RESULTS).write_text(json.dumps({"results": results}))
        num_faults += _report(each, lane, case_folder, f"{time.monotonic() - case_s:.1f} s")
    print(
        f"{len(cases) - num_faults} of {len(cases)} cases agree, "
        f"{time.monotonic() - started_s:.0f} s"
    )
    return int(num_faults > 0)


def compare(output: str, /, root: str = "tests/functional_tests") -> int:
    """Compare the values of an earlier run with the recorded ones.

    A selected case without values is a fault.

    Args:
        output: folder of the run.
        root: folder of recipes and test_cases.
    """
    selection, cases = _read_run(Path(output), Path(root))
    lane = selection["lane"]
    faults = sum(_report(case, lane, Path(output) / case.name, "") for case in cases)
    print(f"{len(cases) - faults} of {len(cases)} cases agree")
    return int(faults > 0)


def update(output: str, /, reason: str = "", root: str = "tests/functional_tests") -> int:
    """Show how much the values of a run moved, and record them if a reason is given.

    Exit codes: 1 if a case of the run has no values to record, else 0.

    Args:
        output: folder of a run of 100 steps.
        reason: why the values changed, recorded with them; empty: nothing is written.
        root: folder of recipes and test_cases.
    """
    selection, cases = _read_run(Path(output), Path(root))
    lane = selection["lane"]
    if TIERS[selection["tier"]].steps != TIERS["golden"].steps:
        raise ValueError(
            f"{output} is a run of the tier {selection['tier']}: only runs of 100 steps can be "
            "recorded, use --tier golden."
        )
    changed, faults = [], []
    for case in cases:
        results, fault = _read_results(Path(output) / case.name)
        comparison = compare_case(case, lane, results) if results else Comparison([fault])
        if not results or any("between repetitions" in line for line in comparison.faults):
            faults.append(f"{case.name} is not recorded: {comparison.faults[0]}")
            continue
        key, known = results[0]["key"], read_golden(case.golden_file(lane))
        drift = ", ".join(f"{name} {value:.2g}" for name, value in comparison.drift.items())
        if key not in known:
            print(f"{case.name} new for {key}{': ' * bool(drift)}{drift}")
        elif comparison.faults or any(comparison.drift.values()):
            print(f"{case.name} moved: {drift}")
        else:
            continue
        changed.append((case, results))
    if changed and not reason:
        raise ValueError(f"{len(changed)} cases moved: give --reason to record their values.")
    for case, results in changed:
        record(case, lane, results, reason)
    print("\n".join([*faults, f"{len(changed)} of {len(cases)} cases recorded"]))
    return int(bool(faults))


def _read_run(folder: Path, root: Path) -> tuple[dict[str, Any], list[Case]]:
    """Read the options of a recorded run."""
    if not (folder / RUN_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} is not the output of a golden run: it has no {RUN_FILE}."
        )
    selection = json.loads((folder / RUN_FILE).read_text())
    return selection, [read_case(root, name, selection["lane"]) for name in selection["cases"]]


def _read_results(case_folder: Path) -> tuple[list[Mapping[str, Any]], str]:
    """Return the repetitions of a case, or the reason why the case has no results."""
    if not (case_folder / RESULTS).is_file():
        return [], f"it did not run: no {case_folder / RESULTS}"
    content = json.loads((case_folder / RESULTS).read_text())
    return content.get("results", []), content.get("fault", "")


def _report(case: Case, lane: str, case_folder: Path, duration: str) -> bool:
    """Print the comparison of a case; return whether it has a fault."""
    results, fault = _read_results(case_folder)
    comparison = compare_case(case, lane, results) if results else Comparison([fault])
    faults, notes = comparison.faults, comparison.notes
    print(f"{'FAULT' if faults else 'ok   '} {case.name} {duration}".rstrip(), flush=True)
    for line in (*faults, *notes):
        print(f"      {line}", flush=True)
    return bool(faults)


VERBS: dict[str, Callable[..., int]] = {
    "list": list_jobs,
    "run": run,
    "compare": compare,
    "update": update,
}
