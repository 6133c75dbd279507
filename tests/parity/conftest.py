"""The oracle: one rank, computed once for the whole test run, and the other layouts' outcomes.

Outcomes are cached for the session too, so that each layout trains once however many tests
look at it.
"""

from pathlib import Path

import pytest
from parity.case import MODELS, train_in_folder

from mcore_parallel.testing import run_ranks
from mcore_train.trial import Trial


class Outcomes:
    """Outcomes of named layouts of one model, each computed when first asked for."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.folder = model, folder
        self._known: dict[str, Trial] = {}

    def __getitem__(self, name: str) -> Trial:
        if name not in self._known:
            world_size = MODELS[self.model][name].world_size
            results = run_ranks(train_in_folder, world_size, self.model, name, str(self.folder))
            self._known[name] = Trial(**results[0])
        return self._known[name]


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> Outcomes:
    return Outcomes("dense", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def sparse(tmp_path_factory) -> Outcomes:
    return Outcomes("sparse", tmp_path_factory.mktemp("sparse"))
