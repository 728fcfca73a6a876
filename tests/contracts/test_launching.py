"""Numbers that the launcher and the headers know as well as Python: one side alone fails here."""

from __future__ import annotations

import re
from pathlib import Path

from brickline import kernel, kernel_arguments
from brickline.device.base import FAULTS
from brickline.dtypes import DTYPES

ROOT = Path(__file__).parents[2]


def text(name: str) -> str:
    return (ROOT / "src" / name).read_text(encoding="utf-8")


def constant(name: str, source: str) -> int:
    found = re.search(rf"constexpr \w+ {name} = (\d+);", text(source))
    assert found is not None, name
    return int(found[1])


def test_the_launcher_has_as_many_places_as_a_kernel_may_declare() -> None:
    assert constant("MAX_ARGUMENTS", "core/launcher.cpp") == kernel.MAX_ARGUMENTS
    assert constant("MAX_DIMENSIONS", "core/buffers.h") == kernel_arguments.MAX_DIMENSIONS


def test_the_launcher_numbers_dtypes_as_python_does() -> None:
    found = re.search(r"enum : uint8_t \{ (F64 [^}]*) \}", text("core/launcher.cpp"))
    assert found is not None
    number, codes = 0, {}
    for member in found[1].split(", "):
        name, _, value = member.partition(" = ")
        number = int(value) if value else number + 1
        codes[name.lower()] = number
    assert codes == {name: DTYPES[name].code for name in codes}
    assert {"f64", "f32", "f16", "i64", "u8", "bool"} <= codes.keys()


def test_every_fault_of_block_has_a_text() -> None:
    found = re.search(
        r"enum Fault : uint32_t \{(.*?)\};", text("brickline/include/brickline/kernel.h"), re.DOTALL
    )
    assert found is not None
    codes = {int(code) for code in re.findall(r"FAULT_\w+ = (\d+)", found[1])}
    assert codes == FAULTS.keys()
    (own,) = re.findall(r"FIRST_OWN_FAULT = (\d+)", found[1])
    assert max(codes) < int(own) == 16
