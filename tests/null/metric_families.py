"""Prometheus' ``metrics.proto``, as far as it is used, so that protobuf can read it back."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="protobuf is not installed")

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

MESSAGES = {
    "LabelPair": "1 name string; 2 value string",
    "Value": "1 value double",
    "Bucket": "1 cumulative_count uint64; 2 upper_bound double",
    "BucketSpan": "1 offset sint32; 2 length uint32",
    "Histogram": "1 sample_count uint64; 2 sample_sum double; 3 bucket *Bucket; 5 schema sint32; "
    "6 zero_threshold double; 7 zero_count uint64; 12 positive_span *BucketSpan; "
    "13 positive_delta *sint64",
    "Metric": "1 label *LabelPair; 2 gauge Value; 3 counter Value; 7 histogram Histogram",
    "MetricFamily": "1 name string; 2 help string; 3 type int32; 4 metric *Metric",
}
"""Field numbers, names and types; ``*`` is repeated."""


def _declared() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="brickline_test_metrics.proto", package="brickline.test", syntax="proto2"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for entry in fields.split("; "):
            number, field, kind = entry.split()
            repeated = kind.startswith("*")
            kind = kind.lstrip("*")
            added = message.field.add(name=field, number=int(number))
            added.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind in MESSAGES:
                added.type = kinds.TYPE_MESSAGE
                added.type_name = f".brickline.test.{kind}"
            else:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName("brickline.test.MetricFamily")
    return message_factory.GetMessageClass(found)


MetricFamily: Any = _declared()


def families_from_bytes(data: bytes) -> list[Any]:
    """Read messages that each follow their length."""
    found, at = [], 0
    while at < len(data):
        length = shift = 0
        while True:
            byte = data[at]
            length |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
        found.append(MetricFamily.FromString(data[at : at + length]))
        at += length
    assert at == len(data)
    return found
