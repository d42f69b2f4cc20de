"""What stored objects may be made of: for each name that their pickles may hold, a constructor that checks its
arguments.

The names are those that Megatron-Core's checkpoints hold, and what `torch.load(weights_only=True)` knows. None of
the constructors can be called for a value that no save has written: arrays are made from bytes of exactly the right
length and of dtypes without Python objects, members of enums are looked up by value, tensors lie inside their
storages, and what the process shares (classes, dtypes, members) has no state to set. Members of classes that the user
vouches for, by `LoadOptions.allowed_classes` or torch's `add_safe_globals`, are made as pickle makes them.

`load_object` is the door for what `torch.save` wrote, stored objects and `common.pt`, to be used: unpickled without
running anything, tensors on the CPU. What is only looked at comes through `state_file.py`, the index through
`index_pickle.py`.
"""

from __future__ import annotations

import datetime
import enum
import importlib
import io
import math
import pathlib
import pickletools
import re
import signal
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    OptionError,
    UnsafePickleError,
)
from mcore_ckpt.format.tensor_pickle import (
    STORAGE_KINDS,
    Maker,
    WrongArgumentsError,
    check_keys,
    checked_size,
    inert_maker,
    name_today,
    rebuilding,
    stored_storage,
    unpickle,
)
from mcore_ckpt.format.tensor_pickle import NotRebuiltError as NotRebuiltError
from mcore_ckpt.format.zip_records import Archive, ItemBytes

# Where each global that a stored object may name is found, beyond torch's own; most are found under their own name.
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
    """Stands in for an instance of an allowed class whose package is not installed, or was not to be imported:
    `arguments` is what it was made with (of an enum member, its value), `state` its pickled state or None.
    """

    class_name = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.arguments, self.state = getattr(self, "arguments", ()), state

    def __repr__(self) -> str:
        return f"<{self.class_name}{getattr(self, 'arguments', ())!r}>"


class StorageBytes(Protocol):
    """The raw bytes of storages."""

    def __call__(self, key: str, nbytes: int) -> Any:
        """A writable buffer of the storage's `nbytes` bytes, little-endian; raises if it has not just as many."""


class ObjectRules:
    """What a stored object may name, with `extra_allowed` classes (`"module.qualified_name"`). Without
    `import_classes`, classes of packages not imported are replaced. `storage_bytes` gives the content of storages.
    """

    def __init__(
        self, where: str, extra_allowed: Collection[str], import_classes: bool, storage_bytes: StorageBytes
    ) -> None:
        self._where, self._extra, self._import_classes = where, extra_allowed, import_classes
        self._storage_bytes = storage_bytes
        self._storages: dict[str, Any] = {}
        self.refused: list[str] = []

    def named(self, module: str, name: str) -> tuple[Any, Maker | None]:
        full_name = f"{module}.{name}"
        if full_name in _BUILTIN_MAKERS:
            return _BUILTIN_MAKERS[full_name]
        if module == "signal" and name in signal.Signals.__members__:  # Python 3.10 pickles signals by their names
            return signal.Signals[name], None
        if full_name in ALLOWED_OBJECT_CLASSES:
            return self._allowed_class(full_name)
        if module.startswith("torch"):
            known = _torch_named(full_name)
            if known is not None:
                return known
        if full_name.startswith("torch._utils._rebuild_"):
            raise UnsafePickleError(
                f"{self._where}: holds a tensor that {full_name:.100} makes; sparse, quantized and meta tensors are "
                "not read. Save a dense tensor, or load with LoadOptions(allowed_classes=('*',)) if you trust it"
            )
        if full_name in self._extra:
            try:
                vouched = _import(full_name, may_import=True)
            except (ImportError, AttributeError) as error:
                raise OptionError(
                    f"allowed_classes: {full_name!r} cannot be imported ({error}); install its package or correct "
                    "the name"
                ) from error
            return vouched, _vouched(vouched)
        registered = _registered_with_torch(full_name)
        if registered is not None:
            return registered, _vouched(registered)
        self.refused.append(full_name)
        raise UnsafePickleError(f"{self._where}: contains {full_name:.200}")

    def referred(self, reference: Any) -> Any:
        """A storage, as torch refers to it."""
        import torch

        key, dtype, nbytes = stored_storage(reference)
        known = self._storages.get(key)
        if known is None:
            content = self._storage_bytes(key, nbytes)
            flat = torch.frombuffer(content, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
            known = self._storages[key] = flat.untyped_storage()
        if known.nbytes() != nbytes:
            raise WrongArgumentsError(f"storage {key!r:.40} as {nbytes} bytes, and as {known.nbytes()}")
        elem = getattr(torch, dtype or "uint8")
        return torch.storage.TypedStorage(wrap_storage=known, dtype=elem, _internal=True)  # type: ignore[no-untyped-call]

    def _allowed_class(self, full_name: str) -> tuple[Any, Maker | None]:
        target = ALLOWED_OBJECT_CLASSES[full_name]
        try:
            value = _import(target, self._import_classes or target.startswith(("numpy.", "torch.")))
        except (ImportError, AttributeError):
            stand_in = type("Unavailable", (Unavailable,), {"class_name": full_name})
            return stand_in, inert_maker(stand_in)
        if isinstance(value, enum.EnumMeta):
            return value, _enum_maker(value)
        return value, _MAKERS.get(target) or _attributes_maker(value)


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
        if found is None and issubclass(cls, enum.Flag) and type(value) is int and 0 < value == value & _all_flags(cls):
            found = cls(value)
        _wants(found is not None, f"the value of a member of {cls.__name__}")
        return found

    return Maker(member)


def _all_flags(cls: Any) -> int:
    flags = 0
    for flag in cls:
        flags |= flag.value
    return flags


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


def _vouched(value: Any) -> Maker:
    """What pickle would do with a class that the user allows."""

    def make(*arguments: Any) -> Any:
        with rebuilding(value):
            return value(*arguments)

    def build(instance: Any, state: Any) -> Any:
        with rebuilding(type(instance)):
            if hasattr(instance, "__setstate__"):
                instance.__setstate__(state)
                return instance
            state, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
            if state:
                instance.__dict__.update(state)
            for name, part in (slots or {}).items():
                setattr(instance, name, part)
            return instance

    def new(*arguments: Any) -> Any:
        with rebuilding(value):
            return value.__new__(value, *arguments)

    takes_members = hasattr(value, "append") or hasattr(value, "__setitem__")
    return Maker(make, build, takes_members=takes_members, new=new, is_vouched=True)


def _members(*arguments: Any) -> Any:
    """The one argument of a collection's constructor, which is copied."""
    _wants(len(arguments) <= 1, "at most one argument")
    members = arguments[0] if arguments else ()
    _wants(type(members) in (list, tuple, set, frozenset), "a list, tuple or set")
    return members


def _hashable_members(*arguments: Any) -> Any:
    members = _members(*arguments)
    check_keys(members)
    return members


def _pairs(*arguments: Any) -> Any:
    pairs = _members(*arguments)
    for pair in pairs:
        _wants(type(pair) in (list, tuple) and len(pair) == 2 and type(pair[0]) in (str, int, bytes), "pairs")
    return pairs


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


def _path(path: Any) -> Maker:
    def make(*parts: Any) -> Any:
        _wants(all(type(part) is str for part in parts), "parts of a path")
        return path(*parts)

    return Maker(make)


def _stream_built(stream: Any, state: Any) -> Any:
    _wants(type(state) is tuple and len(state) == 3 and type(state[0]) is bytes, "content and position")
    # A write far behind the end would fill the gap.
    _wants(type(state[1]) is int and 0 <= state[1] <= len(state[0]), "a position inside the content")
    stream.write(state[0])
    stream.seek(state[1])
    if state[2] is not None:
        stream.__dict__.update(_attributes_of(state[2]))
    return stream


def _stream(content: Any = b"") -> Any:
    _wants(type(content) is bytes, "bytes")
    return io.BytesIO(content)


def _date(kind: Any) -> Maker:
    def make(packed: Any, zone: Any = None) -> Any:
        _wants(
            type(packed) is bytes and len(packed) == {datetime.date: 4, datetime.datetime: 10}[kind], "a packed date"
        )
        _wants(zone is None or type(zone) is datetime.timezone, "a time zone")
        return kind(packed) if zone is None else kind(packed, zone)

    return Maker(make)


def _with_module_versions(made: Any, state: Any) -> Any:
    """The one attribute that `torch.nn.Module.state_dict` sets."""
    _wants(type(state) is dict and set(state) == {"_metadata"}, "the attributes of an OrderedDict")
    made._metadata = state["_metadata"]  # noqa: SLF001 (of an object that this has made)
    return made


_BUILTIN_MAKERS: dict[str, tuple[Any, Maker | None]] = {
    "collections.OrderedDict": (
        OrderedDict,
        Maker(lambda *a: OrderedDict(_pairs(*a)), _with_module_versions),
    ),
    "collections.Counter": (Counter, Maker(_counts)),
    "builtins.set": (set, Maker(lambda *a: set(_hashable_members(*a)))),
    "builtins.bytes": (bytes, _of(bytes)),  # without arguments: as protocol 2 writes empty ones
    "builtins.bytearray": (bytearray, Maker(_byte_array)),
    "builtins.complex": (complex, _of(complex, float, float)),
    "_codecs.encode": (_encoded, Maker(_encoded)),
}


# --------------------------------------------------------------------------------------------------------------- numpy


class _DtypeDraft:
    """A dtype before its state."""

    def __init__(self, code: str) -> None:
        self.code = code


class _ArrayDraft:
    """An array before its state."""


_DTYPE_CODE = re.compile(r"[biufcSUmM][0-9]{0,9}|\?|[<>=|]?[biufc][0-9]{1,2}")
_UNIT = re.compile(r"Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as|generic")


def _dtype(code: Any, *flags: Any) -> Any:
    _wants(type(code) is str and _DTYPE_CODE.fullmatch(code) is not None, "a dtype of numbers, text or times")
    _wants(len(flags) <= 2 and all(type(flag) in (bool, int) for flag in flags), "flags")
    return _DtypeDraft(code)


def _dtype_built(draft: Any, state: Any) -> Any:
    import numpy

    _wants(type(state) is tuple and len(state) in (8, 9) and type(state[0]) is int, "the state of a dtype")
    order, fields = state[1], state[2:5]
    _wants(order in ("<", ">", "|", "=") and fields == (None, None, None), "a dtype without fields")
    code = draft.code
    if code[0] in "SU" and code[1:] == "":
        _wants(type(state[5]) is int, "a width")
    if code[0] in "mM" and len(state) == 9 and state[8] is not None:
        metadata = state[8]
        _wants(type(metadata) is tuple and len(metadata) == 2 and type(metadata[1]) is tuple, "the unit of a time")
        unit, number = metadata[1][:2]
        unit = unit.decode() if type(unit) is bytes else unit
        _wants(type(unit) is str and _UNIT.fullmatch(unit) is not None and type(number) is int and number > 0, "a unit")
        code += "" if unit == "generic" else f"[{number}{unit}]"
    dtype = numpy.dtype(code)
    _wants(dtype.itemsize > 0 or dtype.kind in "SU", "a width")
    return dtype.newbyteorder(order) if order in "<>" else dtype


def _finished(dtype: Any) -> Any:
    """A numpy dtype that holds no Python objects."""
    import numpy

    dtype = numpy.dtype(dtype.code) if type(dtype) is _DtypeDraft else dtype
    _wants(isinstance(dtype, numpy.dtype) and dtype.kind in "biufcSUmM?" and not dtype.hasobject, "a dtype")
    return dtype


def _raw(content: Any) -> bytes:
    content = content.encode("latin1") if type(content) is str else content  # text where Python 2 wrote it
    _wants(type(content) is bytes or type(content) is bytearray, "the bytes of an array")
    return bytes(content)


def _array_draft(kind: Any, shape: Any, code: Any) -> Any:
    import numpy

    _wants(kind is numpy.ndarray and shape == (0,) and code in (b"b", "b"), "an empty array")
    return _ArrayDraft()


def _array_built(_draft: Any, state: Any) -> Any:
    import numpy

    _wants(type(state) is tuple and len(state) == 5 and type(state[3]) in (bool, int), "the state of an array")
    shape, dtype, content = checked_size(state[1]), _finished(state[2]), _raw(state[4])
    _wants(len(content) == math.prod(shape) * dtype.itemsize, f"{math.prod(shape) * dtype.itemsize} bytes")
    if not content:
        _wants(0 in shape, "texts of at least one character")
        return numpy.zeros(shape, dtype.newbyteorder("="), order="F" if state[3] else "C")
    array = numpy.frombuffer(content, dtype).reshape(shape, order="F" if state[3] else "C")
    return array.astype(dtype.newbyteorder("="))


def _scalar(dtype: Any, content: Any) -> Any:
    import numpy

    dtype, content = _finished(dtype), _raw(content)
    _wants(len(content) == dtype.itemsize, f"{dtype.itemsize} bytes")
    return numpy.frombuffer(content, dtype)[0] if content else dtype.type()


# --------------------------------------------------------------------------------------------------------------- torch


def _torch_named(full_name: str) -> tuple[Any, Maker | None] | None:
    return _torch_names().get(full_name)


def _torch_names() -> Mapping[str, tuple[Any, Maker | None]]:
    global _torch_table
    if _torch_table is None:
        _torch_table = _make_torch_table()
    return _torch_table


_torch_table: dict[str, tuple[Any, Maker | None]] | None = None


def _make_torch_table() -> dict[str, tuple[Any, Maker | None]]:
    import torch

    table: dict[str, tuple[Any, Maker | None]] = {
        f"torch.{name}": (value, None)
        for name, value in vars(torch).items()
        if isinstance(value, (torch.dtype, torch.layout))
    }
    table |= STORAGE_KINDS
    layouts = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}

    def layout(name: Any) -> Any:
        _wants(type(name) is str and name in layouts, "the name of a layout")
        return layouts[name]

    def device(kind: Any, number: Any = None) -> Any:
        _wants(type(kind) is str and len(kind) < 40 and (number is None or type(number) is int), "a device")
        return torch.device(kind) if number is None else torch.device(kind, number)

    table |= {
        "torch.Size": (torch.Size, Maker(_torch_size)),
        "torch.device": (torch.device, Maker(device)),
        "torch.serialization._get_layout": (layout, Maker(layout)),
        "torch.Tensor": (torch.Tensor, None),
        "torch.nn.parameter.Parameter": (torch.nn.Parameter, None),
    }
    for function in (*(_rebuild_tensor_v2, _rebuild_tensor_v3, _rebuild_parameter, _rebuild_parameter_with_state),):
        table[f"torch._utils.{function.__name__}"] = (function, Maker(function))
    table["torch._tensor._rebuild_from_type_v2"] = (_rebuild_from_type_v2, Maker(_rebuild_from_type_v2))
    return table


def _torch_size(values: Any = ()) -> Any:
    import torch

    values = checked_size(values)
    return torch.Size(values)


def _wants_storage(value: Any) -> None:
    import torch

    _wants(type(value) is torch.storage.TypedStorage, "a storage")


def _check_place(storage: Any, dtype: Any, offset: Any, size: Any, stride: Any) -> tuple[int, Any, Any]:
    """Offset, sizes and strides (in elements) of a tensor that lies inside its storage."""
    _wants_storage(storage)
    (offset,), size, stride = checked_size((offset,)), checked_size(size), checked_size(stride)
    _wants(len(size) == len(stride), "as many strides as sizes")
    last = -1 if 0 in size else offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    held = storage._untyped_storage.nbytes() // dtype.itemsize  # noqa: SLF001  (`untyped()` warns)
    _wants(last < held, f"elements up to {last} inside a storage of {held}")
    return offset, size, stride


def _check_hooks(hooks: Any, requires_grad: Any) -> None:
    _wants(isinstance(hooks, dict) and not hooks and type(requires_grad) is bool, "no hooks")


def _place_tensor(storage: Any, dtype: Any, offset: Any, size: Any, stride: Any, metadata: Any = None) -> Any:
    import torch

    offset, size, stride = _check_place(storage, dtype, offset, size, stride)
    tensor = torch.empty((0,), dtype=dtype).set_(storage._untyped_storage, offset, size, stride)  # noqa: SLF001
    if metadata:
        _wants(type(metadata) is dict and set(metadata) <= {"conj", "neg"}, "conj or neg")
        flags = {name: value is True for name, value in metadata.items()}
        torch._utils.set_tensor_metadata(tensor, flags)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return tensor


def _rebuild_tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None
) -> Any:
    _check_hooks(hooks, grad)
    _wants_storage(storage)
    return _place_tensor(storage, storage.dtype, offset, size, stride, metadata).requires_grad_(grad)


def _rebuild_tensor_v3(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Any:
    import torch

    _check_hooks(hooks, grad)
    _wants(type(dtype) is torch.dtype, "a dtype")
    return _place_tensor(storage, dtype, offset, size, stride, metadata).requires_grad_(grad)


def _rebuild_parameter(data: Any, grad: Any, hooks: Any) -> Any:
    import torch

    _check_hooks(hooks, grad)
    _wants(isinstance(data, torch.Tensor), "a tensor")
    return torch.nn.Parameter(data, grad)


def _rebuild_parameter_with_state(data: Any, grad: Any, hooks: Any, state: Any) -> Any:
    return _with_state(_rebuild_parameter(data, grad, hooks), state)


def _rebuild_from_type_v2(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    import torch

    maker = next((maker for value, maker in _torch_names().values() if value is function and maker is not None), None)
    _wants(maker is not None and kind in (torch.Tensor, torch.nn.Parameter), "a tensor with attributes")
    _wants(type(arguments) is tuple, "arguments")
    assert maker is not None
    tensor = maker.make(*arguments)
    _wants(isinstance(tensor, kind), kind.__name__)
    return _with_state(tensor, state)


def _with_state(tensor: Any, state: Any) -> Any:
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    _wants(not slots, "attributes without slots")
    tensor.__dict__.update(_attributes_of(attributes))
    return tensor


def _generator(device: Any = None) -> Any:
    import torch

    _wants(device is None or type(device) is torch.device, "a device")
    return torch.Generator()


def _generator_built(generator: Any, state: Any) -> Any:
    import torch

    _wants(type(state) is tuple and len(state) == 3 and type(state[0]) is int, "the state of a generator")
    _wants(isinstance(state[2], torch.Tensor) and state[2].dtype == torch.uint8, "its bytes")
    _wants(state[2].numel() == generator.get_state().numel(), "as many bytes as a generator has")
    generator.manual_seed(state[0])
    generator.set_state(state[2].contiguous())
    return generator


def _registered_with_torch(full_name: str) -> Any:
    """A class that this process has told torch to load (`add_safe_globals`); None if it has not."""
    if full_name.startswith(("numpy.", "builtins.")):
        return None
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    for registered in torch.serialization.get_safe_globals():
        value, name = registered if isinstance(registered, tuple) else (registered, None)
        if full_name == (name or f"{value.__module__}.{getattr(value, '__qualname__', '')}"):
            return value
    return None


# ---------------------------------------------------------------------------------------------------- where names lead

# By target of ALLOWED_OBJECT_CLASSES; enums make their own, and the rest have attributes only.
_MAKERS: dict[str, Maker] = {
    "datetime.date": _date(datetime.date),
    "datetime.datetime": _date(datetime.datetime),
    "datetime.timedelta": _of(datetime.timedelta, int, int, int),
    "datetime.timezone": _of(datetime.timezone, datetime.timedelta, str),
    "builtins.slice": _of(slice, int, int, int),
    "builtins.range": _of(range, int, int, int),
    "builtins.frozenset": Maker(lambda *a: frozenset(_hashable_members(*a))),
    "numpy.ndarray": Maker(lambda *_: _wants(False, "an array from its state")),
    "numpy.dtype": Maker(_dtype, _dtype_built),
    "numpy.*core.multiarray._reconstruct": Maker(_array_draft, _array_built),
    "numpy.*core.multiarray.scalar": Maker(_scalar),
    "torch._C.Generator": Maker(_generator, _generator_built),
    "io.BytesIO": Maker(_stream, _stream_built),
    "pathlib.PosixPath": _path(pathlib.PosixPath),
}
_resolved: dict[str, Any] = {}


def _import(name: str, may_import: bool) -> Any:
    """The object that `name` stands for, imported if need be and if allowed."""
    if name in _resolved:
        return _resolved[name]
    path = name
    if path.startswith("numpy.*core"):
        import numpy

        path = path.replace("*core", "_core" if hasattr(numpy, "_core") else "core")
    parts = path.split(".")
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
            _resolved[name] = value
            return value
    raise ImportError(f"no module of {path} is {'installed' if may_import else 'imported'}")


_logger = logger_of(__name__)


# -------------------------------------------------------------------------------------------------------------- objects

_ANY_OBJECT = "a stored object"
# Among the classes that are allowed: a pickle may call whatever it names.
ANY_CLASS = "*"


def load_object(
    source: bytes | bytearray | memoryview | str | Path | BinaryIO,
    extra_allowed: Iterable[str] = (),
    *,
    where: str = _ANY_OBJECT,
    import_classes: bool = True,
    verify_crc: bool = True,
) -> Any:
    """Unpickle what `torch.save` wrote (bytes, file or path), building nothing outside the allow-list. Tensors land on
    the CPU.

    `extra_allowed` classes (`"module.qualified_name"`) are imported when a pickle names them; `ANY_CLASS`: let it call
    whatever it names. Without `import_classes`, classes of packages that are not imported yet become `Unavailable`.
    `verify_crc`: compare every CRC-32 before anything is unpickled. Raises `UnsafePickleError`,
    `CorruptCheckpointError`, `LoadError` if code that is allowed fails, or `OptionError` if a class of `extra_allowed`
    cannot be imported.
    """
    if isinstance(source, str | Path):
        where = str(source) if where == _ANY_OBJECT else f"{where} ({source})"
        try:
            content = Path(source).read_bytes()
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{where}: there is no such file; is the checkpoint complete?") from error
        except OSError as error:
            raise LoadError(f"{where}: cannot be read: {error.strerror or error}") from error
    else:
        content = bytes(source) if isinstance(source, bytes | bytearray | memoryview) else source.read()
    extra_allowed = tuple(extra_allowed)
    try:
        if ANY_CLASS in extra_allowed:
            return _run_anything(content, where)
        archive = archive_of(content, where)
        if verify_crc:
            for record in archive.records.values():
                archive.content(record)
        return _load(archive, where, extra_allowed, import_classes)
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


def archive_of(content: bytes, where: str) -> Archive:
    return Archive(ItemBytes(lambda offset, length: content[offset : offset + length], len(content), where))


def plain_content(archive: Archive, name: str) -> bytes:
    """A record's content, its CRC-32 not compared."""
    record = archive.record(name)
    return archive.item.get(archive.start(record), record.stored_bytes)


def _load(archive: Archive, where: str, extra_allowed: tuple[str, ...], import_classes: bool) -> Any:
    swapped = archive.find("byteorder") is not None and plain_content(archive, "byteorder") == b"big"

    def storage_bytes(key: str, nbytes: int) -> bytearray:
        content = bytearray(plain_content(archive, f"data/{key}"))
        if len(content) != nbytes or swapped:
            problem = (
                "written on a big-endian machine" if swapped else f"{len(content)} bytes, its pickle says {nbytes}"
            )
            raise CorruptCheckpointError(f"storage {key:.40}: {problem}")
        return content

    rules = ObjectRules(where, extra_allowed, import_classes, storage_bytes)
    return _run(plain_content(archive, "data.pkl"), rules, where)


def _run(data: bytes, rules: ObjectRules, where: str) -> Any:
    try:
        return unpickle(data, rules, where)
    except UnsafePickleError as error:
        if isinstance(error.__cause__, WrongArgumentsError):
            raise UnsafePickleError(
                f"{error} If you trust the origin of this checkpoint, load it with "
                "LoadOptions(allowed_classes=('*',)), which lets it run code as you"
            ) from error.__cause__
        if not rules.refused:
            raise
        refused = _refused_names(data, rules)
        shown = ", ".join(f"{name:.200}" for name in refused[:5]) + (", ..." if len(refused) > 5 else "")
        raise UnsafePickleError(
            f"{where}: contains {shown}, which is not among the classes that checkpoints may hold; nothing was loaded. "
            "If you trust the origin of this checkpoint, allow it with "
            f"LoadOptions(allowed_classes=({', '.join(f'{name!r:.200}' for name in refused[:5])},))"
        ) from error


def _refused_names(data: bytes, rules: ObjectRules) -> list[str]:
    """All names in a pickle that the rules refuse, as far as they stand in it in full."""
    names = set(rules.refused)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "GLOBAL" and isinstance(argument, str):
                module, name = name_today(*argument.partition(" ")[::2])
                try:
                    rules.named(module, name)
                except UnsafePickleError:
                    names.add(f"{module}.{name}")
    except (ValueError, UnicodeDecodeError, OptionError):
        pass  # damaged further on
    return sorted(names)


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
