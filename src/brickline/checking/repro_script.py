"""The text of a repro: a script that runs one op on its own inputs and holds it to its answer.

Knows text only. What is in the data, and whether the script does what it says, is `repro`'s matter.
"""

from __future__ import annotations

import base64
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SCRIPT = '''\
"""{title}

It contains weights and inputs of the model it was taken from: share it only where these may go.
{needs}

Exit status: 1 while it fails, 0 when it is mended, 2 if it cannot run.
"""

{imports}

OUTPUT = {output}  # which of its output tensors is compared
LIMITS = {limits}  # errors above these count as failing
DEVICE = "{device}"
{constants}

def data():
    """Return its inputs, its state and the float64 answer."""
{data}


def make(given):
    """Return the op."""
{make}


def tensors(value):
    """Return every tensor within nested outputs, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [each for key in value for each in tensors(value[key])]
    if isinstance(value, (tuple, list)):
        return [each for one in value for each in tensors(one)]
    return []


def compare(actual, exact):
    """Print the errors and return whether any is above its limit."""
    if actual.shape != exact.shape:
        print(f"shape {{tuple(actual.shape)}} instead of {{tuple(exact.shape)}}")
        return True
    actual, exact = actual.to_dense().double().cpu(), exact.double().cpu()
    odd = actual.isfinite() != exact.isfinite()
    both = actual.isfinite() & exact.isfinite()
    error = torch.where(both, actual - exact, 0.0)
    size = float(exact[both].norm().clamp_min(1e-300))
    figures = {{
        "relative L2": float(error.norm()) / size,
        "largest error": float(error.abs().max()),
        "mean error": abs(float(error.mean())),
        "scale error": abs(float((error * torch.where(both, exact, 0.0)).sum())) / size**2,
    }}
    print(f"not finite on one side only: {{int(odd.sum())}} of {{odd.numel()}} elements")
    for name, value in figures.items():
        limit = LIMITS.get(name)
        print(f"{{name}}: {{value:.4g}}" + ("" if limit is None else f" (limit {{limit:.4g}})"))
    above = [name for name, limit in LIMITS.items() if figures[name] > limit]
    return bool(odd.any()) or bool(above)


def main():
    """Run it and say whether it fails."""
{settings}
    given = data()
    op = make(given)
    with torch.no_grad():
        made = tensors(op(*given["args"], **given["kwargs"]))
    fails = compare(made[OUTPUT], given["exact"])
    print("FAILS" if fails else "MENDED")
    return 1 if fails else 0


{embedded}if __name__ == "__main__":
    try:
        status = main()
    except Exception as error:
        print(f"cannot run: {{type(error).__name__}}: {{error}}", file=sys.stderr)
        status = 2
    sys.exit(status)
'''


@dataclass
class Script:
    """What a script is made of."""

    title: str
    make: Sequence[str]
    """Lines of `make`."""
    output: int
    limits: Mapping[str, float]
    device: str = "cpu"
    needs: str = "It needs torch, and nothing else."
    imports: Sequence[str] = ()
    """Modules beside those that every script needs."""
    constants: Sequence[str] = ()
    settings: Sequence[str] = ()
    """Lines that set torch as it was set."""
    before_load: Sequence[str] = ()
    """Lines that run before the data is read."""
    safe: Sequence[str] = ()
    """Classes that the data may name; the rest of a pickle is refused."""
    trusted: bool = False
    """Whether the data holds objects that only a plain pickle can hold."""

    def text(self, payload: bytes | None, beside: str | None) -> str:
        """Return the script, with its data inside, or in a file beside it."""
        names = sorted({"base64", "io", "sys", "zlib", *self.imports})
        if payload is None:
            names = sorted({"pathlib", "sys", *self.imports})
        return _SCRIPT.format(
            title=_comment(self.title),
            needs=_comment(self.needs),
            imports="\n".join([*(f"import {name}" for name in names), "", "import torch"]),
            output=self.output,
            limits=repr({name: float(f"{value:.6g}") for name, value in self.limits.items()}),
            device=self.device,
            constants="\n".join(self.constants) + ("\n" if self.constants else ""),
            data=_indented(self._load(payload is not None, beside)),
            make=_indented(self.make),
            settings=_indented([*self.settings, "torch.manual_seed(0)"]),
            embedded="" if payload is None else _embedded(payload),
        )

    def _load(self, inside: bool, beside: str | None) -> list[str]:
        if inside:
            source = ["raw = io.BytesIO(zlib.decompress(base64.b64decode(DATA)))"]
        else:
            source = [f"raw = pathlib.Path(__file__).with_name({beside!r})"]
        if self.trusted:
            why = "# A plain pickle, for the op's own objects: run it only if you trust the file."
            load = [why, "return torch.load(raw, map_location=DEVICE, weights_only=False)"]
        elif self.safe:
            load = [
                f"safe = [{', '.join(self.safe)}]",
                "with torch.serialization.safe_globals(safe):",
                "    return torch.load(raw, map_location=DEVICE, weights_only=True)",
            ]
        else:
            load = ["return torch.load(raw, map_location=DEVICE, weights_only=True)"]
        return [*self.before_load, *source, *load]


def _embedded(payload: bytes) -> str:
    packed = base64.b64encode(zlib.compress(payload, 6)).decode("ascii")
    lines = [packed[start : start + 100] for start in range(0, len(packed), 100)]
    return "\n".join(['DATA = """', *lines, '"""', "", "", ""])


def _indented(lines: Sequence[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")


def _comment(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''")
