"""One set of promises, held by every storage back-end.

What a back-end did is looked at with plain file calls, never with the code under test.
"""

import itertools
import os
import random
import secrets
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, SaveError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, DirectIo, Storage
from mcore_ckpt.storage.resolve import LocalStorage, storage_at
from tests.support.gcs_server import GcsDirectory
from tests.support.local_files import MIB, aligned, drop_cached, open_fds, random_bytes
from tests.support.object_server import S3Directory


def without_connections(descriptors: set[str]) -> set[str]:
    """Clients of stores keep those that they have."""
    return {each for each in descriptors if "socket:" not in each}


class StorageConformance(ABC):
    """Promises of `Storage`; `put` and `get` go round it.

    Attributes:
        writes: how data files are opened.
        has_directories: one that is empty is there.
        read_ahead_bytes: what a reader has read when it is opened.
        cut: what is said of a file of `size` bytes that is cut in the middle while it is read.
    """

    writes: DirectIo = "auto"
    has_directories = True
    read_ahead_bytes = 0
    cut = "file ended at byte {half} .*had {size} bytes"

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path / "checkpoint"

    @pytest.fixture
    def storage(self, directory: Path) -> Storage:
        directory.mkdir(parents=True)
        return self.make(directory)

    @abstractmethod
    def make(self, directory: Path) -> Storage:
        """The storage under test, on an existing directory."""

    def put(self, directory: Path, name: str, content: bytes) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)

    def get(self, directory: Path, name: str) -> bytes:
        return (directory / name).read_bytes()

    def truncate(self, directory: Path, name: str, size: int) -> None:
        os.truncate(directory / name, size)

    def names(self, directory: Path) -> list[str]:
        return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())

    # Reading

    def test_lists_all_files_and_their_sizes(self, storage: Storage, directory: Path) -> None:
        assert storage.list() == []
        self.put(directory, "b", b"12")
        self.put(directory, "a", b"123")
        self.put(directory, "below/nested", b"1")
        assert storage.list() == ["a", "b"]
        assert storage.sizes() == {"a": 3, "b": 2}
        assert storage.folders() == ["below"]
        assert storage.is_directory()
        assert self.make(directory / "below").is_directory()
        assert not self.make(directory / "a").is_directory()
        assert storage.exists("b")
        assert not storage.exists("c")
        assert storage.size("below/nested") == 1

    def test_a_directory_that_is_not_there_holds_nothing(self, directory: Path) -> None:
        storage = self.make(directory)
        assert storage.list() == []
        assert not storage.is_directory()
        assert storage.version("file") is None
        for listed in (storage.sizes, storage.folders):
            with pytest.raises(CheckpointNotFoundError, match="no such directory"):
                listed()

    def test_a_version_tells_files_of_one_name_apart(self, storage: Storage) -> None:
        storage.publish("file", b"one")
        first = storage.version("file")
        assert first is not None
        assert first.size_bytes == 3
        assert storage.version("file") == first
        storage.publish("file", b"two")
        assert storage.version("file") != first
        storage.delete("file")
        assert storage.version("file") is None

    @pytest.mark.parametrize("direct", ["auto", "keep", "off"])
    def test_reads_exactly_the_range_that_is_asked_for(
        self, storage: Storage, directory: Path, direct: DirectIo
    ) -> None:
        content = random_bytes(3 * MIB + 777)
        self.put(directory, "file", content)
        self.drop_cache(directory / "file")
        rng = random.Random(1)
        with storage.open_reader("file", direct=direct) as reader:
            assert reader.size_bytes == len(content)
            for _ in range(40):
                start = rng.choice([0, rng.randrange(len(content)), ALIGNMENT_BYTES * rng.randrange(700)])
                count = min(len(content) - start, rng.choice([0, 1, 100_000, 2 * MIB, 3 * MIB + 777]))
                shift = rng.choice([0, start % ALIGNMENT_BYTES, 64, 1])
                memory = aligned(bytes(count + 2 * ALIGNMENT_BYTES))
                reader.read_into(start, memory[shift : shift + count])
                assert memory[shift : shift + count] == content[start : start + count]
                assert not any(memory[:shift]), "bytes before the view were written"
                assert not any(memory[shift + count :]), "bytes behind the view were written"

    def drop_cache(self, path: Path) -> None:
        drop_cached(path)

    @pytest.mark.parametrize(("offset", "length"), [(5, 6), (-1, 2), (2**62, 2**62)])
    def test_a_range_outside_the_file_is_corruption(
        self, storage: Storage, directory: Path, offset: int, length: int
    ) -> None:
        self.put(directory, "file", b"0123456789")
        with (
            pytest.raises(CorruptCheckpointError, match=r"file.*the file has 10 bytes"),
            storage.open_reader("file") as reader,
        ):
            reader.read(offset, length)

    @pytest.mark.parametrize("size", [10, 200_000, 3 * MIB])
    def test_a_file_cut_while_it_is_read_is_corruption(self, storage: Storage, directory: Path, size: int) -> None:
        content = random_bytes(size)
        self.put(directory, "file", content)
        self.drop_cache(directory / "file")
        with storage.open_reader("file") as reader:
            self.truncate(directory, "file", size // 2)
            if size <= self.read_ahead_bytes:
                assert reader.read(0, size) == content
                return
            with pytest.raises(CorruptCheckpointError, match=self.cut.format(half=size // 2, size=size)):
                reader.read_into(0, aligned(bytes(size))[:size])

    def test_a_missing_file_says_so(self, storage: Storage) -> None:
        for look in (storage.size, storage.open_reader, storage.read):
            with pytest.raises(CheckpointNotFoundError, match="missing: no such file"):
                look("missing")

    # Writing

    @pytest.mark.parametrize("size", [0, 4097, 1_000_000])
    def test_a_written_file_holds_exactly_its_bytes(self, storage: Storage, directory: Path, size: int) -> None:
        content = random_bytes(size)
        view = aligned(content)
        writer = storage.open_writer("file", size, direct=self.writes)
        for start in range(0, size, 64 * 1024):
            writer.write(start, view[start : start + 64 * 1024])
        writer.finish()
        assert self.get(directory, "file") == content

    def test_writes_need_neither_order_nor_alignment(self, storage: Storage, directory: Path) -> None:
        content = random_bytes(300_001)
        cuts = [0, 1, 5000, 8192, 65_536 + 8192, 200_000, 300_001]
        parts = list(itertools.pairwise(cuts))
        random.Random(3).shuffle(parts)
        writer = storage.open_writer("file", len(content), direct=self.writes)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda part: writer.write(part[0], memoryview(content)[slice(*part)]), parts))
        writer.finish()
        assert self.get(directory, "file") == content

    @pytest.mark.parametrize("size_bytes", [4096, 9 * MIB])
    def test_an_existing_file_is_never_touched(self, storage: Storage, directory: Path, size_bytes: int) -> None:
        """A store may tell only when the file is finished."""
        self.put(directory, "file", b"precious")

        def write() -> None:
            writer = storage.open_writer("file", size_bytes, direct=self.writes)
            try:
                writer.write(0, aligned(bytes(size_bytes)))
                writer.finish()
            finally:
                writer.abort()

        with pytest.raises(SaveError, match=r"file.*EEXIST.*never overwritten"):
            write()
        assert self.get(directory, "file") == b"precious"
        assert self.names(directory) == ["file"]

    @pytest.mark.parametrize("finished", [False, True])
    def test_an_aborted_file_is_gone(self, storage: Storage, directory: Path, finished: bool) -> None:
        before = without_connections(open_fds())
        writer = storage.open_writer("file", 8192, direct=self.writes)
        writer.write(0, aligned(b"x" * 8192))
        if finished:
            writer.finish()
        writer.abort()
        writer.abort()
        assert self.names(directory) == []
        assert without_connections(open_fds()) == before

    def test_a_finished_file_takes_no_more(self, storage: Storage, directory: Path) -> None:
        writer = storage.open_writer("file", 4096, direct=self.writes)
        writer.write(0, aligned(b"x" * 4096))
        writer.finish()
        with pytest.raises(SaveError, match="finished or aborted"):
            writer.write(0, aligned(b"y" * 4096))
        assert self.get(directory, "file") == b"x" * 4096

    # Publishing

    def test_publish_replaces_and_leaves_nothing_else(self, storage: Storage, directory: Path) -> None:
        storage.publish(".metadata", b"old")
        storage.publish(".metadata", b"new and longer")
        assert self.get(directory, ".metadata") == b"new and longer"
        assert self.names(directory) == [".metadata"]

    def test_a_name_that_is_taken_is_left_as_it_is(self, storage: Storage, directory: Path) -> None:
        self.put(directory, "taken", b"of others")
        with pytest.raises(SaveError, match="EEXIST"):
            storage.create("taken", b"mine")
        assert self.get(directory, "taken") == b"of others"
        assert self.names(directory) == ["taken"]

    def test_of_all_who_would_be_first_one_succeeds(self, storage: Storage, directory: Path) -> None:
        def claim(name: str, own: str) -> bool:
            return storage.claim(name, own) == own and storage.claimed(name) == own

        def replace(name: str, own: str) -> bool:
            return storage.replace_if(name, own.encode(), None) is not None

        for attempt in range(4):
            gate, won, name = threading.Barrier(8), list[str](), f"first-{attempt}"

            def work(own: str, gate: threading.Barrier = gate, won: list[str] = won, name: str = name) -> None:
                gate.wait()
                if (replace if storage.is_store else claim)(name, own):
                    won.append(own)

            threads = [threading.Thread(target=work, args=(f"owner-{number}",)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(won) == 1
            there = self.get(directory, name).decode() if storage.is_store else storage.claimed(name)
            assert there == won[0]

    def test_only_the_version_that_was_seen_is_replaced(self, storage: Storage, directory: Path) -> None:
        if not storage.is_store:
            assert storage.claimed("next") is None
            return
        assert storage.replace_if("file", b"one", None) is not None
        first = storage.version("file")
        assert storage.replace_if("file", b"two", None) is None
        second = storage.replace_if("file", b"two", first)
        assert second is not None
        assert storage.version("file") == second._replace(modified_ns=storage.version("file").modified_ns)  # type: ignore[union-attr]
        assert storage.replace_if("file", b"three", first) is None
        assert self.get(directory, "file") == b"two"

    @pytest.mark.parametrize("content", [b"longer than it was", b"end", b""])
    def test_a_file_is_overwritten(self, content: bytes, storage: Storage, directory: Path) -> None:
        self.put(directory, "file", b"0123456789")
        assert storage.overwrite("file", content)
        assert self.get(directory, "file") == content
        assert not storage.overwrite("missing", b"x")
        assert storage.version("missing") is None

    def test_move_and_delete(self, storage: Storage, directory: Path) -> None:
        self.put(directory, "a", b"a")
        self.put(directory, "b", b"b")
        storage.move("a", "b")
        storage.sync()
        assert self.get(directory, "b") == b"a"
        storage.delete("b", missing_ok=False)
        storage.delete("b")
        assert self.names(directory) == []
        with pytest.raises(SaveError, match="ENOENT"):
            storage.delete("b", missing_ok=False)
        with pytest.raises(SaveError, match="a: renaming it to c failed"):
            storage.move("a", "c")

    def test_a_directory_is_made_and_removed_when_it_is_empty(self, directory: Path) -> None:
        storage = self.make(directory / "of" / "a" / "run")
        storage.ensure()
        storage.ensure()
        storage.sync(parents=True)
        storage.publish("file", b"x")
        assert not storage.remove()
        storage.delete("file")
        assert storage.remove()
        assert not (self.has_directories and storage.remove())
        assert storage.list() == []

    # Names

    @pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a//b", "a\0b", "a\ud800"])
    def test_names_cannot_leave_the_directory(self, storage: Storage, name: str) -> None:
        calls = (storage.exists, storage.size, storage.read, storage.open_reader, storage.delete)
        for call in calls:
            with pytest.raises(CorruptCheckpointError, match="inside the checkpoint"):
                call(name)
        writes = (lambda: storage.publish(name, b""), lambda: storage.open_writer(name, 1))
        for call in (*writes, lambda: storage.move(name, "a")):
            with pytest.raises(CorruptCheckpointError, match="inside the checkpoint"):
                call()


class TestLocalStorage(StorageConformance):
    def make(self, directory: Path) -> Storage:
        return LocalStorage(directory)


class TestLocalStorageThroughThePageCache(StorageConformance):
    writes: DirectIo = "off"

    def make(self, directory: Path) -> Storage:
        return LocalStorage(str(directory))


class TestS3(StorageConformance):
    """moto's server; what was done is looked at by plain requests."""

    in_store = "s3_directory"
    has_directories = False
    read_ahead_bytes = 64 * 1024
    cut = "file: was replaced or deleted while it was read .*had {size} bytes"

    @pytest.fixture(autouse=True)
    def plain(self, request: pytest.FixtureRequest) -> None:
        self.objects: S3Directory | GcsDirectory | AzureDirectory = request.getfixturevalue(self.in_store)

    @pytest.fixture
    def directory(self, plain: None) -> Path:
        return checkpoint_path(self.objects.url)

    @pytest.fixture
    def storage(self, directory: Path) -> Storage:
        return self.make(directory)

    def make(self, directory: Path) -> Storage:
        return storage_at(directory)

    def put(self, directory: Path, name: str, content: bytes) -> None:
        self.objects.put(name, content)

    def get(self, directory: Path, name: str) -> bytes:
        return self.objects.get(name)

    def names(self, directory: Path) -> list[str]:
        return self.objects.names()

    def truncate(self, directory: Path, name: str, size: int) -> None:
        self.objects.put(name, self.objects.get(name)[:size])

    def drop_cache(self, path: Path) -> None:
        pass


class TestGcs(TestS3):
    """A server of Google's JSON API; what was done is looked at by plain requests."""

    in_store = "gcs_directory"


class AzureDirectory:
    """A new prefix of a container, as it is seen by a store of obstore's own."""

    def __init__(self, base: str) -> None:
        from obstore.store import AzureStore

        self.prefix = f"test-{secrets.token_hex(6)}/"
        self.url = f"{base}/{self.prefix}"
        self._store: Any = AzureStore(base.removeprefix("az://"), client_options={"allow_http": True})

    def put(self, name: str, content: bytes) -> None:
        self._store.put(self.prefix + name, content)

    def get(self, name: str) -> bytes:
        return bytes(self._store.get(self.prefix + name).bytes())

    def names(self) -> list[str]:
        return sorted(each["path"].removeprefix(self.prefix) for each in self._store.list(self.prefix).collect())


class TestAzure(TestS3):
    """Azure's store, or Azurite, at the URL that `MCORE_CKPT_TEST_STORE` names: az://container."""

    @pytest.fixture(autouse=True)
    def plain(self) -> None:  # type: ignore[override]
        base = os.environ.get("MCORE_CKPT_TEST_STORE", "")
        if not base.startswith("az:"):
            pytest.skip("MCORE_CKPT_TEST_STORE names no container of Azure's; `make test-stores` runs Azurite")
        self.objects = AzureDirectory(base)
