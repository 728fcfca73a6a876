"""Claims of the half that looks: every `look_*.py` of this folder, one after the other.

Each of them has ``claims(quick)``. One that cannot run here, because a package or a program is
missing, is a claim that is not judged, and the others are measured all the same.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from harness import Claim, main

NO_CLAIMS = {"look_run"}


def _modules() -> dict[str, ModuleType | ImportError]:
    found: dict[str, ModuleType | ImportError] = {}
    for path in sorted(Path(__file__).parent.glob("look_*.py")):
        if path.stem in NO_CLAIMS:
            continue
        try:
            found[path.stem] = importlib.import_module(path.stem)
        except ImportError as error:
            found[path.stem] = error
    return found


MODULES = _modules()  # now, while this folder is where modules are looked for


def claims(quick: bool = False) -> list[Claim]:
    found: list[Claim] = []
    for name, module in MODULES.items():
        try:
            if isinstance(module, ImportError):
                raise module
            found += module.claims(quick)
        except ImportError as error:
            found.append(Claim(name, None, "", None, note=f"not measured: {error}"))
    return found


def run(quick: bool = False) -> list[dict[str, Any]]:
    return [claim.as_dict() for claim in claims(quick)]


if __name__ == "__main__":
    sys.exit(main(run, description=__doc__))
