"""The shell: a module for each sub-command of `mcore-ckpt`, with `add_arguments(parser)` and `run(arguments)`.

In: words of a command line.
Out: text or JSON, and an exit code (`Outcome`). What a command does is a function of `tools` or `convert`.
Must not know: bytes. Nothing is imported before the command that runs needs it.

Modules: cli, _cat, _conversions, _copy, _diff, _export, _import_, _inspect, _list, _prune, _repair, _reshard, _shell,
_verify.
"""
