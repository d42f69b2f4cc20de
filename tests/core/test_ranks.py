"""Coordination: one exchange where possible, every rank's error on every rank, groups that follow the default group."""

from __future__ import annotations

import operator
import os
import platform
import re
import traceback
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.core.errors import CheckpointError, LoadError, MissingKeyError, OptionError, SaveError
from mcore_ckpt.core.ranks import RankGroup, coordination_group, reached_every_rank
from tests.support.gloo_ranks import run_ranks

_BIG = 300_000


class _CountedCollectives:
    """Counts the collectives of torch.distributed that are called inside the block."""

    _NAMES = ("all_reduce", "all_gather", "broadcast", "send", "recv", "irecv", "gather")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in self._NAMES:
            original = getattr(dist, name)

            def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                self.calls.append(_name)
                return _original(*args, **kwargs)

            monkeypatch.setattr(dist, name, counted)


def test_a_world_of_one_needs_no_process_group() -> None:
    group = coordination_group()
    assert (group.rank, group.size, group.is_coordinator) == (0, 1, True)
    assert group.run("think", lambda: 42, wrap=CheckpointError) == [42]
    assert group.run_gather("collect", lambda: "x", wrap=CheckpointError) == ["x"]
    assert group.run_on_coordinator("plan", lambda: {"a": 1}, wrap=CheckpointError) == {"a": 1}
    assert group.run_on_coordinator("distribute", lambda: b"\0" * _BIG, wrap=CheckpointError) == b"\0" * _BIG
    assert group.any(True, wrap=CheckpointError)
    assert not group.any(False, wrap=CheckpointError)


def test_a_world_of_one_keeps_our_errors_and_wraps_those_of_others() -> None:
    group = RankGroup(None)

    def missing() -> None:
        raise MissingKeyError("no such key")

    def full() -> None:
        raise OSError(28, "No space left on device", "/somewhere/file")

    with pytest.raises(MissingKeyError, match=r"^no such key$"):
        group.run("load", missing, wrap=LoadError)
    with pytest.raises(SaveError, match=r"could not write: OSError: .*No space left.*/somewhere/file") as caught:
        group.run("write", full, wrap=SaveError)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == 28


def test_control_c_is_not_turned_into_something_else() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RankGroup(None).run("wait", interrupted, wrap=SaveError)


def _values(rank: int) -> dict[str, Any]:
    group = coordination_group()
    big = bytes([rank]) * (_BIG if rank == 1 else 10)
    return {
        "small": group.run("a", lambda: rank * 10, wrap=CheckpointError),
        "big": [len(part) for part in group.run("b", lambda: big, wrap=CheckpointError)] == [10, _BIG, 10],
        "gathered": None
        if (parts := group.run_gather("collect", lambda: big, wrap=CheckpointError)) is None
        else [(len(p), p[:1]) for p in parts],
        "one": group.run_on_coordinator("plan", lambda: ["plan", rank], wrap=CheckpointError),
        "one_big": group.run_on_coordinator("distribute", lambda: bytes([rank]) * _BIG, wrap=CheckpointError)
        == b"\0" * _BIG,
        "any": (group.any(rank == 2, wrap=CheckpointError), group.any(False, wrap=CheckpointError)),
        "maximum": group.maximum([rank, -rank], wrap=CheckpointError),
        "merged": group.run_merged("add", lambda: [rank], operator.add, sorted, wrap=CheckpointError),
        "unequal_any_size": [len(p) for p in group.all_gather(b"x" * (1000 + rank * 10), wrap=CheckpointError)],
    }


def test_values_travel_whole_whatever_their_size() -> None:
    results = run_ranks(_values, 3)
    for rank, result in enumerate(results):
        assert result["small"] == [0, 10, 20]
        assert result["big"]
        assert result["one"] == ["plan", 0]
        assert result["one_big"]
        assert result["any"] == (True, False)
        assert result["maximum"] == [2, 0]
        assert result["merged"] == [0, 1, 2]
        assert result["unequal_any_size"] == [1000, 1010, 1020]
        expected = [(10, b"\0"), (_BIG, b"\1"), (10, b"\2")] if rank == 0 else None
        assert result["gathered"] == expected


def _collectives_of_success(rank: int) -> dict[str, list[str]]:
    group = coordination_group()
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = _CountedCollectives(monkeypatch)
        calls = {}
        for name, step in {
            "run": lambda: group.run("a", lambda: None, wrap=CheckpointError),
            "merged": lambda: group.run_merged("a", lambda: 1, operator.add, str, wrap=CheckpointError),
            "gather": lambda: group.run_gather("collect", lambda: rank, wrap=CheckpointError),
            "broadcast": lambda: group.run_on_coordinator("a", lambda: 1, wrap=CheckpointError),
            "any": lambda: group.any(False, wrap=CheckpointError),
        }.items():
            counted.calls.clear()
            step()
            calls[name] = list(counted.calls)
    return calls


def test_success_costs_a_message_up_the_tree_and_a_broadcast() -> None:
    # Ranks 1, 2 and 4 tell the coordinator; rank 2 also for rank 3.
    ups = [["recv", "recv", "recv"], ["send"], ["recv", "send"], ["send"], ["send"]]
    for up, calls in zip(ups, run_ranks(_collectives_of_success, 5), strict=True):
        exchange = [*up, "broadcast"]
        assert calls == {
            "run": exchange,
            "merged": exchange,
            "gather": exchange,
            "broadcast": ["broadcast"],
            "any": exchange,
        }


def _fails_on(rank: int, failing: list[int], kind: str, method: str, huge: bool) -> tuple[str, str, bool, bool]:
    group = coordination_group()

    def step() -> str:
        if rank in failing:
            if kind == "ours":
                raise MissingKeyError("key 'w' is missing" + "!" * (5000 if huge else 0))
            if kind == "system":
                os.stat("/does/not/exist")
            if kind == "unpicklable":
                return (lambda: None) and step  # type: ignore[return-value]
        return "fine"

    call = partial(_merged, group) if method == "run_merged" else getattr(group, method)
    try:
        call("read the layer", step, wrap=LoadError)
    except CheckpointError as error:
        own_cause = error.__cause__ is not None and "step" in str(traceback.extract_tb(error.__cause__.__traceback__))
        # The ranks must still be in step after the failure.
        assert group.all_gather(rank, wrap=CheckpointError) == list(range(group.size))
        return type(error).__name__, str(error), own_cause, reached_every_rank(error)
    raise AssertionError("nothing was raised")


def _merged(group: RankGroup, what: str, fn: Any, *, wrap: Any) -> Any:
    return group.run_merged(what, fn, operator.add, str, wrap=wrap)


@pytest.mark.parametrize("method", ["run", "run_gather", "run_merged"])
@pytest.mark.parametrize(("kind", "class_name"), [("ours", "MissingKeyError"), ("system", "LoadError")])
def test_the_first_cause_is_raised_on_every_rank(method: str, kind: str, class_name: str) -> None:
    outcomes = run_ranks(_fails_on, 3, [1, 2], kind, method, False)
    assert {name for name, _, _, _ in outcomes} == {class_name}
    messages = {message for _, message, _, _ in outcomes}
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith("could not read the layer: rank 1 of 3 (2 ranks failed: 1, 2): ")
    assert "in step" in message, "the traceback of the failing rank is part of the message"
    assert ("key 'w' is missing" if kind == "ours" else "/does/not/exist") in message
    assert [own for _, _, own, _ in outcomes] == [False, True, True]
    assert all(reached for *_, reached in outcomes)


@pytest.mark.parametrize("failing", [[1], [0, 1]])
@pytest.mark.parametrize("method", ["run", "run_gather"])
def test_a_failure_with_a_long_message(method: str, failing: list[int]) -> None:
    for name, message, _, _ in run_ranks(_fails_on, 2, failing, "ours", method, True):
        assert name == "MissingKeyError"
        assert "!" * 5000 in message


def test_a_value_that_does_not_pickle() -> None:
    for name, message, _, _ in run_ranks(_fails_on, 2, [1], "unpicklable", "run", False):
        assert name == "LoadError"
        assert "rank 1 of 2" in message


def test_a_failure_of_the_coordinator_reaches_all() -> None:
    for huge in (False, True):
        outcomes = run_ranks(_fails_on, 3, [0, 2], "ours", "run_on_coordinator", huge)
        assert {name for name, *_ in outcomes} == {"MissingKeyError"}
        assert all("rank 0 of 3: key 'w'" in message for _, message, _, _ in outcomes)


def _nested(rank: int) -> str:
    group = coordination_group()

    def inner() -> None:
        if rank == 1:
            raise ValueError("once")

    with pytest.raises(SaveError) as caught:
        group.run("outer", lambda: group.run("inner", inner, wrap=SaveError), wrap=SaveError)
    return str(caught.value)


def test_an_error_that_all_have_is_not_wrapped_again() -> None:
    messages = run_ranks(_nested, 2)
    assert messages[0] == messages[1]
    assert messages[0].count("could not") == 1


def _dies(rank: int) -> str:
    group = coordination_group()
    if rank == 1:
        os._exit(7)
    with pytest.raises(SaveError) as caught:
        group.run("agree", lambda: None, wrap=SaveError)
    return str(caught.value)


def test_a_rank_that_is_gone_is_reported_at_once() -> None:
    from tests.support.gloo_ranks import rank_outcomes

    alive, dead = rank_outcomes(_dies, 2, grace_s=20)
    assert dead.exit_code == 7
    assert alive.ok, alive.error_text
    assert "could not agree: rank 0 of 2 has lost contact" in alive.value
    assert re.search(rf"rank 1 \(process \d+ on host {re.escape(platform.node())}\) ended", alive.value)
    assert alive.seconds < 15


def _waits_for_one_that_is_elsewhere(rank: int) -> str:
    group = coordination_group(dist.new_group(timeout=timedelta(seconds=2)))
    message = ""
    if rank == 0:
        with pytest.raises(SaveError) as caught:
            group.run("agree", lambda: None, wrap=SaveError)
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_rank_that_does_not_come_is_told_from_one_that_is_gone() -> None:
    message, _ = run_ranks(_waits_for_one_that_is_elsewhere, 2)
    assert "the processes of all ranks exist: one hangs, or is in another call" in message
    assert "nothing has come from rank 1" in message


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


def _beside_nccl(rank: int, world_size: int, directory: str) -> tuple[list[int], list[int], int]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        counting = _Counting(monkeypatch)
        first = coordination_group()
        assert coordination_group().all_gather(rank, wrap=CheckpointError) == first.all_gather(
            rank, wrap=CheckpointError
        )
        after_two_calls = counting.made
        store = dist.FileStore(f"{directory}/store", world_size)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        gathered = coordination_group().all_gather(rank, wrap=CheckpointError)
        assert coordination_group().all_gather(rank, wrap=CheckpointError) == gathered
        return [after_two_calls, counting.made], gathered, first.size


def test_groups_are_made_once_and_again_after_a_restart(tmp_path: Any) -> None:
    for made, gathered, size in run_ranks(_beside_nccl, 2, 2, str(tmp_path)):
        assert made == [1, 2]
        assert gathered == [0, 1]
        assert size == 2


def _subset(rank: int) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        subset = dist.new_group([1, 2])
        _Counting(monkeypatch)
        if rank == 0:
            # Rank 0 takes no part: had making the group needed it, the others would wait for ever.
            with pytest.raises(OptionError, match="rank 0 is not in the process group"):
                coordination_group(subset)
            return None
        group = coordination_group(subset)
        gathered = group.run_gather("collect", lambda: rank, wrap=CheckpointError)
        return (
            group.rank,
            group.size,
            gathered,
            group.run_on_coordinator("distribute", lambda: rank, wrap=CheckpointError),
            group.run_gather("collect", lambda: bytes(_BIG), wrap=CheckpointError) is not None,
        )


def test_a_subset_of_the_ranks_coordinates_alone() -> None:
    assert run_ranks(_subset, 3, deadline_s=60) == [None, (0, 2, [1, 2], 1, True), (1, 2, None, 1, False)]


def _with_default_device(rank: int) -> dict[str, Any]:
    with torch.device("meta"):
        return _values(rank)


def test_nothing_is_put_on_the_default_device() -> None:
    # A trainer may have made its accelerator the default device; "meta" tensors would fail in every exchange.
    assert [result["small"] for result in run_ranks(_with_default_device, 3)] == [[0, 10, 20]] * 3
