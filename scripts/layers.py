#!/usr/bin/env python3
"""List in each layer's `__init__` which of its modules need torch, by their imports.

    scripts/layers.py           write the lists into mcore_ckpt/*/__init__.py
    scripts/layers.py --check   write nothing; exit code 1 and the names of the files that are not what the imports give

The order of the layers, and what each is for, is the table in docs/design.md, written by hand; all else comes from the
code. `tests/test_architecture.py` reads the imports through this module and fails where the committed text differs.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["Import", "Package", "layer_of"]

_NAME = "mcore_ckpt"
# One row of the table of layers: | `layer/` | what it is for | torch |
_ROW = re.compile(r"^\| `(\w+)/` \| (.+?) \| (some|-) \|$", re.MULTILINE)
_LIST = re.compile(r'(?<=\n)With torch: .*?(?="""\n)', re.DOTALL)
_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement: what it names, on which line, and whether it runs when its module is imported."""

    name: str
    line: int
    at_import: bool


class Package:
    """The package below `root`: its layers in the order of the table in docs/design.md, their modules and imports.

    Modules are named within the package (`format.crc`); the package's own `__init__` and those of the layers are none.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / _NAME
        self.design = root / "docs" / "design.md"
        self._imports: dict[str, list[Import]] = {}

    @cached_property
    def layers(self) -> dict[str, bool]:
        """Layers in their order; whether some of a layer's modules may need torch."""
        return {name: torch == "some" for name, _, torch in _ROW.findall(self.design.read_text())}

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Modules that hold code, by name."""
        paths = {".".join(path.relative_to(self.package).with_suffix("").parts): path for path in self._files()}
        return {name: path for name, path in sorted(paths.items()) if not name.endswith("__init__")}

    def _files(self) -> Iterator[Path]:
        return self.package.rglob("*.py")

    def modules_in(self, layer: str) -> list[str]:
        """The modules of one layer, without its name; its own (`_name`) last."""
        leaves = [name.partition(".")[2] for name in self.modules if name.startswith(f"{layer}.")]
        return sorted(leaves, key=lambda leaf: (leaf.startswith("_"), leaf))

    def imports(self, name: str) -> list[Import]:
        """All imports of a module, inside functions and for types included."""
        if name not in self._imports:
            self._imports[name] = list(_imports_of(ast.parse(self.modules[name].read_text()), name))
        return self._imports[name]

    def own_imports(self, name: str, *, at_import: bool = False) -> set[str]:
        """The package's modules that a module imports; `at_import`: those imported together with it."""
        found = set()
        for imported in self.imports(name):
            if imported.name.startswith(f"{_NAME}.") and (imported.at_import or not at_import):
                path = imported.name.removeprefix(f"{_NAME}.")
                while path and path not in self.modules:
                    path = path.rpartition(".")[0]
                found.add(path)
        return found - {""}

    @cached_property
    def needing_torch(self) -> set[str]:
        """Modules that cannot be imported without torch."""
        needing = {
            name
            for name in self.modules
            if any(imported.at_import and layer_of(imported.name) == "torch" for imported in self.imports(name))
        }
        while more := {name for name in self.modules if self.own_imports(name, at_import=True) & needing} - needing:
            needing |= more
        return needing

    def list_of(self, layer: str) -> str:
        """The last lines of the docstring of a layer's `__init__`; none, if no module needs torch."""
        torch = [leaf for leaf in self.modules_in(layer) if f"{layer}.{leaf}" in self.needing_torch]
        return _wrapped("With torch", torch) if torch else ""

    def rendered(self) -> dict[Path, str]:
        """The files that hold something made here, with what they should be.

        Raises:
            ValueError: a file lacks the place for it.
        """
        texts = {}
        for layer in self.layers:
            path = self.package / layer / "__init__.py"
            if modules := self.list_of(layer):
                texts[path] = _put(_LIST, modules, path)
        return texts


def layer_of(name: str) -> str:
    """The first part of a dotted name: the layer of a module of the package, the package of any other."""
    return name.partition(".")[0]


def _imports_of(tree: ast.Module, name: str) -> Iterator[Import]:
    deferred = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(scope)
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{name}:{node.lineno}: relative import; write the full name")
            # `from mcore_ckpt.core import crc` names a module, `from mcore_ckpt.core.crc import crc32` a function.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _calls_import_module(node):
            names = [_text(node.args[0])]
        else:
            continue
        yield from (Import(text, node.lineno, id(node) not in deferred) for text in names)


def _is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")) == "TYPE_CHECKING"


def _calls_import_module(node: ast.Call) -> bool:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return called in ("import_module", "__import__") and bool(node.args)


def _text(node: ast.expr) -> str:
    """The constant text that an expression begins with; what follows in an f-string is not known here."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _wrapped(what: str, leaves: list[str]) -> str:
    return textwrap.fill(f"{what}: {', '.join(leaves)}.", _WIDTH, break_on_hyphens=False) + "\n"


def _put(place: re.Pattern[str], text: str, path: Path) -> str:
    whole = path.read_text()
    if len(place.findall(whole)) != 1:
        raise ValueError(f"{path}: expected one place for what is made from the imports, {place.pattern!r}")
    return place.sub(lambda _: text, whole)


def main() -> int:
    """Write, or compare with what is committed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if something would change")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    stale = [path for path, text in Package(root).rendered().items() if path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(root)}: {'not what the imports give: make layers' if arguments.check else 'written'}")
        if not arguments.check:
            path.write_text(Package(root).rendered()[path])
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
