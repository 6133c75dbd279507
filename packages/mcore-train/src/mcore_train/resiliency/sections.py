"""Reports the sections of a run to the monitors of ``ft_launcher``, which check their times.

``ft_launcher`` starts a monitor process for each rank. The rank reports when setup, a step or
a save begins and ends. If a section exceeds its timeout, the monitor ends the rank, and the
launcher starts the ranks again. Timeouts come from the launcher
(``--ft-rank-section-timeouts``), or are computed from measured times and stored
in ``ft_state.json`` of the run folder.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mcore_base.atomic_files import write_durably
from mcore_base.stores import as_path, is_store
from mcore_parallel.launch import launcher
from mcore_train.resiliency.config import FaultToleranceConfig
from mcore_train.resiliency.in_process import import_nvrx

log = logging.getLogger(__name__)

STATE = "ft_state.json"
"""File in the run folder with computed timeouts."""
LEARNED_STEPS = 16
"""Smallest number of measured steps for the computation of timeouts."""


class Sections:
    """Context manager of a run without a monitor: no method has an effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def beat(self) -> None:
        """Report progress within a validation."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one training step."""
        yield

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Context of a validation."""
        yield

    @contextmanager
    def checkpointing(self, *, is_save: bool = False) -> Iterator[None]:  # noqa: ARG002
        """Context of a save, or of a poll of a background save."""
        yield


class InProcessSections(Sections):
    """Reports progress to the wrapper of ``--inprocess-restart``, which restarts hung steps.

    Without these reports a running interpreter counts as progress. A save may take any time.
    """

    def __init__(self, wrapper: Any) -> None:
        """Store the wrapper.

        Args:
            wrapper: the package's wrapper of the current call.
        """
        self._wrapper = wrapper

    def beat(self) -> None:
        """Report progress within a validation."""
        self._wrapper.ping()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one training step."""
        yield
        self._wrapper.ping()

    @contextmanager
    def checkpointing(self, *, is_save: bool = False) -> Iterator[None]:
        """Context of a save, or of a poll of a background save."""
        with self._wrapper.disable_hang_protection() if is_save else nullcontext():
            yield


class MonitoredSections(Sections):
    """Reports the sections to this rank's monitor; entered before process groups are built."""

    def __init__(self, config: FaultToleranceConfig, folder: Path, rank: int) -> None:
        """Store the options; ``__enter__`` connects to the monitor.

        Args:
            config: the options.
            folder: run folder, for ``ft_state.json``.
            rank: rank of this process; rank 0 writes the file.
        """
        self._config, self._file, self._rank = config, folder / STATE, rank
        self._is_setup = True
        self._num_steps = self._num_saves = 0
        self._num_validations = 0
        module = import_nvrx("fault_tolerance", "--enable-ft-package")
        self._client: Any = module.RankMonitorClient()
        self._error: type[Exception] = module.RankMonitorClientError

    def __enter__(self) -> Self:
        """Connect to the monitor, and begin the section ``setup``.

        Raises:
            ValueError: if ``ft_launcher`` did not start this process.
        """
        try:
            self._client.init_workload_monitoring(
                num_warmup_iters=self._config.ft_num_warmup_iters
            )
        except self._error as error:
            raise ValueError(
                f"--enable-ft-package needs ranks that ft_launcher started ({error}): use "
                "mcore-train launch, which starts it, or leave the option out."
            ) from None
        if self._file.is_file():
            try:
                state = json.loads(self._file.read_bytes())
            except ValueError as error:
                raise ValueError(
                    f"{self._file}, the timeouts that were learned, is damaged ({error}): "
                    "remove it, and they are learned again."
                ) from error
            self._client.load_state_dict(state)
        self._client.start_section("setup")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.shutdown_workload_monitoring()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one training step."""
        self._num_steps += 1
        if self._num_steps <= self._config.ft_num_warmup_iters:
            yield
            self._beat()
            return
        self._end_setup()
        with self._section("step"):
            yield
        self._beat()

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Context of a validation; the first validations are part of the setup."""
        self._num_validations += 1
        if self._num_validations <= self._config.ft_num_warmup_iters:
            yield
            return
        with self._section("step"):
            yield

    @contextmanager
    def checkpointing(self, *, is_save: bool = False) -> Iterator[None]:
        """Context of a save, or of a poll of a background save."""
        if self._is_setup:
            yield
            return
        with self._section("checkpointing"):
            yield
        self._num_saves += is_save
        if is_save and self._config.calc_ft_timeouts:
            self._compute_timeouts()

    def _end_setup(self) -> None:
        if self._is_setup:
            self._client.end_section("setup")
            self._is_setup = False

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        self._client.start_section(name)
        try:
            yield
        finally:
            self._client.end_section(name)

    def _beat(self) -> None:
        """Send a heartbeat if the launcher uses heartbeats instead of sections."""
        if self._client.cfg.rank_heartbeat_timeout is not None:
            self._client.send_heartbeat()

    def _compute_timeouts(self) -> None:
        """Compute timeouts from the measured times of all ranks, and store them."""
        if self._num_steps < LEARNED_STEPS:
            return
        names = ["step", "checkpointing"]
        if not self._client.calculate_and_set_section_timeouts(
            selected_sections=names, calc_out_of_section=False, skip_if_not_ready=True
        ):
            return
        if self._rank == 0:
            write_durably(self._file, json.dumps(self._client.state_dict()).encode())


def open_sections(
    config: FaultToleranceConfig, save: str, world: launcher.RankEnvironment
) -> Sections:
    """Return the sections of a run; with ``--enable-ft-package`` they report to the monitor.

    Raises:
        ValueError: if nvidia-resiliency-ext is missing, or the run folder is an object store.
    """
    if not config.enable_ft_package:
        return Sections()
    if is_store(as_path(save)):
        raise ValueError(
            f"--enable-ft-package writes {STATE} to the run folder, and --save {save} is an "
            "object store: give a local folder."
        )
    return MonitoredSections(config, Path(save), world.rank)
