"""The seed's comparison: launches of two runs, matched by kernel, layer and position.

`compare_traces` is a pure function of two lists of traces. Equal means the same bits, as far as
checksums or fingerprints saw them; how large a difference may be is the matter of `comparison`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from brickline.checksums import DivergenceInfo, KernelChecksum, layer_words
from brickline.comparison.traces.sides import Identity, TraceSide
from brickline.errors import UsageError
from brickline.fingerprints import Fingerprint, distance
from brickline.traces import KernelTrace
from brickline.verdict import (
    Coverage,
    DivergenceReport,
    Finding,
    Verdict,
    VerdictRow,
    VerdictTable,
)

Key: TypeAlias = tuple[str, int | None, int]

_MEASURED = 100
"""Findings of which the error is read from the fingerprints; a person reads the first few."""
_UNKNOWABLE = "checksums and fingerprints alone cannot know z, share and repro"
_CAUSES = {
    True: "the same inputs gave another output",
    None: "the first output that differs; its inputs were not recorded",
}


class _Pair(NamedTuple):
    actual: int
    expected: int
    ordinal: int
    inputs_agree: bool | None
    """None where it is not known."""
    outputs_agree: bool | None


def compare_traces(
    candidate: Iterable[KernelTrace] | TraceSide, reference: Iterable[KernelTrace] | TraceSide
) -> DivergenceReport:
    """Hold each launch of the candidate against the reference's with the same key.

    The key is (kernel_name, layer_idx, position); where several launches of one side have the
    same, the first is held against the first, and so on. Outputs that differ make a launch a
    suspect where its inputs agree, or where its inputs are not known and nothing before it
    differs; where its inputs differ too, the difference was passed on.

    Returns:
        Diverged where there is a suspect; matched where every launch of both sides has a partner
        with the same output; otherwise inconclusive, as where outputs differ whose inputs all
        differed already. `first_divergent_kernel` is the first suspect, or without one the first
        launch that differs, and `kernels_compared` counts the pairs up to it, itself included.

    Raises:
        UsageError: if a side is not made of traces.
    """
    actual, expected = _side("candidate", candidate), _side("reference", reference)
    pairs, unmatched, duplicates = _match(actual, expected)
    verdicts = _verdicts(pairs)
    first = _first_divergent(verdicts)
    ours = None if first is None else actual.traces[pairs[first].actual]
    return DivergenceReport(
        candidate=actual.label("candidate"),
        reference=expected.label("reference"),
        findings=_findings(actual, expected, pairs, verdicts),
        verdicts=_table(actual, pairs, verdicts),
        coverage=_coverage(actual, pairs),
        unshown=tuple(_unshown(actual, expected, pairs, verdicts, unmatched)),
        unmatched=unmatched,
        duplicates=duplicates,
        whys=_whys(actual, pairs, verdicts, first),
        first_divergent_kernel=ours,
        expected_trace=None if first is None else expected.traces[pairs[first].expected],
        actual_trace=ours,
        kernels_compared=_compared(pairs if first is None else pairs[: first + 1]),
        diagnosis=_diagnosis(actual, expected, pairs, first, unmatched),
        total_time_us=actual.total_time_us,
        reference_total_time_us=expected.total_time_us,
    )


def first_divergence(
    actual: Iterable[KernelChecksum], expected: Iterable[KernelChecksum]
) -> DivergenceInfo | None:
    """Return the first checksum that is not that of the reference, or None.

    Launches that only one side has are passed over, so None alone does not show agreement;
    `compare_traces` says what was compared.
    """
    known: dict[Key, list[int]] = defaultdict(list)
    for name, layer_idx, position, checksum in _checksums(expected):
        known[name, layer_idx, position].append(checksum)
    seen: Counter[Key] = Counter()
    for name, layer_idx, position, checksum in actual:
        key = (name, layer_idx, position)
        place = seen[key]
        seen[key] += 1
        if place < len(known[key]) and known[key][place] != checksum:
            return DivergenceInfo(name, layer_idx, position, known[key][place], checksum)
    return None


def _checksums(given: Any) -> list[KernelChecksum]:
    """Return checksums that a caller hands in; tuples of the same four are as good."""
    rows = list(given) if isinstance(given, Iterable) else [given]
    for row in rows:
        if not isinstance(row, tuple) or len(row) != 4 or not isinstance(row[0], str):
            raise UsageError(
                "reference: expected KernelChecksums, as `get_checksums` returns them, or another "
                f"profiler, got {row!r:.80}"
            )
    return rows


# ----------------------------------------------------------------------------------------- matching


def _side(role: str, given: Iterable[KernelTrace] | TraceSide) -> TraceSide:
    if isinstance(given, TraceSide):
        return given
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise UsageError(f"{role}: expected traces, got {given!r:.60}")
    traces = tuple(given)
    for trace in traces:
        if not isinstance(trace, KernelTrace):
            raise UsageError(f"{role}: expected KernelTrace objects, got {trace!r:.60}")
    return TraceSide(traces)


def _match(
    actual: TraceSide, expected: TraceSide
) -> tuple[list[_Pair], tuple[str, ...], tuple[str, ...]]:
    """Return the pairs in the candidate's order, and who has no partner or shares its key."""
    mine, theirs = _by_key(actual), _by_key(expected)
    pairs, alone = [], []
    seen: Counter[Key] = Counter()
    for index, trace in enumerate(actual.traces):
        key = _key(trace)
        ordinal = seen[key]
        seen[key] += 1
        partners = theirs.get(key, ())
        if ordinal < len(partners):
            pairs.append(_pair(actual, index, expected, partners[ordinal], ordinal))
        else:
            alone.append(f"candidate: {_place(trace)}")
    for key, indices in theirs.items():
        for index in indices[len(mine.get(key, ())) :]:
            alone.append(f"reference: {_place(expected.traces[index])}")
    return pairs, tuple(alone), (*_duplicates("candidate", mine), *_duplicates("reference", theirs))


def _by_key(side: TraceSide) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = defaultdict(list)
    for index, trace in enumerate(side.traces):
        found[_key(trace)].append(index)
    return found


def _key(trace: KernelTrace) -> Key:
    return trace.kernel_name, trace.layer_idx, trace.position


def _place(trace: KernelTrace) -> str:
    return _place_of(_key(trace))


def _place_of(key: Key) -> str:
    name, layer, position = key
    return f"{name} ({layer_words(layer)}, position {position})"


def _duplicates(role: str, by_key: dict[Key, list[int]]) -> Iterator[str]:
    for key, indices in by_key.items():
        if len(indices) > 1:
            yield f"{role}: {_place_of(key)} ×{len(indices)}"


def _pair(actual: TraceSide, mine: int, expected: TraceSide, theirs: int, ordinal: int) -> _Pair:
    one, other = actual.traces[mine], expected.traces[theirs]
    return _Pair(
        mine,
        theirs,
        ordinal,
        _agree(
            (one.input_checksum, other.input_checksum),
            (_identity(actual.inputs, mine), _identity(expected.inputs, theirs)),
        ),
        _agree(
            (one.output_checksum, other.output_checksum),
            (_identity(actual.outputs, mine), _identity(expected.outputs, theirs)),
        ),
    )


def _identity(identities: Sequence[Identity], index: int) -> Identity | None:
    return (identities[index] or None) if identities else None


def _agree(*evidence: tuple[Any, Any]) -> bool | None:
    """Whether both are the same, by whatever was taken of both; None where nothing was."""
    taken = [one == other for one, other in evidence if one is not None and other is not None]
    return all(taken) if taken else None


# ------------------------------------------------------------------------------------------ judging


def _verdicts(pairs: Sequence[_Pair]) -> list[Verdict]:
    verdicts, is_first = [], True
    for pair in pairs:
        if pair.outputs_agree is None:
            verdicts.append(Verdict.UNKNOWN)
        elif pair.outputs_agree:
            verdicts.append(Verdict.IDENTICAL)
        else:
            verdicts.append(_verdict_of_difference(pair, is_first))
            is_first = False
    return verdicts


def _verdict_of_difference(pair: _Pair, is_first: bool) -> Verdict:
    if pair.inputs_agree is None:
        return Verdict.SUSPECT if is_first else Verdict.UNKNOWN
    return Verdict.SUSPECT if pair.inputs_agree else Verdict.PROPAGATED


def _first_divergent(verdicts: Sequence[Verdict]) -> int | None:
    for wanted in (Verdict.SUSPECT, Verdict.PROPAGATED):
        if wanted in verdicts:
            return verdicts.index(wanted)
    return None


def _compared(pairs: Sequence[_Pair]) -> int:
    return sum(pair.outputs_agree is not None for pair in pairs)


def _coverage(actual: TraceSide, pairs: Sequence[_Pair]) -> Coverage:
    notes = []
    without = sum(pair.outputs_agree is None for pair in pairs)
    if without:
        notes.append(f"{without} launches have no output checksum on one side or on both")
    partly = [
        pair for pair in pairs if pair.outputs_agree and not _identity(actual.outputs, pair[0])
    ]
    if partly:
        notes.append(f"of {len(partly)} outputs only the first 64 floats were compared (checksums)")
    return Coverage(_compared(pairs), len(actual.traces), tuple(notes))


# ------------------------------------------------------------------------------------------- saying


def _table(actual: TraceSide, pairs: Sequence[_Pair], verdicts: Sequence[Verdict]) -> VerdictTable:
    traces = [actual.traces[pair.actual] for pair in pairs]
    names = [trace.kernel_name for trace in traces]
    columns: dict[str, Sequence[Any]] = {
        **{field: [None] * len(pairs) for field in VerdictRow._fields},
        "name": names,
        "reference_name": names,
        "layer_idx": [trace.layer_idx for trace in traces],
        "position": [trace.position for trace in traces],
        "ordinal": [pair.ordinal for pair in pairs],
        "direction": ["forward"] * len(pairs),
        "verdict": list(verdicts),
    }
    return VerdictTable(columns)


def _findings(
    actual: TraceSide,
    expected: TraceSide,
    pairs: Sequence[_Pair],
    verdicts: Sequence[Verdict],
) -> tuple[Finding, ...]:
    """Return the suspects; without one, the first difference, which came from outside."""
    chosen = [index for index, verdict in enumerate(verdicts) if verdict is Verdict.SUSPECT]
    if not chosen and (first := _first_divergent(verdicts)) is not None:
        chosen = [first]
    return tuple(
        _finding(actual, expected, pairs[index], verdicts[index], is_measured=rank < _MEASURED)
        for rank, index in enumerate(chosen)
    )


def _finding(
    actual: TraceSide, expected: TraceSide, pair: _Pair, verdict: Verdict, *, is_measured: bool
) -> Finding:
    mine, theirs = actual.traces[pair.actual], expected.traces[pair.expected]
    error = _relative_l2(actual, expected, pair) if is_measured else None
    evidence = {"inputs": _inputs_text(pair)}
    for side, trace in (("actual", mine), ("expected", theirs)):
        if trace.output_checksum is not None:
            evidence[f"{side}_checksum"] = f"0x{trace.output_checksum:016X}"
    return Finding(
        name=mine.kernel_name,
        verdict=verdict,
        layer_idx=mine.layer_idx,
        position=mine.position,
        ordinal=pair.ordinal,
        local_error=error if pair.inputs_agree else None,
        propagated_error=error,
        cause=_CAUSES[pair.inputs_agree] if verdict is Verdict.SUSPECT else None,
        reference_name=theirs.kernel_name,
        reason=_UNKNOWABLE,
        evidence=evidence,
    )


def _inputs_text(pair: _Pair) -> str:
    return {True: "agree", False: "differ", None: "not recorded"}[pair.inputs_agree]


def _relative_l2(actual: TraceSide, expected: TraceSide, pair: _Pair) -> float | None:
    """Return the largest relative L2 over the outputs, from both sides' fingerprints."""
    if actual.records is None or expected.records is None:
        return None
    mine, theirs = actual.records(pair.actual), expected.records(pair.expected)
    if not mine or len(mine) != len(theirs):
        return None
    errors = []
    for one, other in zip(mine, theirs, strict=True):
        ours, their = Fingerprint.from_bytes(one), Fingerprint.from_bytes(other)
        if ours.shape != their.shape:
            return None
        errors.append(float(distance(ours, their).relative_l2))
    return max(errors)


def _unshown(
    actual: TraceSide,
    expected: TraceSide,
    pairs: Sequence[_Pair],
    verdicts: Sequence[Verdict],
    unmatched: tuple[str, ...],
) -> Iterator[str]:
    first = _first_divergent(verdicts)
    if first is not None and verdicts[first] is Verdict.PROPAGATED:
        place = _place(actual.traces[pairs[first].actual])
        yield f"{place} differs first, and its inputs differed already"
    elif not pairs or unmatched or _compared(pairs) < len(pairs):
        yield _diagnosis(actual, expected, pairs, None, unmatched)


def _whys(
    actual: TraceSide,
    pairs: Sequence[_Pair],
    verdicts: Sequence[Verdict],
    guilty: int | None,
) -> tuple[str, ...]:
    if guilty is None:
        return ()
    counts = Counter(verdicts)
    different = sum(pair.outputs_agree is False for pair in pairs)
    whys = [f"{different} of {_compared(pairs)} outputs differ."]
    if counts[Verdict.PROPAGATED]:
        whys.append(f"{counts[Verdict.PROPAGATED]} of them had inputs that differed already.")
    place = _place(actual.traces[pairs[guilty].actual])
    whys.append(f"The inputs of {place} {_inputs_verb(pairs[guilty])}.")
    return tuple(whys)


def _inputs_verb(pair: _Pair) -> str:
    return {True: "agree", False: "differ", None: "were not recorded"}[pair.inputs_agree]


def _diagnosis(
    actual: TraceSide,
    expected: TraceSide,
    pairs: Sequence[_Pair],
    guilty: int | None,
    unmatched: tuple[str, ...],
) -> str:
    if guilty is not None:
        return _diagnosis_of_difference(actual, expected, pairs[guilty])
    for role, side in (("candidate", actual), ("reference", expected)):
        if not side.traces:
            note = side.note or "record launches with trace() or add_trace()"
            return f"inconclusive: the {role} has no traces; {note}"
    if not pairs:
        return (
            f"inconclusive: nothing in common: none of {len(actual.traces)} launches of the "
            f"candidate has the kernel name, layer and position of any of {len(expected.traces)} "
            "of the reference"
        )
    ours, theirs = actual.label("candidate"), expected.label("reference")
    compared = _compared(pairs)
    if compared == len(pairs) and not unmatched:
        return f"all {compared} kernels matched between {ours} and {theirs}"
    missing = [f"{len(pairs) - compared} without an output checksum"] * (compared < len(pairs))
    missing += [f"{len(unmatched)} without a partner"] * bool(unmatched)
    return (
        f"inconclusive: {compared} kernels matched between {ours} and {theirs}, but there are "
        f"launches that could not be compared: {' and '.join(missing)}"
    )


def _diagnosis_of_difference(actual: TraceSide, expected: TraceSide, pair: _Pair) -> str:
    mine, theirs = actual.traces[pair.actual], expected.traces[pair.expected]
    facts = [_difference(mine, theirs)]
    error = _relative_l2(actual, expected, pair)
    if error is not None:
        facts.append(f"relative L2 {error:.2e}")
    facts.append(f"inputs {_inputs_verb(pair)}")
    for role, trace in (("candidate", mine), ("reference", theirs)):
        if trace.params and (role == "candidate" or theirs.params != mine.params):
            facts.append(f"params of the {role}: {trace.params}")
    place = f"({layer_words(mine.layer_idx)}, position {mine.position})"
    return f'DIVERGENCE: kernel "{mine.kernel_name}" {place}: {"; ".join(facts)}'


def _difference(mine: KernelTrace, theirs: KernelTrace) -> str:
    ours, their = (f"{trace.backend or 'unknown backend'}" for trace in (mine, theirs))
    if mine.output_checksum is None or theirs.output_checksum is None:
        return f"{their} (reference) fingerprint != {ours} (candidate) fingerprint"
    if mine.output_checksum == theirs.output_checksum:
        return (
            f"{their} (reference) and {ours} (candidate) agree in the first 64 floats, "
            f"0x{mine.output_checksum:016X}, and differ after them"
        )
    return (
        f"{their} (reference) checksum 0x{theirs.output_checksum:016X} != "
        f"{ours} (candidate) checksum 0x{mine.output_checksum:016X}"
    )
