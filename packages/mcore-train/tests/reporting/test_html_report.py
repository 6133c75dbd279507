import io
import json
from html.parser import HTMLParser

import pytest
from rich.console import Console

from mcore_train.cli import main
from mcore_train.reporting.alarms import Alarm
from mcore_train.reporting.html_report import html_report, read_pages, spikes
from mcore_train.reporting.kernel_split import read_trace, split_ms, trace_page
from mcore_train.reporting.log import Header, Reporter
from mcore_train.reporting.svg_charts import Line, line_chart, stacked_bars
from mcore_train.reporting.waterfall import AXES, PARTS, Waterfall

VOID = {"meta"}


class Strict(HTMLParser):
    """Fails where tags do not close in order; notes what a page loads and its text."""

    def __init__(self):
        super().__init__()
        self.opened, self.loads, self.texts, self.tags = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        names = dict(attributes)
        self.loads += [names[n] for n in ("src", "href") if n in names]
        if tag not in VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def parsed(page):
    parser = Strict()
    parser.feed(page)
    assert parser.opened == []
    return parser


def numbers(iteration, loss):
    return {
        "loss": loss,
        "grad_norm": 1.0,
        "tokens_per_s": 1e4,
        "step_ms": 5.0,
        "lr": 1e-3,
        "mfu": 0.0,
        "peak_gib": 2.0,
        "train_iters": 20,
        "consumed_train_tokens": 100 * iteration,
    }


def write_run(folder, losses, continues_from=0):
    with Reporter(
        Console(file=io.StringIO()),
        metrics_file=folder / "metrics.jsonl",
        continues_from=continues_from,
        with_lines=False,
    ) as reporter:
        row = {"devices": {"cpu": 1}, "planned_gib": 2.5, "layout": {"data": 2}}
        reporter.report_header(continues_from, Header(lines=(), row=row))
        for step, loss in enumerate(losses, start=continues_from + 1):
            reporter.record("train", step, numbers(step, loss))
        parts = dict.fromkeys((*PARTS, *(f"exposed_{axis}" for axis in AXES)), 0.0)
        parts |= {"compute": 0.003, "exposed_dp": 0.002}
        fall = Waterfall(
            iteration=continues_from + 3,
            parts=parts,
            step_s=0.005,
            slow_rank=-1,
            slow_ratio=1.0,
        )
        alarm = Alarm(name="communication", seen="40 % <exposed>", flag="--x", gain="+5 %")
        reporter.report_waterfall(fall, [alarm])
        reporter.record("valid", continues_from + 4, {"loss": 3.0})
        reporter.record("valid books", continues_from + 4, {"loss": 3.5})
        reporter.record("task tiny", continues_from + 4, {"acc": 0.5})


def test_a_report_has_the_runs_beside_each_other(tmp_path, capsys):
    losses = [4 - 0.1 * step for step in range(12)]
    write_run(tmp_path / "first", losses)
    write_run(tmp_path / "first", [5.0] * 4, continues_from=10)
    write_run(tmp_path / "second", losses)
    runs = [str(tmp_path / name) for name in ("first", "second")]
    output = tmp_path / "out" / "report.html"
    assert main(["report", *runs, "--output", str(output)]) == 0
    text = output.read_text()
    page = parsed(text)
    assert page.loads == []  # nothing comes from elsewhere
    assert "script" not in page.tags
    said = "".join(page.texts)
    for expected in (
        "first and second",
        "Waterfall: ms of recorded steps",
        "communication: 40 % <exposed>; try --x: +5 %",
        "attempt 2 begins",
        "Peak memory, GiB (dashed: planned)",
        "loss 5, ",
        "devices",
        "Validation loss on books",
        "tiny: acc",
    ):
        assert expected in said, expected
    # Steps 11 and 12 of the first attempt were repeated: the curve has each once.
    (first, second) = read_pages([tmp_path / "first", tmp_path / "second"])
    assert [step for step, _ in first.points("loss")] == list(range(1, 15))
    assert second.points("valid/loss") == [(4, 3.0)]
    assert [step for step, *_ in spikes(first)] == [11, 12, 13, 14]
    assert spikes(second) == []
    assert text.count("<polyline") >= 2 * 6


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    write_run(tmp_path, [])
    parsed(html_report(read_pages([tmp_path])))
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl"):
        read_pages([tmp_path / "none"])


def test_charts_draw_what_they_are_given():
    points = [(1, 2.0), (2, 4.0), (3, 3.0)]
    drawn = parsed(line_chart([Line("a < b", points, "red")]))
    assert "a < b" in drawn.texts
    assert line_chart([Line("none", [], "red")]) == ""
    many = [(step, float(step % 7)) for step in range(10_000)]
    assert line_chart([Line("many", many, "red")]).count(",") < 700
    bars = stacked_bars(
        [(3, {"compute": 2.0, "data": 1.0}), (5, {"compute": 1.0})],
        {"compute": "red", "data": "blue"},
    )
    assert parsed(bars).tags.count("rect") == 3
    assert stacked_bars([], {}) == ""


def test_a_trace_is_split_by_kind_and_axis(tmp_path):
    def kernel(name, ts, dur, axis=""):
        extra = {"Process Group Description": axis} if axis else {}
        return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": extra}

    events = [
        {"cat": "user_annotation", "name": "step 3", "ts": 0, "dur": 1000},
        kernel("nvjet_gemm", 0, 600),
        kernel("ncclDevKernel_AllReduce", 500, 300, "cp_dp"),
        kernel("vectorized_elementwise", 900, 100),
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(file)
    split = split_ms(trace.kernels, 1000, len(trace.steps))
    assert split["gemm"] == 0.6
    assert split["exposed_communication"] == 0.2
    assert split["exposed_by_axis"] == {"cp_dp": 0.2}
    assert split["gap"] == 0.1
    assert "0.200  exposed communication over cp_dp" in trace_page(trace)
