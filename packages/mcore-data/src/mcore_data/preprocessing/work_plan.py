"""A fixed division of a corpus into units, which any number of workers write.

``<output-prefix>.plan.json`` lists the inputs with their sizes and stamps, the units, and all
settings that determine the ids. A unit is a part of the corpus, divided as by ``--partitions``,
with its own pair ``<output-prefix>.units/<number>_<key>_document``. The plan does not store
progress: a unit is done if its manifests have the hash of its work, running if its lock file
exists, and failed if ``<number>.failed.json`` exists.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mcore_base.file_lock import Holder, lock_at
from mcore_base.stores import StorePath, as_path
from mcore_data.config import PreprocessConfig, TokenizerConfig
from mcore_data.indexed.index_format import CorruptDatasetError
from mcore_data.indexed.manifest import (
    has_files,
    manifest_path,
    parse_json,
    read_manifest,
    replace_json,
)
from mcore_data.indexed.merging import merge_pairs
from mcore_data.indexed.object_store import (
    address_of,
    is_remote,
    upload_files,
)
from mcore_data.indexed.output_lock import make_folder, only_writer
from mcore_data.indexed.reader import IndexedDataset
from mcore_data.preprocessing.blocks import InputSource
from mcore_data.preprocessing.preprocessing import find_corpus
from mcore_data.preprocessing.sources import Corpus, Part, divide
from mcore_data.preprocessing.tokenizing import (
    FILES,
    Tools,
    build_tools,
    output_prefixes,
    scratch_folder,
    work_hash,
)

log = logging.getLogger(__name__)

SUFFIX = ".plan.json"
_FORMAT = 1
# Options of PreprocessConfig that belong to a worker, or to one command; a plan has no value.
_WORKER_OPTIONS = ("workers", "partitions", "partition", "plan", "claim_timeout_s")
_COMMAND_OPTIONS = ("input", "output_prefix", "overwrite", "scratch_path", *_WORKER_OPTIONS)
_RATE_UNITS = 100
_NAMED = 20
_READERS = 16
_SMALL_SUFFIXES = (".idx", ".origins", ".kept", ".manifest.json")


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of a plan.

    Attributes:
        config: options with the unit's own output prefix.
        corpus: inputs of the unit; its ``part`` has the unit's number.
        work: hash of everything that determines the unit's bytes, as in its manifests.
    """

    config: PreprocessConfig
    corpus: Corpus
    work: str

    @property
    def number(self) -> int:
        """Number of the unit, from 0."""
        return self.corpus.part.number if self.corpus.part else 0

    @property
    def num_bytes(self) -> int:
        """Stored bytes of the unit's inputs."""
        return sum(source.num_bytes for source in self.corpus.sources)

    @property
    def lock_path(self) -> Path:
        """The lock file of the worker that writes the unit."""
        return as_path(f"{self.config.output_prefix}.lock")

    @property
    def failure_path(self) -> Path:
        """The file with the error of the unit's last attempt."""
        return as_path(f"{self.config.output_prefix}.failed.json")

    @property
    def manifest_paths(self) -> list[Path]:
        """The manifest of each key's pair."""
        return [manifest_path(prefix) for prefix in output_prefixes(self.config).values()]

    def is_done(self) -> bool:
        """Whether all pairs of the unit are complete, by manifests and sizes of files."""
        for prefix in output_prefixes(self.config).values():
            facts = read_manifest(prefix)
            if facts.get("work") != self.work:
                return False
            # In a store the manifest is uploaded last, so it implies the other files.
            if not is_remote(prefix) and not has_files(prefix, facts):
                return False
        return True

    def failure(self) -> str:
        """Return the error of the last attempt; "" if it did not fail."""
        try:
            facts = parse_json(self.failure_path.read_bytes())
        except FileNotFoundError:
            return ""
        return str(facts["error"]) if facts else f"unknown: {self.failure_path} is damaged"


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """Content of a plan's file.

    Attributes:
        path: the plan's file.
        config: options of all units, with the output prefix of the joined dataset.
        tokenizer: type and files of the tokenizer.
        tokenizer_sha256: hash of the tokenizer that the plan was made with.
        engine: name of the engine that the plan was made with.
        units: in the order of the corpus.
    """

    path: Path
    config: PreprocessConfig
    tokenizer: TokenizerConfig
    tokenizer_sha256: str
    engine: str
    units: Sequence[Unit]

    @property
    def address(self) -> str:
        """The path as text, for messages and commands."""
        return address_of(self.path)

    @property
    def folder(self) -> Path:
        """Folder of the units' files."""
        return as_path(f"{self.config.output_prefix}.units")


@dataclass(frozen=True, slots=True)
class PlanStatus:
    """State of all units.

    Attributes:
        num_units: units of the plan.
        num_bytes: stored bytes of all inputs.
        done: numbers of the units that are complete.
        running: worker of each unit that is being written, by number.
        failed: error of each unit that failed, by number.
        waiting: numbers of all other units.
        left_bytes: stored bytes of the units that are not done.
        bytes_per_s: speed of all workers over the last finished units; 0 if not yet known.
    """

    num_units: int
    num_bytes: int
    done: Sequence[int]
    running: dict[int, str]
    failed: dict[int, str]
    waiting: Sequence[int]
    left_bytes: int
    bytes_per_s: float


def make_plan(
    config: PreprocessConfig, tokenizer_config: TokenizerConfig, unit_bytes: int
) -> WorkPlan:
    """List the inputs, divide them into units and write ``<output-prefix>.plan.json``.

    If the plan exists already, nothing is written.

    Args:
        config: inputs, output prefix and options of all units.
        tokenizer_config: the tokenizer.
        unit_bytes: stored bytes of a unit. A larger file that ``divide`` cannot cut is one
            unit.

    Raises:
        ValueError: if options of workers or of ``--partitions`` are given, or another plan has
            this output prefix and ``overwrite`` is off; and as ``preprocess`` does.
    """
    worker_options = changed_options(config, _WORKER_OPTIONS)
    if worker_options:
        raise ValueError(
            f"{' and '.join(worker_options)}: not an option of a plan. --unit-size sets the "
            "size of units, and --workers belongs to preprocess --plan."
        )
    corpus = find_corpus(config)
    tools = build_tools(config, tokenizer_config)
    frozen = replace(config, sentence_splitter=_splitter_kind(tools, config))
    total = sum(source.size for source in corpus.sources)
    divided = divide(corpus, max(1, -(-total // unit_bytes)))
    parts = [part for part in divided if part.sources] or divided[:1]
    plan = WorkPlan(
        path=as_path(f"{config.output_prefix}{SUFFIX}"),
        config=frozen,
        tokenizer=tokenizer_config,
        tokenizer_sha256=tools.tokenizer.fingerprint(),
        engine=tools.encoder.engine.name,
        units=[],
    )
    units = []
    for number, part in enumerate(parts):
        corpus_hash = part.part.corpus if part.part else ""
        unit_corpus = replace(part, part=Part(number, len(parts), corpus_hash))
        work = work_hash(frozen, unit_corpus, tools)
        units.append(Unit(_unit_config(frozen, number), unit_corpus, work))
    plan = replace(plan, units=units)
    make_folder(plan.path.parent, f"--output-prefix {config.output_prefix}")
    facts = _facts(plan, corpus)
    with only_writer(config.output_prefix):
        if plan.path.is_file():
            stored = parse_json(plan.path.read_bytes()) or {}
            if all(stored.get(name) == value for name, value in facts.items()):
                return plan
            if not config.overwrite:
                raise ValueError(
                    f"{plan.address} exists for other inputs or options: choose another "
                    "--output-prefix, or give --overwrite to replace the plan and its units."
                )
        replace_json(plan.path, facts)
    return plan


def read_plan(path: str | Path) -> WorkPlan:
    """Read a plan; its outputs are in the plan's folder, also if the folder was moved.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not named as a plan.
        CorruptDatasetError: if the file is damaged or of a later version.
    """
    path = as_path(path)
    if not path.name.endswith(SUFFIX):
        raise ValueError(f"--plan {path}: give <output-prefix>{SUFFIX} of mcore-data plan.")
    if not path.is_file():
        raise FileNotFoundError(f"--plan {path} does not exist: make it with mcore-data plan.")
    facts = parse_json(path.read_bytes())
    if facts is None or facts["format"] != _FORMAT:
        raise CorruptDatasetError(
            f"{path} is damaged or of a later version. Repeat its mcore-data plan command with "
            "--overwrite; finished units of the same inputs and options are kept."
        )
    inputs = [InputSource(*fields) for fields in facts["inputs"]]
    settings = {name: _from_json(value) for name, value in facts["settings"].items()}
    config = PreprocessConfig(
        input=tuple(source.path for source in inputs),
        output_prefix=address_of(path)[: -len(SUFFIX)],
        **settings,
    )
    units = []
    for number, unit in enumerate(facts["units"]):
        sources = [
            replace(inputs[index], start=start, stop=stop)
            for index, start, stop in unit["sources"]
        ]
        part = Part(number, len(facts["units"]), facts["corpus"])
        corpus = Corpus(sources, facts["left_out"], part)
        units.append(Unit(_unit_config(config, number), corpus, unit["work"]))
    return WorkPlan(
        path,
        config,
        TokenizerConfig(
            **{name: _from_json(value) for name, value in facts["tokenizer_settings"].items()}
        ),
        facts["tokenizer"]["sha256"],
        facts["tokenizer"]["engine"],
        units,
    )


def build_plan_tools(plan: WorkPlan) -> Tools:
    """Build the tokenizer and engine of a plan.

    Raises:
        ValueError: if tokenizer or engine differ from those of the plan; and as ``preprocess``.
    """
    tools = build_tools(plan.config, plan.tokenizer)
    if tools.tokenizer.fingerprint() != plan.tokenizer_sha256:
        raise ValueError(
            f"{plan.address}: the files of the tokenizer changed since the plan was made. "
            "Restore them, or make a plan with another --output-prefix."
        )
    if tools.encoder.engine.name != plan.engine:
        raise ValueError(
            f"{plan.address} was made with the engine {plan.engine}, and this machine has "
            f"{tools.encoder.engine.name}: install the same extras."
        )
    unit = plan.units[0]
    if work_hash(unit.config, unit.corpus, tools) != unit.work:
        raise ValueError(
            f"{plan.address}: the plan was made with another version of mcore-data or of NLTK, "
            "which would write other units. Use one version on all machines."
        )
    return tools


def status_of(plan: WorkPlan) -> PlanStatus:
    """Determine the state of all units from the files in the plan's folder."""
    names = list_names(plan)
    done: list[int] = []
    waiting: list[int] = []
    running: dict[int, str] = {}
    failed: dict[int, str] = {}
    complete = [unit for unit in plan.units if has_manifests(unit, names)]
    with ThreadPoolExecutor(_READERS) as pool:  # in a store each check is a request
        numbers = [unit.number for unit in complete]
        are_done = dict(zip(numbers, pool.map(Unit.is_done, complete), strict=True))
    for unit in plan.units:
        if are_done.get(unit.number):
            done.append(unit.number)
        elif unit.lock_path.name not in names and unit.failure_path.name not in names:
            waiting.append(unit.number)
        elif (holder := read_holder(unit.lock_path)) and holder.is_alive() is not False:
            running[unit.number] = str(holder)
        elif error := unit.failure():
            failed[unit.number] = error
        else:
            waiting.append(unit.number)
    num_bytes = sum(unit.num_bytes for unit in plan.units)
    done_bytes = sum(plan.units[number].num_bytes for number in done)
    return PlanStatus(
        num_units=len(plan.units),
        num_bytes=num_bytes,
        done=done,
        running=running,
        failed=failed,
        waiting=waiting,
        left_bytes=num_bytes - done_bytes,
        bytes_per_s=_rate([plan.units[number] for number in done]),
    )


def merge_plan(
    plan: WorkPlan,
    *,
    physical: bool = False,
    overwrite: bool = False,
    scratch_path: str | Path = "",
    workers: int = 1,
) -> dict[str, IndexedDataset]:
    """Join the units into one dataset for each key: a logical dataset unless ``physical``.

    Args:
        plan: a plan whose units are all done.
        physical: write one pair; not possible in an object store.
        overwrite: replace a dataset that was joined from other files.
        scratch_path: local folder for small files, if the plan is in an object store.
        workers: with ``physical``, threads that copy.

    Raises:
        ValueError: if a unit is not done; and as ``merge_pairs`` does.
    """
    status = status_of(plan)
    missing = sorted({*range(status.num_units)} - {*status.done})
    if missing:
        named = ", ".join(map(str, missing[:_NAMED])) + ", ..." * (len(missing) > _NAMED)
        failed = "".join(
            f" Unit {number} failed: {error}" for number, error in status.failed.items()
        )
        raise ValueError(
            f"{len(missing)} of {status.num_units} units are not done: {named}. Write them "
            f"with mcore-data preprocess --plan {plan.address}.{failed}"
        )
    if is_remote(plan.config.output_prefix):
        if physical:
            raise ValueError(
                "--physical writes one pair to a local disk, and the plan is in an object "
                "store: leave it out, training reads the logical dataset."
            )
        return _merge_in_store(plan, scratch_folder(plan.config.output_prefix, scratch_path))
    return {
        key: merge_pairs(
            [output_prefixes(unit.config)[key] for unit in plan.units],
            prefix,
            overwrite=overwrite,
            logical=not physical,
            workers=workers,
        )
        for key, prefix in output_prefixes(plan.config).items()
    }


def _merge_in_store(plan: WorkPlan, scratch: Path) -> dict[str, IndexedDataset]:
    """Join units in an object store, from local copies of all files but the ``.bin`` files."""
    assert isinstance(plan.folder, StorePath)
    sizes = plan.folder.list_sizes()
    units = scratch / plan.folder.name
    units.mkdir(parents=True, exist_ok=True)
    small = [name for name in sizes if name.endswith(_SMALL_SUFFIXES)]
    plan.folder.system.get(
        [f"{plan.folder.key}/{name}" for name in small], [str(units / name) for name in small]
    )
    datasets = {}
    for key, prefix in output_prefixes(plan.config).items():
        pairs = [units / output_prefixes(unit.config)[key].name for unit in plan.units]
        for pair in pairs:
            expected = {
                f"{pair.name}{Path(name).suffix}": file["bytes"]
                for name, file in read_manifest(pair)["files"].items()
            }
            actual = {name: sizes.get(name) for name in expected}
            if actual != expected:
                raise CorruptDatasetError(
                    f"{plan.address}: the files have {actual} bytes, and the manifest of "
                    f"{pair.name} lists {expected}. Remove this manifest and write the unit "
                    "again."
                )
        local = scratch / prefix.name
        merge_pairs(pairs, local, overwrite=True, logical=True, bins_elsewhere=True)
        upload_files(local, prefix, FILES)
        datasets[key] = IndexedDataset(prefix, cache_path=scratch)
    return datasets


def changed_options(
    config: PreprocessConfig | TokenizerConfig, names: Iterable[str]
) -> list[str]:
    """Return the flags of the options in ``names`` that differ from their defaults."""
    defaults = {each.name: each.default for each in fields(config)}
    return [
        f"--{name.replace('_', '-')}"
        for name in names
        if getattr(config, name) != defaults[name]
    ]


def list_names(plan: WorkPlan) -> set[str]:
    """Return the names of all files in the units' folder; none before the first worker."""
    if isinstance(plan.folder, StorePath):
        return set(plan.folder.list_sizes())
    return set(os.listdir(plan.folder)) if plan.folder.is_dir() else set()


def has_manifests(unit: Unit, names: set[str]) -> bool:
    """Whether ``names`` includes all manifests of a unit."""
    return all(path.name in names for path in unit.manifest_paths)


def read_holder(path: Path) -> Holder | None:
    """Return the holder of a lock file; None if the file does not exist."""
    content = lock_at(path).read()
    return content[0] if content else None


def describe_status(plan: WorkPlan, status: PlanStatus) -> Iterator[str]:
    """Format the state of a plan as lines."""
    yield f"{plan.address}: {status.num_units} units, {status.num_bytes:,} bytes"
    yield f"  done: {len(status.done)}"
    yield f"  running: {len(status.running)}"
    for number, holder in status.running.items():
        yield f"    unit {number}: {holder}"
    yield f"  failed: {len(status.failed)}"
    for number, error in status.failed.items():
        yield f"    unit {number}: {error}"
    yield f"  waiting: {len(status.waiting)}"
    if not status.left_bytes and len(status.done) == status.num_units:
        yield f"  next: mcore-data merge --plan {plan.address}"
    elif status.bytes_per_s:
        left_s = status.left_bytes / status.bytes_per_s
        yield f"  rate: {status.bytes_per_s / 1e6:,.1f} MB/s, {left_s:,.0f} s left"
    else:
        yield "  rate: not known before two units are done"


def _rate(done: Sequence[Unit]) -> float:
    """Return the bytes per second of the last finished units, by their manifests' times.

    All times come from the clock of the file server. The first unit only marks the start.
    """
    finished = sorted(
        (max(map(_modified_s, unit.manifest_paths)), unit.num_bytes) for unit in done
    )[-_RATE_UNITS:]
    span_s = finished[-1][0] - finished[0][0] if finished else 0.0
    return sum(num_bytes for _, num_bytes in finished[1:]) / span_s if span_s else 0.0


def _modified_s(path: Path) -> float:
    return path.modified_s() if isinstance(path, StorePath) else path.stat().st_mtime


def _facts(plan: WorkPlan, corpus: Corpus) -> dict[str, Any]:
    """Return the content of the plan's file as JSON types."""
    index = {source.path: number for number, source in enumerate(corpus.sources)}
    first = plan.units[0].corpus.part
    return {
        "format": _FORMAT,
        "settings": {
            name: _to_json(value)
            for name, value in asdict(plan.config).items()
            if name not in _COMMAND_OPTIONS
        },
        "tokenizer_settings": {
            name: _to_json(value) for name, value in asdict(plan.tokenizer).items()
        },
        "tokenizer": {"sha256": plan.tokenizer_sha256, "engine": plan.engine},
        "corpus": first.corpus if first else "",
        "inputs": [
            [source.path, source.kind, source.size, source.stamp] for source in corpus.sources
        ],
        "left_out": list(corpus.left_out),
        "units": [
            {
                "work": unit.work,
                "sources": [
                    [index[source.path], source.start, source.stop]
                    for source in unit.corpus.sources
                ],
            }
            for unit in plan.units
        ],
    }


def _unit_config(config: PreprocessConfig, number: int) -> PreprocessConfig:
    return replace(config, output_prefix=f"{config.output_prefix}.units/{number:05d}")


def _splitter_kind(tools: Tools, config: PreprocessConfig) -> Any:
    """Return the splitter that ``auto`` chose, or the option itself if it is not ``auto``."""
    if tools.splitter is None or config.sentence_splitter != "auto":
        return config.sentence_splitter
    return "rules" if tools.splitter.name.startswith("rules") else "punkt"


def _to_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _from_json(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
