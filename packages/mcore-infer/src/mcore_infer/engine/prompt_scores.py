"""Log probabilities of a prompt's own tokens, gathered chunk by chunk.

Scores of a whole prompt are one number for each token and each entry of the vocabulary, so
they are computed and forgotten a few rows at a time.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from mcore_infer.host_to_device import on_device
from mcore_infer.sampling import token_log_probs, top_log_probs, tops
from mcore_infer.stages import from_last_stage, last_stage_logits
from mcore_infer.writing import Generation, Top
from mcore_models.protocol import LanguageModel

_ROWS = 256


class PromptScores:
    """Log probabilities of one prompt's tokens behind the first."""

    def __init__(self, prompt: Sequence[int], num_top: int) -> None:
        """Begin with nothing scored.

        Args:
            prompt: token ids.
            num_top: likeliest tokens to keep for each place.
        """
        self.prompt, self.num_top = prompt, num_top
        self._log_probs = [float("nan")] * (len(prompt) - 1)
        self._top: list[Top] = [()] * (len(prompt) - 1)

    def add(self, model: LanguageModel, begin: int, hidden: Float[Tensor, "S 1 D"]) -> None:
        """Score the tokens behind those of a chunk, as far as the prompt goes.

        All-gathers the vocabulary over ``tp``, all-reduces over ``pp``. Computing a chunk again
        changes nothing.
        """
        end = min(begin + len(hidden), len(self.prompt) - 1)
        for first in range(begin, end, _ROWS):
            last = min(first + _ROWS, end)
            logits = last_stage_logits(model, hidden[first - begin : last - begin])
            following = on_device(self.prompt[first + 1 : last + 1], logits.device)
            found = from_last_stage(token_log_probs(logits, following), model.pp)
            self._log_probs[first:last] = found.tolist()
            if self.num_top:
                best = from_last_stage(top_log_probs(logits, self.num_top), model.pp)
                self._top[first:last] = tops(best)

    def added_to(self, result: Generation) -> Generation:
        """Return a result with the prompt's scores."""
        return replace(
            result,
            prompt_log_probs=tuple(self._log_probs),
            prompt_top=tuple(self._top) if self.num_top else (),
        )
