"""The commands that read the files of a run: ``report``, ``explain``, ``profile``."""

from pathlib import Path


def show_profile(trace: Path, /) -> int:
    """Print the time of a profiled step by kinds of kernels, communication and phases.

    Args:
        trace: file of --profile, such as profiles/rank0.json.gz; Perfetto opens it too.
    """
    from mcore_train.reporting.kernel_split import read_trace, trace_page

    print(trace_page(read_trace(trace)))
    return 0


def explain_spikes(run: Path, /, *, step: int = 0, samples: int = 4) -> int:
    """Print the steps that a run left out as spikes, and the documents of these steps.

    Args:
        run: --save folder of the run.
        step: step whose documents are shown, as in the log; 0: all steps of spikes.jsonl.
        samples: number of samples of each step's batch to show.
    """
    from mcore_train.reporting.spike_ledger import ledger_page

    for line in ledger_page(run, step, samples):
        print(line)
    return 0


def write_report(runs: tuple[Path, ...], /, *, output: Path = Path("report.html")) -> int:
    """Write one self-contained HTML page about a run, or a comparison of several runs.

    Only reads files, so a run may still be training.

    Args:
        runs: --save folders.
        output: page to write.
    """
    from mcore_train.reporting.html_report import html_report, read_pages

    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(html_report(read_pages(runs)), encoding="utf-8")
    print(f"{output} has {len(runs)} run{'s' * (len(runs) > 1)}")
    return 0
