"""A rank of a server whose engine fails in its third step on the rank that is named first."""

import itertools
import os
import sys

from mcore_infer.cli import main
from mcore_infer.commands import opening
from mcore_infer.engine.engine import Engine

if __name__ == "__main__":
    failing, *words = sys.argv[1:]
    opening._TIMEOUT_MINUTES = 0.3  # so that ranks look at each other more often
    step, count = Engine.step, itertools.count(1)

    def failing_step(engine):
        if engine.has_work and next(count) == 3 and os.environ["RANK"] == failing:
            raise RuntimeError("no memory for this step")
        return step(engine)

    Engine.step = failing_step
    sys.exit(main(["serve", *words]))
