"""Models: the same parameters under the names and in the files of Megatron-Core, Hugging Face and other frameworks.

In: a checkpoint of one of them, its configuration or arguments.
Out: views of stored tensors under other keys, objects and common state, written by `target` and `reshard`.
Must not know: how a running job saves or loads. A trainer never imports this package.

Modules: conversions, families._computation, families._deepseek, families._dense, families._gemma, families._gpt2,
families._gpt_oss, families._mixtures, families._registry, families._rotary, families._rows, families._settings,
families._starcoder2, families._table, families._values, logits, options, _foreign, _huggingface, _imports,
_legacy_export, _legacy_files, _legacy_import, _legacy_optimizer, _megatron_fsdp, _megatron_named, _nemo, _quantized,
_safetensors_files, _sources, _torch_files.
"""
