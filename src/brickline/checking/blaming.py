"""Who is to blame, where several modules had a hand in what is wrong.

One module that explains several wrong values is likelier than several that explain one each. Among
those left, one that does other operations than its siblings in other layers stands out; then the
first, because right values before it would have found their partner.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from brickline.checking.facts import Fact
from brickline.checking.pairing import is_boundary
from brickline.checking.recording import Recording
from brickline.checking.stage import family_of

FAINT = 1e-3
"""What is wrong by less than this part of what else is wrong says nothing about who did that."""


def blame(guilty: Sequence[Fact], recording: Recording) -> None:
    """Put the module to blame first among each fact's modules; note those that are as likely.

    Args:
        guilty: What is wrong, each with the modules that had a hand in it.
        recording: What the candidate made.
    """
    odd = odd_modules(recording) if any(len(each.modules) > 1 for each in guilty) else set()
    waiting = list(guilty)
    while waiting:
        loud = FAINT * max(each.ratios.relative_l2 for each in waiting)
        counts = Counter(
            path
            for fact in waiting
            for path in set(fact.modules)
            if not fact.ratios.relative_l2 < loud
        )
        order = {
            path: number
            for number, path in enumerate(
                dict.fromkeys(path for fact in waiting for path in fact.modules)
            )
        }
        ranks = {path: (counts[path], path in odd) for path in counts}
        chosen = max(counts, key=lambda path: (*ranks[path], -order[path]))
        for fact in [each for each in waiting if chosen in each.modules]:
            others = tuple(path for path in fact.modules if path != chosen)
            equals = [path for path in others if ranks.get(path) == ranks[chosen]]
            fact.notes["equals"] = equals
            fact.modules = (chosen, *others)
            waiting.remove(fact)


def odd_modules(recording: Recording) -> set[str]:
    """Return the modules that do other operations than most of their siblings."""
    programs: defaultdict[str, list[str]] = defaultdict(list)
    for value in recording.values:
        if not value.view and not is_boundary(value.key):
            programs[value.key.path].append(value.key.op)
    for path, _ in recording.callers:
        programs.setdefault(path, [])
    families: defaultdict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
    for path, program in programs.items():
        families[family_of(path)][path] = tuple(program)
    odd: set[str] = set()
    for members in families.values():
        common, count = Counter(members.values()).most_common(1)[0]
        if count > 1:
            odd.update(path for path, program in members.items() if program != common)
    return odd
