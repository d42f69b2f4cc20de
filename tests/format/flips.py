"""Damage of every kind to checkpoints of every kind: is it noticed, and what would a load have given?

    python -m tests.format.flips --flips 10000 --seed 1        # minutes; `make test-flips`

A *flip* is one changed bit of one file. `verify` has to notice it, or it has to be harmless; a load has to give what
was stored or to refuse; whatever is raised has to be an exception of this package; nothing hangs, dies or takes memory
without end. Beside flips: files cut at every boundary of a record, every pair of files swapped, and every file taken
from the save before.

Each trial runs in a forked child with a deadline and a limit of its memory. What comes out is counted by the kind of
the checkpoint, the kind of the file and the outcome:

    seen        verify notices it, loads give what was stored or refuse
    harmless    verify does not notice it, and every load gives what was stored
    missed      verify does not notice it, and some load refuses
    part        verify notices it; a load of a part of a record, for which no checksum is stored, gives other data
    WRONG       some other load gives other data than was stored
    FOREIGN     a third-party exception came out
    DIED        the process ended by a signal, at its deadline, or out of memory

What cannot be expected of checkpoints without a seal (those of others, and of this package before it wrote seals) is
that files which were swapped, or are of another save, are told from those that belong there, that parts of records are
checked, and that a key is known to have had another name; all else must not happen to any.
"""

import argparse
import hashlib
import itertools
import os
import random
import re
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from mcore_ckpt.core.errors import CheckpointError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, read_index
from mcore_ckpt.load.requests import ReadRequest, stored_dtype
from mcore_ckpt.megatron.serialization import load_common
from mcore_ckpt.models.conversions import import_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.processes import in_child

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_KINDS = ("megatron-0.16.1", "megatron-0.19.2", "dcp-2.13.0", "ours-0.1.0")
OUTCOMES = ("seen", "harmless", "missed", "part", "WRONG", "FOREIGN", "DIED")
DEADLINE_S = 60.0
MEMORY_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class Subject:
    """A checkpoint to damage, by who wrote it; `before`: another save of the same structure and other values."""

    kind: str
    directory: Path
    before: Path | None = None

    @property
    def sealed(self) -> bool:
        return read_index(self.directory).manifest is not None


@dataclass
class Tally:
    """What came of the trials: by kind of checkpoint, kind of file and outcome; and what must not be."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    trials: int = 0

    def add(self, subject: Subject, file: str, outcome: str, what: str) -> None:
        """One trial has ended."""
        name = outcome.split(":", 1)[0]
        self.trials += 1
        self.counts[subject.kind, file, name] += 1
        if name in ("seen", "harmless"):
            return
        bound = subject.sealed or not file.endswith((", swapped", ", stale"))
        if name in ("FOREIGN", "DIED") or subject.sealed or (name == "WRONG" and bound):
            self.unexpected.append(f"{subject.kind}, {what}: {outcome}")

    def of(self, *outcomes: str) -> int:
        """How many trials had one of these outcomes."""
        return sum(count for (_, _, outcome), count in self.counts.items() if outcome in outcomes)

    def summary(self) -> str:
        """Rows of writer and kind of damage, columns of outcomes: for people to read."""
        counts: Counter[tuple[str, str, str]] = Counter()
        for (subject, file, outcome), count in self.counts.items():
            by = "this package" if subject.startswith(("ours", "safetensors")) else "Megatron-Core, DCP"
            counts[by, file.rpartition(", ")[2], outcome] += count
        seen = [outcome for outcome in OUTCOMES if outcome not in ("FOREIGN", "DIED") or self.of(outcome)]
        lines = ["|written by|damage|trials|" + "|".join(seen) + "|", "|---|---|---|" + "---|" * len(seen)]
        for by, damage in sorted({(by, damage) for by, damage, _ in counts}):
            cells = [counts[by, damage, outcome] for outcome in seen]
            lines.append(f"|{by}|{damage}|{sum(cells)}|" + "|".join(str(n or "") for n in cells) + "|")
        lines.append(f"|all||{self.trials}|" + "|".join(str(self.of(outcome)) for outcome in seen) + "|")
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- checkpoints


def state(seed: int) -> dict[str, Any]:
    """Tensors of several dtypes and sizes, and an object; another seed gives other values of the same form."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "decoder.weight": torch.randn(64, 48, generator=generator),
        "decoder.bias": torch.randn(48, generator=generator).bfloat16(),
        "steps": torch.randint(0, 1000, (5, 3), generator=generator),
        "scalar": torch.randn((), generator=generator),
        "large": torch.randn(300, 500, generator=generator),
        "rng": {"seed": seed, "name": "generator"},
    }


def make_subjects(scratch: Path) -> list[Subject]:
    """Checkpoints of all kinds: those that are kept with the tests, and fresh ones with a save before them."""
    found = []
    for name in GOLDEN_KINDS:
        directory = scratch / name
        shutil.copytree(GOLDEN / name, directory)
        for other in ("expected.json", "writer.txt"):  # about the checkpoint, not of it
            (directory / other).unlink(missing_ok=True)
        found.append(Subject(name, directory))
    fresh: dict[str, Callable[[Path, int], object]] = {
        "ours": lambda path, seed: dcp.save(
            state(seed), storage_writer=FileSystemWriterAsync(path, thread_count=2), no_dist=True
        ),
        "stock dcp": lambda path, seed: dcp.save(
            state(seed), storage_writer=dcp.FileSystemWriter(path, thread_count=2), no_dist=True
        ),
        "safetensors, imported": _import_safetensors,
    }
    for kind, write in fresh.items():
        for when, seed in (("before", 1), ("now", 2)):
            write(scratch / kind / when, seed)
        found.append(Subject(kind, scratch / kind / "now", scratch / kind / "before"))
    return found


def _import_safetensors(target: Path, seed: int) -> None:
    source = target.with_name(f"{target.name}.safetensors")
    target.parent.mkdir(exist_ok=True)
    save_file({key: value for key, value in state(seed).items() if isinstance(value, torch.Tensor)}, source)
    import_checkpoint(source, target, tp=2, allow_whole=True)
    source.unlink()


# -------------------------------------------------------------------------------------------------------------- trials


@dataclass(frozen=True)
class Truth:
    """What a checkpoint holds, as loads gave it before anything was damaged: digests by what was asked for."""

    index: CheckpointIndex
    digests: dict[str, str]
    megatron: bool


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _loads(index: CheckpointIndex, directory: Path, megatron: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """Every way of asking for what the checkpoint holds, by what is asked for; each on its own, with a new reader."""
    options = LoadOptions()

    def loaded(fqn: str, sizes: tuple[int, ...]) -> str:
        entry = index.tensors[fqn]
        offsets = tuple(size - part for size, part in zip(entry.shape, sizes, strict=True))
        tensor = torch.empty(sizes, dtype=stored_dtype(entry))
        FileSystemReader(directory, options=options).read_items([ReadRequest(fqn, tensor, offsets, sizes, entry.shape)])
        return _digest(tensor)

    for fqn, entry in index.tensors.items():
        yield f"tensor {fqn}", lambda fqn=fqn, sizes=entry.shape: loaded(fqn, sizes)
        if entry.shape and 0 not in entry.shape and max(entry.shape) > 1:
            half = tuple(max(1, size // 2) for size in entry.shape)
            yield f"part of {fqn}", lambda fqn=fqn, sizes=half: loaded(fqn, sizes)
    for fqn in index.objects:
        yield f"object {fqn}", lambda fqn=fqn: repr(FileSystemReader(directory, options=options).read_object(fqn))
    if megatron:
        yield "common state", lambda: repr(load_common(directory, options))


def truth_of(directory: Path) -> Truth:
    """Load everything once."""
    index = read_index(directory)
    megatron = (directory / CONFIG_FILE).exists()
    return Truth(index, {what: load() for what, load in _loads(index, directory, megatron)}, megatron)


def outcome_of(directory: Path, truth: Truth) -> str:
    """What verify and loads make of a damaged checkpoint."""
    try:
        noticed = not verify_checkpoint(directory, workers=1).whole
    except CheckpointError:
        noticed = True
    except Exception as error:  # noqa: BLE001  (that is what is looked for)
        return f"FOREIGN: verify raised {type(error).__name__}: {str(error)[:200]}"
    refused, partial = [], []
    for what, load in _loads(truth.index, directory, truth.megatron):
        try:
            got = load()
        except CheckpointError as error:
            refused.append(f"{what}: {type(error).__name__}")
        except Exception as error:  # noqa: BLE001
            return f"FOREIGN: loading {what} raised {type(error).__name__}: {str(error)[:200]}"
        else:
            if got != truth.digests[what]:
                if noticed and what.startswith("part of"):
                    partial.append(what)
                    continue
                return f"WRONG: {what}, {'which verify notices' if noticed else 'and verify says it is whole'}"
    if partial:
        return f"part: {partial[0]}"
    if noticed:
        return "seen"
    return f"missed: {refused[0]}" if refused else "harmless"


def in_bounds(directory: Path, truth: Truth) -> str:
    """`outcome_of` in a forked child with a deadline and a limit of its memory."""

    def limited() -> str:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (what is logged about damage is not wanted here)
        return outcome_of(directory, truth)

    try:
        return in_child(limited, deadline_s=DEADLINE_S)
    except AssertionError as error:
        return f"DIED: {error}"[-2000:]


def file_kind(name: str) -> str:
    """Files of a kind are counted together."""
    return "data" if name.endswith(".distcp") else name


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_file())


@dataclass(frozen=True)
class Damage:
    """What is done to a checkpoint: how, for counting; where, for people; what files hold then."""

    how: str
    where: str
    contents: dict[str, bytes]


def damages(subject: Subject, index: CheckpointIndex, flips: int, seed: str, *, cuts: bool) -> Iterator[Damage]:
    """Every pair of files swapped, every file taken from the save before, so many random bits, and each cut."""
    contents = {path.name: path.read_bytes() for path in _files(subject.directory)}
    for first, second in itertools.combinations(contents, 2):
        if contents[first] != contents[second]:
            kinds = " and ".join(sorted({file_kind(first), file_kind(second)}))
            changed = {first: contents[second], second: contents[first]}
            yield Damage(f"{kinds}, swapped", f"{first} and {second} swapped", changed)
    for path in _files(subject.before) if subject.before else ():
        if contents.get(path.name, b"") not in (b"", path.read_bytes()):
            changed = {path.name: path.read_bytes()}
            yield Damage(f"{file_kind(path.name)}, stale", f"{path.name} of the save before", changed)
    # Files weigh by the square root of their size, so that small ones get their share.
    rng, names = random.Random(seed), [name for name in contents if contents[name]]
    for name in rng.choices(names, [len(contents[name]) ** 0.5 for name in names], k=flips):
        content = bytearray(contents[name])
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        where = f"bit {bit % 8} of byte {bit // 8} of {name}"
        yield Damage(f"{file_kind(name)}, flipped", where, {name: bytes(content)})
    for name, content in contents.items() if cuts else ():
        for at in _boundaries(name, content, index):
            yield Damage(f"{file_kind(name)}, cut", f"{name} cut to {at} bytes", {name: content[:at]})


def _boundaries(name: str, content: bytes, index: CheckpointIndex) -> list[int]:
    """Where what lies in a file begins and ends, and a byte before and behind each."""
    items = [chunk.item for entry in index.tensors.values() for chunk in entry.chunks]
    items += [entry.item for entry in index.objects.values()]
    spans = [(item.offset, item.offset + item.length) for item in items if item.file == name]
    marks = {0, len(content) // 2, len(content), *itertools.chain(*spans)}
    for start, stop in [*spans, *([(0, len(content))] if name == COMMON_FILE else [])]:
        marks |= {start + found.start() for found in re.finditer(b"PK", content[start:stop])}
    return sorted(at for at in {mark + step for mark in marks for step in (-1, 0, 1)} if 0 <= at < len(content))


def _put(path: Path, content: bytes) -> None:
    """Over what is there: a file that is truncated first is flushed by some file systems when it is closed."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def run(flips: int, seed: int, scratch: Path, *, cuts: bool = True) -> Tally:
    """All trials: `flips` random bits over all checkpoints, and with `cuts` every boundary."""
    tally, subjects = Tally(), make_subjects(scratch)
    for number, subject in enumerate(subjects):
        truth, damaged = truth_of(subject.directory), scratch / "damaged"
        shutil.copytree(subject.directory, damaged)
        share = (flips + number) // len(subjects)
        for damage in damages(subject, truth.index, share, f"{seed} {subject.kind}", cuts=cuts):
            for name, content in damage.contents.items():
                _put(damaged / name, content)
            outcome = in_bounds(damaged, truth)
            for name in damage.contents:
                _put(damaged / name, (subject.directory / name).read_bytes())
            tally.add(subject, damage.how, outcome, damage.where)
        shutil.rmtree(damaged)
        print(f"{subject.kind}: {tally.trials} trials, {len(tally.unexpected)} as they must not", flush=True)
    return tally


def write_page(page: Path, told: str) -> None:
    """Put the results between `<!-- flips -->` and `<!-- end of flips -->`."""
    before, mark, rest = page.read_text().partition("<!-- flips -->\n")
    _, end, after = rest.partition("<!-- end of flips -->")
    if not mark or not end:
        raise SystemExit(f"{page}: expected the marks <!-- flips --> and <!-- end of flips -->")
    page.write_text(f"{before}{mark}\n{told}\n\n{end}{after}")


def main() -> int:
    """The command; 1 if anything came out that must not."""
    parser = argparse.ArgumentParser(description="Damage checkpoints of every kind, and count what comes of it.")
    parser.add_argument("--flips", type=int, default=10_000, help="random bits (10000)")
    parser.add_argument("--seed", type=int, default=0, help="of the random bits (0)")
    parser.add_argument("--write", metavar="PAGE", type=Path, help="put the table between its marks in this page")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="flips-") as scratch:
        tally = run(chosen.flips, chosen.seed, Path(scratch))
    bad = tally.of("FOREIGN", "DIED")
    told = (
        f"{tally.trials} trials, {chosen.flips} of them flipped bits, seed {chosen.seed}, torch {torch.__version__}; "
        f"{len(tally.unexpected)} outcomes were unexpected, {bad} ended in a third-party exception, a crash, at the "
        f"deadline ({DEADLINE_S:.0f} s) or at the limit of memory ({MEMORY_BYTES >> 30} GiB).\n\n{tally.summary()}"
    )
    print(told)
    if chosen.write is not None:
        write_page(chosen.write, told)
    for example in tally.unexpected:
        print(f"UNEXPECTED: {example}")
    return 1 if tally.unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
