"""Options of sampling as plain frozen data; imports the standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How each next token is chosen, and when to stop."""

    num_tokens: int = 128
    """Tokens to write after the prompt, at most."""

    temperature: float = 1.0
    """Scores are divided by it before anything is cut off; below 1 the likely gets likelier."""

    top_k: int = 0
    """Choose among so many most likely tokens, and those as likely as the last; 0: all, 1:
    always the most likely one, whatever the temperature."""

    top_p: float = 0.0
    """Leave out tokens when those before them, likeliest first, hold more than this
    probability; 0: none."""

    stop_words: tuple[str, ...] = ()
    """Stop when the text's tokens end with those of one of these, which are cut off."""

    ignore_eod: bool = False
    """Write on after an end of document."""

    def __post_init__(self) -> None:
        """Check the values and that the two ways to cut off are not mixed.

        Raises:
            ValueError: with the flag to change.
        """
        if self.num_tokens < 1:
            raise ValueError(f"--num-tokens {self.num_tokens} must be 1 or more.")
        if not self.temperature > 0:
            raise ValueError(
                f"--temperature {self.temperature} must be above 0. Use --top-k 1 to always "
                "take the most likely token."
            )
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k} must be 0 (off) or more.")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p} must be from 0 (off) to 1.")
        if self.top_k and self.top_p:
            raise ValueError(
                f"--top-k {self.top_k} and --top-p {self.top_p} cannot be used together: set "
                "one of them to 0."
            )
