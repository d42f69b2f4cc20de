"""The package is built as docs/design.md says: these tests hold the imports against the table of rooms in it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import mcore_ckpt

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mcore_ckpt"
# Where megatron-core may be named in an import; all else gets what it needs of it from there.
KNOWS_MEGATRON = {"megatron._versions", "megatron._errors", "megatron.strategy"}
# One row of the table of rooms: | `room/` | what it is for | torch |
ROW = re.compile(r"^\| `(\w+)/` \| (.+?) \| (some|-) \|$", re.MULTILINE)
# What lies beside the rooms and starts things: it may import every room, and no room imports it.
ENTRANCES = {"launch", "__main__"}


@dataclass(frozen=True)
class Import:
    """One import statement: what it names, on which line, and whether it runs when the module is imported."""

    name: str
    line: int
    at_import: bool


@cache
def rooms() -> dict[str, bool]:
    """Rooms in their order; whether some of a room's modules may import torch."""
    return {name: torch == "some" for name, _, torch in ROW.findall((ROOT / "docs" / "design.md").read_text())}


def room_of(name: str) -> str:
    return name.partition(".")[0]


@cache
def modules() -> dict[str, Path]:
    """Modules that hold code, by dotted name within the package; the package's own `__init__` is the public face."""
    paths = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name: path for name, path in sorted(paths.items()) if not name.endswith("__init__")}


@cache
def imports(name: str) -> list[Import]:
    tree = ast.parse(modules()[name].read_text())
    deferred = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(scope)
        for node in ast.walk(scope)
    }
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import; write the full name"
            # `from mcore_ckpt import crc` names a module, `from mcore_ckpt.format.crc import crc32` a function in one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _calls_import_module(node):
            names = [_text(node.args[0])]
        found += [Import(text, node.lineno, id(node) not in deferred) for text in names]
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _calls_import_module(node: ast.Call) -> bool:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return called in ("import_module", "__import__") and bool(node.args)


def _text(node: ast.expr) -> str:
    """The constant text that an expression begins with; what follows in an f-string is not known here."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def own_modules_imported(name: str) -> set[str]:
    """Modules of the package that `name` imports, at import time or later."""
    targets = set()
    for imported in imports(name):
        if imported.name.startswith("mcore_ckpt."):
            path = imported.name.removeprefix("mcore_ckpt.")
            while path and path not in modules():
                path = path.rpartition(".")[0]
            targets.add(path)
    return targets - {""}


def test_the_table_names_every_room_and_nothing_else() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(rooms()) == folders
    assert {room_of(name) for name in modules()} - folders == ENTRANCES


@pytest.mark.parametrize("name", modules())
def test_imports_go_up_the_table_only(name: str) -> None:
    """Imports inside functions and for types count as any other."""
    order = list(rooms())
    if name in ENTRANCES:
        return
    allowed = set(order[: order.index(room_of(name)) + 1])
    offending = sorted(target for target in own_modules_imported(name) if room_of(target) not in allowed)
    assert not offending, f"{name} imports {offending}, which the table of rooms has below it"


def test_no_module_imports_itself_in_a_circle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for target in own_modules_imported(name):
                visit(target, (*path, name))
            done.add(name)

    for name in modules():
        visit(name, ())


def test_what_only_its_own_room_uses_begins_with_an_underscore() -> None:
    public = {f"mcore_ckpt.{home}" for home in mcore_ckpt.homes().values()}
    users: dict[str, set[str]] = {name: set() for name in modules()}
    for name in modules():
        for target in own_modules_imported(name):
            users[target].add(room_of(name))
    for name, used_by in users.items():
        if name in ENTRANCES or name == "commands.cli":  # started by the interpreter
            continue
        leaf = name.rpartition(".")[2]
        elsewhere = used_by - {room_of(name)}
        if leaf.startswith("_"):
            assert not elsewhere, f"{name} is its room's own, and {sorted(elsewhere)} import it"
        else:
            assert elsewhere or f"mcore_ckpt.{name}" in public, f"only its own room uses {name}: call it _{leaf}"


def test_megatron_is_imported_in_few_modules_only() -> None:
    where = sorted(
        {
            f"{name}:{imported.line}"
            for name in modules()
            for imported in imports(name)
            if imported.name.split(".")[0] in ("megatron", "nvidia_resiliency_ext") and name not in KNOWS_MEGATRON
        }
    )
    assert not where, f"megatron is imported at {where}; ask megatron_compat for what is needed"


def test_torch_free_rooms_are_free_of_torch() -> None:
    """In an interpreter where torch and megatron cannot be imported."""
    names = [name for name in modules() if name != "__main__"]  # which runs the command when it is imported
    code = f"""
import importlib, sys
for name in ("torch", "megatron"):
    sys.modules[name] = None
for name in {names!r}:
    try:
        importlib.import_module("mcore_ckpt." + name)
    except ModuleNotFoundError as error:
        print(name, error.name.partition(".")[0])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 0, ended.stderr
    needing = dict(line.split() for line in ended.stdout.splitlines())
    assert set(needing.values()) <= {"torch"}
    assert {room_of(name) for name in needing} == {name for name, some in rooms().items() if some}


def test_import_of_the_package_brings_in_neither_torch_nor_megatron() -> None:
    code = "import sys, mcore_ckpt; print(sorted({'torch', 'numpy', 'megatron', 'rich'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.stdout.strip() == "[]", ended.stdout + ended.stderr


def test_no_module_is_named_after_nothing() -> None:
    vague = {"utils", "util", "helpers", "helper", "misc", "common", "manager", "engine"}
    named = [name for name in modules() if name.split(".")[-1] in vague]
    assert not named, f"these names do not say what the module is about: {named}"


def test_every_module_says_what_it_is_for() -> None:
    silent = [name for name, path in modules().items() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


def test_no_view_of_a_bytesio_is_kept() -> None:
    """CPython before 3.11.7 and 3.12.2 crashes when a `BytesIO.getbuffer()` is collected as part of a cycle.

    Fixed by https://github.com/python/cpython/issues/111049. A failed save leaves such cycles: its traceback holds the
    frames. `getvalue()` copies nothing either while nobody else holds the bytes.
    """
    keep_views = [str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py") if ".getbuffer(" in path.read_text()]
    assert not keep_views, f"use getvalue(): {keep_views}"
