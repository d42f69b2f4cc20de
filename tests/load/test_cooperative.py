"""What several ranks of a load want is read by one of them, and handed on."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.errors import CheckpointError, ChecksumError, LoadError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.ranks import coordination_group
from mcore_ckpt.load import _handing_on
from mcore_ckpt.load.read_requests import ReadRequest
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.load.shares import SHARE_BYTES, Member, WantedRanges, merged, share_out, shares_of
from tests.support.gloo_ranks import rank_outcomes, run_ranks

RANKS = 3
_MIB = 1024 * 1024


def _state(fill: bool) -> dict[str, torch.Tensor]:
    """Three large tensors, and many small ones that are read together."""
    sizes = {f"large{i}": 10 * _MIB // 4 + i for i in range(3)} | {f"small{i:03}": 1000 + i for i in range(300)}
    made = torch.Generator().manual_seed(1)
    return {
        key: torch.randn(size, generator=made) if fill else torch.full((size,), -1.0) for key, size in sizes.items()
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mcore_ckpt.dcp.writer import FileSystemWriterAsync

    path = tmp_path_factory.mktemp("cooperative") / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: nothing is distributed here
        dcp.save(_state(True), storage_writer=FileSystemWriterAsync(path))
    return path


def _load(rank: int, path: Path, keys: dict[int, str] | None = None) -> tuple[int, int, bool]:
    reader = FileSystemReader(path, options=LoadOptions(cooperative="on"))
    wanted = {key: value for key, value in _state(False).items() if keys is None or key.startswith(keys[rank])}
    dcp.load(wanted, storage_reader=reader)
    expected = _state(True)
    same = all(torch.equal(value, expected[key]) for key, value in wanted.items())
    return reader.stats.bytes_from_storage, reader.stats.bytes_needed, same


def test_what_all_ranks_want_is_read_once(checkpoint: Path) -> None:
    """Each tensor arrives on each rank, and the storage is asked for about the bytes of one of them."""
    asked, needed, same = zip(*run_ranks(_load, RANKS, checkpoint), strict=True)
    assert all(same)
    assert sum(asked) < 1.02 * needed[0]
    assert max(asked) < 0.6 * needed[0]


def test_what_one_rank_wants_it_reads_itself(checkpoint: Path) -> None:
    """Ranks that want different things read for others only what these want, too."""
    keys = {0: "large", 1: "large0", 2: "small"}
    asked, needed, same = zip(*run_ranks(_load, RANKS, checkpoint, keys=keys), strict=True)
    assert all(same)
    assert sum(asked) < 1.05 * (needed[0] + needed[2])
    assert asked[2] < 1.25 * needed[2]  # headers, too


def _shared_bytes(rank: int, path: Path, options: dict[str, Any], refused: str) -> tuple[int, bool]:
    if rank == 1 and refused:

        def refuse(*_: Any) -> Any:
            raise PermissionError(1, "not here")

        setattr(_handing_on.SharedMemory, refused, staticmethod(refuse))
    reader = FileSystemReader(path, options=LoadOptions(**{"cooperative": "auto", **options}))
    wanted, expected = _state(False), _state(True)
    dcp.load(wanted, storage_reader=reader)
    return reader.stats.bytes_shared, all(torch.equal(value, expected[key]) for key, value in wanted.items())


@pytest.mark.parametrize(
    ("ranks", "options", "refused", "shares"),
    [
        pytest.param(4, {}, "", False, id="what the page cache has, each rank takes there"),
        pytest.param(4, {"page_cache": "off"}, "", True, id="else one reads for all of a host"),
        pytest.param(3, {"page_cache": "off"}, "", False, id="if these are four at least"),
        pytest.param(4, {"page_cache": "off"}, "of", False, id="unless a process may not be looked into"),
        pytest.param(4, {"page_cache": "off"}, "make", False, id="or has no memory to share"),
        pytest.param(4, {"page_cache": "off", "cooperative": "off"}, "", False, id="or it is switched off"),
    ],
)
def test_auto_shares_what_is_not_cached(
    checkpoint: Path, ranks: int, options: dict[str, Any], refused: str, shares: bool
) -> None:
    for file in checkpoint.iterdir():
        file.read_bytes()
    shared, same = zip(*run_ranks(_shared_bytes, ranks, checkpoint, options, refused), strict=True)
    assert all(same)
    assert all(nbytes > 30 * _MIB for nbytes in shared) if shares else not any(shared)


def test_bytes_that_were_damaged_are_noticed_by_all(checkpoint: Path, tmp_path: Path) -> None:
    """What one rank has read is checked where it is used."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in checkpoint.iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".distcp" and len(content) > 12 * _MIB:
            content[9 * _MIB] ^= 1
        (damaged / file.name).write_bytes(content)
    for outcome in rank_outcomes(_load, RANKS, damaged):
        assert isinstance(outcome.error, dcp.api.CheckpointException), outcome.error_text
        raised = [error for error, _ in outcome.error.failures.values()]
        assert any(isinstance(error, ChecksumError) for error in raised)


def _waits_for_another(rank: int, path: Path, how: str) -> tuple[float, str]:
    """What a rank is told of rank 1, which fails in the midst of reading; and after how many seconds."""
    deadline_s = 2.0 if how == "hangs" else 60.0
    reader = FileSystemReader(path, options=LoadOptions(cooperative="on", hand_on_deadline_s=deadline_s))
    if rank == 1:
        read = _handing_on.HandingOn._read

        def fails(self: Any, share: int, view: memoryview) -> None:
            if how == "raises":
                raise OSError(5, "the device is broken")
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(5.0)
            read(self, share, view)

        _handing_on.HandingOn._read = fails  # type: ignore[method-assign]
    group, plan, wanted = coordination_group(), reader.plan(), _state(False)
    plan.add(ReadRequest(key, value, (0,), tuple(value.shape)) for key, value in wanted.items())
    offer = reader.offer(plan)
    assert offer is not None
    shares = group.run_merged("plan", lambda: {offer[0]: {rank: offer[1]}}, merged, shares_of, wrap=CheckpointError)
    began = time.monotonic()
    try:
        with reader.handing_on(shares[offer[0].source, offer[1].host], rank, group):
            reader.read(plan)
    except LoadError as error:
        return time.monotonic() - began, str(error)
    same = all(torch.equal(value, wanted[key]) for key, value in _state(True).items())
    return time.monotonic() - began, "" if same else "other values"


def test_ranks_read_themselves_what_one_that_hangs_does_not_hand_on(checkpoint: Path) -> None:
    """After one deadline, and not one for each share."""
    outcomes = rank_outcomes(_waits_for_another, RANKS, checkpoint, "hangs", deadline_s=60.0, grace_s=20.0)
    assert [outcome.value[1] for outcome in outcomes] == [""] * RANKS


def _load_large(rank: int, path: Path) -> tuple[int, int, bool]:
    options = LoadOptions(cooperative="on", hand_on_deadline_s=5.0, window_bytes=96 * _MIB, buffer_bytes=96 * _MIB)
    reader, wanted = FileSystemReader(path, options=options), {"large": torch.zeros(24 * _MIB)}
    dcp.load(wanted, storage_reader=reader)
    stats = reader.stats
    return stats.bytes_from_storage, stats.bytes_needed, torch.equal(wanted["large"], torch.arange(24.0 * _MIB))


def test_one_read_may_need_more_than_the_memory_of_a_rank_holds(tmp_path: Path) -> None:
    """What is copied makes room at once, so that no rank waits for itself."""
    from mcore_ckpt.dcp.writer import FileSystemWriterAsync

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: nothing is distributed here
        dcp.save({"large": torch.arange(24.0 * _MIB)}, storage_writer=FileSystemWriterAsync(tmp_path))
    asked, needed, same = zip(*run_ranks(_load_large, 2, tmp_path), strict=True)
    assert all(same)
    assert sum(asked) < 1.05 * needed[0]


def _load_beside_late_shares(rank: int, path: Path) -> tuple[bool, int]:
    """Every other round of shares comes late, and no rank may wait for it; how often a place was in use twice."""
    plan, read = _handing_on.HandingOn._plan, _handing_on.HandingOn._read
    in_use: set[int] = set()
    twice = 0

    def is_late(self: Any, share: int) -> bool:
        return bool(self._place[share] // self._slots.get(self._provider[share], 1) % 2 == 0)

    def planned(self: Any) -> None:
        plan(self)
        for share in range(len(self._needs)):
            self._needs[share] = 2**32 if is_late(self, share) else -1

    def read_late(self: Any, share: int, view: memoryview) -> None:
        nonlocal twice
        place = np.frombuffer(view, np.uint8).ctypes.data
        twice += place in in_use
        in_use.add(place)
        time.sleep(0.2 if is_late(self, share) else 0.0)
        read(self, share, view)
        in_use.discard(place)

    _handing_on.HandingOn._plan = planned  # type: ignore[method-assign]
    _handing_on.HandingOn._read = read_late  # type: ignore[method-assign]
    more = {"window_bytes": 4 * _MIB, "buffer_bytes": 16 * _MIB, "hand_on_deadline_s": 5.0}
    options = LoadOptions(cooperative="on", verify_crc=False, io_threads=4, **more)
    wanted = {"large": torch.zeros(24 * _MIB)}
    dcp.load(wanted, storage_reader=FileSystemReader(path, options=options))
    return torch.equal(wanted["large"], torch.arange(24.0 * _MIB)), twice


def test_a_place_is_not_filled_again_before_it_has_been_filled(tmp_path: Path) -> None:
    """Otherwise bytes of one share lie where another one is taken from."""
    from mcore_ckpt.dcp.writer import FileSystemWriterAsync

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: nothing is distributed here
        dcp.save({"large": torch.arange(24.0 * _MIB)}, storage_writer=FileSystemWriterAsync(tmp_path))
    assert run_ranks(_load_beside_late_shares, 2, tmp_path) == [(True, 0), (True, 0)]


class _FailingPlanner(dcp.DefaultLoadPlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        raise ValueError("no plan")


def _load_with_planner(rank: int, path: Path) -> None:
    planner = _FailingPlanner() if rank == 1 else None
    dcp.load(
        _state(False), storage_reader=FileSystemReader(path, options=LoadOptions(cooperative="on")), planner=planner
    )


def test_a_rank_that_fails_before_it_reads_is_not_waited_for_long(checkpoint: Path) -> None:
    """The others read for themselves, and DCP tells all which rank has failed, long before `hand_on_deadline_s`."""
    for outcome in rank_outcomes(_load_with_planner, RANKS, checkpoint, deadline_s=60.0, grace_s=60.0):
        assert isinstance(outcome.error, dcp.api.CheckpointException), outcome.error_text
        assert list(outcome.error.failures) == [1]


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_rank_that_fails_is_named(checkpoint: Path, how: str) -> None:
    """The cause where it can tell, or that its process has ended: nobody waits for ever."""
    outcomes = rank_outcomes(_waits_for_another, RANKS, checkpoint, how, deadline_s=60.0, grace_s=20.0)
    said = {
        "raises": "the device is broken",
        "dies": "has ended during a load",
    }
    for rank in (0, 2):
        seconds, error = outcomes[rank].value
        assert re.search(r"rank 1\b", error), error
        assert said[how] in error
        assert seconds < 20.0


def test_shares_are_what_several_ranks_want() -> None:
    """Compared with a look at each page: which ranks want it, that shares are apart, and that owners are among them."""
    numbers = np.random.default_rng(7)
    page, pages = 4096, 4000
    for _ in range(20):
        wants = np.zeros((5, pages), dtype=bool)
        offers = {}
        for rank in range(5):
            ranges = []
            for _ in range(int(numbers.integers(0, 6))):
                first, last = sorted(numbers.integers(0, pages, 2).tolist())
                ranges.append(("file", first * page, last * page, (last - first) * page))
                wants[rank, first:last] = True
            member = Member(f"host{rank // 2}", rank, 0, 8, True)
            offers.setdefault(WantedRanges.of(ranges), {})[rank] = member
        shares = share_out(offers)
        handed_on = np.zeros(pages, dtype=int)
        for start, stop, owner, group in zip(shares.starts, shares.stops, shares.owners, shares.groups, strict=True):
            own = slice(start // page, stop // page)
            assert 0 < stop - start <= SHARE_BYTES
            assert owner in shares.wanting[group]
            assert (np.isin(np.arange(5), shares.wanting[group]) == wants[:, own].T).all()
            handed_on[own] += 1
        assert handed_on.max(initial=0) <= 1
        # What is not handed on lies in stretches that are short, or that one rank wants.
        left = (wants.sum(0) > 1) & (handed_on == 0)
        changes = np.flatnonzero(np.diff(wants, axis=1).any(0)) + 1
        for stretch in np.split(np.arange(pages), changes):
            assert not left[stretch].all() or len(stretch) < 16


def test_hosts_and_ranks_read_about_as_much() -> None:
    """What all want is levelled out over hosts, and over the ranks of each."""
    everything = WantedRanges.of([("file", 0, 400 * SHARE_BYTES, 400 * SHARE_BYTES)])
    both = WantedRanges.of(
        [("file", 0, 400 * SHARE_BYTES, 400 * SHARE_BYTES), ("other", 0, 100 * SHARE_BYTES, 100 * SHARE_BYTES)]
    )
    hosts = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b"}
    members = {rank: Member(host, rank, 0, 8, True) for rank, host in hosts.items()}
    shares = share_out({everything: {r: members[r] for r in (2, 3, 4)}, both: {r: members[r] for r in (0, 1)}})
    owned = np.bincount(shares.owners, minlength=5)
    assert owned.sum() == 500
    assert abs(owned[:3].sum() - owned[3:].sum()) <= 2
    assert np.ptp(owned[:3]) <= 2
    assert np.ptp(owned[3:]) <= 2


def _load_of_two(rank: int, paths: list[Path]) -> tuple[int, bool]:
    path, added = paths[rank % 2], rank % 2
    reader = FileSystemReader(path, options=LoadOptions(cooperative="on"))
    group, plan, wanted = coordination_group(), reader.plan(), _state(False)
    plan.add(ReadRequest(key, value, (0,), tuple(value.shape)) for key, value in wanted.items())
    offer = reader.offer(plan)
    assert offer is not None
    shares = group.run_merged("plan", lambda: {offer[0]: {rank: offer[1]}}, merged, shares_of, wrap=CheckpointError)
    with reader.handing_on(shares.get((offer[0].source, offer[1].host)), rank, group):
        reader.read(plan)
    same = all(torch.equal(wanted[key], value + added) for key, value in _state(True).items())
    return reader.stats.bytes_shared, same


def test_ranks_that_load_different_checkpoints_share_nothing(tmp_path: Path) -> None:
    """Those of one checkpoint read for each other, though the files of the other have the same names and sizes."""
    paths = [tmp_path / "first", tmp_path / "second"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: nothing is distributed here
        for added, path in enumerate(paths):
            state = {key: value + added for key, value in _state(True).items()}
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    shared, same = zip(*run_ranks(_load_of_two, 4, paths), strict=True)
    assert all(same)
    assert all(nbytes > 30 * _MIB for nbytes in shared)


def test_a_checkpoint_that_was_replaced_is_another_one(tmp_path: Path) -> None:
    """What is offered before and after a save into the same directory has nothing in common."""

    def offered() -> WantedRanges:
        reader = FileSystemReader(tmp_path, options=LoadOptions(cooperative="on"))
        plan = reader.plan()
        plan.add(ReadRequest(key, value, (0,), tuple(value.shape)) for key, value in _state(False).items())
        offer = reader.offer(plan)
        assert offer is not None
        return offer[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_state(True), storage_writer=dcp.FileSystemWriter(tmp_path))
        before, again = offered(), offered()
        dcp.save(_state(True), storage_writer=dcp.FileSystemWriter(tmp_path))
    assert before == again
    assert before != offered()


def test_on_means_two_ranks_even_where_they_cannot_send() -> None:
    """Ranks of a part of the job, whose group is not known, read for each other within their host."""
    wanted = WantedRanges.of([("file", 0, 8 * SHARE_BYTES, 8 * SHARE_BYTES)])
    for crosses, expected in ((True, [("", "here")]), (False, [])):
        members = {rank: Member("here", rank, 0, 8, crosses) for rank in range(2)}
        assert list(shares_of({wanted: members}, one_group=False)) == expected
