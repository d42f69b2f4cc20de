"""The sub-commands of `mcore-ckpt`, one module each: `add_arguments(parser)`, and `run(arguments) -> Outcome`.

What a command does lives in the package proper, as an API; here are its arguments and how its result is shown.
"""
