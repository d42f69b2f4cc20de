"""Coordination: one exchange where possible, every rank's error on every rank, groups that follow the default group."""

import operator
import os
import re
import signal
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.core.errors import CheckpointError, LoadError, MissingKeyError, OptionError, SaveError
from mcore_ckpt.core.ranks import RankGroup, coordination_group, reached_every_rank
from tests.support.gloo_ranks import on_ranks, rank_outcomes

_BIG = 300_000


def test_a_world_of_one_keeps_our_errors_and_wraps_those_of_others() -> None:
    def fail(error: BaseException) -> None:
        raise error

    full = OSError(28, "No space left on device", "/somewhere/file")
    for raised, expected in (
        (MissingKeyError("no such key"), (MissingKeyError, r"^no such key$")),
        (full, (SaveError, r"could not write: OSError: .*No space left.*/somewhere/file")),
        (KeyboardInterrupt("now"), (KeyboardInterrupt, "now")),
    ):
        with pytest.raises(expected[0], match=expected[1]):
            RankGroup(None).run("write", lambda raised=raised: fail(raised), wrap=SaveError)


@on_ranks(3, preload=())
def test_values_travel_whole_whatever_their_size(rank: int) -> None:
    group = coordination_group()
    big = bytes([rank]) * (_BIG if rank == 1 else 10)
    parts = group.gather("collect", lambda: big, wrap=CheckpointError)
    assert {
        "small": group.run("a", lambda: rank * 10, wrap=CheckpointError),
        "big": [len(part) for part in group.run("b", lambda: big, wrap=CheckpointError)],
        "gathered": parts and [(len(part), part[:1]) for part in parts],
        "one": group.run_on_coordinator("plan", lambda: ["plan", rank], wrap=CheckpointError),
        "one_big": len(group.run_on_coordinator("distribute", lambda: bytes(_BIG + rank), wrap=CheckpointError)),
        "any": (group.any("test", rank == 2, wrap=CheckpointError), group.any("test", False, wrap=CheckpointError)),
        "maximum": group.maximum("test", [rank, -rank], wrap=CheckpointError),
        "merged": group.run_merged("add", lambda: [rank], operator.add, sorted, wrap=CheckpointError),
    } == {
        "small": [0, 10, 20],
        "big": [10, _BIG, 10],
        "gathered": None if rank else [(10, b"\0"), (_BIG, b"\1"), (10, b"\2")],
        "one": ["plan", 0],
        "one_big": _BIG,
        "any": (True, False),
        "maximum": [2, 0],
        "merged": [0, 1, 2],
    }


@on_ranks(7, preload=())
def test_each_rank_is_given_its_own_value_down_the_tree(rank: int) -> None:
    for size in range(1, 8):
        group = dist.new_group(list(range(size)))
        if rank < size:
            own = coordination_group(group)
            given = own.scatter(
                "share", lambda n=size: [bytes([r]) * (r * _BIG // n + 1) for r in range(n)], wrap=SaveError
            )
            assert (given[0], len(given)) == (rank, rank * _BIG // size + 1)


def _fails_on(rank: int, failing: list[int], kind: str, method: str, raised: type[CheckpointError]) -> None:
    group = coordination_group()

    def step() -> str:
        if rank in failing:
            if kind == "ours":
                raise MissingKeyError("key 'w' is missing" + "!" * 5000)
            if kind == "system":
                os.stat("/does/not/exist")
        return "fine"

    call = partial(_merged, group) if method == "run_merged" else getattr(group, method)
    with pytest.raises(raised) as caught:
        call("read the layer", step, wrap=LoadError)
    error, message = caught.value, str(caught.value)
    # The ranks must still be in step after the failure.
    assert group.run("test", lambda: message, wrap=CheckpointError) == [message] * group.size
    assert type(error) is raised
    assert message.startswith("could not read the layer: rank 1 of 3 (2 ranks failed: 1, 2): ")
    assert "in step" in message, "the traceback of the failing rank is part of the message"
    assert ("key 'w' is missing" + "!" * 5000 if kind == "ours" else "/does/not/exist") in message
    own_cause = error.__cause__ is not None and "step" in str(traceback.extract_tb(error.__cause__.__traceback__))
    assert own_cause == (rank in failing)
    assert reached_every_rank(error)


def _merged(group: RankGroup, what: str, fn: Any, *, wrap: Any) -> Any:
    return group.run_merged(what, fn, operator.add, str, wrap=wrap)


@on_ranks(3, preload=())
def test_the_first_cause_is_raised_on_every_rank(rank: int) -> None:
    _fails_on(rank, [1, 2], "ours", "run", MissingKeyError)
    _fails_on(rank, [1, 2], "system", "gather", LoadError)
    _fails_on(rank, [1, 2], "ours", "run_merged", MissingKeyError)


def _dies(rank: int) -> str:
    group = coordination_group()
    if rank == 1:
        os._exit(7)
    with pytest.raises(SaveError) as caught:
        group.run("agree", lambda: None, wrap=SaveError)
    return str(caught.value)


def test_a_rank_that_is_gone_is_reported_at_once() -> None:
    alive, dead = rank_outcomes(_dies, 2, grace_s=20)
    assert dead.exit_code == 7
    assert alive.ok, alive.error_text
    assert "could not agree: rank 0 of 2 has lost contact" in alive.value
    assert "rank 1 has ended, hangs, or is in another call" in alive.value
    assert alive.seconds < 15


def _come_apart(rank: int, odd: int, way: str, said: str) -> None:
    """One rank comes to another exchange than the others, or to the same with another setting."""
    group = coordination_group(compare_replicas="warn" if rank == odd and way == "setting" else "off")
    steps: dict[str, Any] = {
        "exchange": partial(group.maximum, "test", [1, 2]),
        "gathering": partial(group.gather_parts, "gather", lambda: [bytes(_BIG)]),
        "setting": partial(group.run_merged, "add", lambda: {rank}, operator.or_, sorted),
    }
    step = steps[way if rank == odd else "setting"]
    kind = OptionError if way == "setting" else SaveError
    with pytest.raises(kind, match=said) as caught:
        step(wrap=SaveError)
    assert reached_every_rank(caught.value)
    # The ranks must still be in step.
    assert coordination_group().run("test", lambda: rank, wrap=CheckpointError) == list(range(group.size))


@on_ranks(4, preload=())
def test_all_ranks_raise_where_one_comes_to_another_exchange(rank: int) -> None:
    _come_apart(rank, 0, "exchange", r"(?s)(?=.*\(test\)).*\(add\)")
    _come_apart(rank, 1, "setting", r"(?s)(?=.*MCORE_CKPT_COMPARE_REPLICAS).*alike on all hosts")
    _come_apart(rank, 2, "gathering", r"(?s)(?=.*\(gather\)).*\(add\)")


class _Counting:
    """Stands for a default group that gloo does not serve: reports another backend configuration for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        config = dist.get_backend_config
        new_group = dist.new_group
        own: set[int] = set()

        def no_gloo(group: Any = None) -> str:
            return str(config(group)) if id(group) in own else "cuda:nccl"

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.made += 1
            group = new_group(*args, **kwargs)
            own.add(id(group))
            return group

        monkeypatch.setattr(dist, "get_backend_config", no_gloo)
        monkeypatch.setattr(dist, "new_group", counted)


@on_ranks(2, preload=())
def test_groups_are_made_once_and_again_after_a_restart(rank: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        counting = _Counting(monkeypatch)
        first = coordination_group()
        again = coordination_group().run("test", lambda: rank, wrap=CheckpointError)
        assert again == first.run("test", lambda: rank, wrap=CheckpointError)
        assert (counting.made, first.size) == (1, 2)
        store = dist.FileStore(f"{tmp_path}/store", 2)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        for _ in range(2):
            assert coordination_group().run("test", lambda: rank, wrap=CheckpointError) == [0, 1]
        assert counting.made == 2


@on_ranks(3, preload=(), deadline_s=60)
def test_a_subset_of_the_ranks_coordinates_alone(rank: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        subset = dist.new_group([1, 2])
        _Counting(monkeypatch)
        if rank == 0:
            # Rank 0 takes no part: had making the group needed it, the others would wait for ever.
            with pytest.raises(OptionError, match="rank 0 is not in the process group"):
                coordination_group(subset)
            return
        group = coordination_group(subset)
        assert (group.rank, group.size) == (rank - 1, 2)
        gathered = group.gather("collect", lambda: rank, wrap=CheckpointError)
        assert gathered == ([1, 2] if rank == 1 else None)
        assert group.run_on_coordinator("distribute", lambda: rank, wrap=CheckpointError) == 1
        large = group.gather("collect", lambda: bytes(_BIG), wrap=CheckpointError)
        assert (large is not None) == (rank == 1)


_PATIENCE_S = 3.0


def _waited_for(rank: int, who: int, exchange: str) -> None:
    """One rank does not come to an exchange, and does not end."""
    group = coordination_group(dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENCE_S)))
    group.any("test", False, wrap=SaveError)
    if rank == who:
        os.kill(os.getpid(), signal.SIGSTOP)
    if exchange == "parts":
        group.gather_parts("meet", lambda: [bytes([rank]) * 5000], wrap=SaveError)
    group.run_on_coordinator("meet", lambda: None, wrap=SaveError)
    group.run("meet", lambda: None, wrap=SaveError)


@pytest.mark.parametrize(
    ("who", "exchange"),
    [
        pytest.param(0, "all", marks=pytest.mark.long),
        pytest.param(2, "parts", marks=pytest.mark.long),
        (1, "all"),
    ],
)
def test_a_rank_that_is_waited_for_in_vain_is_named_by_all_others(who: int, exchange: str) -> None:
    """Also by those that do not wait for it themselves, but for another that does."""
    outcomes = rank_outcomes(_waited_for, 4, who, exchange, deadline_s=90, grace_s=5)
    for outcome in outcomes:
        if outcome.rank != who:
            assert isinstance(outcome.error, SaveError), outcome.error_text
            named = rf"lost contact with another rank: rank {who}(, for which rank \d has waited,)? has ended, hangs"
            assert re.search(named, str(outcome.error)), outcome.error
