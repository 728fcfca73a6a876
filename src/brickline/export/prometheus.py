"""A run as Prometheus metrics: families of samples and histograms, and their text exposition.

Owns the names, which are stable and carry their units, and the text format. `prometheus_protobuf`
writes the same families for scrapers that ask for it. It makes figures of a Profile and measures
nothing.

Durations are histograms in seconds with a bucket per octave, ``2^k`` ns: those edges are edges of
the run's own buckets, so every count is exact, and they are the same in every run, so series can be
added. A native histogram holds all of the run's buckets. Its edges are ``2^(i/16)`` of its unit,
which for nanoseconds are the run's own, so it is a family in nanoseconds; in seconds they would lie
elsewhere and counts would have to be guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from typing import TypeAlias

import numpy as np

from brickline.abi import HIST_SCALE
from brickline.histogram import Histogram
from brickline.profile import Profile
from brickline.stats import BrickStats

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels: TypeAlias = tuple[tuple[str, str], ...]

OCTAVES = range(7, 38)
"""Buckets end at 2^k ns for these k: 128 ns to 137 s."""
PER_OCTAVE = 1 << HIST_SCALE


@dataclass(frozen=True)
class Sample:
    """One value."""

    labels: Labels
    value: float


@dataclass(frozen=True)
class Durations:
    """One histogram: what its entries add up to, and their buckets."""

    labels: Labels
    histogram: Histogram
    sum_ns: int

    def below(self) -> Iterator[tuple[float, int]]:
        """Return upper edges in seconds, and how many entries are not longer."""
        reached = np.concatenate([[0], np.cumsum(self.histogram.counts.astype(np.int64))])
        for octave in OCTAVES:
            # Bucket i ends at 2^((i + 1)/16), so those up to an octave's end have i < 16 * octave.
            at = int(np.searchsorted(self.histogram.indices, octave * PER_OCTAVE))
            yield 2**octave / 1e9, int(reached[at]) + self.histogram.zero_count


@dataclass(frozen=True)
class Family:
    """A metric: its name, what it is, and its values."""

    name: str
    help: str
    kind: str
    """``counter``, ``gauge`` or ``histogram``."""
    samples: list[Sample] = field(default_factory=list)
    durations: list[Durations] = field(default_factory=list)
    native: bool = False
    """Whether the histograms are native ones in ns, which text cannot show."""


def families_of_profile(profile: Profile) -> list[Family]:
    """Return every metric of a run."""
    found = [
        *_about(profile),
        *_bricks(profile),
        *_steps(profile),
        *_recording(profile),
    ]
    return [family for family in found if family.samples or family.durations]


def _about(profile: Profile) -> Iterator[Family]:
    labels = (("name", profile.name), ("run", str(profile.manifest.get("id", ""))))
    yield Family("brickline_run_info", "The run that is shown.", "gauge", [Sample(labels, 1)])
    yield Family(
        "brickline_run_live",
        "1 while some process records into the run.",
        "gauge",
        [Sample((), int(profile.is_live))],
    )
    yield Family(
        "brickline_run_problems",
        "Damaged parts and failures of brickline, which are not in the figures.",
        "gauge",
        [Sample((), len(profile.problems))],
    )
    yield Family(
        "brickline_run_coverage_ratio",
        "Part of the steps' time that is inside bricks.",
        "gauge",
        [] if profile.coverage is None else [Sample((), profile.coverage)],
    )
    facts = [Sample((("fact", name),), value) for name, value in sorted(profile.facts.items())]
    yield Family("brickline_fact", "Numbers noted during the run.", "gauge", facts)


def _bricks(profile: Profile) -> Iterator[Family]:
    rows = [(_brick_labels(row), row) for row in profile.brick_layers]
    yield from _histograms("brick", "an entry of a brick, what is inside included", rows)
    sums = (
        ("entries_total", "Entries of a brick, timed or not.", "count", 1.0),
        ("exclusive_seconds_total", "Time in a brick and in no inner one.", "exclusive_ns", 1e-9),
        ("elements_total", "Elements of all entries.", "total_elements", 1.0),
        ("read_bytes_total", "Declared bytes into timed entries.", "total_bytes", 1.0),
        ("written_bytes_total", "Declared bytes out of them.", "total_compressed_bytes", 1.0),
        ("flops_total", "Declared floating-point operations of them.", "total_flops", 1.0),
    )
    for name, words, column, unit in sums:
        samples = [Sample(labels, getattr(row, column) * unit) for labels, row in rows]
        yield Family(f"brickline_brick_{name}", words, "counter", samples)


def _steps(profile: Profile) -> Iterator[Family]:
    rows: list[tuple[Labels, BrickStats]] = [
        ((("phase", step.phase),), step.stats) for step in profile.steps.values()
    ]
    yield from _histograms("step", "a step", rows)
    steps = [Sample(labels, row.count) for labels, row in rows]
    tokens = [Sample(labels, row.total_elements) for labels, row in rows]
    yield Family("brickline_steps_total", "Steps, timed or not.", "counter", steps)
    yield Family("brickline_tokens_total", "Tokens of all steps.", "counter", tokens)


def _recording(profile: Profile) -> Iterator[Family]:
    recording = profile.recording
    figures = (
        ("lost_records_total", "Records that found no space.", recording.lost),
        (
            "overhead_seconds_total",
            "What recording itself took, estimated.",
            recording.overhead_ns / 1e9,
        ),
        ("processes", "Processes that recorded.", recording.processes),
    )
    for name, words, value in figures:
        kind = "counter" if name.endswith("_total") else "gauge"
        yield Family(f"brickline_recording_{name}", words, kind, [Sample((), value)])


def _histograms(what: str, of: str, rows: list[tuple[Labels, BrickStats]]) -> Iterator[Family]:
    found = [Durations(labels, row.histogram, row.total_ns) for labels, row in rows if row.timed]
    words = f"Duration of {of}; of the timed ones."
    yield Family(f"brickline_{what}_duration_seconds", words, "histogram", [], found)
    name = f"brickline_{what}_duration_nanoseconds"
    yield Family(name, words, "histogram", [], found, native=True)


def _brick_labels(row: BrickStats) -> Labels:
    layer = "" if row.layer is None else str(row.layer)
    return (("brick", row.name), ("category", row.category.label), ("layer", layer))


def exposition_text(families: Iterable[Family]) -> str:
    """Return the text format, version 0.0.4; native histograms have none and are left out."""
    return "".join(chain.from_iterable(_lines(each) for each in families if not each.native))


def _lines(family: Family) -> Iterator[str]:
    words = family.help.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {family.name} {words}\n# TYPE {family.name} {family.kind}\n"
    for sample in family.samples:
        yield f"{family.name}{_label_text(sample.labels)} {number_text(sample.value)}\n"
    for each in family.durations:
        for edge, count in each.below():
            labels = (*each.labels, ("le", number_text(edge)))
            yield f"{family.name}_bucket{_label_text(labels)} {count}\n"
        labels = (*each.labels, ("le", "+Inf"))
        yield f"{family.name}_bucket{_label_text(labels)} {each.histogram.count}\n"
        yield f"{family.name}_sum{_label_text(each.labels)} {number_text(each.sum_ns / 1e9)}\n"
        yield f"{family.name}_count{_label_text(each.labels)} {each.histogram.count}\n"


def _label_text(labels: Labels) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_escaped(label_value(value))}"' for name, value in labels)
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def label_value(text: str) -> str:
    """Return a label's value as UTF-8 can hold it; NUL, at which scrapers stop, is replaced."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "\ufffd")


def number_text(value: float) -> str:
    """Return a number as the text format spells it, so that nothing is lost."""
    if isfinite(value):
        return repr(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)
    return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
