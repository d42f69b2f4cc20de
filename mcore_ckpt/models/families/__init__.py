"""Families of models as Hugging Face and Megatron-Core know them: the names of parameters and of settings.

In: a `config.json` or Megatron's stored arguments, and how a checkpoint names its layers and experts.
Out: shapes on both sides, and links: slices of a tensor there that are slices of a tensor here.
Must not know: files, checkpoints, where any byte lies.
"""
