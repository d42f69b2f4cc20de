"""What real launches do beside saving and loading, one test for each thing that a replacement can get wrong.

The traps are in `failure_traps` and `launch_traps`; they run on two gloo ranks of a machine without CUDA, all of a kind
in one world, since importing Megatron is most of their time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from tests.megatron.failure_traps import FAILURES
from tests.megatron.launch_traps import LAUNCHES
from tests.megatron.trap_ranks import run_traps
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks

DEADLINE_S = 150

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    directory = tmp_path_factory.mktemp("failures")
    fork = {"MCORE_CKPT_WRITER": "fork"}
    return run_ranks(run_traps, 2, directory, FAILURES, deadline_s=DEADLINE_S, environment=fork)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_ranks(run_traps, 2, tmp_path_factory.mktemp("launches"), LAUNCHES, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("trap", FAILURES, ids=lambda trap: trap.__name__)
def test_a_failure(failures: list[dict[str, str]], trap: Callable[..., Any]) -> None:
    assert [rank[trap.__name__] for rank in failures] == ["", ""]


@pytest.mark.parametrize("trap", LAUNCHES, ids=lambda trap: trap.__name__)
def test_a_launch(launches: list[dict[str, str]], trap: Callable[..., Any]) -> None:
    assert [rank[trap.__name__] for rank in launches] == ["", ""]
