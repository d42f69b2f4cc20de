"""Every exception that this package raises on purpose.

    CheckpointError
    |-- OptionError                 an option has a value that cannot work (also a ValueError)
    |-- UnsupportedMegatronError    the installed megatron-core is missing, too old, or changed under us
    |-- StrategyNotFoundError       no strategy is registered under that name (also a LookupError)
    |-- PlanError                   the shards do not add up: a chunk twice, missing, or out of bounds
    |-- SaveError                   a save failed; nothing was published
    |   |-- CheckpointExistsError   `on_existing="error"` and there is a checkpoint already (also a RuntimeError)
    |   |-- WriterDiedError         the writer process ended by signal or exit code
    |   `-- WriteTimeoutError       a write passed its deadline
    `-- LoadError
        |-- CheckpointNotFoundError no such directory, or no `.metadata` in it (also a FileNotFoundError)
        |-- MissingKeyError         the checkpoint has no tensor or object of that key (also a KeyError)
        |-- ShapeMismatchError      global shape stored and wanted differ
        |-- DtypeMismatchError      dtype stored and wanted differ
        |-- KindMismatchError       an object where a tensor is requested, or vice versa
        |-- NewerFormatError        written by a newer torch, Megatron-Core or mcore_ckpt than this one reads; no damage
        `-- CorruptCheckpointError  what lies on the disk cannot be right
            |-- ChecksumError       the CRC-32 stored with a record is not that of its bytes
            `-- UnsafePickleError   a pickle names something outside the allow-list

Messages say what happened, where (rank, key, file, byte range), what was expected and what was there, and what to do
next. Errors of third parties are mapped once, where they enter; the original stays as `__cause__`.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ChecksumError",
    "CorruptCheckpointError",
    "DtypeMismatchError",
    "KindMismatchError",
    "LoadError",
    "MissingKeyError",
    "NewerFormatError",
    "OptionError",
    "PlanError",
    "SaveError",
    "ShapeMismatchError",
    "StrategyNotFoundError",
    "UnsafePickleError",
    "UnsupportedMegatronError",
    "WriteTimeoutError",
    "WriterDiedError",
]


IF_DAMAGED: Final = (
    "`mcore-ckpt repair --from` takes the bytes from another copy, and a job with MCORE_CKPT_ON_DAMAGED=go_back loads "
    "an earlier checkpoint"
)
"""How the message of a damaged file ends: what to do next."""


class CheckpointError(Exception):
    """Root of this package's exceptions."""


class OptionError(CheckpointError, ValueError):
    """An option, or a combination of options, that cannot work."""


class UnsupportedMegatronError(CheckpointError):
    """megatron-core is not installed, or is a version that this package cannot serve."""


class StrategyNotFoundError(CheckpointError, LookupError):
    """No strategy is registered for that action, backend and version."""


class PlanError(CheckpointError):
    """The shards of the ranks do not make up the global tensors exactly."""


class SaveError(CheckpointError):
    """A save failed on some rank; the checkpoint was not published."""


class CheckpointExistsError(SaveError, RuntimeError):
    """The directory holds a checkpoint and `on_existing="error"` was asked for. DCP raises a `RuntimeError` there."""


class WriterDiedError(SaveError):
    """The writer process ended before its work was done."""


class WriteTimeoutError(SaveError):
    """A write did not finish within `write_deadline_s`."""


class LoadError(CheckpointError):
    """A load cannot be done as asked.

    Attributes:
        file: name of the data file that could not be used; None where it is another one, or none.
    """

    file: str | None = None


class CheckpointNotFoundError(LoadError, FileNotFoundError):
    """There is no checkpoint at that path."""


class MissingKeyError(LoadError, KeyError):
    """The checkpoint holds nothing under a key that was asked for."""

    def __str__(self) -> str:
        # KeyError shows repr(message); a message meant for people is shown as it is.
        return Exception.__str__(self)


class ShapeMismatchError(LoadError):
    """A stored tensor has another global shape than the one asked for."""


class DtypeMismatchError(LoadError):
    """A stored tensor has another dtype than the one asked for."""


class KindMismatchError(LoadError):
    """An object is stored where a tensor is requested, or vice versa."""


class NewerFormatError(LoadError):
    """Something newer wrote the checkpoint; this version cannot read it. Nothing says that it is damaged."""


class CorruptCheckpointError(LoadError):
    """Stored bytes contradict the format: truncated, overlapping, out of bounds, or not what they claim to be."""


class ChecksumError(CorruptCheckpointError):
    """A record's bytes do not have the CRC-32 that is stored with them."""


class UnsafePickleError(CorruptCheckpointError):
    """A pickle asks for a class or function outside the allow-list."""
