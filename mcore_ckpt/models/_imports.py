"""The last step of all imports: from payloads of a source to the plan of a `torch_dist` checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, encode_config
from mcore_ckpt.models.options import ImportOptions
from mcore_ckpt.reshard.conversion import Conversion, ConversionReport, KeyPlan, SourceFiles, in_dtype
from mcore_ckpt.reshard.options import PartitionRule
from mcore_ckpt.reshard.partition import Partitioner
from mcore_ckpt.reshard.plan import TargetLayout, make_plan
from mcore_ckpt.reshard.target_files import TargetFiles
from mcore_ckpt.reshard.view import TensorView, ViewPayloads
from mcore_ckpt.reshard.weight_files import encode_state
from mcore_ckpt.tools.payloads import StoredPayloads

_UNDIVIDED = TargetLayout(1, 1)


def layout_of(options: ImportOptions, source: TargetLayout = _UNDIVIDED) -> TargetLayout:
    """The sizes together, as the source has them where nothing was said; raises `OptionError` where they cannot be."""
    etp = options.etp if options.etp is not None or options.tp is not None else source.etp
    tp, pp, ep = (
        own if size is None else size
        for size, own in ((options.tp, source.tp), (options.pp, source.pp), (options.ep, source.ep))
    )
    return TargetLayout(tp, pp, ep, etp)


def import_conversion(
    payloads: StoredPayloads,
    options: ImportOptions,
    layout: TargetLayout,
    arguments: Mapping[str, Any],
    common: Callable[[set[str]], bytes],
    *,
    format: str,
    keys: Callable[[], Iterable[KeyPlan]],
    tensors: Mapping[str, TensorView] | None = None,
    objects: Mapping[str, Any] | None = None,
    rules: tuple[PartitionRule, ...] = (),
    **more: Any,
) -> Conversion:
    """Plan the target of an import. `common` gives the content of `common.pt` for the dtypes of the target's tensors.
    `tensors` of the target: None for those of the source; `more`: further fields of `ConversionReport`.
    """
    files = SourceFiles(payloads.index)
    if tensors is not None:
        # Many of the objects are one and the same.
        contents = {id(value): encode_state(value) for value in (objects or {}).values()}
        payloads = ViewPayloads(payloads, tensors, {key: contents[id(value)] for key, value in (objects or {}).items()})
    payloads = in_dtype(payloads, options.dtype)
    index = payloads.index
    partitioner = Partitioner(index, rules=rules, arguments=arguments, chunks_tell=tensors is None)
    plan = make_plan(index, layout, partitioner, workers=options.workers, arguments=arguments)

    def carry(target: TargetFiles) -> None:
        target.put(CONFIG_FILE, encode_config())
        target.put(COMMON_FILE, common({entry.dtype for entry in index.tensors.values()}))

    return Conversion(
        payloads=payloads,
        source=files,
        plan=plan.target,
        keys=keys,
        report=ConversionReport(
            format=format, target_layout=str(layout), arguments=arguments, objects=len(objects or ()), **more
        ),
        carry=carry,
        carried=(CONFIG_FILE, COMMON_FILE),
    )
