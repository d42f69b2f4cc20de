"""`megatron/contract.py` compared with sources of Megatron-Core: the one that is installed, and a newer checkout."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from mcore_ckpt.commands.cli import main
from mcore_ckpt.megatron.contract import CONTRACT, Name
from tests.support.forked import in_child

pytest.importorskip("megatron.core", reason="what the contract is with")


def source_has(folder: Path) -> Callable[[Name], bool]:
    """Whether a name is defined or imported in the source of `dist_checkpointing` in that folder; nothing is run."""
    names: dict[str, set[str]] = {}

    def has(name: Name) -> bool:
        if name.module not in names:
            path = folder / f"{name.module.replace('.', '/')}.py"
            names[name.module] = set(_names(ast.parse(path.read_text()).body)) if path.exists() else set()
        return name.name in names[name.module]

    return has


def _names(body: list[ast.stmt]) -> list[str]:
    found = []
    for node in body:
        match node:
            case ast.FunctionDef(name=name):
                found.append(name)
            case ast.ClassDef(name=name, body=members):
                found += [name, *(f"{name}.{member}" for member in _names(members))]
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                found += [alias.asname or alias.name for alias in aliases]
            case ast.Try(body=inner, handlers=handlers):
                found += _names(inner) + [name for handler in handlers for name in _names(handler.body)]
            case ast.Assign(targets=targets):
                found += [target.id for target in targets if isinstance(target, ast.Name)]
    return found


def missing(version: tuple[int, int], folder: Path) -> list[Name]:
    has = source_has(folder)
    return [name for name in CONTRACT if name.belongs_to(version) and not has(name)]


def _installed() -> tuple[Path, tuple[int, int]]:
    from megatron.core import package_info

    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "dist_checkpointing", (package_info.MAJOR, package_info.MINOR)


def test_the_installed_version_has_all_of_the_contract() -> None:
    folder, version = _installed()
    assert not [str(name) for name in missing(version, folder)]


def test_a_newer_source_still_has_all_that_is_needed() -> None:
    """Names what has moved in the checkout that `MEGATRON_LM_REPO` names."""
    checkout = os.environ.get("MEGATRON_LM_REPO")
    if not checkout:
        pytest.skip("MEGATRON_LM_REPO is not set: it has to name a checkout of Megatron-LM")
    folder = Path(checkout) / "megatron/core/dist_checkpointing"
    moved = [f"{name} ({name.absence or 'NEEDED'})" for name in missing((0, 20), folder)]
    print("moved:", ", ".join(moved) or "nothing")
    assert not [line for line in moved if line.endswith("(NEEDED)")]


def test_doctor_says_what_install_finds_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a child: Megatron is imported, and warnings are switched off."""

    def run() -> None:
        assert main(["doctor", str(tmp_path), "--json"]) == 0
        found = {one["what"]: one["state"] for one in json.loads(capsys.readouterr().out)["findings"]}
        assert found["serialization.save"] == "replaced by mcore_ckpt"
        assert found[f"direct I/O in {tmp_path}"] in ("works", "refused")
        os.environ["MCORE_CKPT_WRITER"] = "pigeon"
        assert main(["doctor", str(tmp_path)]) == 1
        assert "MCORE_CKPT_WRITER='pigeon'" in capsys.readouterr().out
        assert main(["doctor", str(tmp_path / "absent")]) == 2
        assert not list(tmp_path.iterdir())

    in_child(run)
