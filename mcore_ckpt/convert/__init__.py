"""A checkpoint on the disk to another: reshard, export, import.

In: a checkpoint, safetensors or torch files, and the layout or format that is wanted.
Out: a directory that appears by a rename when it is whole and proved.
Must not know: how a running job saves or loads.

Modules: export, huggingface, import_, legacy, legacy_export, logits, megatron_named, reshard, reshard_plan, rules,
_deepspeed, _file_stream, _foreign_names, _foreign_optimizer, _legacy_files, _legacy_optimizer, _nemo, _new_directory,
_optimizer_layout, _partition, _pieces, _quantized, _reshard_copy, _reshard_target, _safetensors_files, _shard_files,
_sources, _torch_files.
With torch: legacy_export, _torch_files.
"""
