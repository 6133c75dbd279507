"""``mcore-train report``: one HTML page about runs, from the files of their folders.

The page has no scripts and loads no other files, so it can be mailed. Each chart has the curves
of all runs; waterfall, events and recipe follow for each run. Of a run that still trains the
page shows the steps so far.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from mcore_train.reporting.log import METRICS, SAMPLES, read_metrics
from mcore_train.reporting.spike_ledger import describe_spike, read_ledger
from mcore_train.reporting.svg_charts import COLORS, Line, line_chart, stacked_bars
from mcore_train.reporting.waterfall import AXES, PARTS

SPIKE = 1.2
"""Loss over the median of the previous reports that counts as a spike."""
BEFORE = 8
"""Number of previous reports in this median."""
ORIGIN = ("kind", "attempt", "continues_from", "iteration", "time")
"""Keys of every row."""
MOST_SPIKES, MOST_DOCUMENTS, MOST_BARS = 5, 4, 60

Rows = Sequence[Mapping[str, Any]]

CURVES = {
    "loss": "Loss, nats per token",
    "valid/loss": "Validation loss",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "tokens_per_s": "Tokens per second",
    "step_ms": "Step, ms",
    "mfu": "MFU",
    "peak_gib": "Peak memory, GiB (dashed: planned)",
    "expert_imbalance": "Rows of the busiest expert over the mean",
    "waterfall/gradient_noise": "Gradient noise scale over the batch",
    "waterfall/communication_share": "Exposed communication, share of the step",
    "waterfall/utilisation": "Utilisation",
    "layers/weight_norm": "Norm of all weights",
    "layers/update_norm": "Norm of an update",
    "layers/largest_attention_logit": "Largest attention logit",
}
"""Titles of the curves by number; numbers without a kind are of kind train. Curves of named
validation sets and of zero-shot tasks follow."""
SPEEDS = ("tokens_per_s", "step_ms", "mfu")
"""Curves without the first report of each attempt, whose first step compiles and connects."""

_PART_COLORS = {
    "compute": "#1f6feb",
    "optimizer": "#54aeff",
    "exposed_tp": "#cf222e",
    "exposed_cp": "#fa4549",
    "exposed_ep": "#ff8182",
    "exposed_dp": "#bf3989",
    "exposed_pp": "#8250df",
    "exposed_world": "#6e7781",
    "bubble": "#d4a72c",
    "data": "#1a7f37",
    "host": "#9a6700",
    "checkpoint": "#4ac26b",
}
_STYLE = """
:root{color-scheme:light}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:1120px;font:15px/1.45 system-ui,sans-serif}
body{color:#1f2328}
h1{font-size:22px}h2{font-size:18px;margin:28px 0 8px;overflow-wrap:anywhere}
h3{font-size:14px;margin:0 0 6px}
.grid{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
.card{border:1px solid #d0d7de;border-radius:8px;padding:12px;min-width:0}
svg{display:block;width:100%;height:auto}
.wide{overflow-x:auto;margin-top:14px}.card .wide{margin-top:0}
table{border-collapse:collapse;font-size:13px;width:100%}
th,td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid #eaeef2;vertical-align:top}
td:first-child{width:1%;padding-right:18px}td:first-child,td:first-child pre{white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
pre{font-size:12px;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
.key{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.keys span{margin-right:14px;white-space:nowrap;font-size:13px}
details{margin:8px 0}summary{cursor:pointer}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPage:
    """Data of one run folder for the report."""

    name: str
    """Unique among the runs of a report."""
    folder: Path
    rows: Rows
    """Rows of ``metrics.jsonl``, without steps that later attempts repeated."""
    recipe: str
    """Text of the newest recipe.toml; "" if none was saved yet."""
    samples: Rows
    ledger: Rows
    """Rows of ``spikes.jsonl``."""

    def of_kind(self, kind: str) -> Rows:
        """Return the rows of one kind."""
        return [row for row in self.rows if row["kind"] == kind]

    @property
    def header(self) -> Mapping[str, Any]:
        """Description of the run at its last start."""
        rows = self.of_kind("run")
        return rows[-1] if rows else {}

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return steps and finite values of a number, such as ``loss`` or ``valid/loss``."""
        kind, _, key = name.rpartition("/")
        rows = self.of_kind(kind or "train")
        if name in SPEEDS and len(rows) > 1:
            attempts = [row.get("attempt", 1) for row in rows]
            rows = [rows[n] for n in range(1, len(rows)) if attempts[n] == attempts[n - 1]]
        found = [(row["iteration"], row.get(key)) for row in rows]
        return [(x, y) for x, y in found if isinstance(y, int | float) and math.isfinite(y)]


def read_pages(folders: Sequence[Path]) -> list[RunPage]:
    """Read the files of run folders.

    Raises:
        ValueError: if a folder has no ``metrics.jsonl``.
    """
    pages = []
    for number, folder in enumerate(folders):
        rows = read_metrics(folder / METRICS)
        if not rows:
            raise ValueError(f"{folder} holds no {METRICS}: give the --save folder of a run.")
        recipes = sorted(folder.rglob("recipe.toml"), key=lambda file: file.stat().st_mtime)
        names = [other.name for other in folders]
        name = folder.name if names.count(folder.name) == 1 else str(folder)
        name = name if folders.index(folder) == number else f"{name} ({number + 1})"
        pages.append(
            RunPage(
                name=name,
                folder=folder,
                rows=rows,
                recipe=recipes[-1].read_text(encoding="utf-8") if recipes else "",
                samples=read_metrics(folder / SAMPLES),
                ledger=read_ledger(folder),
            )
        )
    return pages


def html_report(pages: Sequence[RunPage]) -> str:
    """Return the page as HTML."""
    title = " and ".join(page.name for page in pages)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _keys({page.name: color for page, color in zip(pages, _colors(pages), strict=True)})
        if len(pages) > 1
        else "",
        _comparison(pages),
        "<h2>Curves</h2><div class=grid>",
        *_curves(pages),
        "</div>",
    ]
    for page in pages:
        parts += [f"<h2>{escape(page.name)}</h2>", *_run_parts(page)]
    return "".join([*parts, "</body></html>\n"])


def spikes(page: RunPage) -> list[tuple[int, float, float]]:
    """Return the steps at which the loss jumped, with the loss and the previous median."""
    points, jumps = page.points("loss"), []
    for index in range(BEFORE, len(points)):
        median = statistics.median(loss for _, loss in points[index - BEFORE : index])
        step, loss = points[index]
        if loss > SPIKE * median:
            jumps.append((int(step), loss, median))
    return jumps[:MOST_SPIKES]


def _colors(pages: Sequence[RunPage]) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(len(pages))]


def _comparison(pages: Sequence[RunPage]) -> str:
    """Return the table of all runs, with their progress and newest numbers."""
    numbers = {
        "steps": lambda p: _newest(p, "iteration", 0),
        "of": lambda p: _newest(p, "train_iters", 0),
        "tokens": lambda p: _newest(p, "consumed_train_tokens", 0),
        "loss": lambda p: _newest(p, "loss"),
        "validation loss": lambda p: (
            p.points("valid/loss")[-1][1] if p.points("valid/loss") else None
        ),
        "tokens/s": lambda p: _median(p, "tokens_per_s"),
        "step, ms": lambda p: _median(p, "step_ms"),
        "MFU": lambda p: _median(p, "mfu") or None,
        "peak GiB": lambda p: max((y for _, y in p.points("peak_gib")), default=0.0) or None,
        "attempts": lambda p: max((row.get("attempt", 1) for row in p.rows), default=1),
    }
    columns = {name: [value(page) for page in pages] for name, value in numbers.items()}
    columns = {name: found for name, found in columns.items() if any(found)}
    head = "".join(f"<th class=n>{name}</th>" for name in columns)
    body = "".join(
        f"<tr><td>{escape(page.name)}</td>"
        + "".join(f"<td class=n>{_number(found[row])}</td>" for found in columns.values())
        + "</tr>"
        for row, page in enumerate(pages)
    )
    return f"<div class=wide><table><tr><th>run</th>{head}</tr>{body}</table></div>"


def _newest(page: RunPage, key: str, otherwise: float | None = None) -> float | None:
    rows = page.of_kind("train")
    return rows[-1].get(key, otherwise) if rows else otherwise


def _median(page: RunPage, key: str) -> float | None:
    values = [y for _, y in page.points(key)]
    return statistics.median(values) if values else None


def _curves(pages: Sequence[RunPage]) -> Iterator[str]:
    for name, title in (CURVES | _scores(pages)).items():
        lines = [
            Line(page.name, page.points(name), color)
            for page, color in zip(pages, _colors(pages), strict=True)
        ]
        if not any(y for line in lines for _, y in line.points):
            continue
        if name == "peak_gib":
            for page, line in zip(pages, list(lines), strict=True):
                if (planned := page.header.get("planned_gib")) and line.points:
                    ends = [(line.points[0][0], planned), (line.points[-1][0], planned)]
                    lines.append(Line(f"{page.name}, planned", ends, line.color, True))
        yield f"<div class=card><h3>{escape(title)}</h3>{line_chart(lines)}</div>"


def _scores(pages: Sequence[RunPage]) -> dict[str, str]:
    """Return the titles of the curves of named validation sets and of zero-shot tasks."""
    titles = {}
    for row in (row for page in pages for row in page.rows):
        split, _, name = row["kind"].partition(" ")
        if name and split == "valid":
            titles[f"{row['kind']}/loss"] = f"Validation loss on {name}"
        elif split == "task":
            numbers = [key for key in row if key not in ORIGIN]
            titles |= {f"{row['kind']}/{key}": f"{name}: {key}" for key in numbers}
    return titles


def _run_parts(page: RunPage) -> Iterator[str]:
    if falls := page.of_kind("waterfall"):
        yield from _waterfall(falls)
    yield _table("Events", ("step", "what"), list(_events(page)))
    texts = {
        step: f"loss {loss:.4g}, {median:.4g} before" for step, loss, median in spikes(page)
    } | {row["iteration"]: describe_spike(row) for row in page.ledger[-MOST_SPIKES:]}
    if texts:
        head = ("step", "documents")
        yield _table("Spikes and steps left out", head, _documents(page, texts))
    if page.samples:
        rows = [(row["iteration"], row["prompt"] + row["text"]) for row in page.samples[-3:]]
        yield _table("Samples", ("step", "text"), rows)
    environment = [
        (key.replace("_", " "), _plain(value))
        for key, value in page.header.items()
        if key not in ORIGIN
    ]
    table = _table("", ("", ""), environment)
    yield f"<details><summary>Environment</summary>{table}</details>"
    if page.recipe:
        text = escape(page.recipe)
        yield f"<details><summary>Recipe</summary><pre>{text}</pre></details>"


def _waterfall(falls: Rows) -> Iterator[str]:
    names = [*PARTS, *(f"exposed_{axis}" for axis in AXES)]
    used = [n for n in _PART_COLORS if n in names and any(row.get(f"{n}_ms") for row in falls)]
    colors = {name.replace("_", " "): _PART_COLORS[name] for name in used}
    bars = [
        (row["iteration"], {n.replace("_", " "): row.get(f"{n}_ms") or 0.0 for n in used})
        for row in falls[-MOST_BARS:]
    ]
    last = falls[-1]
    shares = [
        (name.replace("_", " "), f"{last[f'{name}_ms']:.2f}", f"{_share(last, name):.1f} %")
        for name in used
    ]
    yield "<div class=grid><div class=card><h3>Waterfall: ms of recorded steps</h3>"
    yield f"{stacked_bars(bars, colors)}{_keys(colors)}</div>"
    yield f"<div class=card><h3>Step {last['iteration']}</h3>"
    yield _table("", ("part", "ms", "share"), shares)
    yield "</div></div>"


def _share(row: Mapping[str, Any], name: str) -> float:
    return 100 * row[f"{name}_ms"] / row["step_ms"]


def _events(page: RunPage) -> Iterator[tuple[Any, str]]:
    """Yield starts, alarms, saves and skipped steps in the order of the file."""
    alarms: dict[str, str] = {}
    for row in page.rows:
        kind, step = row["kind"], row["iteration"]
        if kind == "run":
            yield step, f"attempt {row.get('attempt', 1)} begins"
        elif kind == "alarm" and alarms.get(row["name"]) != row["flag"]:
            alarms[row["name"]] = row["flag"]
            remedy = f"try {row['flag']}: {row['gain']}" if row["flag"] else row["gain"]
            yield step, f"{row['name']}: {row['seen']}; {remedy}"
        elif kind == "save_durable":
            yield step, f"saved, durable after {row['after_s']:.1f} s"
        elif kind == "train" and row.get("skipped_steps"):
            yield step, f"{row['skipped_steps']} steps skipped"


def _documents(page: RunPage, texts: Mapping[int, str]) -> list[tuple[int, str]]:
    """Append the documents of some steps to their texts, if the data still exist."""
    from mcore_data.tracing.explaining import RunData

    rows, why = [], ""
    try:
        data = RunData(page.folder)
    except (OSError, ValueError) as error:
        data, why = None, str(error)
    for step, text in sorted(texts.items()):
        if data is None:
            rows.append((step, f"{text}; the documents are not known: {why}"))
            continue
        try:
            pieces = [p for sample in range(MOST_DOCUMENTS) for p in data.explain(step, sample)]
        except ValueError:
            pieces = data.explain(step, 0)
        shown = "\n".join(
            f"document {p.document} of {p.prefix or 'mock data'}: {p.text[:160]}"
            for p in pieces[:MOST_DOCUMENTS]
        )
        rows.append((step, f"{text}\n{shown}"))
    return rows


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    heads = "".join(f"<th>{escape(name)}</th>" for name in head) if any(head) else ""
    body = "".join(
        "<tr>" + "".join(f"<td><pre>{escape(str(cell))}</pre></td>" for cell in row) + "</tr>"
        for row in rows
    )
    named = f"<h3>{escape(title)}</h3>" if title else ""
    return f"<div class=wide>{named}<table><tr>{heads}</tr>{body}</table></div>"


def _keys(colors: Mapping[str, str]) -> str:
    keys = (
        f'<span><i class=key style="background:{color}"></i>{escape(name)}</span> '
        for name, color in colors.items()
    )
    return f"<p class=keys>{''.join(keys)}</p>"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(_plain, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
