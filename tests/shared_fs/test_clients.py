"""What one host sees of another's changes, and what commits, locks and commands make of it."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt import SaveError, list_run
from mcore_ckpt.commands.cli import main
from mcore_ckpt.directory import commit
from mcore_ckpt.directory.commit import Commit, identity_in_force, notes
from mcore_ckpt.storage.resolve import storage_at
from tests.shared_fs.conftest import Hosts, seen
from tests.support.gloo_ranks import start_apart
from tests.support.local_files import aligned
from tests.support.stored_saves import loaded, save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_it_does_what_is_asked_of_a_file_system(hosts: Hosts) -> None:
    a, b = hosts
    assert not (b / "new").exists()
    (a / "new").write_bytes(b"1")
    assert seen(lambda: (b / "new").read_bytes() == b"1" and "new" in os.listdir(b))
    (a / "new").write_bytes(b"longer")
    assert seen(lambda: (b / "new").read_bytes() == b"longer")
    (a / "other").write_bytes(b"of a rename")
    os.replace(a / "other", a / "new")
    assert seen(lambda: (b / "new").read_bytes() == b"of a rename" and not (b / "other").exists())
    (a / "new").unlink()
    assert seen(lambda: not (b / "new").exists())
    for number in range(10):
        made: list[Path] = []

        def link(at: Path, name: str = f"link{number}", made: list[Path] = made) -> None:
            try:
                os.symlink("target", at / name)
            except FileExistsError:
                return
            made.append(at)

        threads = [threading.Thread(target=link, args=(at,)) for at in hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1
    writer = storage_at(a).open_writer("direct", 8192)
    writer.write(0, aligned(b"d" * 8192))
    writer.finish()
    assert storage_at(b).read("direct") == b"d" * 8192


def test_what_is_opened_is_what_the_other_host_has_just_put_there(hosts: Hosts) -> None:
    a, b = map(storage_at, hosts)
    a.publish("file", b"0")
    for number, held in enumerate([False, True] * 10):
        assert b.version("file") == a.version("file")
        with b.open_reader("file") as reader:
            a.publish("file", b"%d" % number)
            if held:
                assert reader.read(0, reader.size_bytes)
                assert b.read("file") == b"%d" % number
        assert (b.version("file"), b.read("file")) == (a.version("file"), b"%d" % number)


@pytest.mark.parametrize("held", [False, True])
def test_a_save_begins_on_what_another_host_has_just_published(held: bool, hosts: Hosts) -> None:
    a, b = map(storage_at, hosts)
    Commit.begin(a).publish(b"first" * 600)
    for number in range(6):
        reader = b.open_reader(".metadata")
        if not held:
            reader.close()
        Commit.begin(a).publish(b"a%d" % number * 1000)
        begun = Commit.begin(b)
        assert begun.base == identity_in_force(a)
        begun.publish(b"b%d" % number * 1000)
        reader.close()
        assert a.read(".metadata") == b"b%d" % number * 1000


def test_a_save_whose_base_was_just_replaced_by_another_host_has_lost(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client still shows the old `.metadata` when it looks again, behind its claim. (Notes are a courtesy.)"""
    monkeypatch.setattr(commit, "refuse_others", lambda *_: None)
    a, b = map(storage_at, hosts)
    Commit.begin(a).publish(b"first" * 600)
    for number in range(6):
        late, other = Commit.begin(b), Commit.begin(a)
        assert late.base == identity_in_force(b)
        other.publish(b"%d" % number * 3000)
        with pytest.raises(SaveError, match="has lost"):
            late.publish(b"late" * 600)
        late.give_up()
        assert a.read(".metadata") == b.read(".metadata") == b"%d" % number * 3000


def test_a_load_right_after_a_replacement_is_seen_by_a_removal(hosts: Hosts) -> None:
    a, b = map(storage_at, hosts)
    a.publish(".metadata", b"0")
    for number in range(6):
        with b.in_use(".metadata"):
            assert a.is_in_use(".metadata")
            storage_at(hosts[0]).publish(".metadata", b"%d" % number)
            with b.in_use(".metadata"):
                assert a.is_in_use(".metadata")
        assert not a.is_in_use(".metadata")


def publish_for(directory: Path, seconds: float) -> None:
    until_s, storage = time.monotonic() + seconds, storage_at(directory)
    while time.monotonic() < until_s:
        begun = Commit.begin(storage, common=b"common" * 200)
        begun.publish(os.urandom(3000))
        time.sleep(0.2)


def save_for(directory: Path, seconds: float) -> None:
    until_s, value = time.monotonic() + seconds, 1.0
    while time.monotonic() < until_s:
        value += 1.0
        save(directory, value, rows=20)
        time.sleep(0.2)


def test_no_look_at_a_run_fails_while_another_host_saves_into_it(hosts: Hosts) -> None:
    a, b = hosts
    (a / "iter_0000001").mkdir()
    publish_for(a / "iter_0000001", 0.0)
    saver = start_apart(publish_for, a / "iter_0000001", 8.0)
    while saver.is_alive():
        list_run(b)
        notes(storage_at(b / "iter_0000001"), os.listdir(b / "iter_0000001"))
    saver.join()
    assert saver.exitcode == 0


@pytest.mark.long
def test_what_another_host_replaces_is_read_complete_or_said_to_be_replaced(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = hosts
    save(a / "iter_0000001", rows=20)
    saver = start_apart(save_for, a / "iter_0000001", 30.0)
    counts: Counter[str] = Counter()

    def note(what: str, result: Any, said: str) -> None:
        replaced = "replaced" in said and "amaged" not in said.replace("damaged file", "")
        assert result == 0 or replaced, f"{what}: {said}"
        counts[f"{what}: {'complete' if result == 0 else 'replaced'}"] += 1

    checkpoint, number = str(b / "iter_0000001"), 0
    while saver.is_alive():
        number += 1
        try:
            loaded(checkpoint, rows=20)
            note("load", 0, "")
        except CheckpointException as error:  # of torch, around ours
            note("load", 1, str(error))
        copied = str(b.with_name(f"{b.name}-copy{number}"))
        commands = [["verify", checkpoint], ["list", str(b)], ["inspect", checkpoint], ["copy", checkpoint, copied]]
        command = commands[number % len(commands)]
        result = main(command)
        note(command[0], result, "".join(capsys.readouterr()))
        if command[0] == "copy" and result == 0:
            assert main(["verify", copied]) == 0
    saver.join()
    assert saver.exitcode == 0
    assert {f"{what}: complete" for what in ("load", "verify", "list", "inspect")} <= counts.keys(), counts
    assert main(["verify", checkpoint]) == 0
    assert loaded(checkpoint, rows=20) > 1.0


@pytest.mark.long
def test_the_quick_tests_pass_on_the_mount(hosts: Hosts) -> None:
    tests = [f"tests/{layer}" for layer in ("directory", "load", "save", "dcp")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "quick", "-n", "4", *tests]
    options = ["-p", "no:cacheprovider", f"--basetemp={hosts[0] / 'quick'}"]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "quick"}
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
