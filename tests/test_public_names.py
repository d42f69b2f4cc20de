"""The public names: exactly these, each importable, without megatron-core where it is not needed."""

import inspect
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core import errors
from scripts import site_pages
from tests.support.processes import printed_by

pytestmark = pytest.mark.quick

PUBLIC = """
    AsyncCallsQueue Certificate Checkpoint CheckpointError CheckpointExistsError CheckpointNotFoundError
    CheckpointSummary ChecksumError ConversionReport CopyReport CorruptCheckpointError DiffReport DtypeMismatchError
    FileSystemReader
    FileSystemWriterAsync KindMismatchError LazyTensor LoadError LoadOptions MCoreLoadPlanner MCoreSavePlanner
    MissingKeyError NewerFormatError OptionError PlanError PruneReport RunReport SaveError SaveOptions
    ShapeMismatchError StateFingerprint StrategyNotFoundError TorchDistLoadStrategy TorchDistSaveStrategy
    UnsafePickleError UnsupportedMegatronError VerifyReport WriteTimeoutError WriterDiedError __version__
    certify checkpoint_fingerprint copy_checkpoint diff_checkpoints export_checkpoint get_strategy
    import_checkpoint install list_run load_sharded_optimizer_state merge_checkpoints open_checkpoint prune_run
    register_strategy repair_checkpoint reshard_checkpoint summarize_checkpoint uninstall verify_checkpoint
""".split()
NEED_MEGATRON = {"TorchDistLoadStrategy", "TorchDistSaveStrategy", "get_strategy", "register_strategy"}
GOLDEN = Path(__file__).parent / "format" / "golden" / "ours-0.1.0"

WITHOUT_MEGATRON = """
import sys
sys.modules["megatron"] = None
import mcore_ckpt
for name in {names}:
    getattr(mcore_ckpt, name)
for use in (lambda: mcore_ckpt.install(), lambda: mcore_ckpt.TorchDistSaveStrategy()):
    try:
        use()
    except mcore_ckpt.UnsupportedMegatronError as error:
        print(" ".join(str(error).split()))
"""


def test_the_list_is_exact() -> None:
    assert sorted(mcore_ckpt.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(mcore_ckpt))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_can_be_imported(name: str) -> None:
    assert inspect.getdoc(getattr(mcore_ckpt, name))


def test_each_stands_on_one_page_of_the_site() -> None:
    pages = site_pages.reference().values()
    shown = [name for page in pages for name in re.findall(r"^::: mcore_ckpt\.(\w+)$", page, re.MULTILINE)]
    assert sorted(shown) == sorted({*PUBLIC} - {"__version__"})


def test_without_megatron_all_can_be_imported_but_what_needs_it_and_that_says_so() -> None:
    messages = printed_by(WITHOUT_MEGATRON.format(names=sorted(set(PUBLIC) - NEED_MEGATRON))).splitlines()
    assert len(messages) == 2
    for message in messages:
        assert "megatron-core is not installed" in message
        assert "pip install" in message


class PathLike:
    """Neither text nor a `Path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def test_a_checkpoint_goes_through_all_of_them(tmp_path: Path) -> None:
    """As a user would: with nothing but `import mcore_ckpt`."""
    golden, other = PathLike(GOLDEN), PathLike(tmp_path / "other")
    summary = mcore_ckpt.summarize_checkpoint(golden)
    assert summary.tensors
    assert not summary.problems
    assert mcore_ckpt.verify_checkpoint(golden).whole
    resharded = mcore_ckpt.reshard_checkpoint(golden, other, tp=1, pp=1, drop_optimizer=True)
    assert resharded.verified
    left = mcore_ckpt.diff_checkpoints(golden, other)
    assert all(tensor.same for tensor in left.tensors)
    assert not left.only_in_b
    exported = mcore_ckpt.export_checkpoint(other, PathLike(tmp_path / "tensors"), to="safetensors")
    assert exported.tensors == resharded.tensors
    imported = mcore_ckpt.import_checkpoint(PathLike(tmp_path / "tensors"), PathLike(tmp_path / "back"), tp=2, pp=1)
    assert imported.tensors == resharded.tensors
    report = mcore_ckpt.diff_checkpoints(other, PathLike(tmp_path / "back"))
    assert len(report.tensors) == resharded.tensors
    assert all(tensor.same for tensor in report.tensors)
    with mcore_ckpt.open_checkpoint(PathLike(tmp_path / "back")) as checkpoint:
        assert set(checkpoint.tensors) == {tensor.fqn for tensor in report.tensors}


@pytest.fixture
def run_of_seven(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "run" / "iter_0000007")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    return tmp_path / "run"


def test_the_directory_of_a_run_stands_for_its_last_iteration(run_of_seven: Path, tmp_path: Path) -> None:
    assert mcore_ckpt.verify_checkpoint(run_of_seven).whole
    assert mcore_ckpt.summarize_checkpoint(run_of_seven).tensors
    assert mcore_ckpt.diff_checkpoints(run_of_seven, GOLDEN).identical
    assert mcore_ckpt.export_checkpoint(run_of_seven, tmp_path / "e").tensors
    assert not (tmp_path / "e" / "iter_0000007").exists()


_RESHARD = {"tp": 1, "pp": 1, "drop_optimizer": True}


@pytest.mark.parametrize(("command", "keywords"), [("copy", {}), ("reshard", _RESHARD)])
def test_function_and_command_make_the_same_of_a_run_and_a_job_loads_it(
    run_of_seven: Path, tmp_path: Path, command: str, keywords: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    function = getattr(mcore_ckpt, f"{command}_checkpoint")
    report = function(run_of_seven, tmp_path / "python", **keywords)
    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in keywords.items()]
    assert main([command, str(run_of_seven), str(tmp_path / "shell"), *words]) == 0
    assert report.target == str(tmp_path / "python" / "iter_0000007")
    for made in (tmp_path / "python", tmp_path / "shell"):
        # `--load` takes a directory with a tracker file, and the iteration that it names.
        assert (made / "latest_checkpointed_iteration.txt").read_text() == "7"
        assert sorted(path.name for path in made.iterdir()) == ["iter_0000007", "latest_checkpointed_iteration.txt"]
        assert mcore_ckpt.verify_checkpoint(made / "iter_0000007").whole
    # A checkpoint by itself becomes one by itself, with a tracker file where a job looks for one.
    function(run_of_seven / "iter_0000007", tmp_path / "plain", **keywords)
    assert (tmp_path / "plain" / ".metadata").exists()
    function(run_of_seven / "iter_0000007", tmp_path / "python" / "iter_0000009", **keywords)
    assert (tmp_path / "python" / "latest_checkpointed_iteration.txt").read_text() == "9"
    function(run_of_seven / "iter_0000007", tmp_path / "python" / "iter_0000008", **keywords)
    assert (tmp_path / "python" / "latest_checkpointed_iteration.txt").read_text() == "9"
    (tmp_path / "python" / "latest_checkpointed_iteration.txt").write_text("ten")
    function(run_of_seven / "iter_0000007", tmp_path / "python" / "iter_0000010", **keywords)
    assert "latest_checkpointed_iteration.txt: stays as it is, and names no checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "no target layout"),
        ({"optimizer_layout": "fully_reshardable", "ep": 2}, "need --tp and --pp"),
        ({"tp": 1, "pp": 1, "dtype": "int7"}, "dtype int7: expected one of"),
        ({"tp": 1, "pp": "x"}, "--pp 'x': expected a whole number of at least 1"),
        ({"tp": 1, "pp": 1, "ep": True}, "--ep True: expected a whole number"),
        ({"tp": 1, "pp": 1, "verify": "no"}, "--verify 'no': expected True or False"),
        ({"tp": 1, "pp": 1, "memory_bytes": "much"}, "'much': expected a number such as"),
        ({"tp": 1, "pp": 1, "only": 3}, "--only 3: expected text"),
        ({"optimizer_layout": "flat"}, "--optimizer-layout 'flat': expected one of fully_reshardable"),
    ],
)
def test_a_reshard_that_cannot_be_says_why(tmp_path: Path, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(mcore_ckpt.OptionError, match=message):
        mcore_ckpt.reshard_checkpoint(GOLDEN, tmp_path / "t", **keywords)
    assert not list(tmp_path.iterdir())


# --- errors -----------------------------------------------------------------------------------------------------------

ALSO = {
    "OptionError": ValueError,
    "CheckpointExistsError": RuntimeError,
    "StrategyNotFoundError": LookupError,
    "CheckpointNotFoundError": FileNotFoundError,
    "MissingKeyError": KeyError,
}


@pytest.mark.parametrize("name", errors.__all__)
def test_message_is_shown_as_written_and_survives_pickling(name: str) -> None:
    error = getattr(errors, name)("rank 3, /ckpt/__3_0.distcp: expected 5 bytes, got 4")
    assert str(error) == "rank 3, /ckpt/__3_0.distcp: expected 5 bytes, got 4"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    assert isinstance(error, ALSO.get(name, Exception))
