"""The families that there are, and which one a model belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.families._deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from mcore_ckpt.families._gemma import GEMMA
from mcore_ckpt.families._gpt2 import GPT2
from mcore_ckpt.families._gpt_oss import GPT_OSS
from mcore_ckpt.families._llama import LLAMA
from mcore_ckpt.families._mistral import MISTRAL
from mcore_ckpt.families._mixtral import MIXTRAL
from mcore_ckpt.families._qwen import QWEN2, QWEN3
from mcore_ckpt.families._qwen_moe import QWEN2_MOE, QWEN3_MOE
from mcore_ckpt.families.table import Family

__all__ = ["FAMILIES", "family_named", "family_of_arguments", "family_of_config"]

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    GPT2,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA,
    GPT_OSS,
)
"""In the order in which arguments are held against them."""


def family_named(name: str) -> Family:
    """A family by its name; raises `OptionError`."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise OptionError(f"arch {name!r}: expected one of auto, {', '.join(family.name for family in FAMILIES)}")


def family_of_config(config: Mapping[str, Any], where: str) -> Family:
    """The family that a `config.json` names; raises `OptionError`."""
    kind = config.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise OptionError(f"{where}: model_type {kind!r:.80} is not known here; expected one of {known}")


def family_of_arguments(arguments: Mapping[str, Any], where: str) -> Family:
    """The family that Megatron's arguments describe; raises `OptionError`."""
    for family in FAMILIES:
        if family.recognizes(arguments):
            return family
    raise OptionError(
        f"{where}: its stored arguments are those of no family known here; name one (--arch) or give the model's "
        "config.json (--hf-config)"
    )
