"""What a checkpoint is asked to be: plain frozen data, one field a flag."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionConfig:
    """Which steps stay on disk once a newer one is durable. All, unless told otherwise."""

    save_retain_last: int = 0
    """Newest steps to keep; 0: all."""

    save_retain_interval: int = 0
    """Steps that are multiples of this stay for good; 0: none does."""

    def __post_init__(self) -> None:
        """Check the fields against each other.

        Raises:
            ValueError: with the flag to change.
        """
        for name in ("save_retain_last", "save_retain_interval"):
            if getattr(self, name) < 0:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} {getattr(self, name)} must be 0 or more.")
        if self.save_retain_interval and not self.save_retain_last:
            raise ValueError(
                "--save-retain-interval has no effect without --save-retain-last: all steps "
                "are kept. Set how many of the newest stay beside the multiples."
            )
