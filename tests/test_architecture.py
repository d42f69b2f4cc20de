"""The package is built as docs/design.md says: these tests hold the imports against the table of layers in it."""

import ast
import re
from pathlib import Path

import pytest

from scripts.layers import Package, layer_of
from tests.support.processes import printed_by

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent
TREE = Package(ROOT)
PACKAGE = TREE.package
# Where megatron-core may be named in an import; all else gets what it needs of it from there.
KNOWS_MEGATRON = {
    "bridge",
    "megatron.versions",
    "megatron.strategy",
    "reshard.parameter_orders",
    "models.logits",
}
# What lies beside the layers and starts things: it may import every layer, and no layer imports it.
ENTRANCES = {"bridge", "launch", "__main__"}
# Folders of tests that belong to no layer: whole launches, other versions, others' tests, what all tests use.
TESTS_OF_NO_LAYER = {"field", "frameworks", "hosts", "shared_fs", "launch", "matrix", "upstream", "support"}
MOST_LINES_OF_A_LAYER = 20


def backward_imports(package: Package, entrances: set[str]) -> list[str]:
    """Imports from a layer further down the table, or from an entrance."""
    order = list(package.layers)
    found = []
    for name in set(package.modules) - entrances:
        allowed = set(order[: order.index(layer_of(name)) + 1])
        found += [f"{name} -> {target}" for target in package.own_imports(name) if layer_of(target) not in allowed]
    return sorted(found)


def circles(package: Package) -> list[str]:
    """Each way from a module back to itself."""
    done: set[str] = set()
    found = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(package.own_imports(name)):
                visit(target, (*path, name))
            done.add(name)

    for name in package.modules:
        visit(name, ())
    return found


def wrong_underscores(package: Package) -> list[str]:
    """Modules `_name` that another layer uses."""
    users: dict[str, set[str]] = {name: set() for name in package.modules}
    for name in package.modules:
        for target in package.own_imports(name):
            users[target].add(layer_of(name))
    found = []
    for name in package.modules:
        elsewhere = sorted(users[name] - {layer_of(name)})
        if elsewhere and name.rpartition(".")[2].startswith("_"):
            found.append(f"{name} is its layer's own, and {elsewhere} import it")
    return sorted(found)


def test_the_table_names_every_layer_and_nothing_else() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(TREE.layers) == folders
    assert {layer_of(name) for name in TREE.modules} - folders == ENTRANCES


def test_imports_go_up_the_table_only() -> None:
    """Imports inside functions and for types count as any other."""
    assert not backward_imports(TREE, ENTRANCES)


def test_no_module_imports_itself_in_a_circle() -> None:
    assert not circles(TREE)


def test_what_begins_with_an_underscore_only_its_own_layer_uses() -> None:
    assert not wrong_underscores(TREE)


def test_the_lists_are_what_the_imports_give() -> None:
    others = [path for path, text in TREE.rendered().items() if path.read_text() != text]
    assert not others, "not what the imports give: make layers"


@pytest.mark.parametrize("layer", TREE.layers)
def test_a_layer_says_what_it_is_in_twenty_lines_and_holds_no_code(layer: str) -> None:
    text = (PACKAGE / layer / "__init__.py").read_text()
    assert len(text.splitlines()) <= MOST_LINES_OF_A_LAYER
    tree = ast.parse(text)
    assert len(tree.body) == 1, "names have one home: the module that defines them"
    said = ast.get_docstring(tree) or ""
    for words in ("In: ", "Out: ", "Must not know: "):
        assert f"\n{words}" in said


def test_the_tests_mirror_the_layers() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(TREE.layers) | TESTS_OF_NO_LAYER
    empty = [layer for layer in TREE.layers if not list((ROOT / "tests" / layer).glob("test_*.py"))]
    assert not empty


def test_megatron_is_imported_in_few_modules_only() -> None:
    where = sorted(
        {
            f"{name}:{imported.line}"
            for name in TREE.modules
            for imported in TREE.imports(name)
            if layer_of(imported.name) in ("megatron", "nvidia_resiliency_ext") and name not in KNOWS_MEGATRON
        }
    )
    assert not where, f"megatron is imported at {where}; ask megatron.versions for what is needed"


def test_modules_without_torch_are_those_that_the_layers_say() -> None:
    """In an interpreter where torch and megatron cannot be imported those fail that the layer's `__init__` names."""
    apart = ("__main__", "bridge")  # the first runs the command when it is imported, the second needs Megatron-Bridge
    names = [name for name in TREE.modules if name not in apart]
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
    needing = dict(line.split() for line in printed_by(code).splitlines())
    for name in ("_gcs", "_obstore"):
        needing.pop(f"storage.{name}", None)  # of the extra `objects`
    assert set(needing.values()) <= {"torch"}
    assert set(needing) == TREE.needing_torch - set(apart)
    assert {layer_of(name) for name in needing} == {name for name, some in TREE.layers.items() if some}


HEAVY = ("torch", "numpy", "megatron", "rich", "isal")


def test_importing_a_layer_or_the_package_brings_in_nothing_heavy() -> None:
    code = f"""
import importlib, sys
for name in {["mcore_ckpt", *(f"mcore_ckpt.{layer}" for layer in TREE.layers)]!r}:
    importlib.import_module(name)
    print(name, *sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    lines = [line.split() for line in printed_by(code).splitlines()]
    assert [name for name, *_ in lines] == ["mcore_ckpt", *(f"mcore_ckpt.{layer}" for layer in TREE.layers)]
    assert not [line for line in lines if len(line) > 1], "the first line that names something heavy is the culprit"


def test_a_reshard_never_imports_models() -> None:
    """Neither the function nor the command, measured; torch and Megatron are not imported either. (A trainer: as
    `tests/megatron/test_install.py` launches one.)
    """
    golden = ROOT / "tests" / "format" / "golden" / "ours-0.1.0"
    code = f"""
import sys, tempfile
import mcore_ckpt
from mcore_ckpt.commands.cli import main
with tempfile.TemporaryDirectory() as path:
    mcore_ckpt.reshard_checkpoint({str(golden)!r}, path + "/made", tp=1, pp=1, drop_optimizer=True)
    main(["reshard", path + "/made", path + "/again", "--tp", "1", "--pp", "1", "--quiet"])
print(*sorted({{name.split(".")[1] for name in sys.modules if name.startswith("mcore_ckpt.")}}))
print(*sorted({{"torch", "megatron"}} & set(sys.modules)))
"""
    loaded, heavy = printed_by(code).split("\n")[-3:-1]
    assert "reshard" in loaded.split()
    assert "models" not in loaded.split()
    assert not heavy


def test_what_is_logged_and_shown_goes_through_one_module() -> None:
    """Elsewhere a handler or a stream could fail or block a save."""
    direct = re.compile(r"= logging\.getLogger\(|warnings\.warn\(|\.isatty\(")
    found = {name for name, path in TREE.modules.items() if direct.search(path.read_text())}
    assert found == {"core.console", "megatron.install"}


DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_files_that_are_there(document: Path) -> None:
    text = document.read_text()
    named = {*re.findall(r"`([\w./-]+\.(?:py|sh|toml))`", text), *re.findall(r"`(tests/[\w./-]+)`", text)}
    named -= {"utils.py", "pretrain_gpt.py"}  # what the rules forbid, and Megatron's own
    missing = sorted(name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists())
    assert not missing


def test_no_view_of_a_bytesio_is_kept() -> None:
    """CPython before 3.11.7 and 3.12.2 crashes when a `BytesIO.getbuffer()` is collected as part of a cycle.

    Fixed by https://github.com/python/cpython/issues/111049. A failed save leaves such cycles: its traceback holds the
    frames. `getvalue()` copies nothing either while nobody else holds the bytes.
    """
    keep_views = [str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py") if ".getbuffer(" in path.read_text()]
    assert not keep_views, f"use getvalue(): {keep_views}"
