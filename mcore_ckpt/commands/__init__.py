"""The shell: for each sub-command of `mcore-ckpt` `add_COMMAND(parser)` and `run_COMMAND(arguments)`.

In: words of a command line.
Out: text or JSON, and an exit code (`Outcome`). What a command does is a function of `tools`, `reshard` or `models`.
Must not know: bytes. Nothing is imported before the command that runs needs it.
"""
