"""Logs to Weights & Biases; ``WANDB_MODE=offline`` only writes files."""

from collections.abc import Mapping

from mcore_train.reporting.loggers.protocol import Attempt, Header


class WandbLogger:
    """Logs to one W&B run, which later attempts continue."""

    takes_back = False

    def __init__(self, project: str, name: str, entity: str, folder: str) -> None:
        """Import W&B and store the options of the run.

        Args:
            project: project on the server.
            name: name of the run as shown; empty: W&B chooses a name.
            entity: team or user; empty: the user's default.
            folder: folder of W&B's files; empty: ``wandb`` in the run folder.

        Raises:
            ModuleNotFoundError: if the package is not installed.
        """
        import wandb  # pyrefly: ignore

        self._wandb = wandb
        self._project, self._name, self._entity = project, name or None, entity or None
        self._folder = folder

    def begin(self, attempt: Attempt) -> None:
        """Open the run; a later attempt opens the same run again."""
        folder = self._folder or (str(attempt.folder) if attempt.folder else None)
        self._run = self._wandb.init(
            project=self._project,
            name=self._name,
            entity=self._entity,
            dir=folder,
            id=attempt.run_id,
            resume="allow",
        )
        # Waterfalls arrive after later steps were logged, but W&B's step can only increase: use
        # ``iteration`` as the x-axis.
        self._run.define_metric("*", step_metric="iteration")

    def describe(self, header: Header) -> None:
        """Store the description of the run."""
        self._run.config.update(dict(header.row), allow_val_change=True)

    def log(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        """Send numbers of a step."""
        row = {f"{kind}/{name}": value for name, value in numbers.items()}
        self._run.log({**row, "iteration": iteration})

    def close(self) -> None:
        """Send all queued numbers and close the run."""
        self._run.finish()
