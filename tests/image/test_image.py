"""Images of files: what was written is compared with what was planned."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.image.layout import PlannedFile, WrittenFile, check_results


def test_results_that_are_not_the_plan_are_refused() -> None:
    image: Any = SimpleNamespace(size_bytes=4096, payload_offsets=[0, 64])
    planned = [PlannedFile(name, image) for name in ("a", "b")]
    none: array[int] = array("I")

    def written(name: str, size_bytes: int = 4096, crcs: int = 2) -> WrittenFile:
        return WrittenFile(name, size_bytes, 0, none, array("I", [7] * crcs), none, none, none)

    right = [written("a"), written("b")]
    check_results(planned, right)
    wrong = ([written("a")], [*right, written("c")], [right[0], written("b", 4095)], [right[0], written("b", crcs=1)])
    for results in wrong:
        with pytest.raises(SaveError, match="not what was planned"):
            check_results(planned, results)
