"""The launches that pages show, as a shell would take them apart."""

import shlex


def shown_launches(text: str) -> list[list[str]]:
    """The words of each `torchrun` line in a text; continued lines are joined, dots are left out."""
    joined = text.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    return [
        [word for word in shlex.split(line, comments=True) if word != "..."]
        for line in lines
        if line.startswith("torchrun ")
    ]
