"""Whatever an index claims, a command ends soon, in bounded memory, with an error of ours or an answer."""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_ckpt.commands.cli import main
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from tests.support.model_like import write_model

pytestmark = pytest.mark.quick

DEADLINE_S = 40
MAX_BYTES = 6 * 1024**3
MANY = 2**40


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> CheckpointIndex:
    directory = tmp_path_factory.mktemp("hostile") / "base"
    write_model(directory, tp=1, tensors={"w": torch.ones(4, 4)})
    torch.save({}, directory / "common.pt")
    return read_index(directory)


def claims(kind: str, item: StoredItem) -> TensorEntry:
    endless = item._replace(length=2**60)
    key, shape, item = {
        "400 axes": ("w", (1,) * 399 + (16,), item),
        "60 long axes": ("w", (2**62,) * 60, item),
        "layers in an endless file": ("decoder.layers.mlp.w", (MANY, 4), endless),
        "experts": ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (1, MANY, 4, 4), endless),
        "digits of a layer": (f"decoder.layers.{'9' * 5000}.w", (4, 4), item),
    }[kind]
    return TensorEntry(key, "float32", shape, (StoredChunk((0,) * len(shape), shape, item),))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def run_bounded(words: list[str], log: Path) -> tuple[int, str]:
    """The command in a child with a deadline and little memory; its exit code (negative: a signal) and what it says."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            sys.stdout = sys.stderr = log.open("w", errors="backslashreplace")
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(DEADLINE_S)
            resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
            code = main(words)
            sys.stdout.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("400 axes", "reshard --tp 2 --pp 1"),
        ("60 long axes", "inspect --html"),
        ("60 long axes", "cat"),
        ("layers in an endless file", "diff"),
        ("layers in an endless file", "export --to dcp"),
        ("experts", "reshard --tp 2 --pp 2"),
        ("digits of a layer", "reshard --tp 2 --pp 2"),
    ],
)
def test_a_command_ends_with_an_answer_or_an_error_of_ours(
    base: CheckpointIndex, directory: Path, kind: str, command: str
) -> None:
    path = directory / "c"
    shutil.copytree(base.path, path)
    entry = claims(kind, base.tensors["w"].chunks[0].item)
    (path / ".metadata").write_bytes(encode_metadata(replace(base, path=str(path), tensors={entry.fqn: entry})))
    name, *options = command.split()
    words = [name, str(path), *{"cat": [entry.fqn], "diff": [str(path)]}.get(name, [])]
    if name in ("reshard", "export", "import"):
        words.append(str(directory / "out"))
    words += [*options, "-q"]
    if options and options[-1] == "--html":
        words.insert(len(words) - 1, str(directory / "file"))
    code, said = run_bounded(words, directory / "log")
    assert code in (0, 1, 2), said[-500:]
    assert "should not happen" not in said
    assert len(said) < 100_000
    if (directory / "file").exists():
        assert (directory / "file").stat().st_size < 1_000_000


def test_more_ranks_than_there_are_machines(base: CheckpointIndex, directory: Path) -> None:
    words = ["reshard", base.path, str(directory / "out"), "--tp", "1", "--pp", "1", "--ep", "9999999999"]
    code, said = run_bounded(words, directory / "log")
    assert code == 2
    assert "at most 1000000" in said
