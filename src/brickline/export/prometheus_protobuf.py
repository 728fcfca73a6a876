"""Prometheus metrics as protobuf, the exposition that carries native histograms.

Each family is one ``io.prometheus.client.MetricFamily``, preceded by its length as a varint. The
numbers are those of the fields in Prometheus' ``metrics.proto``. What the metrics are is the matter
of `prometheus`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from brickline.abi import HIST_SCALE
from brickline.export.prometheus import Durations, Family, Labels, Sample, label_value
from brickline.export.wire import (
    bytes_field,
    double_field,
    number_field,
    packed_field,
    text_field,
    varint,
    zigzag,
)
from brickline.histogram import Histogram

PROTOBUF_TYPE = (
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
)
ZERO_THRESHOLD = 2.0**-128
"""What is below counts as zero, in ns: a duration of 0 and nothing else."""

_KINDS = {"counter": 0, "gauge": 1, "histogram": 4}
_VALUES = {"counter": 3, "gauge": 2}
# Metric and Histogram
_LABEL, _HISTOGRAM = 1, 7
_COUNT, _SUM, _BUCKET, _SCHEMA, _ZERO_THRESHOLD, _ZERO_COUNT, _SPAN, _DELTA = (
    1,
    2,
    3,
    5,
    6,
    7,
    12,
    13,
)


def exposition_protobuf(families: Iterable[Family]) -> bytes:
    """Return all families, classic and native histograms among them."""
    messages = [_family(family) for family in families]
    return b"".join(varint(len(message)) + message for message in messages)


def _family(family: Family) -> bytes:
    metrics = [_sample(family.kind, sample) for sample in family.samples]
    metrics += [
        _labels(each.labels)
        + bytes_field(_HISTOGRAM, _native(each) if family.native else _classic(each))
        for each in family.durations
    ]
    head = text_field(1, family.name) + text_field(2, family.help)
    head += number_field(3, _KINDS[family.kind])
    return head + b"".join(bytes_field(4, metric) for metric in metrics)


def _sample(kind: str, sample: Sample) -> bytes:
    return _labels(sample.labels) + bytes_field(_VALUES[kind], double_field(1, sample.value))


def _labels(labels: Labels) -> bytes:
    pairs = (text_field(1, name) + text_field(2, label_value(value)) for name, value in labels)
    return b"".join(bytes_field(_LABEL, pair) for pair in pairs)


def _classic(durations: Durations) -> bytes:
    buckets = [number_field(1, count) + double_field(2, edge) for edge, count in durations.below()]
    head = number_field(_COUNT, durations.histogram.count)
    head += double_field(_SUM, durations.sum_ns / 1e9)
    return head + b"".join(bytes_field(_BUCKET, bucket) for bucket in buckets)


def _native(durations: Durations) -> bytes:
    histogram = durations.histogram
    spans = b"".join(
        bytes_field(_SPAN, number_field(1, zigzag(offset)) + number_field(2, length))
        for offset, length in bucket_spans(histogram)
    )
    counts = histogram.counts.astype(np.int64)
    deltas = np.diff(counts, prepend=0).tolist()
    return (
        number_field(_COUNT, histogram.count)
        + double_field(_SUM, float(durations.sum_ns))
        + number_field(_SCHEMA, zigzag(HIST_SCALE))
        + double_field(_ZERO_THRESHOLD, ZERO_THRESHOLD)
        + number_field(_ZERO_COUNT, histogram.zero_count)
        + spans
        + (packed_field(_DELTA, map(zigzag, deltas)) if deltas else b"")
    )


def bucket_spans(histogram: Histogram) -> Iterator[tuple[int, int]]:
    """Return runs of filled buckets: how far after the one before, and how many.

    Prometheus names a bucket by its upper edge, so its index is one higher than the run's.
    """
    indices = histogram.indices.astype(np.int64) + 1
    if not len(indices):
        return
    firsts = np.flatnonzero(np.append(True, np.diff(indices) > 1))
    lasts = np.append(firsts[1:], len(indices)) - 1
    end = 0
    for first, last in zip(indices[firsts].tolist(), indices[lasts].tolist(), strict=True):
        yield first - end, last - first + 1
        end = last + 1
