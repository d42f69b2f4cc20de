"""One folder for all launches of a session: those that several tests need are made once."""

from pathlib import Path

import pytest

from tests.launch.pretrain import missing_reason


@pytest.fixture(scope="session")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing_reason():
        pytest.skip(missing_reason())
    return tmp_path_factory.mktemp("launches")
