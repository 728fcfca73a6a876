"""The names of a plan in the words of an error: what there is, and what a caller may have meant.

Knows names alone, nothing of what they stand for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

MOST_CHARACTERS = 400
"""Longer lists of names are cut; a decoder has hundreds of buffers."""


def unknown_buffer(
    plan: str, name: object, buffers: Collection[str], variables: Collection[str]
) -> str:
    """Say that a plan has no buffer of a name, what it has instead, and what may be meant.

    Args:
        plan: The plan's name.
        name: What was given as the name of a buffer.
        buffers: Names of its buffers.
        variables: Names of its variables.
    """
    if not isinstance(name, str):
        known = getattr(name, "name", None)
        hint = f"; pass its name, {known!r}" if isinstance(known, str) else ""
        return f"plan {plan}: expected the name of a buffer as text, got {name!r:.80}{hint}"
    if name in variables:
        return (
            f"plan {plan} has no buffer {name!r}: that is a variable, which a run is given, "
            f"prepared({name}=...), and prepared.values has"
        )
    return (
        f"plan {plan} has no buffer {name!r}; it has {listed(buffers, 'buffers')} and "
        f"{listed(variables, 'variables')}{nearest(name, [*buffers, *variables])}"
    )


def listed(names: Collection[str], what: str) -> str:
    """Return names in a row, the first of many; without any, that there are none.

    Example:
        >>> listed(["x", "y"], "buffers"), listed(["n"], "variables"), listed([], "variables")
        ('x, y', 'the variable n', 'no variables')
    """
    if not names:
        return f"no {what}"
    shown: list[str] = []
    length = 0
    for name in names:
        length += len(name) + 2
        if shown and length > MOST_CHARACTERS:
            break
        shown.append(name)
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    kind = "" if what == "buffers" else f"the {what if len(names) > 1 else what[:-1]} "
    return f"{kind}{', '.join(shown)}{more}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the one of the known names that looks like another as a question, or nothing.

    Example:
        >>> nearest("gaet", ["gate", "up"]), nearest("N", ["n"]), nearest("other", ["n"])
        ("; did you mean 'gate'?", "; did you mean 'n'?", '')
    """
    spelled = {each.lower(): each for each in known}
    close = get_close_matches(name.lower(), spelled, n=1, cutoff=0.6)
    return f"; did you mean {spelled[close[0]]!r}?" if close else ""
