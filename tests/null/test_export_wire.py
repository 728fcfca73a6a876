"""Protobuf by hand, held to literal bytes and to protobuf's own decoder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brickline.export.wire import (
    Message,
    Same,
    bytes_field,
    double_field,
    encode_rows,
    fixed64s,
    number_field,
    packed_field,
    text_field,
    varint,
    varints,
    zigzag,
)

NUMBERS = st.integers(0, 2**64 - 1)


def test_the_worked_examples() -> None:
    assert number_field(3, 300) == bytes.fromhex("18 AC 02")
    assert text_field(2, "ab") == bytes.fromhex("12 02 61 62")
    assert number_field(58, 3) == bytes.fromhex("D0 03 03")
    assert double_field(2, 1.0) == bytes.fromhex("11 00 00 00 00 00 00 F0 3F")
    assert packed_field(4, [3, 270]) == bytes.fromhex("22 03 03 8E 02")
    assert varint(-1) == b"\xff" * 9 + b"\x01"
    assert [zigzag(value) for value in (0, -1, 1, -2, 2)] == [0, 1, 2, 3, 4]
    assert text_field(1, "\ud800") == bytes.fromhex("0A 01 3F")


@pytest.mark.parametrize("more", range(1, 10))
def test_a_number_grows_by_a_byte_at_seven_bits(more: int) -> None:
    limit = 1 << 7 * more
    assert len(varint(limit - 1)) == more
    assert len(varint(limit)) == more + 1


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans(), st.booleans()), max_size=30))
def test_columns_are_the_rows_one_by_one(rows: list[tuple[int, int, bool, bool]]) -> None:
    first = np.array([row[0] for row in rows], np.uint64)
    second = np.array([row[1] for row in rows], np.uint64)
    some = np.array([row[2] for row in rows], bool)
    fixed = np.array([row[3] for row in rows], bool)
    inner = Message(4, [Same(b"\x08\x01", some), varints(20, second, some)], some)
    message = Message(1, [varints(8, first), Same(b"\x68\x02"), inner, fixed64s(47, first, fixed)])
    expected = b""
    for a, b, has, flow in rows:
        body = number_field(8, a) + b"\x68\x02"
        body += bytes_field(4, b"\x08\x01" + number_field(20, b)) if has else b""
        body += b"\xf9\x02" + a.to_bytes(8, "little") if flow else b""
        expected += bytes_field(1, body)
    assert encode_rows(message, len(rows)) == expected


def test_perfettos_classes_read_what_columns_are() -> None:
    pb = pytest.importorskip(
        "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="perfetto is not installed"
    )
    times = np.array([0, 127, 128, 2**63], np.uint64)
    data = encode_rows(Message(1, [varints(8, times)]), len(times))
    trace = pb.Trace()
    trace.ParseFromString(data)
    assert [packet.timestamp for packet in trace.packet] == times.tolist()
