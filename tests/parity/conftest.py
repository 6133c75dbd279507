"""The oracle: one rank, computed once for the whole test run, and the other layouts' outcomes.

Outcomes are cached for the session too, so that each layout trains once however many tests
look at it. Annotated shapes are not checked here, which takes longer than the numbers do:
rows of test_brief_layouts check them in the same code, and drawn layouts of ``parity_long``.
"""

from pathlib import Path

import pytest
from parity.case import MODELS, trained

from mcore_train.layout_check.trial import Trial


class Outcomes:
    """Outcomes of named layouts of one model, each computed when first asked for."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.folder = model, folder
        self._known: dict[str, Trial] = {}

    def __getitem__(self, name: str) -> Trial:
        if name not in self._known:
            world_size = MODELS[self.model][name].world_size
            self._known[name] = trained(world_size, self.model, name, str(self.folder))
        return self._known[name]


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> Outcomes:
    return Outcomes("dense", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def fp8(tmp_path_factory) -> Outcomes:
    return Outcomes("fp8", tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="session")
def sparse(tmp_path_factory) -> Outcomes:
    return Outcomes("sparse", tmp_path_factory.mktemp("sparse"))
