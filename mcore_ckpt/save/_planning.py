"""What the ranks of a save agree on before a byte is written: every file, every offset, and that all of it fits.

Layout and plan follow from the structure of the state alone (keys, dtypes, shapes, offsets), and are kept in a
`Structure`. So a further save of the same model is planned by an exchange of a few bytes, in which every rank says that
its structure has stayed, and no plan travels again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.failures import attempt, value_of
from mcore_ckpt.core.ranks import RankGroup
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.layout.buckets import RankLayout, lay_out_rank
from mcore_ckpt.layout.plan_check import global_plan
from mcore_ckpt.layout.plans import GlobalPlan
from mcore_ckpt.save.rank_state import NOTHING, Described, RankState


@dataclass(slots=True)
class Planned:
    """On the coordinator: the checked plan of all ranks, and its encoder once a writer or a commit has made that."""

    plan: GlobalPlan
    encoder: MetadataEncoder | None = None

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
    # Rank, number of ranks and `thread_count` when it was laid out: file names and plans are of those. A restart inside
    # the process may give it another place, and a setting may be changed between two saves.
    laid_out_for: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What one rank is going to write, and on the coordinator what all are; `reused`: it is the plan of the save
    before.
    """

    layout: RankLayout
    planned: Planned | None
    save_id: bytes
    reused: bool

    @property
    def unencoded(self) -> GlobalPlan | None:
        """On the coordinator, what `.metadata` is still to be made from, during the writing."""
        return None if self.planned is None else self.planned.unencoded


def agree(
    structure: Structure,
    state: RankState | BaseException,
    group: RankGroup,
    open_directory: Callable[[], bytes],
    *,
    thread_count: int,
    separation_hint: str | None,
) -> SavePlan:
    """Open the directory and settle what all ranks write: as in the save before, if every rank can, or laid out again.
    What `state` carries as an error is raised on all ranks, as is `PlanError`.
    """
    place = (group.rank, group.size, thread_count)
    layout = structure.layout
    unchanged = (
        layout is not None
        and not isinstance(state, BaseException)
        and structure.laid_out_for == place
        and (layout.separation_hint, layout.specs) == (separation_hint, state.specs)
        and layout.has_room(state.object_keys, state.object_bytes)
    )

    def prepare() -> tuple[bool, bytes]:
        value_of(state)
        return unchanged, open_directory() if group.is_coordinator else b""

    answers = group.run("prepare the save", prepare, wrap=SaveError)
    _, save_id = answers[0]
    if layout is not None and all(same for same, _ in answers):
        return SavePlan(layout, structure.planned, save_id, reused=True)
    structure.layout = structure.planned = None
    structure.layout, structure.planned = _laid_out(value_of(state), group, thread_count, separation_hint)
    structure.laid_out_for = place
    return SavePlan(structure.layout, structure.planned, save_id, reused=False)


def _laid_out(
    state: RankState, group: RankGroup, thread_count: int, separation_hint: str | None
) -> tuple[RankLayout, Planned | None]:
    """Lay out what this rank writes, and let the coordinator check the plans of all ranks."""
    laid_out = attempt(
        partial(
            lay_out_rank,
            state.specs,
            state.object_keys,
            state.object_bytes,
            rank=group.rank,
            thread_count=thread_count,
            separation_hint=separation_hint,
        )
    )

    def encode() -> tuple[bytes, dict[str, tuple[int, ...]]]:
        """This rank's plan, and the shapes of parameters that are stored in another form."""
        own_shapes = {spec.key: spec.original_shape for spec in state.specs if spec.original_shape is not None}
        return value_of(laid_out).plan.encode(), own_shapes

    encoded = group.run_gather("plan the save", encode, wrap=SaveError)
    planned: list[Planned] = []

    def check() -> None:
        planned.append(Planned(global_plan(encoded or ())))

    group.run_on_coordinator("check the plan", check, wrap=SaveError)
    return value_of(laid_out), planned[0] if planned else None
