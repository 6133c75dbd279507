"""Numbers for Weights & Biases; ``WANDB_MODE=offline`` writes them to files alone."""

from collections.abc import Mapping

from mcore_train.reporting.loggers.protocol import Attempt, Header


class WandbLogger:
    """Logs to one W&B run, which later attempts go on with."""

    takes_back = False

    def __init__(self, project: str, name: str, entity: str, folder: str) -> None:
        """Check that W&B is there.

        Args:
            project: on the server.
            name: of the run as shown; empty: W&B makes one up.
            entity: team or user; empty: the user's default.
            folder: of W&B's own files; empty: ``wandb`` in the run folder.

        Raises:
            ModuleNotFoundError: if the package is not installed.
        """
        import wandb  # pyrefly: ignore

        self._wandb = wandb
        self._project, self._name, self._entity = project, name or None, entity or None
        self._folder = folder

    def begin(self, attempt: Attempt) -> None:
        """Open the run, or open it again."""
        folder = self._folder or (str(attempt.folder) if attempt.folder else None)
        self._run = self._wandb.init(
            project=self._project,
            name=self._name,
            entity=self._entity,
            dir=folder,
            id=attempt.run_id,
            resume="allow",
        )
        # A waterfall is of a step before the last report: W&B's own count only goes up.
        self._run.define_metric("*", step_metric="iteration")

    def describe(self, header: Header) -> None:
        """Take the description of the run."""
        self._run.config.update(dict(header.row), allow_val_change=True)

    def log(self, kind: str, iteration: int, numbers: Mapping[str, float | int]) -> None:
        """Take numbers of a step."""
        row = {f"{kind}/{name}": value for name, value in numbers.items()}
        self._run.log({**row, "iteration": iteration})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
