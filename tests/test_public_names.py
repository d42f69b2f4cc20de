"""The public names: exactly these, each importable, without megatron-core where it is not needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mcore_ckpt

PUBLIC = [
    "AsyncCallsQueue",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ChecksumError",
    "CorruptCheckpointError",
    "DtypeMismatchError",
    "FileSystemReader",
    "FileSystemWriterAsync",
    "KindMismatchError",
    "LoadError",
    "LoadOptions",
    "MCoreLoadPlanner",
    "MCoreSavePlanner",
    "MissingKeyError",
    "OptionError",
    "PlanError",
    "SaveError",
    "SaveOptions",
    "ShapeMismatchError",
    "StrategyNotFoundError",
    "TorchDistLoadStrategy",
    "TorchDistSaveStrategy",
    "UnsafePickleError",
    "UnsupportedMegatronError",
    "WriteTimeoutError",
    "WriterDiedError",
    "__version__",
    "get_strategy",
    "install",
    "load_sharded_optimizer_state",
    "open_checkpoint",
    "register_strategy",
    "uninstall",
]
NEED_MEGATRON = {"TorchDistLoadStrategy", "TorchDistSaveStrategy"}

WITHOUT_MEGATRON = """
import sys
sys.modules["megatron"] = None
import mcore_ckpt
"""


def run(code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_list_is_exact() -> None:
    assert sorted(mcore_ckpt.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(mcore_ckpt))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_can_be_imported(name: str) -> None:
    assert getattr(mcore_ckpt, name) is not None


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'FileSystemWriter'"):
        mcore_ckpt.FileSystemWriter  # noqa: B018


def test_without_megatron_all_but_the_strategies_can_be_imported() -> None:
    names = sorted(set(PUBLIC) - NEED_MEGATRON)
    assert run(WITHOUT_MEGATRON + f"for name in {names}: getattr(mcore_ckpt, name)\nprint('all')") == "all\n"


@pytest.mark.parametrize("use", ["mcore_ckpt.install()", "mcore_ckpt.TorchDistSaveStrategy()"])
def test_without_megatron_what_needs_it_says_so(use: str) -> None:
    code = f"try:\n    {use}\nexcept mcore_ckpt.UnsupportedMegatronError as error:\n    print(error)"
    message = run(WITHOUT_MEGATRON + code)
    assert "megatron-core is not installed" in message
    assert "pip install" in message
