"""No error is swallowed: who catches all of them raises one, or records a failure of brickline.

Read from the source. `except Exception`, `except BaseException` and a bare `except` must on each of
their paths raise, or call `record_failure`, which puts the error into the run for every report to
say. What is expected is caught by its name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import brickline

PACKAGE = Path(brickline.__file__).parent
ELSEWHERE = {"checking"}
"""Rooms that have yet to be brought to this."""
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ELSEWHERE
)
BROAD = {"Exception", "BaseException"}
RECORDS = "record_failure"


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def is_broad(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(name_of(kind) in BROAD for kind in kinds)


def is_suppress(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and name_of(node.func) == "suppress"


def is_silent(body: list[ast.stmt]) -> bool:
    """Whether some path through these statements neither raises nor records."""
    return bool(outcomes(body) - {"said"})


def outcomes(body: list[ast.stmt]) -> set[str]:
    """How a block may end: "said", "next" (at its end) or "left" (by return, break, continue)."""
    found: set[str] = set()
    for statement in body:
        ends = outcomes_of(statement)
        found |= ends - {"next"}
        if "next" not in ends:
            return found
    return found | {"next"}


def outcomes_of(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Raise):
        return {"said"}
    if isinstance(statement, ast.Return | ast.Break | ast.Continue):
        return {"left"}
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return {"said"} if name_of(statement.value.func) == RECORDS else {"next"}
    if isinstance(statement, ast.If):
        return outcomes(statement.body) | outcomes(statement.orelse)
    if isinstance(statement, ast.With):
        inside = outcomes(statement.body)
        swallows = any(is_suppress(item.context_expr) for item in statement.items)
        return inside | {"next"} if swallows else inside
    if isinstance(statement, ast.Try):
        last = outcomes(statement.finalbody)
        if "next" not in last:
            return last
        ends = outcomes([*statement.body, *statement.orelse])
        return ends.union(*(outcomes(handler.body) for handler in statement.handlers))
    if isinstance(statement, ast.For | ast.While):
        return outcomes(statement.body) | {"next"}
    return {"next"}


def silent_handlers(source: str) -> Iterator[int]:
    """Give the lines at which every error is caught and may be swallowed."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type):
            if is_silent(node.body):
                yield node.lineno
        elif isinstance(node, ast.Call) and is_suppress(node) and any(map(is_broad, node.args)):
            yield node.lineno


def test_no_error_is_swallowed() -> None:
    silent = [
        f"src/brickline/{path.relative_to(PACKAGE).as_posix()}:{line}"
        for path in FILES
        for line in silent_handlers(path.read_text(encoding="utf-8"))
    ]
    assert not silent, (
        f"name what is expected, raise again, or call {RECORDS} of brickline/run/failures.py: "
        f"{silent}"
    )


def test_the_rooms_that_are_left_out_are_there() -> None:
    assert all((PACKAGE / room).is_dir() for room in ELSEWHERE)


SAID = [
    "except Exception:\n  clean()\n  raise",
    "except Exception as error:\n  raise ValueError from error",
    "except Exception as error:\n  if a:\n    raise\n  raise ValueError from error",
    "except Exception as error:\n  log.record_failure('x', error)",
    "except Exception as error:\n  log.record_failure('x', error)\n  return None",
    "except BaseException:\n  with suppress(OSError):\n    remove()\n  raise",
    "except (OSError, ValueError):\n  pass",
    "except:\n  try:\n    clean()\n  finally:\n    raise",
]
SILENT = [
    "except Exception:\n  pass",
    "except:\n  return 0",
    "except (SystemExit, Exception):\n  note()",
    "except BaseException as error:\n  if a:\n    raise",
    "except Exception as error:\n  if a:\n    return 1\n  raise",
    "except Exception as error:\n  if a:\n    log.record_failure('x', error)",
    "except Exception:\n  for each in a:\n    raise",
    "except Exception:\n  with suppress(ValueError):\n    raise",
    "except builtins.Exception:\n  unobserved['x'] += 1",
    "finally:\n  with suppress(Exception):\n    close()",
]


@pytest.mark.parametrize("handler", [*SAID, *SILENT])
def test_the_check_tells_them_apart(handler: str) -> None:
    source = f"def f():\n try:\n  run()\n {handler.replace(chr(10), chr(10) + ' ')}"
    assert bool(list(silent_handlers(source))) is (handler in SILENT)
