"""Mutated inputs of every parser: whatever the bytes say, only our own errors come out, and soon.

The corpus is what real writers wrote (`golden`, `items`), what is made here, and what was found (`corpus`). Each run
takes a few seconds of mutations from a fixed seed; `MCORE_CKPT_TEST_FUZZ_SECONDS` asks for more, from another seed each
time. What is found belongs into `corpus/<target>/`, and into a test with a name.
"""

import io
import os
import random
import shutil
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt.core.errors import CheckpointError, ChecksumError
from mcore_ckpt.format.item import locate_tensor_in
from mcore_ckpt.format.metadata_read import encode_config, parse_index, read_config
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.format.state_file import read_plain
from mcore_ckpt.format.zip_records import NotRangeable
from mcore_ckpt.megatron.serialization import load_common
from mcore_ckpt.models._foreign import read_safetensors
from mcore_ckpt.reshard.weight_files import safetensors_header
from tests.format.flips import run
from tests.support.stored_layouts import encode_tensor, rewritten
from tests.support.stored_layouts import stock_item as saved

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("MCORE_CKPT_TEST_FUZZ_SECONDS", "0"))
MUTANTS = 300  # of a target, where no time is asked for
SLOWEST_S = 10.0

pytestmark = [
    pytest.mark.quick,
    pytest.mark.timeout(120 + 2 * SECONDS),
    # torch and numpy complain about tensors and arrays that they then refuse, or that nobody would save.
    pytest.mark.filterwarnings("ignore"),
]


def _pickle_of(container: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(container)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


STATES = [np.random.RandomState(1).get_state(), random.Random(1).getstate()[1][:5]]
OBJECTS = [
    saved([{"a": [1, 2.5, None], "b": (b"bytes", "text"), (1, 2): {3}}]),
    saved([*STATES, torch.arange(4.0), torch.nn.Parameter(torch.ones(2))]),
    saved(Namespace(dtype=torch.bfloat16, size=torch.Size([1, 2]), array=np.arange(3.0), scalar=np.int64(4))),
]


def _try_object_pickle(content: bytes, _: Path) -> None:
    item = rewritten(OBJECTS[1], lambda name, old: content if name == "data.pkl" else old)
    for read in (load_object, partial(read_plain, where="object")):
        with suppress(CheckpointError):
            read(item)


def _as_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes, Path], Any]:
    def write_and_read(content: bytes, directory: Path) -> None:
        (directory / name).write_bytes(content)
        read(directory)

    return write_and_read


def _seeds() -> dict[str, list[bytes]]:
    tensor = torch.arange(15.0).view(3, 5)
    header, _ = safetensors_header([("a", "float32", (2, 3)), ("b", "int64", (4,))], {"format": "pt"})
    return {
        "index": [path.read_bytes() for path in sorted((HERE / "golden").glob("*/.metadata"))],
        "item": [
            encode_tensor("float32", (3, 5), tensor.numpy().tobytes()),
            saved(tensor),
            *(path.read_bytes() for path in sorted((HERE / "items").iterdir())),
        ],
        "object": OBJECTS,
        "object_pickle": [_pickle_of(content) for content in OBJECTS],
        "common": [saved({"iteration": 7, "args": Namespace(lr=0.5)})],
        "config": [encode_config()],
        "safetensors": [header + bytes(56)],
    }


TARGETS: dict[str, Callable[[bytes, Path], Any]] = {
    "index": lambda content, _: parse_index(content, "/ckpt", strict=False),
    "item": lambda content, _: locate_tensor_in(memoryview(content), "item"),
    "object": lambda content, _: load_object(content, verify_crc=False),
    "object_pickle": _try_object_pickle,
    "common": _as_file("common.pt", load_common),
    "config": _as_file("metadata.json", read_config),
    "safetensors": _as_file("x.safetensors", lambda directory: read_safetensors(directory, "x.safetensors")),
}
_NUMBERS = (b"\0", b"\xff", b"\x7f", b"\x80", b"\xff" * 4, b"\0\0\0\x80", b"\xff\xff\xff\x7f", b"\x94", b"9" * 30)
_OPCODES = (
    b"(.012FIJKLMNPQRSTUVXabcde]gh}ijlopqrstu)\x80\x81\x82\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8f\x90\x91\x92\x93\x94\x95"
)


def mutated(seed: bytes, other: bytes, chance: random.Random) -> bytes:
    """`seed` with one to four changes of the kinds that damage and attackers make."""
    content = bytearray(seed)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(content) + 1)
        span = min(chance.choice((1, 2, 4, 16, 200)), len(content) - at)
        kind = chance.randrange(7)
        if kind == 0 and content:
            content[at - 1] ^= 1 << chance.randrange(8)
        elif kind == 1:
            number = chance.choice(_NUMBERS)
            content[at : at + len(number)] = number
        elif kind == 2:
            del content[at : at + span]
        elif kind == 3:
            content[at:at] = content[at : at + span] * chance.choice((1, 2, 50))
        elif kind == 4:
            start = chance.randrange(len(other) + 1)
            content[at : at + span] = other[start : start + span]
        elif kind == 5:
            content[at:at] = bytes(chance.choice(_OPCODES) for _ in range(chance.randint(1, 6)))
        else:
            del content[at:]
    return bytes(content)


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_and_mutants(target: str, tmp_path: Path) -> None:
    chance = random.Random(time.time_ns() if SECONDS else target)
    seeds = _seeds()[target] + [path.read_bytes() for path in sorted((HERE / "corpus" / target).glob("*"))]
    for content in seeds:
        _try(target, content, tmp_path)
    ends = time.monotonic() + SECONDS / len(TARGETS)
    count = 0
    while time.monotonic() < ends if SECONDS else count < MUTANTS:
        count += 1
        content = mutated(chance.choice(seeds), chance.choice(seeds), chance)
        _try(target, content, tmp_path)
    assert count


def _try(target: str, content: bytes, directory: Path) -> None:
    started = time.monotonic()
    try:
        TARGETS[target](content, directory)
    except (CheckpointError, NotRangeable, ChecksumError):
        pass
    except BaseException:
        found = Path(directory.parent) / f"{target}-found"
        found.write_bytes(content)
        kept = shutil.copy(found, Path.cwd() / f".fuzz-{target}") if SECONDS else found
        print(f"the input is kept in {kept}")
        raise
    assert time.monotonic() - started < SLOWEST_S, f"{target}: {content[:200]!r} takes too long"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_damage_is_noticed_or_harmless_and_never_loaded(tmp_path: Path) -> None:
    """A few hundred of the trials that `make test-flips` makes by the thousand."""
    tally = run(350, 2024, tmp_path, cuts=False)
    assert tally.trials > 350
    assert tally.of("seen") > 250
    assert not tally.unexpected, "\n".join(tally.unexpected)
