"""What a training job on this machine would stumble over, found without one: `mcore-ckpt doctor`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from mcore_ckpt.core.errors import OptionError, UnsupportedMegatronError
from mcore_ckpt.core.options import LoadOptions, SaveOptions, unknown_variables
from mcore_ckpt.core.process import free_host_bytes
from mcore_ckpt.megatron._versions import TESTED_VERSIONS, installed_version_text, megatron_version
from mcore_ckpt.storage.base import ALIGNMENT_BYTES
from mcore_ckpt.storage.direct_io import aligned_buffer, enable


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        what: it is about.
        state: in a word or two.
        remark: what follows from it; may be empty.
        is_wrong: a job would fail.
    """

    what: str
    state: str
    remark: str = ""
    is_wrong: bool = False


def diagnose(directory: str) -> list[Finding]:
    """Everything that `install()` would find here, and how checkpoints in `directory` would be written.

    Raises:
        OSError: the directory cannot be written.
    """
    free = Finding(
        "host memory for staging", f"{free_host_bytes() / 1e9:.1f} GB", "asynchronous saves copy tensors there"
    )
    return [*_software(), *_options(), _direct_io(directory), free, *_contract()]


def _software() -> list[Finding]:
    import torch

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    found = [Finding("torch", torch.__version__, cuda)]
    try:
        version = megatron_version()[:2]
    except UnsupportedMegatronError as error:
        is_too_old = find_spec("megatron") is not None
        remark = str(error) if is_too_old else "torch.distributed.checkpoint is served without it"
        return [*found, Finding("megatron-core", "not served", remark, is_too_old)]
    newest = tuple(map(int, TESTED_VERSIONS[-1].split(".")[:2]))
    remark = f"tested: {TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}" if version > newest else "tested"
    found.append(Finding("megatron-core", installed_version_text(), remark))
    if find_spec("nvidia_resiliency_ext") is None:
        return [*found, Finding("nvidia-resiliency-ext", "not installed", "what Megatron imports of it is supplied")]
    return [*found, Finding("nvidia-resiliency-ext", metadata.version("nvidia-resiliency-ext"), "its queue is served")]


def _options() -> list[Finding]:
    found = [
        Finding(name, "no option", f"{alike} would be one" * bool(alike)) for name, alike in unknown_variables().items()
    ]
    for options in (SaveOptions, LoadOptions):
        try:
            options.from_environment()
        except OptionError as error:
            found.append(Finding("MCORE_CKPT_* variables", "refused", str(error), is_wrong=True))
    return found


def _direct_io(directory: str) -> Finding:
    if not Path(directory).is_dir():
        raise NotADirectoryError(f"{directory}: there is no such directory; name the one where checkpoints will lie")
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".mcore_ckpt_doctor") as file:
        works = _takes_direct_writes(file.fileno())
    remark = "" if works else "files are written and read through the page cache"
    return Finding(f"direct I/O in {directory}", "works" if works else "refused", remark)


def _takes_direct_writes(fd: int) -> bool:
    try:  # some file systems take the flag, and refuse the write
        return enable(fd) and os.pwrite(fd, aligned_buffer(ALIGNMENT_BYTES), 0) > 0
    except OSError:
        return False


def _contract() -> Iterator[Finding]:
    from mcore_ckpt.megatron.install import CONTRACT, owner_of

    with contextlib.suppress(UnsupportedMegatronError):  # which has been said
        version = megatron_version()[:2]
        for name in CONTRACT:
            if not name.belongs_to(version):
                continue
            if owner_of(name) is not None:
                yield Finding(str(name), f"{name.use} by mcore_ckpt")
            else:
                yield Finding(str(name), "missing", name.absence or "install() refuses", is_wrong=not name.absence)
