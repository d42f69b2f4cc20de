"""A checkpoint's directory as a whole: whose files they are, which checkpoint is in force, publishing, removing.

In: a storage, the names in it, and a finished `.metadata`.
Out: a directory that holds the old checkpoint or the new one, never a mix.
Must not know: how files are filled, ranks, Megatron.
"""
