"""Writer processes that really write, fail, hang and die."""

import contextlib
import gc
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_ckpt.core.errors import SaveError, WriterDiedError, WriteTimeoutError
from mcore_ckpt.save.forked_child import fork_call, report_progress
from mcore_ckpt.save.writer_process import PersistentWriter
from tests.support.processes import children, in_child, is_running, suspend, until
from tests.support.writer_jobs import MisbehavingStorage, SmallBuffer, image, job

_MIB = 1024 * 1024
_REPOSITORY = Path(__file__).resolve().parents[2]
# What is noticed by a sentinel takes milliseconds, and seconds on a machine that is busy with other tests.
_AT_ONCE_S = 20.0


@pytest.fixture
def writer() -> Iterator[PersistentWriter]:
    made = PersistentWriter(cpu_priority=7)
    yield made
    made.close(abort=True)


@pytest.fixture
def buffer() -> Iterator[SmallBuffer]:
    made = SmallBuffer(8 * _MIB)
    made.fill(1)
    yield made
    made.close()


# --- the persistent writer does its work ------------------------------------------------------------------------------


def test_the_process_is_bare_and_out_of_the_terminals_reach(writer: PersistentWriter, buffer: SmallBuffer) -> None:
    writer.warm_up(buffer_fd=buffer.fd)
    assert writer.pid is not None
    maps = Path(f"/proc/{writer.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "multiarray" not in maps
    assert os.getpgid(writer.pid) == writer.pid
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{writer.pid}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 40_000, "kB"
    # A nice value counts within a session only, where the kernel shares cores among sessions.
    assert os.getpriority(os.PRIO_PROCESS, writer.pid) == max(7, os.getpriority(os.PRIO_PROCESS, 0))
    assert os.getsid(writer.pid) == os.getsid(0)
    assert os.sched_getscheduler(writer.pid) == os.SCHED_BATCH
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(writer.pid, number)
    time.sleep(0.1)
    assert writer.pid is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_to_all_processes_ends_no_forked_writer(number: signal.Signals, tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda *_: heard.append(1))
    go = tmp_path / "go"
    try:
        call = fork_call(_write_when_told, (go,), what="test", deadline_s=60.0)
        (pid,) = [process.pid for process in multiprocessing.active_children() if process.name == "test"]
        assert pid is not None
        os.kill(pid, number)
        os.kill(os.getpid(), number)
        go.touch()
        assert call.result() == "written"
        assert heard == [1], "the trainer's own handler was called, and the child's copy of it was not"
    finally:
        signal.signal(number, before)


def _write_when_told(go: Path) -> str:
    until(go.exists)
    return "written"


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "text"), [("SIGKILL", "SIGKILL"), ("SIGSEGV", "SIGSEGV"), ("SIGABRT", "SIGABRT"), ("exit", "exit code 3")]
)
def test_the_writers_death_is_noticed_and_named(
    writer: PersistentWriter, buffer: SmallBuffer, tmp_path: Path, how: str, text: str
) -> None:
    storage = MisbehavingStorage(str(tmp_path), how, at_file=1)
    doomed = writer.submit(job(tmp_path, [image("a", 100), image("b", 100)], storage=storage), buffer.fd)
    behind = writer.submit(job(tmp_path, [image("c", 100)]), buffer.fd)
    pid = writer.pid
    started_s = time.monotonic()
    with pytest.raises(WriterDiedError, match=text) as caught:
        doomed.result()
    assert time.monotonic() - started_s < _AT_ONCE_S
    assert f"pid {pid}" in str(caught.value)
    assert "a, b into" in str(caught.value)
    if how == "SIGSEGV":
        assert "in misbehave" in str(caught.value), "the stack that the process left behind"
    with pytest.raises(WriterDiedError, match=text):
        behind.result()
    with pytest.raises(WriterDiedError, match=text):
        doomed.result()
    again = writer.submit(job(tmp_path, [image("d", 100)]), buffer.fd)
    assert again.result().files[0].name == "d"
    assert writer.pid != pid


def test_a_writer_that_cannot_start_says_why(
    monkeypatch: pytest.MonkeyPatch, buffer: SmallBuffer, tmp_path: Path
) -> None:
    monkeypatch.setattr("mcore_ckpt.save.jobs._PROGRAM", "raise ImportError('no module named zlib')")
    writer = PersistentWriter()
    with pytest.raises(WriterDiedError, match="no module named zlib"):
        writer.submit(job(tmp_path, [image("a", 100)]), buffer.fd).result()
    with pytest.raises(WriterDiedError, match="exit code 1"):
        writer.warm_up()
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(SaveError, match=r'writer="fork"'):
        writer.submit(job(tmp_path, [image("b", 100)]), buffer.fd)


def test_an_exception_in_the_writer_comes_back_with_its_cause(
    writer: PersistentWriter, buffer: SmallBuffer, tmp_path: Path
) -> None:
    (tmp_path / "b").write_text("in the way")
    handle = writer.submit(job(tmp_path, [image("a", _MIB), image("b", 100)]), buffer.fd)
    with pytest.raises(SaveError, match=r"b: .*exist") as caught:
        handle.result()
    assert isinstance(caught.value.__cause__, OSError)
    assert (caught.value.__cause__.errno, caught.value.__cause__.filename) == (17, str(tmp_path / "b"))
    assert "in open_writer" in str(caught.value.__cause__.__cause__)
    assert not (tmp_path / "a").exists(), "all files of a job, or none"
    assert writer.submit(job(tmp_path, [image("c", 100)]), buffer.fd).result()


@pytest.mark.parametrize("how", ["hang", "stopped"])
def test_a_stuck_write_passes_its_deadline(
    writer: PersistentWriter, buffer: SmallBuffer, tmp_path: Path, how: str
) -> None:
    writer.warm_up()
    pid = writer.pid
    assert pid is not None
    if how == "stopped":
        os.kill(pid, signal.SIGSTOP)
    storage = MisbehavingStorage(str(tmp_path), "hang")
    handle = writer.submit(job(tmp_path, [image("a", 100)], storage=storage, deadline_s=0.5), buffer.fd)
    started_s = time.monotonic()
    with pytest.raises(WriteTimeoutError, match=r"no progress for 0\.[5-9] s .*write_deadline_s=0\.5"):
        handle.result()
    assert 0.4 < time.monotonic() - started_s < _AT_ONCE_S
    assert not is_running(pid)
    assert writer.submit(job(tmp_path, [image("b", 100)]), buffer.fd).result()


def _suspended(kind: str, directory: Path) -> bool:
    if kind == "fork":
        handle = fork_call(_report_for, (2.0,), what="a call", deadline_s=_DEADLINE_S)
        pid = handle.pid
    else:
        writer, buffer = PersistentWriter(), SmallBuffer(_MIB)
        slow = MisbehavingStorage(str(directory), "slow", write_bytes=65536)
        handle = writer.submit(job(directory, [image("a", _MIB - 64)], storage=slow, deadline_s=_DEADLINE_S), buffer.fd)
        pid = writer.pid or 0
    assert not handle.wait(0.5)
    suspend(pid, for_s=2 * _DEADLINE_S)
    handle.result()
    return True


def _report_for(seconds: float) -> None:
    for _ in range(int(seconds / 0.1)):
        time.sleep(0.1)
        report_progress()


_DEADLINE_S = 4.0  # a busy machine stalls for two seconds


@pytest.mark.parametrize("kind", ["persistent", "fork"])
def test_a_job_that_was_suspended_as_a_whole_has_not_waited(kind: str, tmp_path: Path) -> None:
    assert in_child(_suspended, kind, tmp_path) == "True"


def test_a_job_can_be_called_off(writer: PersistentWriter, buffer: SmallBuffer, tmp_path: Path) -> None:
    slow = MisbehavingStorage(str(tmp_path), "slow", write_bytes=65536)
    handle = writer.submit(job(tmp_path, [image("a", 2 * _MIB)], storage=slow), buffer.fd)
    behind = writer.submit(job(tmp_path, [image("b", 100)]), buffer.fd)
    assert not handle.wait(0.5)
    handle.abort()
    assert handle.memory_is_free()
    with pytest.raises(SaveError, match="cancelled"):
        handle.result()
    behind.result()
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    hanging = MisbehavingStorage(str(tmp_path), "hang")
    handle = writer.submit(job(tmp_path, [image("c", 100)], storage=hanging), buffer.fd)
    pid = writer.pid
    until((tmp_path / "c").exists)
    handle.abort()
    assert handle.memory_is_free(), "killed, since it does not listen"
    assert pid is not None
    assert not is_running(pid)


# --- nothing is left behind -------------------------------------------------------------------------------------------


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


_TRAINER = """
    import os, sys, time
    from pathlib import Path
    from mcore_ckpt.save.forked_child import fork_call
    from mcore_ckpt.save.writer_process import PersistentWriter
    from tests.support.writer_jobs import MisbehavingStorage, SmallBuffer, image, job
    directory, kind, ending = sys.argv[1:]
    buffer = SmallBuffer(1 << 20)
    if kind == "persistent":
        writer = PersistentWriter()
        handle = writer.submit(job(Path(directory), [image("a", 100)],
                                   storage=MisbehavingStorage(directory, "hang")), buffer.fd)
        pid = writer.pid
    else:
        handle = fork_call(lambda: time.sleep(600), what="a", expendable=True)
        pid = handle.pid
    # A forked process that holds all it inherited, as a data loader's worker does.
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    while kind == "persistent" and not (Path(directory) / "a").exists():
        time.sleep(0.01)
    print(pid, flush=True)
    if ending == "exit":
        sys.exit(0)
    time.sleep(600)
"""


@contextlib.contextmanager
def _trainer(directory: Path, kind: str, ending: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a save in the writing, in a session of its own, and the writer's pid."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_TRAINER), str(directory), kind, ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=_REPOSITORY,
        text=True,
        start_new_session=True,
    ) as trainer:
        assert trainer.stdout is not None
        yield trainer, int(trainer.stdout.readline())


@pytest.mark.parametrize("ending", ["SIGKILL", "SIGTERM", "SIGINT", "exit"])
@pytest.mark.parametrize("kind", ["persistent", "fork"])
def test_no_writer_survives_its_trainer(kind: str, ending: str, tmp_path: Path) -> None:
    with _trainer(tmp_path, kind, ending) as (trainer, pid):
        try:
            if ending != "exit":
                assert is_running(pid)
                # What terminals and schedulers send goes to all processes of a job, the writer's among them.
                (os.kill if ending == "SIGKILL" else os.killpg)(trainer.pid, signal.Signals[ending])
            trainer.wait(10)
            until(lambda: not is_running(pid), f"process {pid} is still running", within_s=1.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer.pid, signal.SIGKILL)  # the process that stands for the data loader's


# --- the forked writer ------------------------------------------------------------------------------------------------


# Children of this process that hang before their first line, as with a lock that is never given back;
# pages that children share, so that each can tell how many have hung already.
_hanging: dict[str, tuple[mmap.mmap, int]] = {}


def _hang_as_told() -> None:
    for page, times in _hanging.values():
        if page[0] < times:
            page[0] += 1
            time.sleep(600)


os.register_at_fork(after_in_child=_hang_as_told)


@pytest.fixture
def hanging_forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    monkeypatch.setattr("mcore_ckpt.save.forked_child._START_DEADLINES_S", (0.3, 0.5, 20.0))

    def hang(times: int) -> None:
        _hanging["now"] = (mmap.mmap(-1, 1), times)

    yield hang
    _hanging.clear()


def test_a_child_that_hangs_in_the_fork_itself_is_replaced(
    hanging_forks: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()
    before = _descriptors(), children()
    hanging_forks(2)
    runs = mmap.mmap(-1, 1)  # of all children together

    def work() -> str:
        runs[0] += 1
        return "done"

    handle = fork_call(work, what="writing a", expendable=True)
    assert handle.result() == "done"
    assert runs[0] == 1, "a child that is given up must not have begun"
    assert [record.getMessage() for record in caplog.records if "did not start" in record.getMessage()][1:]
    del handle
    gc.collect()
    # Fewer, where what an earlier test has left is collected meanwhile.
    assert _descriptors() <= before[0]
    assert children() == before[1]


def test_a_forked_child_without_progress_passes_its_deadline() -> None:
    stuck = fork_call(lambda: time.sleep(600), what="writing a", deadline_s=0.5)
    with pytest.raises(WriteTimeoutError, match=r"writing a: .*no progress"):
        stuck.result()

    def slow() -> str:
        for _ in range(12):
            time.sleep(0.2)
            report_progress()
        return "done"

    assert fork_call(slow, what="writing b", deadline_s=2.0).result() == "done"
