"""Models: the same parameters under the names and in the files of Megatron-Core, Hugging Face and other frameworks.

In: a checkpoint of one of them, its configuration or arguments.
Out: views of stored tensors under other keys, objects and common state, written by `target` and `reshard`.
Must not know: how a running job saves or loads. A trainer never imports this package.
"""
