"""The command ``mcore-train``. Help answers without loading torch."""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial

from mcore_base.command_line import HELP_FLAGS
from mcore_base.command_line import parse as parse_options
from mcore_base.entry_point import Commands, run_program
from mcore_train.composition import FAMILY_COMMANDS, TrainConfig, Verified

ABOUT = """Train large language models: one program from a laptop CPU to a cluster.

examples:
  mcore-train quickstart
  mcore-train gpt --model tiny --mock-data --seq-length 64 --train-iters 100 --lr 1e-3
  torchrun --nproc-per-node 8 -m mcore_train gpt --model llama-3-8b --data-path ...
  mcore-train mamba --model mamba2-130m --mock-data --seq-length 64 --train-iters 10 --lr 1e-3
  mcore-train bert --train-data-path story_text_sentence --vocab-file vocab.txt ...
  mcore-train t5 --train-data-path story_text_sentence --vocab-file vocab.txt ...
  mcore-train verify gpt --model tiny --mock-data --seq-length 64 \\
      --tensor-model-parallel-size 2 --nproc 2
  mcore-train reference gpt --objective dpo --reference-cache cache ...
  mcore-train plan --model llama-3-8b --gpus 8 --gpu h100 --seq-length 8192
  mcore-train migrate pretrain.sh --output recipe.toml
  mcore-train schedule show --ranks 4 --microbatches 8
  mcore-train triage logs
  mcore-train memory snapshot.rank0.pickle
  mcore-train profile trace.json
  mcore-train explain runs/quickstart/checkpoint --step 3
  mcore-train report runs/quickstart/checkpoint
  mcore-train doctor
  mcore-train doctor runs/quickstart/checkpoint

pages:
  docs/training.md          quickstart gpt mamba schedule profile report explain
  docs/fine-tuning.md       gpt
  docs/objectives.md        gpt reference
  docs/encoders.md          bert t5
  docs/layouts.md           gpt verify schedule
  docs/planning.md          plan
  docs/cluster.md           launch doctor triage
  docs/migration.md         migrate
  docs/golden-runs.md       golden
  docs/troubleshooting.md   doctor triage memory"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 2 for bad input, else what ``exit_code`` gives."""
    return _run(COMMANDS, argv)


def _run(commands: Commands, argv: Sequence[str] | None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return run_program("mcore-train", ABOUT, commands, argv, exit_code, _call)


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error.

    Faults of gradients, weights and devices that a run detected have the exit code of their
    class in ``diagnosis.rules.FAULTS``. Other codes are 2 for bad input, 1 for files or devices
    that failed, and 0 for a fault of the program.
    """
    if (name := type(error).__name__) in _CLASSES:
        from mcore_train.diagnosis.rules import FAULTS

        return FAULTS[_CLASSES[name]].exit_code
    if isinstance(error, (ValueError, FileNotFoundError)):
        return 2
    if isinstance(error, (FloatingPointError, OSError)):
        return 1
    return int(isinstance(error, RuntimeError) and is_of_machines(error))


_CLASSES = {
    "NonFiniteError": "nan",
    "SpikeError": "spike",
    "UnlikeWeightsError": "replicas",
    "BrokenDeviceError": "hardware",
}
"""Fault classes by the name of the error, so that help does not load torch."""


def _call(function: Callable[[list[str]], int], _: str, words: list[str]) -> int:
    return function(words)


def pretrain(name: str, words: Sequence[str]) -> int:
    """Run ``mcore-train NAME`` for an entry script of Megatron's; return its exit code.

    Lists Megatron's defaults that differ from the run's.
    """
    summary = COMMANDS[name][0]
    train = partial(_train, name, is_megatron_script=True)
    return _run({**COMMANDS, name: (summary, train)}, [name, *words])


def _train(name: str, words: Sequence[str], *, is_megatron_script: bool = False) -> int:
    """Train a model of the family that has the command ``name``."""
    from mcore_train.options.parsing import parse

    command = FAMILY_COMMANDS[name]
    if "auto" in (word.partition("=")[2] or word for word in words):
        words = _expand_auto_micro_batch(words)

    def check(config: TrainConfig) -> None:
        """Raise one error with all faults, before ranks start."""
        from mcore_parallel.launch.launcher import read_environment
        from mcore_train.options.output_checks import build_checked_plan
        from mcore_train.precision import with_device_precision

        config = with_device_precision(config, 0)
        world_size = config.launch.nproc or read_environment().world_size
        build_checked_plan(config, world_size, command.family)

    config = parse(
        words,
        f"mcore-train {name}",
        command.run,
        command.beginning,
        needs=command.needs,
        is_megatron_script=is_megatron_script,
        check=check,
    )
    if config.launch.dry_run:
        from mcore_train.planning.dry_run import dry_run

        world_size = config.launch.world_size or config.launch.nproc or 1
        print(dry_run(config, command.family, world_size))
        return 0
    if config.launch.nproc:
        check(config)
        return start_ranks(name, words, config.launch.nproc)
    from mcore_train.running import run_training

    return run_training(config, command.family)


def _expand_auto_micro_batch(words: Sequence[str]) -> list[str]:
    """Replace ``--micro-batch-size auto`` by its switch, ``--find-micro-batch-size``."""
    text = "\0".join(words).replace("--micro-batch-size=auto", "--micro-batch-size\0auto")
    return text.replace("--micro-batch-size\0auto", "--find-micro-batch-size").split("\0")


def reference(words: Sequence[str]) -> int:
    """Store the results of an objective's frozen model for each sample."""
    from mcore_train.options.parsing import parse

    rest = list(words[1:] if words[:1] == ["gpt"] else words)
    config = parse(rest, "mcore-train reference", TrainConfig)
    if config.launch.nproc:
        return start_ranks("reference", words, config.launch.nproc)
    from mcore_train.objectives.reference_cache import write_reference_cache

    return write_reference_cache(config)


def quickstart(words: Sequence[str]) -> int:
    """Train on the shipped book, from its text to a paragraph."""
    from mcore_train.quickstart.plan import QuickstartConfig, build_tour_plan

    config = parse_options(QuickstartConfig, "mcore-train quickstart", words)
    if config.tour.nproc:
        # Reports all faults once, before ranks start.
        build_tour_plan(config, config.tour.nproc)
        return start_ranks("quickstart", words, config.tour.nproc)
    from mcore_train.quickstart.tour import run_quickstart

    return run_quickstart(config)


def verify(words: Sequence[str]) -> int:
    """Check that a run's layout computes the same results as one rank."""
    from mcore_train.options.parsing import parse

    name = words[0] if words and words[0] in FAMILY_COMMANDS else "gpt"
    options = words[1:] if words[:1] == [name] else words
    command = FAMILY_COMMANDS[name]

    def check(config: Verified) -> None:
        """Raise one error with all faults, before ranks start."""
        from mcore_train.layout_check.verification import check_verified

        check_verified(config, command)

    config = parse(
        options,
        f"mcore-train verify {name}",
        command.verified,
        command.beginning,
        needs=command.needs,
        check=check,
    )
    from mcore_train.layout_check.small_layout import smallest_world
    from mcore_train.layout_check.verification import run_verification

    if config.run.device == "cuda" and not is_launched():
        return start_ranks("verify", words, config.launch.nproc or smallest_world(config))
    return run_verification(config, command)


def schedule(words: Sequence[str]) -> int:
    """Draw a pipeline schedule: ``schedule show``."""
    from mcore_train.reporting.schedule_view import ShowConfig, draw_schedule, view_words

    if words[:1] != ["show"] and not set(words) & set(HELP_FLAGS):
        raise ValueError("mcore-train schedule has one verb: mcore-train schedule show --help.")
    options = view_words([word for word in words if word != "show"])
    print(draw_schedule(parse_options(ShowConfig, "mcore-train schedule show", options)))
    return 0


def launch(words: Sequence[str]) -> int:
    """Render, submit and follow jobs on several hosts."""
    from mcore_train.launching.cli import launch as run_verb

    return run_verb(words)


def triage(words: Sequence[str]) -> int:
    """Read the logs of a run that ended and print why it did."""
    from mcore_train.diagnosis.cli import triage_logs

    return parse_options(triage_logs, "mcore-train triage", words)


def memory(words: Sequence[str]) -> int:
    """Print a snapshot of GPU memory by class of tensors."""
    from mcore_train.diagnosis.cli import show_snapshot

    return parse_options(show_snapshot, "mcore-train memory", words)


def doctor(words: Sequence[str]) -> int:
    """Check a cluster before a run, or judge the numbers of a run."""
    from mcore_train.diagnosis.cli import judge_run, report_cluster

    if words and not words[0].startswith("-"):
        return parse_options(judge_run, "mcore-train doctor RUN", words)
    from mcore_train.diagnosis.doctor import DoctorConfig

    config = parse_options(DoctorConfig, "mcore-train doctor", words)
    if config.options.nproc:
        return start_ranks("doctor", words, config.options.nproc)
    return report_cluster(config)


def profile(words: Sequence[str]) -> int:
    """Print where the time of a profiled step went."""
    from mcore_train.reporting.cli import show_profile

    return parse_options(show_profile, "mcore-train profile", words)


def report(words: Sequence[str]) -> int:
    """Write one HTML page about a run, or several."""
    from mcore_train.reporting.cli import write_report

    return parse_options(write_report, "mcore-train report", words)


def explain(words: Sequence[str]) -> int:
    """Print the steps that a run skipped, and the documents of a step."""
    from mcore_train.reporting.cli import explain_spikes

    return parse_options(explain_spikes, "mcore-train explain", words)


def golden(words: Sequence[str]) -> int:
    """Train golden cases and compare their values with the recorded ones."""
    from mcore_train.golden.cli import golden as run_verb

    return run_verb(words)


def plan(words: Sequence[str]) -> int:
    """Search the layouts of a model on a cluster."""
    from mcore_train.planning.command import run_plan

    if text := run_plan(words):
        print(text)
    return 0


def migrate(words: Sequence[str]) -> int:
    """Translate a launch script or config of another trainer into a recipe."""
    from mcore_train.migrating.cli import migrate as migrate_file

    return parse_options(migrate_file, "mcore-train migrate", words)


def start_ranks(command: str, words: Sequence[str], nproc: int) -> int:
    """Start ``nproc`` ranks of this same command on this host and wait for them."""
    from mcore_parallel.launch.launcher import launch_local

    rest = without_option(words, "--nproc")
    return launch_local([sys.executable, "-m", "mcore_train", command, *rest], nproc)


def is_launched() -> bool:
    """Whether a launcher started this process as one rank of several."""
    from mcore_parallel.launch.launcher import read_environment

    return read_environment().is_launched


def without_option(words: Sequence[str], flag: str) -> list[str]:
    """Return the words without every ``flag VALUE`` and ``flag=VALUE``."""
    remaining, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == flag:
            skip = True
        elif not word.startswith(f"{flag}="):
            remaining.append(word)
    return remaining


def is_of_machines(error: RuntimeError) -> bool:
    """Whether an error comes from damaged files or disks, not from a fault of the program."""
    from mcore_ckpt.errors import CheckpointError
    from mcore_data.indexed.index_format import CorruptDatasetError

    return isinstance(error, (CheckpointError, CorruptDatasetError))


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    **{
        name: (command.summary, partial(_train, name))
        for name, command in FAMILY_COMMANDS.items()
    },
    "quickstart": ("train on a book, from its text to a paragraph, in minutes", quickstart),
    "verify": (
        "verify gpt FLAGS (bert, t5): does this layout compute the same as one rank?",
        verify,
    ),
    "reference": (
        "reference FLAGS: store the results of a reference or teacher next to the data",
        reference,
    ),
    "launch": ("start a run on several hosts: Slurm, Kubernetes, Ray, SkyPilot, here", launch),
    "plan": ("from a model and a cluster to the fastest layouts that fit", plan),
    "migrate": (
        "migrate FILE: a launch script or config of another trainer to a recipe",
        migrate,
    ),
    "schedule": ("schedule show: draw a pipeline schedule and its bubble", schedule),
    "triage": ("triage LOGDIR: why a run ended, and whether to start it again", triage),
    "memory": (
        "memory SNAPSHOT: GPU memory by class of tensors, compared with the plan",
        memory,
    ),
    "profile": ("profile TRACE: where the time of a profiled step went", profile),
    "report": ("report RUN [RUN2 ...]: one HTML page about a run, or several", report),
    "explain": ("explain RUN: steps left out as spikes, and their documents", explain),
    "golden": ("golden run: train small cases and compare recorded values", golden),
    "doctor": ("is this cluster healthy? doctor RUN: faults in the numbers of a run", doctor),
}
