import gzip
import json
from collections import defaultdict

import pytest
from warm_ranks import run_command

from mcore_train.reporting.kernel_split import read_trace

TRAIN = (
    "gpt --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--vocab-size 16 --mock-data --num-workers 0 --global-batch-size 2 --train-iters 5 "
    "--lr 1e-3"
)


METADATA = {
    "process_name",
    "process_labels",
    "process_sort_index",
    "thread_name",
    "thread_sort_index",
}


def check_trace_events(events):
    """Hold events to the published Trace Event Format, which Perfetto and Chromium read.

    Complete events of one thread must nest: a viewer has no place for two that overlap.
    """
    slices = defaultdict(list)
    flows = {"s": set(), "f": set()}
    for event in events:
        assert {"ph", "name", "pid"} <= set(event), event
        if event["ph"] == "M":
            assert event["name"] in METADATA
            assert len(event["args"]) == 1
            continue
        assert event["ph"] in set("XistfbenC"), event
        assert event["ts"] >= 0
        assert isinstance(event["tid"], int | str)
        assert isinstance(event["pid"], int | str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
        if event["ph"] in "stf":
            assert "id" in event
        if event["ph"] in flows:
            flows[event["ph"]].add((event["cat"], event["id"]))
    assert flows["f"] <= flows["s"]  # an arrow that ends has begun
    for thread in slices.values():
        ends = []
        for begin, negative_length in sorted(thread):
            end = begin - negative_length
            while ends and ends[-1] <= begin + 1e-3:  # times are rounded to nanoseconds
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3
            ends.append(end)


def test_a_profile_has_the_steps_and_their_phases(tmp_path):
    save = tmp_path / "run"
    options = f"--profile --profile-step-start 2 --profile-step-end 4 --save {save}"
    run_command("mcore_train", *TRAIN.split(), *options.split())
    file = save / "profiles" / "rank0.json.gz"
    with gzip.open(file, "rt") as stream:
        # JSON has no NaN and no Infinity, which Python reads without a word.
        document = json.load(stream, parse_constant=pytest.fail)
    assert document.get("displayTimeUnit", "ms") in ("ms", "ns")
    events = document["traceEvents"]  # what Perfetto reads
    check_trace_events(events)
    ranges = {e["name"]: e for e in events if e.get("cat") == "user_annotation"}
    assert {"step 3", "step 4", "data", "compute", "F/0", "B/0", "optimizer"} <= set(ranges)
    assert not {"step 2", "step 5"} & set(ranges)
    page = run_command("mcore_train", "profile", file).stdout
    assert page.startswith("2 steps\n")
    lines = {line.split("  ")[-1].split(",")[0].strip(): line for line in page.splitlines()}
    assert "2.0 x" in lines["F/0"]  # two micro-batches a step
    assert float(lines["compute"].split()[0]) >= float(lines["F/0"].split()[0]) > 0


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    file = tmp_path / "trace.json"
    file.write_text("[1]")
    with pytest.raises(ValueError, match="is not a trace"):
        read_trace(file)
