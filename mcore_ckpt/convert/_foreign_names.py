"""What other frameworks call the tensors of a model: its parameters' names with something before them or in them.

A checkpoint of `torch.distributed.checkpoint` holds whatever state dict was given to it: `model.layers.0...`,
`app.model.model.layers.0...`, `module.model.layers.0...`. So no prefix is known beforehand; it is what stands before
the names that a model has in most keys.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

__all__ = ["is_foreign_optimizer_key", "plain_names", "without_wrappers"]

# Put into names by wrappers of modules: torch.compile, activation checkpointing, FSDP.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_OPTIMIZER = re.compile(r"(?:^|\.)(?:optim|optimizers?|chained_\d+)\.")


def is_foreign_optimizer_key(key: str) -> bool:
    """Whether a key belongs to an optimizer's state, whatever stands before it."""
    return _OPTIMIZER.search(key) is not None


def without_wrappers(key: str) -> str:
    """A key without what wrappers of modules put into it."""
    return _WRAPPERS.sub("", key)


def plain_names(keys: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Stored keys by the names that a model has for them.

    Args:
        keys: as stored, without the optimizer's.
        known: the names that the model has.

    Returns:
        Every key is in it: one that has no known name under what it is called without wrappers and without what
        stands before the known names in most of the keys, or, of two keys that would get one name, as stored.
    """
    bare = {key: without_wrappers(key) for key in keys}
    found: Counter[str] = Counter()
    for name in bare.values():
        at = 0
        while name[at:] not in known:
            at = name.find(".", at) + 1
            if not at:
                break
        else:
            found[name[:at]] += 1
    prefix = min(found, key=lambda text: (-found[text], len(text)), default="")
    names: dict[str, str] = {}
    for key, name in bare.items():
        new = name.removeprefix(prefix)
        names[key if new in names else new] = key
    return names
