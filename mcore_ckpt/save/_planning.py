"""What the ranks of a save agree on before a byte is written: every file, every offset, and that all of it fits.

Layout and plan follow from the structure of the state alone (keys, dtypes, shapes, offsets), and are kept in a
`Structure`. A further save of the same model is planned by one exchange of a few bytes. Every rank says which plan it
can use again, by the id of the save that made it. If all name the same one, it is used. Otherwise all ranks plan again,
so no rank waits in another exchange than the others. What has moved from one rank to another is planned again, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from mcore_ckpt.core.errors import OptionError, SaveError
from mcore_ckpt.core.failures import attempt, value_of
from mcore_ckpt.core.ranks import RankGroup
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.layout.accesses import Accesses
from mcore_ckpt.layout.buckets import RankLayout, lay_out_rank
from mcore_ckpt.layout.plan_check import check_accesses, global_plan
from mcore_ckpt.layout.plans import GlobalPlan
from mcore_ckpt.layout.saved_layout import LoadedCheckpoint, SavedLayout
from mcore_ckpt.save._state_history import StateHistory
from mcore_ckpt.save.rank_state import NOTHING, Described, RankState

_SHOWN = 5


@dataclass(slots=True)
class Planned:
    """On the coordinator: the checked plan of all ranks, and its encoder once a writer or a commit has made that."""

    plan: GlobalPlan
    encoder: MetadataEncoder | None = None
    held: Sequence[bytes] = ()  # by rank, what it holds of what is to be compared (`held_slices`)
    history: StateHistory = field(default_factory=StateHistory)

    @property
    def unencoded(self) -> GlobalPlan | None:
        """What a writer has to make the encoder from; None if there is one."""
        return self.plan if self.encoder is None else None


@dataclass(slots=True)
class Structure:
    """What one strategy keeps between its saves."""

    layout: RankLayout | None = None  # this rank's files
    planned: Planned | None = None  # on the coordinator, every rank's plan
    # The shards of the last save. To compare takes a fraction of the time of describing them.
    described: Described = NOTHING
    # Rank, number of ranks, `thread_count` and `fingerprints` when it was laid out: files and plans are of those. A
    # restart inside the process may give it another place, and a setting may be changed between two saves.
    laid_out_for: tuple[int, int, int, bool] | None = None
    laid_out_in: bytes = b""
    accesses: Accesses | None = None  # what was checked with it, if that was asked for


class Validation(NamedTuple):
    """What a save has to check besides the plan; the same on all ranks. (Megatron's validation of access integrity.)"""

    accesses: Accesses  # all that this rank holds, main replicas or not
    common_digest: bytes | None = None  # of the state that all ranks should have alike
    compare_common: Callable[[RankGroup], None] | None = None  # called on all ranks where the digests are not the same
    # The main replicas are what ranks save, though other ranks may save them than hold them.
    mains_are_saved: bool = False


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What one rank is going to write, and on the coordinator what all are; `reused`: it is the plan of the save
    before.
    """

    layout: RankLayout
    planned: Planned | None
    save_id: bytes
    reused: bool
    resumed: bool = False  # it is the plan of the checkpoint that was loaded

    @property
    def unencoded(self) -> GlobalPlan | None:
        """On the coordinator, what `.metadata` is still to be made from, during the writing."""
        return None if self.planned is None else self.planned.unencoded


def agree(
    structure: Structure,
    state: RankState | BaseException,
    group: RankGroup,
    open_directory: Callable[[], bytes],
    is_left_out: Callable[[RankState], bool],
    *,
    name: str,
    thread_count: int,
    separation_hint: str | None,
    drain_to: str | None,
    fingerprints: bool,
    loaded: LoadedCheckpoint | None = None,
    validation: Validation | None = None,
    held: Callable[[], bytes] | None = None,
) -> tuple[SavePlan, RankState] | None:
    """Open the directory and settle what all ranks write: as in the save before, if every rank can, or laid out again.
    None, and nothing is touched, if a rank wants the save left out. What `state` carries as an error is raised on all
    ranks, as is `PlanError`; `SaveError` unless all save to a directory of this name; and `OptionError` unless all have
    the same second tier. `loaded`: what this job has loaded. `held`: what this rank holds, if replicas are to be
    compared.
    """
    place = (group.rank, group.size, thread_count, fingerprints)
    layout = structure.layout
    unchanged = (
        layout is not None
        and not isinstance(state, BaseException)
        and structure.laid_out_for == place
        and (layout.separation_hint, layout.specs) == (separation_hint, state.specs)
        and layout.has_room(state.object_keys, state.object_bytes)
        and (validation is None or validation.accesses == structure.accesses)
    )
    lay_out = partial(_lay_out, rank=group.rank, hint=separation_hint, files=thread_count, fingerprints=fingerprints)
    laid_out = None if unchanged else attempt(partial(lay_out, state))
    if structure.laid_out_in:
        loaded = None  # of an older state than that of the save before
    saved = _same_as_loaded(loaded, laid_out, group)
    resumed: list[Planned] = []

    def prepare() -> _Prepared:
        plan = structure.laid_out_in if unchanged else b"" if saved is None else saved.plan_id
        common = None if validation is None else validation.common_digest
        left_out = is_left_out(value_of(state))
        return _Prepared(plan, left_out, frozenset([drain_to]), frozenset([common]), frozenset([name]))

    def resume(plan: bytes) -> bytes:
        if saved is not None and plan:
            resumed.append(Planned(replace(saved.plan(), fingerprints=fingerprints)))
        return plan

    def open_unless_left_out(prepared: _Prepared) -> tuple[bytes, bytes, bool] | None:
        if len(prepared.names) > 1:
            # With a second tier each of them would pass for a node's own part of one checkpoint.
            raise SaveError(
                f"the ranks save to different checkpoints, {', '.join(sorted(prepared.names)[:_SHOWN])}: they are at "
                "different iterations, or were given different directories"
            )
        if len(prepared.second_tiers) > 1:
            raise OptionError(
                f"drain_to differs between the ranks: {sorted(map(str, prepared.second_tiers))}; set "
                "MCORE_CKPT_DRAIN_TO alike on all hosts, or nowhere"
            )
        if None in prepared.common and len(prepared.common) > 1:
            raise OptionError(
                "the access integrity is to be validated on some ranks of the save, and not on others: pass "
                "validate_access_integrity alike on all"
            )
        if prepared.left_out:
            return None
        resume(prepared.plan)
        return prepared.plan, open_directory(), len(prepared.common) > 1

    agreed = group.run_merged("prepare the save", prepare, _both, open_unless_left_out, wrap=SaveError)
    if agreed is None:
        return None
    plan, save_id, common_differs = agreed
    if common_differs and validation is not None and validation.compare_common is not None:
        validation.compare_common(group)
    if plan and unchanged:
        assert layout is not None
        return SavePlan(layout, structure.planned, save_id, reused=True), value_of(state)
    structure.layout = structure.planned = structure.accesses = None
    accesses = None if validation is None else validation.accesses
    laid_out = attempt(partial(lay_out, state)) if laid_out is None else laid_out
    told = partial(_told, validation, state, held)
    if plan:
        planned = resumed[0] if resumed else None
        if accesses is not None:
            _check_accesses(told, planned, group)
    else:
        planned = _plan_together(value_of(state), laid_out, told, group, fingerprints=fingerprints)
    if planned is not None and loaded is not None:
        planned.history.expect(loaded.name, loaded.index.fingerprints)
    structure.layout, structure.planned, structure.accesses = value_of(laid_out), planned, accesses
    # Not the checkpoint that was resumed from: what has been checked besides the plan is of this save.
    structure.laid_out_for, structure.laid_out_in = place, save_id
    return SavePlan(structure.layout, structure.planned, save_id, reused=False, resumed=bool(plan)), value_of(state)


def _same_as_loaded(
    loaded: LoadedCheckpoint | None, laid_out: RankLayout | BaseException | None, group: RankGroup
) -> SavedLayout | None:
    """The layout of the loaded checkpoint, if this rank has just laid out the same, and no rank of it is missing."""
    if loaded is None or not isinstance(laid_out, RankLayout):
        return None
    saved = SavedLayout.of(loaded.index)
    if saved is None or saved.ranks > group.size or not saved.is_laid_out(laid_out.plan, group.rank):
        return None
    return saved


class _Prepared(NamedTuple):
    """What ranks say ahead of a save: the plan that they can use again, empty if there is none or there are several;
    whether the save is to be left out; where it is to be copied to; digests of the common state; the name of its
    directory.
    """

    plan: bytes
    left_out: bool
    second_tiers: frozenset[str | None]
    common: frozenset[bytes | None]
    names: frozenset[str]


def _both(first: _Prepared, second: _Prepared) -> _Prepared:
    return _Prepared(
        _same_plan(first.plan, second.plan),
        first.left_out or second.left_out,
        first.second_tiers | second.second_tiers,
        first.common | second.common,
        first.names | second.names,
    )


def _same_plan(first: bytes, second: bytes) -> bytes:
    return first if first == second else b""


def _lay_out(
    state: RankState | BaseException, *, rank: int, hint: str | None, files: int, fingerprints: bool
) -> RankLayout:
    own = value_of(state)
    return lay_out_rank(
        own.specs,
        own.object_keys,
        own.object_bytes,
        rank=rank,
        thread_count=files,
        separation_hint=hint,
        fingerprints=fingerprints,
    )


def _told(
    validation: Validation | None,
    state: RankState | BaseException,
    held: Callable[[], bytes] | None,
) -> list[bytes]:
    """What this rank tells besides its plan: which slices it holds, and what `Accesses.told` says; where that is not
    asked for, nothing.
    """
    slices = b"" if held is None else held()
    if validation is None:
        return [slices]
    written = value_of(state).specs
    return [slices, *validation.accesses.told(written, mains_are_written=validation.mains_are_saved)]


def _check_accesses(told: Callable[[], list[bytes]], planned: Planned | None, group: RankGroup) -> None:
    """Check what ranks hold besides what they write, of which the plan is known to be right."""
    what = "check what ranks hold"
    gathered = group.run_gather_parts(what, told, wrap=SaveError) or []

    def check() -> None:
        assert planned is not None
        planned.held = [of_rank[0] for of_rank in gathered]
        check_accesses([of_rank[1:] for of_rank in gathered], planned.plan)

    group.run_on_coordinator(what, check, wrap=SaveError)


def _plan_together(
    state: RankState,
    laid_out: RankLayout | BaseException,
    told: Callable[[], list[bytes]],
    group: RankGroup,
    *,
    fingerprints: bool,
) -> Planned | None:
    """Let the coordinator check the plans of all ranks; returns them there."""

    def encode() -> list[bytes]:
        """This rank's plan, and the shapes of parameters that are stored in another form; what it holds, to compare it;
        then what else it holds, to check it.
        """
        own_shapes = {spec.key: spec.original_shape for spec in state.specs if spec.original_shape is not None}
        return [pickle.dumps((value_of(laid_out).plan.encode(), own_shapes)), *told()]

    gathered = group.run_gather_parts("plan the save", encode, wrap=SaveError) or []
    planned: list[Planned] = []

    def check() -> None:
        plans = [pickle.loads(of_rank[0]) for of_rank in gathered]
        others = [of_rank[2:] for of_rank in gathered]
        plan = global_plan(plans, others if all(others) else ())
        planned.append(Planned(replace(plan, fingerprints=fingerprints), held=[of_rank[1] for of_rank in gathered]))

    group.run_on_coordinator("check the plan", check, wrap=SaveError)
    return planned[0] if planned else None
