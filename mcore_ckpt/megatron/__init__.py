"""This package behind Megatron-Core, version by version: the only layer that imports it.

In: what Megatron's training code calls: strategies, common state, async queue, registry.
Out: the same under this package's saves and loads; `install()`, which puts them in place, and the way back.
Must not know: how bytes are laid out, read or written.

Modules: common_state, contract, fixed_layouts, install, nvrx, optimizer_state, registry, strategy, _async_queue,
_distribution, _errors, _fully_parallel, _go_back, _integrity, _joint_load, _one_save, _patches, _proof, _quantized,
_replaced, _validation, _versions.
With torch: common_state, install, nvrx, optimizer_state, strategy, _async_queue, _distribution, _errors,
_fully_parallel, _go_back, _integrity, _joint_load, _patches, _proof, _quantized, _replaced, _validation, _versions.
"""
