"""What pytest collected in this run, before marks choose among it."""

import pytest

KNOWN = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the names of all tests, with and without their parameters."""
    config.stash[KNOWN] = {
        name for item in items for name in (item.nodeid, item.nodeid.split("[")[0])
    }


@pytest.fixture
def known_nodes(request: pytest.FixtureRequest) -> set[str]:
    return request.config.stash[KNOWN]
