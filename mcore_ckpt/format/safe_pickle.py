"""What stored objects may be made of: for each name that their pickles may hold, a constructor that checks its
arguments.

The names are those in Megatron-Core's checkpoints, and those known to `torch.load(weights_only=True)`. None of the
constructors can be called for a value that no save has written: arrays are made from bytes of exactly the right length
and of dtypes without Python objects, members of enums are looked up by value, tensors lie inside their storages, and
what the process shares (classes, dtypes, members) has no state to set. Members of classes that the user vouches for, by
`LoadOptions.allowed_classes` or torch's `add_safe_globals`, are made as pickle makes them.

`load_object` is the door for what `torch.save` wrote, stored objects and `common.pt`, to be used, tensors on the CPU.
`refusals` tells what it would refuse, without making anything. What else is only looked at comes through
`state_file.py`, the index through `index_pickle.py`.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import importlib
import io
import math
import operator
import pathlib
import re
import signal
import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from functools import reduce
from itertools import pairwise
from typing import Any, Final

from mcore_ckpt.core.boxes import strides_of
from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError, LoadError, OptionError
from mcore_ckpt.format.tensor_pickle import (
    DTYPES,
    STORAGE_KINDS,
    FileTensor,
    NotPlainTensorError,
    StorageReference,
    WrongArgumentsError,
    checked_size,
    described,
    stored_storage,
)
from mcore_ckpt.format.unpickler import (
    Maker,
    NotRebuiltError,
    Rules,
    check_hashable,
    rebuilding,
    unpickle,
)
from mcore_ckpt.format.zip_records import Archive, archive_of

# ------------------------------------------------------------------------------------------------ the standard library


def _wants(condition: bool, what: str) -> None:
    if not condition:
        raise WrongArgumentsError(f"expected {what}")


def _enum_maker(cls: Any) -> Maker:
    """Members by value: calling a flag's class would make new members."""

    def member(*values: Any) -> Any:
        _wants(len(values) == 1, f"one value of a member of {cls.__name__}")
        (value,) = values
        found = cls._value2member_map_.get(value) if type(value) in (int, str, bool, float) else None
        if found is None:
            found = next(
                (member for member in cls if type(member.value) is type(value) and member.value == value), None
            )
        if found is None and issubclass(cls, enum.Flag) and type(value) is int:
            flags = reduce(operator.or_, (flag.value for flag in cls), 0)
            found = cls(value) if 0 < value == value & flags else None
        _wants(found is not None, f"the value of a member of {cls.__name__}")
        return found

    return Maker(member)


def _attributes_of(state: Any) -> dict[str, Any]:
    _wants(type(state) is dict and all(type(name) is str for name in state), "attributes by name")
    attributes: dict[str, Any] = state
    return attributes


def _attributes_maker(cls: Any) -> Maker:
    """An instance without arguments, and its attributes: namespaces and plain dataclasses."""

    def build(instance: Any, state: Any) -> Any:
        instance.__dict__.update(_attributes_of(state))
        return instance

    def make() -> Any:
        return cls.__new__(cls)

    return Maker(make, build)


def _tuple_maker(cls: Any) -> Maker:
    """A named tuple, by the values of its fields."""

    def make(*values: Any) -> Any:
        _wants(len(values) == len(cls._fields), f"{len(cls._fields)} values of a {cls.__name__}")
        check_hashable([values])  # it may be a key
        return tuple.__new__(cls, values)

    return Maker(make)


def _vouched(value: Any) -> Maker:
    """What pickle would do with a class that the user allows."""

    def make(*arguments: Any) -> Any:
        with rebuilding(value):
            return value(*arguments)

    def new(*arguments: Any) -> Any:
        with rebuilding(value):
            return value.__new__(value, *arguments)

    def build(instance: Any, state: Any) -> Any:
        with rebuilding(type(instance)):
            if hasattr(instance, "__setstate__"):
                instance.__setstate__(state)
                return
            state, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
            if state:
                instance.__dict__.update(state)
            for name, part in (slots or {}).items():
                setattr(instance, name, part)

    takes_members = hasattr(value, "append") or hasattr(value, "__setitem__")
    return Maker(make, build, takes_members=takes_members, new=new, is_vouched=True)


def _members(*arguments: Any) -> Any:
    """The one argument of a collection's constructor, which is copied."""
    _wants(len(arguments) <= 1, "at most one argument")
    members = arguments[0] if arguments else ()
    _wants(type(members) in (list, tuple, set, frozenset), "a list, tuple or set")
    check_hashable(members)
    return members


def _ordered(*pairs: Any) -> Any:
    _wants(not pairs or pairs == ([],), "an empty OrderedDict")
    return OrderedDict()


def _counts(counts: Any = None) -> Any:
    counts = {} if counts is None else counts
    _wants(type(counts) is dict, "counts by name")
    return Counter(counts)


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    """Bytes, as protocol 2 writes them."""
    _wants(type(text) is str and encoding in ("latin1", "latin-1"), "bytes as text in latin1")
    return bytes(text, "latin1")


def _byte_array(content: Any = b"", encoding: Any = None) -> bytearray:
    if type(content) is str:
        content = _encoded(content, encoding)
    _wants(type(content) is bytes, "bytes")
    return bytearray(content)


def _of(function: Callable[..., Any], *kinds: type) -> Maker:
    """A constructor that checks its own arguments, of which there are as many as kinds at most, and of these types."""

    def make(*arguments: Any) -> Any:
        _wants(len(arguments) <= len(kinds), f"at most {len(kinds)} arguments")
        for argument, kind in zip(arguments, kinds, strict=False):
            _wants(
                type(argument) is kind or (kind is float and type(argument) is int) or argument is None, kind.__name__
            )
        return function(*arguments)

    return Maker(make)


def _path(*parts: Any) -> pathlib.PosixPath:
    _wants(all(type(part) is str for part in parts), "parts of a path")
    return pathlib.PosixPath(*parts)


def _stream(state: Any, content: Any = b"") -> io.BytesIO:
    state = (content, 0, None) if state is None else state
    _wants(type(state) is tuple and len(state) == 3 and type(state[0]) is bytes, "content and position")
    # A write far behind the end would fill the gap.
    _wants(type(state[1]) is int and 0 <= state[1] <= len(state[0]), "a position inside the content")
    stream = io.BytesIO(state[0])
    stream.seek(state[1])
    if state[2] is not None:
        stream.__dict__.update(_attributes_of(state[2]))
    return stream


def _with_module_versions(made: Any, state: Any) -> None:
    """The one attribute that `torch.nn.Module.state_dict` sets."""
    _wants(type(state) is dict and set(state) == {"_metadata"}, "the attributes of an OrderedDict")
    made._metadata = state["_metadata"]  # noqa: SLF001 (of an object that this has made)


_OF_PYTHON: Final[dict[str, tuple[Any, Maker]]] = {
    "collections.OrderedDict": (OrderedDict, Maker(_ordered, _with_module_versions, takes_members=True)),
    "collections.Counter": (Counter, Maker(_counts)),
    "builtins.set": (set, Maker(lambda *a: set(_members(*a)))),
    "builtins.frozenset": (frozenset, Maker(lambda *a: frozenset(_members(*a)))),
    "builtins.bytes": (bytes, _of(bytes)),  # without arguments: as protocol 2 writes empty ones
    "builtins.bytearray": (bytearray, Maker(_byte_array)),
    "builtins.complex": (complex, _of(complex, float, float)),
    "builtins.slice": (slice, _of(slice, int, int, int)),
    "builtins.range": (range, _of(range, int, int, int)),
    "_codecs.encode": (_encoded, Maker(_encoded)),
    "_io.BytesIO": (io.BytesIO, Maker(_stream, with_state=True)),
    "argparse.Namespace": (argparse.Namespace, _attributes_maker(argparse.Namespace)),
    "types.SimpleNamespace": (types.SimpleNamespace, _attributes_maker(types.SimpleNamespace)),
    "signal.Signals": (signal.Signals, _enum_maker(signal.Signals)),
    "datetime.date": (datetime.date, _of(datetime.date, bytes)),
    "datetime.datetime": (datetime.datetime, _of(datetime.datetime, bytes, datetime.timezone)),
    "datetime.timedelta": (datetime.timedelta, _of(datetime.timedelta, int, int, int)),
    "datetime.timezone": (datetime.timezone, _of(datetime.timezone, datetime.timedelta, str)),
    # Paths keep their kind from Python to Python; 3.13 gave them another module.
    **{f"{module}.PosixPath": (pathlib.PosixPath, Maker(_path)) for module in ("pathlib", "pathlib._local")},
}


# --------------------------------------------------------------------------------------------------------------- numpy


_DTYPE_CODE = re.compile(r"[biufcSUmM][0-9]{0,9}|\?|[<>=|]?[biufc][0-9]{1,2}")
_UNIT = re.compile(r"Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as|generic")


def _dtype(state: Any, code: Any, *_flags: Any) -> Any:
    """A numpy dtype that holds no Python objects."""
    import numpy

    if type(code) is str and code[:1] == "V" and type(state) is tuple and len(state) >= 6:
        return _bytes_dtype(*state[2:6])
    _wants(type(code) is str and _DTYPE_CODE.fullmatch(code) is not None, "a dtype of numbers, text or times")
    state = (3, "=", None, None, None) if state is None else state
    _wants(type(state) is tuple and len(state) >= 5 and state[2:5] == (None, None, None), "a dtype without fields")
    order, metadata = state[1], state[8] if len(state) > 8 else None
    _wants(type(order) is str and order in ("<", ">", "|", "="), "the order of a dtype's bytes")
    if code[0] in "mM" and metadata is not None:
        _wants(type(metadata) is tuple and len(metadata) == 2 and type(metadata[1]) is tuple, "the unit of a time")
        unit, number = metadata[1][:2]
        unit = unit.decode() if type(unit) is bytes else unit
        _wants(type(unit) is str and _UNIT.fullmatch(unit) is not None and type(number) is int and number > 0, "a unit")
        code += "" if unit == "generic" else f"[{number}{unit}]"
    dtype = numpy.dtype(code)
    _wants(dtype.kind in "biufcSUmM" and (dtype.itemsize > 0 or dtype.kind in "SU"), "a dtype with a width")
    return dtype.newbyteorder(order) if order in "<>" else dtype


def _bytes_dtype(subarray: Any, names: Any, fields: Any, size: Any) -> Any:
    """A dtype of records, of the arrays in their fields, or of bytes."""
    import numpy

    def is_plain(dtype: Any) -> bool:
        return isinstance(dtype, numpy.dtype) and dtype.base.kind in "biufcSUmM"  # overlapping records have no end

    if names is not None:
        _wants(type(names) is tuple and type(fields) is dict and set(names) == set(fields), "the names of fields")
        parts = [fields[name] for name in names]
        _wants(all(type(part) is tuple and len(part) == 2 and is_plain(part[0]) for part in parts), "plain fields")
        formats, offsets = ([part[n] for part in parts] for n in (0, 1))
        ends = [(start, start + kind.itemsize) for kind, start in parts if type(start) is int and kind.itemsize]
        is_apart = all(end <= start for (_, end), (start, _) in pairwise(sorted(ends)))
        _wants(is_apart, "fields that do not overlap")  # bytes are brought into order field by field
        return numpy.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})
    if subarray is not None:
        _wants(type(subarray) is tuple and len(subarray) == 2 and is_plain(subarray[0]), "an array in a field")
        return numpy.dtype((subarray[0], checked_size(subarray[1])))
    _wants(type(size) is int and 0 < size < 2**31, "a number of bytes")
    return numpy.dtype(f"V{size}")


def _raw(content: Any, dtype: Any, count: int) -> bytes:
    import numpy

    _wants(isinstance(dtype, numpy.dtype), "a dtype")
    _wants(type(content) is bytes or type(content) is bytearray, "the bytes of an array")
    _wants(len(content) == count * dtype.itemsize, f"{count * dtype.itemsize} bytes")
    return bytes(content)


def _array(state: Any, kind: Any, shape: Any, _code: Any) -> Any:
    import numpy

    _wants(kind is numpy.ndarray and shape == (0,), "an empty array")
    _wants(type(state) is tuple and len(state) == 5 and type(state[3]) in (bool, int), "the state of an array")
    shape, dtype = checked_size(state[1]), state[2]
    order: Any = "F" if state[3] else "C"
    content = _raw(state[4], dtype, math.prod(shape))
    if not content:
        _wants(0 in shape, "texts of at least one character")
        return numpy.zeros(shape, dtype.newbyteorder("="), order=order)
    array = numpy.frombuffer(content, dtype).reshape(shape, order=order)
    return array.astype(dtype.newbyteorder("="))


def _scalar(dtype: Any, content: Any) -> Any:
    import numpy

    content = _raw(content, dtype, 1)
    return numpy.frombuffer(bytearray(content), dtype)[0] if content else dtype.type()


_OF_NUMPY: Final[dict[str, Maker | None]] = {
    "numpy.ndarray": None,
    "numpy.dtype": Maker(_dtype, with_state=True),
    # numpy 2 moved its core; a file of either is read under either.
    **{f"numpy.{core}.multiarray._reconstruct": Maker(_array, with_state=True) for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": Maker(_scalar) for core in ("core", "_core")},
}

# ------------------------------------------------------------------------------------------------------------ Megatron

MEGATRON_CLASSES: Final = frozenset(
    (
        *("megatron.core.enums.ModelType", "megatron.core.enums.Fp8Recipe", "megatron.core.enums.Fp4Recipe"),
        *(
            f"megatron.core.transformer.enums.{enum}"
            for enum in ("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope")
        ),
        "megatron.core.transformer.enums.CudaGraphModule",
        "megatron.core.transformer.enums.InferenceCudaGraphScope",
        *(
            f"megatron.core.rerun_state_machine.{name}"
            for name in ("Call", "Caller", "RerunDiagnostic", "RerunMode", "RerunState", "RerunValidationStatus")
        ),
        "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    )
)
"""Enums, dataclasses and named tuples; stand-ins stay in the place of what is not installed, or not to be imported."""

# An optimizer that is offloaded to the CPU keeps the classes of its two parts in its groups; they are never called.
_OPTIMIZER_CLASSES: Final = frozenset(
    (
        *("torch.optim.adamw.AdamW", "torch.optim.adam.Adam", "torch.optim.sgd.SGD"),
        *(f"transformer_engine.pytorch.optimizers.{name}" for name in ("fused_adam.FusedAdam", "fused_sgd.FusedSGD")),
        *(f"apex.optimizers.{name}" for name in ("fused_adam.FusedAdam", "fused_sgd.FusedSGD")),
    )
)


def _import(full_name: str, may_import: bool) -> Any:
    """The object that a name stands for, imported if need be and if allowed."""
    parts = full_name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        if may_import:
            try:
                importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                # `a.b.Outer.Inner`: a.b.Outer is no module; but a module whose own import fails is an error.
                if error.name is None or not module_name.startswith(error.name):
                    raise
        if module_name in sys.modules:
            return operator.attrgetter(".".join(parts[length:]))(sys.modules[module_name])
    raise ImportError(f"no module of {full_name} is {'installed' if may_import else 'imported'}")


def _registered_with_torch(full_name: str) -> Any:
    """A class that this process has told torch to load (`add_safe_globals`); None if it has not."""
    if full_name.startswith(("numpy.", "builtins.")) or (torch := sys.modules.get("torch")) is None:
        return None
    for registered in torch.serialization.get_safe_globals():
        value, name = registered if isinstance(registered, tuple) else (registered, None)
        if full_name == (name or f"{value.__module__}.{getattr(value, '__qualname__', '')}"):
            return value
    return None


# ------------------------------------------------------------------------------------------------- objects with tensors


class ObjectRules(Rules):
    """What a stored object may name, with `extra_allowed` classes (`"module.qualified_name"`). Without
    `import_classes`, stand-ins stay for classes of Megatron's that are not imported. `archive` has the storages.
    """

    advice = (
        " If you trust the origin of this checkpoint, load it with LoadOptions(allowed_classes=('*',)), which lets it "
        "run code as you"
    )

    def __init__(
        self, archive: Archive | None = None, extra_allowed: Iterable[str] = (), import_classes: bool = True
    ) -> None:
        self._archive, self._extra, self._import_classes = archive, frozenset(extra_allowed), import_classes
        self._storages: dict[str, Any] = {}
        self._functions: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor_v2": self._rebuild_v2,
            "torch._utils._rebuild_tensor_v3": self._rebuild_v3,
            "torch._utils._rebuild_parameter": self._parameter,
            "torch._utils._rebuild_parameter_with_state": self._parameter,
            "torch._tensor._rebuild_from_type_v2": self._rebuild_from_type,
        }

    def named(self, full_name: str) -> tuple[Any, Maker | None] | None:
        if full_name in _OF_PYTHON:
            return _OF_PYTHON[full_name]
        if full_name in _OF_NUMPY:
            import numpy

            return getattr(numpy, full_name.removeprefix("numpy."), full_name), _OF_NUMPY[full_name]
        module, _, last = full_name.rpartition(".")
        if module == "signal" and last in signal.Signals.__members__:  # Python 3.10 pickles signals by their names
            return signal.Signals[last], None
        if full_name in self._functions:
            return self._functions[full_name], Maker(self._functions[full_name])
        if full_name in STORAGE_KINDS:
            return STORAGE_KINDS[full_name], None
        if full_name in MEGATRON_CLASSES or full_name in _OPTIMIZER_CLASSES:
            try:
                value = _import(full_name, self._import_classes)
            except (ImportError, AttributeError):
                return None
            if full_name in _OPTIMIZER_CLASSES:
                return value, None
            if issubclass(value, tuple):
                return value, _tuple_maker(value)
            return value, _enum_maker(value) if isinstance(value, enum.EnumMeta) else _attributes_maker(value)
        if full_name.startswith("torch.") and (known := _of_torch(full_name)) is not None:
            return known
        vouched = _registered_with_torch(full_name)
        if full_name in self._extra:
            try:
                vouched = _import(full_name, may_import=True)
            except (ImportError, AttributeError) as error:
                raise OptionError(
                    f"allowed_classes: {full_name!r} cannot be imported ({error}); install its package or correct "
                    "the name"
                ) from error
        if vouched is None:
            raise KeyError(full_name)
        return vouched, _vouched(vouched)

    def referred(self, reference: Any) -> Any:
        """A storage, as torch refers to it."""
        import torch

        record, dtype, nbytes = stored_storage(reference)
        if record not in self._storages:
            assert self._archive is not None
            content = bytearray(plain_content(self._archive, f"data/{record}"))
            flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            self._storages[record] = flat.untyped_storage()
        known = self._storages[record]
        if known.nbytes() != nbytes:
            raise CorruptCheckpointError(f"storage {record:.40}: {known.nbytes()} bytes, its pickle says {nbytes}")
        elem = getattr(torch, dtype or "uint8")
        return torch.storage.TypedStorage(wrap_storage=known, dtype=elem, _internal=True)  # type: ignore[no-untyped-call]

    def _rebuild_v2(
        self, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, flags: Any = None
    ) -> Any:
        return self._tensor(storage, getattr(storage, "dtype", None), (offset, size, stride), grad, hooks, flags)

    def _rebuild_v3(
        self, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, flags: Any = None
    ) -> Any:
        return self._tensor(storage, dtype, (offset, size, stride), grad, hooks, flags)

    def _rebuild_from_type(self, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        _wants(function in (self._rebuild_v2, self._rebuild_v3, self._parameter), "a tensor with attributes")
        _wants(type(arguments) is tuple, "arguments")
        return self._attributed(function(*arguments), kind, state)

    def _tensor(self, storage: Any, dtype: Any, place: tuple[Any, Any, Any], grad: Any, hooks: Any, flags: Any) -> Any:
        import torch

        _wants(type(storage) is torch.storage.TypedStorage and type(dtype) is torch.dtype, "a storage and a dtype")
        _wants(isinstance(hooks, dict) and not hooks and type(grad) is bool, "no hooks")
        untyped, name = storage._untyped_storage, str(dtype).removeprefix("torch.")  # noqa: SLF001 (`untyped()` warns)
        found = described(StorageReference("", name, untyped.nbytes()), name, *place)
        strides = found.strides or strides_of(found.shape)
        tensor = torch.empty((0,), dtype=dtype).set_(untyped, found.offset, found.shape, strides)
        if flags:
            _wants(type(flags) is dict and set(flags) <= {"conj", "neg"}, "conj or neg")
            told = {name: value is True for name, value in flags.items()}
            torch._utils.set_tensor_metadata(tensor, told)  # type: ignore[no-untyped-call]  # noqa: SLF001
        return tensor.requires_grad_(grad)

    def _parameter(self, data: Any, grad: Any, hooks: Any, state: Any = None) -> Any:
        import torch

        _wants(isinstance(data, torch.Tensor) and type(grad) is bool and not hooks, "a tensor")
        parameter = torch.nn.Parameter(data, grad)
        return parameter if state is None else self._attributed(parameter, torch.nn.Parameter, state)

    def _attributed(self, tensor: Any, kind: Any, state: Any) -> Any:
        import torch

        _wants(kind in (torch.Tensor, torch.nn.Parameter) and isinstance(tensor, kind), "a tensor with attributes")
        attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        _wants(not slots, "attributes without slots")
        tensor.__dict__.update(_attributes_of(attributes))
        return tensor


def _of_torch(full_name: str) -> tuple[Any, Maker | None] | None:
    """Dtypes, layouts and the like."""
    import torch

    def layout(name: Any) -> Any:
        found = vars(torch).get(name.removeprefix("torch.")) if type(name) is str else None
        _wants(isinstance(found, torch.layout), "the name of a layout")
        return found

    def size(values: Any = ()) -> Any:
        return torch.Size(checked_size(values))

    def device(kind: Any, number: Any = None) -> Any:
        _wants(type(kind) is str and len(kind) < 40 and (number is None or type(number) is int), "a device")
        return torch.device(kind) if number is None else torch.device(kind, number)

    value = vars(torch).get(full_name.removeprefix("torch."))
    if isinstance(value, (torch.dtype, torch.layout)):
        return value, None
    others: dict[str, tuple[Any, Maker | None]] = {
        "torch.Size": (torch.Size, Maker(size)),
        "torch.device": (torch.device, Maker(device)),
        "torch.serialization._get_layout": (layout, Maker(layout)),
        "torch.Tensor": (torch.Tensor, None),
        "torch.nn.parameter.Parameter": (torch.nn.Parameter, None),
    }
    return others.get(full_name)


_logger = logger_of(__name__)

# Among the classes that are allowed: a pickle may call whatever it names.
ANY_CLASS = "*"


def load_object(
    content: bytes | bytearray | memoryview,
    extra_allowed: Iterable[str] = (),
    *,
    where: str = "a stored object",
    verify_crc: bool = True,
) -> Any:
    """Unpickle what `torch.save` wrote, building nothing outside the allow-list. Tensors land on the CPU.

    `extra_allowed` classes (`"module.qualified_name"`) are imported when a pickle names them; `ANY_CLASS`: let it call
    whatever it names. `verify_crc`: compare every CRC-32 before anything is unpickled. Raises `UnsafePickleError`,
    `CorruptCheckpointError`, `LoadError` if code that is allowed fails, or `OptionError` if a class of `extra_allowed`
    cannot be imported.
    """
    content, extra_allowed = bytes(content), tuple(extra_allowed)
    try:
        if ANY_CLASS in extra_allowed:
            return _run_anything(content, where)
        archive = archive_of(content, where)
        if verify_crc:
            for record in archive.records.values():
                archive.content(record)
        if archive.find("byteorder") is not None and plain_content(archive, "byteorder") == b"big":
            raise CorruptCheckpointError(f"{where}: written on a big-endian machine")
        return unpickle(plain_content(archive, "data.pkl"), ObjectRules(archive, extra_allowed), where)
    except OptionError:
        raise
    # Damaged archives and the objects that are built of them can fail in any way at all.
    except Exception as error:
        if isinstance(error, LoadError) and type(error) is not CorruptCheckpointError:
            raise
        reason = str(error).splitlines()[0] if str(error) else ""
        raise CorruptCheckpointError(
            f"{where}: cannot be read as a torch.save container of plain data ({type(error).__name__}: {reason:.300}). "
            "The bytes are damaged or incomplete; restore them from another copy, or load an earlier checkpoint."
        ) from error


def plain_content(archive: Archive, name: str) -> bytes:
    """A record's content, its CRC-32 not compared."""
    record = archive.record(name)
    return archive.item.get(archive.start(record), record.stored_bytes)


def _run_anything(content: bytes, where: str) -> Any:
    import torch

    _logger.warning(
        "%s is unpickled without any restriction, because allowed_classes holds '*': it can do whatever you can do",
        where,
    )
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is raised as the cause)
        archive = archive_of(content, where)
        for record in archive.records.values():
            archive.content(record)
        failed = NotRebuiltError.of(error, "what is stored")
        failed.__cause__ = error
        raise failed.as_load_error(where) from failed


# ------------------------------------------------------------------------------------------- what is only looked at


class _DtypeName(str):
    __slots__ = ()


class TensorNotes(ObjectRules):
    """As for stored objects; tensors are noted, and what is not known is inert."""

    advice = ""

    def __init__(self) -> None:
        super().__init__(import_classes=False)

    def named(self, full_name: str) -> tuple[Any, Maker | None] | None:
        try:
            return super().named(full_name)
        except KeyError:
            return None

    def referred(self, reference: Any) -> StorageReference:
        return stored_storage(reference)

    def _tensor(
        self, storage: Any, dtype: Any, place: tuple[Any, Any, Any], grad: Any, hooks: Any, flags: Any
    ) -> FileTensor:
        if type(grad) is not bool or hooks or flags:
            raise NotPlainTensorError("a tensor with hooks or flags (conjugated, negated)")
        kind = type(dtype)  # a dtype of torch's, or its name; nothing else is printed, since it may be without end
        is_dtype = kind is _DtypeName or kind is str or (kind.__module__, kind.__name__) == ("torch", "dtype")
        return described(storage, str(dtype).removeprefix("torch.") if is_dtype else f"a {kind.__name__}", *place)

    def _parameter(self, data: Any, *_: Any) -> FileTensor:
        if type(data) is not FileTensor:
            raise WrongArgumentsError("a parameter of a tensor")
        return data

    def _attributed(self, tensor: Any, kind: Any, state: Any) -> Any:
        return tensor  # without attributes of Megatron's on it (`tensor_model_parallel`, ...)


BESIDE_TENSORS: Final[dict[str, tuple[Any, Maker | None]]] = {
    **{f"torch.{name}": (_DtypeName(name), None) for name in DTYPES},
    **{name: (name, None) for name in ("torch.Tensor", "torch.nn.parameter.Parameter")},
    "collections.OrderedDict": (dict, Maker(dict)),
}


class _LoadRules(TensorNotes):
    """Rules of a load that collect the names it refuses. Nothing is called that the user vouches for."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}

    def named(self, full_name: str) -> tuple[Any, Maker | None] | None:
        if full_name.startswith("torch.") and full_name in BESIDE_TENSORS:
            return BESIDE_TENSORS[full_name]
        try:
            found = ObjectRules.named(self, full_name)
        except KeyError:
            self.refused[full_name] = f"{full_name}, which is not among the classes that stored objects may contain"
            return None
        return None if found and found[1] and found[1].is_vouched else found

    def _tensor(
        self, storage: Any, dtype: Any, place: tuple[Any, Any, Any], grad: Any, hooks: Any, flags: Any
    ) -> FileTensor:
        return super()._tensor(storage, dtype, place, grad, hooks, None)  # loads take conjugated and negated ones

    def _attributed(self, tensor: Any, kind: Any, state: Any) -> Any:
        if kind not in BESIDE_TENSORS:
            raise WrongArgumentsError("expected a tensor or parameter, and no class of the user's")
        return tensor


def refusals(content: bytes | memoryview, where: str) -> dict[str, str]:
    """Parts of a stored object that loads refuse, in words, by the class that has to be allowed for each."""
    return _refused_in(_pickle_in(content, where), where)


def _pickle_in(content: bytes | memoryview, where: str) -> bytes | None:
    try:
        return plain_content(archive_of(content, where), "data.pkl")
    except Exception:  # noqa: BLE001  (what is damaged is told elsewhere)
        return None


def _refused_in(pickle: bytes | None, where: str) -> dict[str, str]:
    rules = _LoadRules()
    try:
        if pickle is not None:
            unpickle(pickle, rules, where)
    except CheckpointError as error:
        rules.refused[ANY_CLASS] = f"what loads do not read ({error.__cause__ or error})"
    return rules.refused


_looked_at: Final[dict[str, int]] = {}  # CRC-32 of the last pickle, by key
_told: Final[set[tuple[str, str]]] = set()


def warn_of_refused(key: str, content: bytes | memoryview) -> None:
    """Before an object is saved: warn, once of each class, if loads will refuse it."""
    pickle = _pickle_in(content, key)
    crc = crc32(pickle or b"")
    if _looked_at.get(key) == crc:
        return
    _looked_at[key] = crc
    for name, held in _refused_in(pickle, key).items():
        told = (name, key if name == ANY_CLASS else "")
        if told not in _told:
            _told.add(told)
            _logger.warning(
                "%s: holds %s: loads refuse it without MCORE_CKPT_ALLOWED_CLASSES=%s. Save plain values instead, or "
                "set that in the jobs that load",
                *(key, held, name),
            )
