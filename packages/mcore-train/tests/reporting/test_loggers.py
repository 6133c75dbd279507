"""Each logger with the real package, offline; `nox -s loggers` brings the packages."""

import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from mcore_train.config import LogConfig
from mcore_train.reporting.log import Header, Reporter
from mcore_train.running import named_loggers

HEADER = Header(lines=("model: GPT", "layout: 1 rank"), row={"parameters": 8})


def attempt(folder, options, continues_from, steps):
    """Report the loss of some steps as one attempt that continues from a step."""
    with Reporter(
        Console(file=io.StringIO()),
        metrics_file=folder / "metrics.jsonl",
        loggers=named_loggers(options, str(folder)),
        continues_from=continues_from,
    ) as reporter:
        reporter.report_header(continues_from, HEADER)
        for step in steps:
            reporter.record("train", step, {"loss": 10.0 - step})
        reporter.record("waterfall", steps[0], {"step_ms": 5.0})
        reporter.record("experts", steps[-1], {"imbalance/layer_3": 1.5})
        assert len(reporter.loggers) == len(named_loggers(options, str(folder))), "one failed"


def crash_and_resume(folder, options):
    attempt(folder, options, 0, (1, 2, 3, 4))
    attempt(folder, options, 2, (3, 4, 5, 6))


def wandb_records(data):
    """Yield the records of an offline run: LevelDB's log format after a header of 7 bytes."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # a record header never spans blocks
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_gets_every_step_once(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as messages

    monkeypatch.setenv("WANDB_MODE", "offline")
    crash_and_resume(tmp_path, LogConfig(wandb_project="p", wandb_exp_name="n"))
    wandb.teardown()  # its process has written all files then
    points, identities = [], set()
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(file.read_bytes()):
            record = messages.Record.FromString(data)
            if record.run.run_id:
                identities.add((record.run.run_id, record.run.project, record.run.display_name))
            row = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            if "train/loss" in row:
                points.append((int(row["iteration"]), float(row["train/loss"])))
    assert sorted(points) == [(step, 10.0 - step) for step in range(1, 7)]
    ((_, project, name),) = identities
    assert (project, name) == ("p", "n")


def test_mlflow_gets_every_step_once(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "e")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    crash_and_resume(tmp_path, LogConfig(loggers=("mlflow",)))
    client = mlflow.MlflowClient()
    number = client.get_experiment_by_name("e").experiment_id
    (run,) = client.search_runs([number])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((m.step, m.value) for m in history) == [(s, 10.0 - s) for s in range(1, 7)]
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.note.content"].startswith("model: GPT")


def test_trackio_gets_every_step_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("TRACKIO_PROJECT", "p")
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    crash_and_resume(tmp_path, LogConfig(loggers=("trackio",)))
    (run,) = SQLiteStorage.get_runs("p")
    rows = SQLiteStorage.get_logs("p", run)
    points = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert sorted(points) == [(step, 10.0 - step) for step in range(1, 7)]


def test_prometheus_reads_the_newest_numbers(tmp_path):
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    crash_and_resume(tmp_path, LogConfig(loggers=("prometheus",)))
    text = (tmp_path / "metrics.prom").read_text()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    found = {sample.name: sample.value for sample in samples}
    assert found["mcore_train_loss"] == 4.0
    assert found["mcore_train_iteration"] == 6
    assert found["mcore_experts_imbalance_layer_3"] == 1.5
    assert len({sample.labels["run"] for sample in samples}) == 1


def test_a_collector_of_opentelemetry_gets_the_newest_numbers(tmp_path, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        attempt(tmp_path, LogConfig(loggers=("opentelemetry",)), 0, (1, 2, 3))
        server.shutdown()
        thread.join()
    request = ExportMetricsServiceRequest.FromString(bodies[-1])
    (resource,) = request.resource_metrics
    found = {
        metric.name: metric.gauge.data_points[0].as_double or metric.gauge.data_points[0].as_int
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert found["mcore.train.loss"] == 7.0
    assert found["mcore.train.iteration"] == 3
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert names["service.name"] == "mcore-train"


@pytest.mark.parametrize("name", ["mlflow", "trackio", "prometheus", "opentelemetry", "wandb"])
def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch, name):
    package = {"prometheus": "prometheus_client"}.get(name, name)
    for module in [m for m in list(sys.modules) if m.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    options = LogConfig(wandb_project="p") if name == "wandb" else LogConfig(loggers=(name,))
    with pytest.raises(ValueError, match=rf"pip install .mcore-train\[{name}\]"):
        named_loggers(options, str(tmp_path))


def test_the_run_has_one_identity_over_its_attempts(tmp_path):
    crash_and_resume(tmp_path, LogConfig())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len({row["run_id"] for row in rows if row["kind"] == "run"}) == 1
