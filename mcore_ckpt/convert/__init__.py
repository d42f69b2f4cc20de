"""A checkpoint on the disk to another: reshard, export, import.

In: a checkpoint, safetensors or torch files, and the layout or format that is wanted.
Out: a directory that appears by a rename when it is whole and proved.
Must not know: how a running job saves or loads.

Modules: conversion, exchange, logits, reshard, reshard_plan, rules, _file_stream, _foreign, _huggingface,
_legacy_export, _legacy_files, _legacy_import, _legacy_optimizer, _megatron_named, _new_directory, _optimizer_layout,
_partition, _pieces, _quantized, _read_ahead, _reshard_copy, _reshard_target, _safetensors_files, _shard_files,
_sources, _torch_files.
With torch: _torch_files.
"""
