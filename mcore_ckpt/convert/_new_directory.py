"""A directory of files that appears under its name when all of them are written, whoever else wants that name.

For what holds no `.metadata`, by which it could be told that it is not whole. The work is done in
`TARGET.partial/ID`, where ID is that of a claim of `TARGET.partial`: nobody else ever writes there. Who takes the
claim over, since its holder is gone or was thought to be, gives the folder another name before anything in it is
removed. A holder that goes on all the same has nothing left to write to, and nothing to give the target's name to.

What was interrupted can be gone on with, if it keeps a journal: who comes next gives that folder its own name. A holder
that goes on all the same then writes, into files that are open, the bytes that belong there.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_ckpt.convert._reshard_copy import JOURNAL_FILE, Journal
from mcore_ckpt.convert._reshard_target import EXPORT_FOLDER, appear, claim_partial
from mcore_ckpt.core.errors import CheckpointError, OptionError, SaveError
from mcore_ckpt.directory.lock import DirectoryLock, is_lock_file
from mcore_ckpt.storage.resolve import storage_at

__all__ = ["new_directory"]


@contextmanager
def new_directory(target: Path, fingerprint: str | None = None) -> Iterator[tuple[Path, Journal | None]]:
    """A directory to write into, which becomes `target` on leaving the block, and is removed on an error.

    Args:
        target: it must not exist, or be empty.
        fingerprint: of what is made, which then has a journal: what an interrupted run has left of the same is in the
            directory, and stays there if this run is interrupted, or cannot write. Otherwise the directory is empty.

    Raises:
        OptionError: there is something else in the temporary directory.
        CheckpointExistsError: there is something at `target`.
        SaveError: somebody else is making `target`, or has taken over from here; or it cannot be written.
    """
    with claim_partial(target) as claim:
        partial = Path(claim.storage.location)
        folder = partial / claim.owner.save_id
        try:
            if fingerprint is not None:
                _take_up(partial, folder, fingerprint)
            _clear(partial, folder.name, {gone.save_id for gone in claim.after})
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise SaveError(f"{folder}: the directory cannot be made: {error.strerror or error}") from error
        kept = False
        try:
            if fingerprint is None:
                yield folder, None
            else:
                with Journal(folder, fingerprint) as journal:
                    try:
                        yield folder, journal
                    except CheckpointError as error:
                        kept = bool(journal.done) and isinstance(error, SaveError)
                        raise
                    except BaseException:
                        kept = bool(journal.done)
                        raise
                storage_at(folder).delete(JOURNAL_FILE)
            storage_at(folder).sync()
            claim.check()
            appear(folder, target)
        except SaveError:
            claim.check()  # says better what has happened, if the folder was taken away
            raise
        finally:
            if not kept:
                shutil.rmtree(folder, ignore_errors=True)
            _let_go(claim, partial)


def _take_up(partial: Path, folder: Path, fingerprint: str) -> None:
    """Give what an interrupted run has left of the same work the name of this run's folder."""
    for path in sorted(partial.iterdir()):
        if EXPORT_FOLDER.fullmatch(path.name) and "." not in path.name and (path / JOURNAL_FILE).is_file():
            try:
                with Journal(path, fingerprint) as journal:
                    same = bool(journal.done)
            except (OptionError, SaveError):
                continue  # other work, which goes
            if same:
                path.rename(folder)
                return


def _clear(partial: Path, own: str, gone: Collection[str]) -> None:
    """Remove the folders of earlier runs; what anybody else has is not, whatever it is called.

    Args:
        partial: the temporary directory.
        own: this run's folder.
        gone: claims that were taken over.

    Raises:
        OptionError: there is something else.
    """
    names = [path.name for path in partial.iterdir() if not is_lock_file(path.name) and path.name != own]
    foreign = [name for name in names if not _is_left_over(partial / name, gone)]
    for number, name in enumerate(set(names) - set(foreign)):
        # In one step, so that whoever has made it finds either all of it or nothing.
        removed = partial / f"{own}.gone{number}"
        (partial / name).rename(removed)
        shutil.rmtree(removed)
    if foreign:
        raise OptionError(
            f"{partial}: holds {min(foreign)}, which no export has left there (an unfinished reshard?); finish or "
            "remove that, or export to another name"
        )


def _is_left_over(path: Path, gone: Collection[str]) -> bool:
    """Whether something is the folder of an earlier run: of a claim, with a journal, or with nothing in it yet."""
    if path.is_symlink() or not path.is_dir() or not EXPORT_FOLDER.fullmatch(path.name):
        return False
    return path.name.partition(".")[0] in gone or (path / JOURNAL_FILE).is_file() or not any(path.iterdir())


def _let_go(claim: DirectoryLock, partial: Path) -> None:
    """Nothing is left that the next run would have to find by the claim's marker."""
    with contextlib.suppress(SaveError, OSError):
        claim.release()
    with contextlib.suppress(OSError):
        partial.rmdir()
