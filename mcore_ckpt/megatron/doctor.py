"""What a training job on this machine would stumble over, found without one: `mcore-ckpt doctor`."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from mcore_ckpt.core.errors import OptionError, UnsupportedMegatronError
from mcore_ckpt.core.options import LoadOptions, SaveOptions, unknown_variables
from mcore_ckpt.megatron._versions import TESTED_VERSIONS, installed_version_text, megatron_version
from mcore_ckpt.megatron.contract import CONTRACT

_ALIGNED_BYTES = 4096


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
    return [*_software(), *_options(), _direct_io(directory), _staging_memory(), *_contract()]


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
    what = f"direct I/O in {directory}"
    folder = Path(directory)
    if not folder.is_dir():
        raise NotADirectoryError(f"{directory}: there is no such directory; name the one where checkpoints will lie")
    with (
        tempfile.NamedTemporaryFile(dir=folder, prefix=".mcore_ckpt_doctor") as file,
        mmap.mmap(-1, _ALIGNED_BYTES) as page,
    ):
        try:
            fd = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
            try:
                os.write(fd, page)
            finally:
                os.close(fd)
        except OSError as error:
            return Finding(what, "refused", f"{error.strerror}: files are written and read through the page cache")
    return Finding(what, "works")


def _staging_memory() -> Finding:
    """Asynchronous saves copy tensors into a memfd, which counts as shared memory."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            return Finding(
                "host memory for staging", f"{available / 1e9:.1f} GB", "asynchronous saves copy a rank's tensors there"
            )
    return Finding("host memory for staging", "unknown")


def _contract() -> list[Finding]:
    from mcore_ckpt.megatron.install import owner_of

    try:
        version = megatron_version()[:2]
    except UnsupportedMegatronError:
        return []
    found = []
    for name in CONTRACT:
        if not name.belongs_to(version):
            continue
        if owner_of(name) is not None:
            found.append(Finding(str(name), f"{name.use} by mcore_ckpt"))
        else:
            found.append(Finding(str(name), "missing", name.absence or "install() refuses", is_wrong=not name.absence))
    return found
