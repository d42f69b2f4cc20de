"""Unpickling that can run nothing: exact allow-lists, and failures mapped to this package's exceptions.

Two doors, one for each kind of pickle in a checkpoint:

    loads(data, allowed, where)       an index: every global is replaced by an inert stand-in, nothing is imported
    load_object(source, ...)          a stored object or `common.pt`: `torch.load(weights_only=True)` with exactly the
                                      classes that Megatron-Core's own checkpoints hold

`pickle.Unpickler` in C does the work of the first, so that a large index costs microseconds an entry; its only openings
to the outside are `find_class` and `persistent_load`, and both are closed here.

What is not prevented: a pickle can make either door take long, for example by nested tuples as the key of a dict, which
are hashed without end. It cannot run, change or fetch anything meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pickle
import pickletools
import re
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mcore_ckpt.core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    OptionError,
    UnsafePickleError,
)
from mcore_ckpt.format.zip_records import ItemBytes, read_directory

__all__ = ["ALLOWED_OBJECT_CLASSES", "Unavailable", "check_memo", "load_object", "loads", "refuse_zip_bomb"]


class _Restricted(pickle.Unpickler):
    def __init__(self, data: bytes, allowed: Mapping[tuple[str, str], Any], where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._where = where

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise UnsafePickleError(
                f"{self._where}: the pickle asks for {module}.{name}, which is not among the classes that a checkpoint "
                "index may hold. Nothing was imported or run. The file is damaged, was tampered with, or was written "
                "by something other than Megatron-Core, torch.distributed.checkpoint or this package."
            ) from None

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise UnsafePickleError(
            f"{self._where}: the pickle asks for an external object (persistent id {pid!r:.80}); an index has none. "
            "The file is damaged or is not a checkpoint index."
        )


@functools.cache
def _simple_opcodes() -> re.Pattern[bytes]:
    """Matches a run of the opcodes that make up nearly all of an index: none of them touches the memo's size by more
    than one. Compiled on first use, which takes milliseconds.
    """
    without_argument = b"(012NRab}de]lost)u\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"
    short_texts = b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(128))
    integers = b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(9))
    return re.compile(
        b"(?:[hKq\x80].|[%b]+|j....|J....|\x8c(?:%b)|M..|[G\x95].{8}|\x8a(?:%b)){1,200}"
        % (re.escape(without_argument), short_texts, integers),
        re.DOTALL,
    )


def check_memo(data: bytes, where: str) -> None:
    """Refuse a pickle that numbers memoized objects beyond its own length.

    The C unpickler keeps the memo in an array: one crafted LONG_BINPUT of six bytes makes it fill 64 GB. Finding that
    opcode needs the boundaries of all opcodes; a regular expression steps over them at a third of what unpickling
    costs, and `pickletools` over the rare rest.
    """
    match, position, stream = _simple_opcodes().match, 0, io.BytesIO(data)
    opcodes = {opcode.code: opcode for opcode in pickletools.opcodes}
    while True:
        run = match(data, position)
        if run is not None:
            position = run.end()
            continue
        opcode = opcodes.get(chr(data[position])) if position < len(data) else None
        if opcode is None:
            raise CorruptCheckpointError(
                f"{where}: not a readable pickle: no opcode at byte {position} of {len(data)}. The file is truncated "
                "or damaged; restore it from another copy, or load an earlier checkpoint."
            )
        if opcode.name == "STOP":
            return
        position += 1
        if opcode.arg is None:
            continue
        stream.seek(position)
        argument = opcode.arg.reader(stream)
        position = stream.tell()
        if opcode.name in ("PUT", "LONG_BINPUT") and argument > len(data):
            raise UnsafePickleError(
                f"{where}: the pickle numbers an object {argument} in {len(data)} bytes, which would fill the memory. "
                "The file is damaged or was made to do harm; do not load it."
            )


def loads(data: bytes, allowed: Mapping[tuple[str, str], Any], where: str) -> Any:
    """Unpickle `data`, with `allowed[module, name]` standing in for each global that the pickle names.

    Args:
        data: the pickle; bytes after its end are ignored.
        allowed: what each (module, qualified name) is replaced by. The replacements must be inert when called, and
            must not be mutable through attributes (a pickle can set attributes of what it holds).
        where: the file, for error messages.

    Raises:
        UnsafePickleError: the pickle names something else, or an external object.
        CorruptCheckpointError: the bytes are no pickle, are truncated, or build something that cannot be.
    """
    try:
        check_memo(data, where)
        return _Restricted(data, allowed, where).load()
    except UnsafePickleError:
        raise
    # A damaged pickle can fail in any way that object construction can (UnpicklingError, EOFError, TypeError,
    # ValueError, UnicodeDecodeError, RecursionError, MemoryError, OverflowError ...): all of them mean the same here.
    except Exception as error:
        raise CorruptCheckpointError(
            f"{where}: not a readable pickle of {len(data)} bytes ({type(error).__name__}: {error}). The file is "
            "truncated or damaged; restore it from another copy, or load an earlier checkpoint."
        ) from error


_NUMPY_DTYPES = (
    *("Bool", "Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32", "Int64", "UInt64", "LongLong", "ULongLong"),
    *("Float16", "Float32", "Float64", "LongDouble", "Complex64", "Complex128", "CLongDouble"),
    *("Bytes", "Str", "DateTime64", "TimeDelta64"),
)

# Where each global that a stored object may name is found; most are found under their own name. None of them does
# anything but hold values, whatever it is called with. torch.load allows tensors, dtypes and plain containers itself.
ALLOWED_OBJECT_CLASSES: dict[str, str] = {
    **{
        name: name
        for name in (
            *("argparse.Namespace", "types.SimpleNamespace", "signal.Signals", "torch._C.Generator"),
            *("datetime.date", "datetime.datetime", "datetime.timedelta", "datetime.timezone"),
            *("builtins.slice", "builtins.frozenset", "builtins.range"),
            *("numpy.ndarray", "numpy.dtype"),
            *("megatron.core.enums.ModelType", "megatron.core.enums.Fp8Recipe", "megatron.core.enums.Fp4Recipe"),
            *(
                f"megatron.core.transformer.enums.{enum}"
                for enum in ("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope")
            ),
            "megatron.core.transformer.enums.CudaGraphModule",
            "megatron.core.transformer.enums.InferenceCudaGraphScope",
            *(
                f"megatron.core.rerun_state_machine.{name}"
                for name in ("RerunDiagnostic", "RerunMode", "RerunState", "RerunValidationStatus")
            ),
            "megatron.core.optimizer.optimizer_config.OptimizerConfig",
        )
    },
    "_io.BytesIO": "io.BytesIO",
    # Paths keep their kind from Python to Python; 3.13 gave them another module.
    **{f"{module}.{kind}": f"pathlib.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("PosixPath",)},
    # numpy 2 moved its core; a file of either is read under either.
    **{
        f"numpy.{core}.multiarray.{function}": f"numpy.*core.multiarray.{function}"
        for core in ("core", "_core")
        for function in ("_reconstruct", "scalar")
    },
}


class Unavailable:
    """Stands in for an instance of an allowed class whose package is not installed, or was not to be imported.

    Attributes:
        arguments: what the instance was made with (for an enum member: its value).
        state: its pickled state, None where there is none.
    """

    class_name = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.arguments, self.state = getattr(self, "arguments", ()), state

    def __repr__(self) -> str:
        return f"<{self.class_name}{getattr(self, 'arguments', ())!r}>"


_ANY_OBJECT = "a stored object"
_NamedGlobal = tuple[Callable[..., Any], str]  # as torch's safe_globals takes them
_resolved: dict[str, Any] = {}
# torch keeps the classes that weights_only may build in a global set: two loads must not take each other's away.
_globals_lock = threading.Lock()


def load_object(
    source: bytes | bytearray | memoryview | str | Path | BinaryIO,
    extra_allowed: Iterable[str] = (),
    *,
    where: str = _ANY_OBJECT,
    import_classes: bool = True,
) -> Any:
    """Unpickle what `torch.save` wrote, building nothing outside the allow-list. Tensors land on the CPU.

    Args:
        source: the container's bytes, a file, or a path.
        extra_allowed: further classes, as `"module.qualified_name"`; they are imported when a pickle names them.
        where: what is being loaded, for error messages (a path is added by itself).
        import_classes: import the packages of allowed classes. Otherwise classes of packages that are not imported yet
            are replaced by `Unavailable`, as are those of packages that are not installed.

    Raises:
        CheckpointNotFoundError: there is no such file.
        UnsafePickleError: the pickle names a class outside the allow-list.
        CorruptCheckpointError: the bytes are not what `torch.save` writes, or are damaged.
        OptionError: a class of `extra_allowed` cannot be imported.
    """
    if not isinstance(source, str | Path):
        stream: BinaryIO = io.BytesIO(source) if isinstance(source, bytes | bytearray | memoryview) else source
        return _load(stream, tuple(extra_allowed), where, import_classes)
    where = str(source) if where == _ANY_OBJECT else f"{where} ({source})"
    try:
        with Path(source).open("rb") as file:
            return _load(file, tuple(extra_allowed), where, import_classes)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{where}: there is no such file; is the checkpoint complete?") from error
    except OSError as error:
        raise LoadError(f"{where}: cannot be read: {error.strerror or error}") from error


def _load(stream: BinaryIO, extra_allowed: tuple[str, ...], where: str, import_classes: bool) -> Any:
    import torch

    start = stream.tell()
    try:
        refuse_zip_bomb(stream, start, where)
        try:
            return torch.load(stream, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            # Most objects need no class at all; only for the others it is worth looking which.
            stream.seek(start)
            needed = _needed_globals(stream, extra_allowed, where, import_classes)
        stream.seek(start)
        with _globals_lock, torch.serialization.safe_globals(needed):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except (UnsafePickleError, OptionError):
        raise
    # torch.load fails in many ways on damaged bytes (RuntimeError from its zip reader, EOFError, KeyError, ValueError,
    # UnpicklingError ...), and building objects from damaged pickles in any way at all.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise CorruptCheckpointError(
            f"{where}: cannot be read as a torch.save container of plain data ({type(error).__name__}: {reason:.300}). "
            "The bytes are damaged or incomplete; restore them from another copy, or load an earlier checkpoint."
        ) from error


# torch.save never compresses; what others have compressed is inflated in memory, so up to this much, or ratio, only.
_MAX_INFLATED_BYTES = 1024**3
_MAX_INFLATION = 20


def refuse_zip_bomb(stream: BinaryIO, start: int, where: str) -> None:
    """Refuse a container whose compressed records would fill the memory. Leaves the stream at `start`."""

    def read(offset: int, length: int) -> bytes:
        stream.seek(start + offset)
        return stream.read(length)

    container_bytes = stream.seek(0, io.SEEK_END) - start
    try:
        directory = read_directory(ItemBytes(read, container_bytes, where))
        is_plain = all(record.method == 0 for record in directory.values())
    except CorruptCheckpointError:
        is_plain = False  # perhaps not even a zip archive, which torch.load reads as well: look closer
    if not is_plain:
        stream.seek(start)
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(stream) as archive:
            inflated_bytes = sum(record.file_size for record in archive.infolist())
            if inflated_bytes > max(_MAX_INFLATED_BYTES, _MAX_INFLATION * container_bytes):
                raise UnsafePickleError(
                    f"{where}: {container_bytes} bytes would become {inflated_bytes} when inflated; torch.save never "
                    "compresses. The file was made to do harm, or damaged; do not load it."
                )
    stream.seek(start)


def _needed_globals(
    stream: BinaryIO, extra_allowed: tuple[str, ...], where: str, import_classes: bool
) -> list[Callable[..., Any] | _NamedGlobal]:
    """What the pickle in `stream` names beyond torch's own list, as (object, name) for `safe_globals`.

    Pairs are used even where the name is the object's own: torch takes what it is given out of its list afterwards,
    and a pair never equals an entry that someone else (Megatron-Core) has put there.
    """
    import torch

    names = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    refused = sorted(name for name in names if name not in ALLOWED_OBJECT_CLASSES and name not in extra_allowed)
    if refused:
        shown = ", ".join(f"{name:.200}" for name in refused[:5]) + (", ..." if len(refused) > 5 else "")
        raise UnsafePickleError(
            f"{where}: contains {shown}, which is not among the classes that checkpoints may hold; nothing was loaded. "
            "If you trust the origin of this checkpoint, allow it with "
            f"LoadOptions(allowed_classes=({', '.join(f'{name!r:.200}' for name in refused[:5])},))"
        )
    found: list[Callable[..., Any] | _NamedGlobal] = [
        (_resolve(name, is_extra=name in extra_allowed, import_classes=import_classes), name) for name in names
    ]
    if "numpy.dtype" in names or "numpy" in sys.modules:
        # The instances of numpy.dtype are of these classes, which no pickle names. That it is not among `names` may
        # mean that someone else has allowed it.
        dtypes = [f"numpy.dtypes.{kind}DType" for kind in _NUMPY_DTYPES]
        found.extend((_resolve(name, is_extra=False, import_classes=True), name) for name in dtypes)
    return found


def _resolve(name: str, *, is_extra: bool, import_classes: bool) -> Any:
    """The object that `name` stands for, imported if need be, or an `Unavailable`."""
    if name in _resolved:
        return _resolved[name]
    target = ALLOWED_OBJECT_CLASSES.get(name, name)
    try:
        value = _import(target, import_classes or is_extra or target.startswith(("numpy.", "torch.")))
    except (ImportError, AttributeError) as error:
        if is_extra:
            raise OptionError(
                f"allowed_classes: {name!r} cannot be imported ({error}); install its package or correct the name"
            ) from error
        # Not remembered: the package may be imported later.
        return type("Unavailable", (Unavailable,), {"class_name": name})
    _resolved[name] = value
    return value


def _import(name: str, may_import: bool) -> Any:
    if name.startswith("numpy.*core"):
        import numpy

        name = name.replace("*core", "_core" if hasattr(numpy, "_core") else "core")
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        if may_import:
            try:
                importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                # `a.b.Outer.Inner`: a.b.Outer is no module; but a module whose own import fails is an error.
                if error.name is None or not module_name.startswith(error.name):
                    raise
        module = sys.modules.get(module_name)
        if module is not None:
            value: Any = module
            for part in parts[length:]:
                value = getattr(value, part)
            return value
    raise ImportError(f"no module of {name} is {'installed' if may_import else 'imported'}")
