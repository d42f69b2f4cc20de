"""`mcore-ckpt cat`: show or extract one tensor or object."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.commands._shell import Outcome, document_of, numbers, one_line
from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.paths import local_path

if TYPE_CHECKING:
    from mcore_ckpt.tools.checkpoint import Checkpoint, LazyTensor
    from mcore_ckpt.tools.tensor_stats import Stats

_SLICE = re.compile(r"^-?\d*(?::-?\d*(?::\d*)?)?$|^\.\.\.$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", metavar="CKPT", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument("key", metavar="KEY", help="of a tensor or an object; a part that only one key has will do")
    parser.add_argument("--slice", metavar="SLICE", help="of a tensor, as in numpy: '0:4, :' or '..., -1'")
    parser.add_argument("--head", type=int, default=10, metavar="N", help="elements to show (default: 10)")
    parser.add_argument("--stats", action="store_true", help="read the whole tensor: min, max, mean, std, norm, NaNs")
    parser.add_argument("--npy", metavar="FILE", help="write the tensor, or the slice, as a numpy file")


def run(arguments: argparse.Namespace) -> Outcome:
    """Show a tensor or an object."""
    from mcore_ckpt.tools.checkpoint import open_checkpoint

    with open_checkpoint(arguments.checkpoint) as checkpoint:
        key = _resolve(checkpoint, arguments.key)
        if key in checkpoint.index.objects:
            return _object(checkpoint, key)
        return _tensor(checkpoint, checkpoint.tensors[key], arguments)


def _resolve(checkpoint: Checkpoint, key: str) -> str:
    if key in checkpoint.index.tensors or key in checkpoint.index.objects:
        return key
    found = [other for other in checkpoint if key in other]
    if len(found) == 1:
        return found[0]
    if found:
        raise OptionError(
            f"{key!r}: {len(found)} keys of {checkpoint.path} contain this, such as {', '.join(found[:3])}; "
            "give a whole key"
        )
    raise checkpoint.missing(key)


def _object(checkpoint: Checkpoint, key: str) -> Outcome:
    import pprint

    from mcore_ckpt.tools.plain_state import read_plain_object

    entry = checkpoint.index.objects[key]
    value = read_plain_object(checkpoint.index, entry)
    item = entry.item
    header = f"{one_line(key)}: object, {item.file} bytes [{item.offset}, {item.offset + item.length})"
    return Outcome({"key": key, "value": value}, f"{header}\n{pprint.pformat(value, width=110)}")


def _parse_slice(text: str) -> Any:
    """`'0:4, :, -1'` -> a tuple of slices and ints."""
    parts: list[Any] = []
    for word in text.strip().removeprefix("[").removesuffix("]").split(","):
        word = word.strip()
        if not word or not _SLICE.match(word):
            raise OptionError(f"--slice {text!r}: expected numbers, slices and `...`, such as '0:4, :, -1'")
        if word == "...":
            parts.append(Ellipsis)
        elif ":" in word:
            parts.append(slice(*(int(bound) if bound else None for bound in word.split(":"))))
        else:
            parts.append(int(word))
    return tuple(parts)


def _tensor(checkpoint: Checkpoint, tensor: LazyTensor, arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.tools.tensor_stats import tensor_stats

    index = _parse_slice(arguments.slice) if arguments.slice else None
    document: dict[str, Any] = {
        "key": tensor.fqn,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "chunks": len(tensor.chunks),
    }
    size = f"{human_bytes(tensor.nbytes)} in {len(tensor.chunks)} chunks"
    lines = [f"{one_line(tensor.fqn)}: {tensor.dtype} {numbers(tensor.shape)}, {size}"]
    try:
        if arguments.npy:
            shape = _write_npy(checkpoint, tensor, index, local_path(arguments.npy))
            document |= {"npy": arguments.npy, "npy_shape": shape}
            lines.append(f"wrote {arguments.npy} {numbers(shape)}")
        if arguments.stats:
            stats = tensor_stats(checkpoint.payloads, checkpoint.index.tensors[tensor.fqn])
            document["stats"] = _stats(stats)
            lines.append("  ".join(f"{name} {value}" for name, value in _stats(stats).items()))
        if not arguments.npy:
            values = _head(tensor, index, arguments.head)
            document["values"] = values
            lines.append(str(values) if index is not None else f"first elements: {values}")
    except IndexError as error:
        raise OptionError(f"--slice {arguments.slice!r}: {error}") from error
    return Outcome(document, "\n".join(lines))


def _stats(stats: Stats) -> dict[str, Any]:
    found = document_of(stats)
    return {name: float(f"{value:.9g}") if isinstance(value, float) else value for name, value in found.items()}


def _head(tensor: LazyTensor, index: Any, count: int) -> Any:
    """The slice as nested lists (its first rows), or without a slice the first elements."""
    import numpy as np

    if index is None:
        index = ()
        for size in tensor.shape[:-1]:
            index = (*index, 0) if size else (*index, slice(0))
        if tensor.shape:
            index = (*index, slice(0, count))
    values = np.atleast_1d(tensor.numpy(index))
    return _plain_numbers(values[: max(count, 1)].tolist())


def _plain_numbers(value: Any) -> Any:
    """Nested lists in which JSON can hold every number: NaN, infinities and complex numbers become text."""
    if isinstance(value, list):
        return [_plain_numbers(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if abs(value) < float("inf") else str(value)
    return str(value) if isinstance(value, complex) else value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_npy(checkpoint: Checkpoint, tensor: LazyTensor, index: Any, path: Path) -> tuple[int, ...]:
    """Write a numpy file: a slice at once, a whole tensor slab by slab."""
    import numpy as np

    from mcore_ckpt.tools.dtype_cast import as_numbers
    from mcore_ckpt.tools.tensor_stats import SlabReader

    sample = as_numbers(memoryview(b""), tensor.dtype)
    if sample is None:
        raise OptionError(f"{tensor.fqn}: numpy has no numbers like {tensor.dtype}, so there is no .npy of it")
    if index is not None or not tensor.shape:
        values = tensor.numpy(... if index is None else index)
        with open(path, "wb") as file:  # noqa: PTH123  (a name without .npy must stay as it is)
            np.save(file, values)
        return tuple(values.shape)
    if tensor.nbytes > sys.maxsize // sample.dtype.itemsize:
        raise OptionError(f"{tensor.fqn}: {tensor.nbytes} bytes are more than a numpy file can hold; give a --slice")
    if path.exists() and not path.is_file():
        raise OptionError(f"--npy {path}: not a regular file; give a --slice, which is written as a stream")
    # A damaged tensor must leave no file that looks whole, and another program's file may not be in the way.
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".partial", dir=path.absolute().parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            descriptor = np.lib.format.dtype_to_descr(sample.dtype)
            header = {"descr": descriptor, "fortran_order": False, "shape": tensor.shape}
            np.lib.format.write_array_header_1_0(file, header)
            start, nbytes = file.tell(), math.prod(tensor.shape) * sample.dtype.itemsize
            file.flush()
            # A disk that is full has to say so here: writing to mapped memory would end in a signal.
            os.posix_fallocate(handle, 0, start + nbytes)
            os.fchmod(handle, 0o666 & ~_umask())
        target = np.memmap(partial, mode="r+", offset=start, dtype=sample.dtype, shape=tensor.shape)
        for box, content in SlabReader(checkpoint.payloads).walk(checkpoint.index.tensors[tensor.fqn]):
            numbers = as_numbers(content, tensor.dtype)
            assert numbers is not None
            place = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
            target[place] = numbers.reshape(box.sizes)
        target.flush()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return tensor.shape
