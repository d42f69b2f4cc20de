"""Pages of the site that are no files in docs/: README.md and its companions, and the reference of the public names.

A hook of mkdocs (mkdocs.yml names it). The reference is made from `mcore_ckpt.__all__`: each public name stands on
exactly one page, as `import mcore_ckpt` gives it, with its docstring.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

__all__ = ["on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parent.parent

# What lies at the root, where people and hosts look for it, and the page of the site that shows it.
COMPANIONS = {
    "README.md": "guide.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
PLAIN = {"LICENSE": "license.txt"}
# What pages in docs/ link to outside of it, so that their links lead somewhere in a clone, too.
OUTSIDE = {**COMPANIONS, **PLAIN, "mcore_ckpt/__init__.py": "reference/checkpoints.md"}

_LINK = re.compile(r"(\[[^\]]*\])\(([^)\s]+)\)")

SAVES_AND_LOADS = """
install uninstall TorchDistSaveStrategy TorchDistLoadStrategy AsyncCallsQueue get_strategy register_strategy
load_sharded_optimizer_state FileSystemReader FileSystemWriterAsync MCoreSavePlanner MCoreLoadPlanner
""".split()
OPTIONS = ["SaveOptions", "LoadOptions"]
NO_PAGE = ["__version__"]


def public_names() -> tuple[list[str], list[str]]:
    """The names of `mcore_ckpt.__all__` without importing it: those that it lists, and the errors."""

    def listed(path: Path) -> list[ast.expr]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                assert isinstance(node.value, ast.List)
                return node.value.elts
        raise ValueError(f"{path}: no __all__")

    names = [entry.value for entry in listed(ROOT / "mcore_ckpt" / "__init__.py") if isinstance(entry, ast.Constant)]
    errors = [
        entry.value for entry in listed(ROOT / "mcore_ckpt" / "core" / "errors.py") if isinstance(entry, ast.Constant)
    ]
    return [str(name) for name in names], [str(name) for name in errors]


def reference() -> dict[str, str]:
    """The pages of the reference."""
    names, errors = public_names()
    rest = [name for name in names if name not in {*SAVES_AND_LOADS, *OPTIONS, *NO_PAGE}]
    functions = [name for name in rest if name[0].islower()]
    results = [name for name in rest if name[0].isupper()]
    return {
        "reference/saves_and_loads.md": _page("Saves and loads", _CHOOSE, SAVES_AND_LOADS),
        "reference/checkpoints.md": _page("Checkpoints on a disk", _ON_A_DISK, [*functions, *results]),
        "reference/options.md": _page("Options", "", OPTIONS),
        "reference/errors.md": _page("Errors", _module_docstring("core/errors.py"), errors),
    }


_CHOOSE = """
`install()` is enough for a launch of Megatron-Core; the rest is for code that passes strategies, planners, readers and
writers itself. All names are those of `mcore_ckpt`; each is imported on first use.
"""
_ON_A_DISK = """
What the commands of `mcore-ckpt` do, as functions of `mcore_ckpt`, and what they return. Paths are directories that
hold `.metadata`, or the directory of a run with a tracker file: then the iteration is taken that it names.
"""


def _page(title: str, introduction: str, names: list[str]) -> str:
    return "\n\n".join([f"# {title}", introduction, *(f"::: mcore_ckpt.{name}" for name in names)]) + "\n"


def _module_docstring(path: str) -> str:
    text = ast.get_docstring(ast.parse((ROOT / "mcore_ckpt" / path).read_text()))
    assert text
    return text


def page_of(name: str) -> str:
    """One of the files at the root, with its links as the site needs them.

    Raises:
        ValueError: it links to a file that is no page of the site.
    """
    text = (ROOT / name).read_text()

    def link(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match[2].partition("#")
        if not target or "://" in target:
            return match[0]
        if target in COMPANIONS or target in PLAIN:
            new = {**COMPANIONS, **PLAIN}[target]
        elif target.startswith("docs/"):
            new = target.removeprefix("docs/")
        else:
            raise ValueError(f"{name}: the site has no page for {target}")
        return f"{match[1]}({new}{hash_sign}{anchor})"

    return _LINK.sub(link, text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links out of docs/ to the pages of the site that show what they name (called by mkdocs for each page)."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match[2].partition("#")
        outside = posixpath.relpath(posixpath.join("docs", folder, target))
        if not target.startswith("../") or outside not in OUTSIDE:
            return match[0]
        return f"{match[1]}({posixpath.relpath(OUTSIDE[outside], folder or '.')}{hash_sign}{anchor})"

    return _LINK.sub(link, markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages (called by mkdocs once it has listed docs/)."""
    from mkdocs.structure.files import File

    pages = {**reference(), **{page: page_of(name) for name, page in COMPANIONS.items()}}
    pages |= {page: (ROOT / name).read_text() for name, page in PLAIN.items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files
