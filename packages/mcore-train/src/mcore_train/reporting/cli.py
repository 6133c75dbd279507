"""The commands that read what a run has written: ``report``, ``explain``, ``profile``."""

from pathlib import Path


def show_profile(trace: Path, /) -> int:
    """Print what a profiled step's time went to: kinds of kernels, communication, phases.

    Args:
        trace: file of --profile, such as profiles/rank0.json.gz; Perfetto opens it too.
    """
    from mcore_train.reporting.kernel_split import read_trace, trace_page

    print(trace_page(read_trace(trace)))
    return 0


def explain_spikes(run: Path, /, *, step: int = 0, samples: int = 4) -> int:
    """Print the steps that a run has left out as spikes, and the documents that they read.

    Args:
        run: its --save folder.
        step: step whose documents are shown, as the log counts; 0: all of spikes.jsonl.
        samples: first samples of each step's batch that are shown.
    """
    from mcore_train.reporting.spike_ledger import ledger_page

    for line in ledger_page(run, step, samples):
        print(line)
    return 0


def write_report(runs: tuple[Path, ...], /, *, output: Path = Path("report.html")) -> int:
    """Write one self-contained HTML page about a run, or one that compares several.

    Reads files alone, also while a run goes on.

    Args:
        runs: --save folders.
        output: page to write.
    """
    from mcore_train.reporting.html_report import html_report, read_pages

    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(html_report(read_pages(runs)), encoding="utf-8")
    print(f"{output} has {len(runs)} run{'s' * (len(runs) > 1)}")
    return 0
