"""What is looked at while a save replaces it: what is said is true of one of the two checkpoints, or it is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.tools import diff, inspection, verify
from tests.support.stored_saves import save

LOOKS: dict[str, tuple[Any, Callable[[Path], bool]]] = {
    "verify": (verify, lambda path: verify.verify_checkpoint(path).whole),
    "inspect": (inspection, lambda path: not inspection.summarize_checkpoint(path).problems),
    "diff": (diff, lambda path: not diff.diff_checkpoints(path, path.with_name("as before")).identical),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_checkpoint_that_is_replaced_right_after_its_index_was_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, look = LOOKS[name]
    path = tmp_path / "c"
    for each in (path, tmp_path / "as before"):
        save(each, 1.0, rows=1)
    read_index, replaced = module.read_index, []

    def then_a_save(*arguments: Any, **options: Any) -> Any:
        index = read_index(*arguments, **options)
        if not replaced:
            replaced.append(True)
            save(path, 2.0, rows=1)
        return index

    monkeypatch.setattr(module, "read_index", then_a_save)
    with pytest.raises(LoadError, match="replaced the checkpoint"):
        look(path)
    assert look(path)
