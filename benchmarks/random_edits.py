"""Is `check` ever satisfied with a candidate that computes something else?

Claims: of random edits (a weight, a row, a column, one element, two weights exchanged or one
shifted, a constant, a buffer) that move the outputs in float64 by more than ten times what rounding
may move, none is matched; and no clean pair is called diverged. The models are those of
`localisation`, some of transformers and some of torch's own layers, with random weights, in
float32, bfloat16 and float16, some compiled. Peers are the decision rules of other tools on the
outputs of the model.

An edit is judged here and by no tool: both models as plain copies in float64, moved by half a unit
in the last place of float32. Run with ``python benchmarks/random_edits.py``.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import harness
from harness import Claim

SEED = 31
EDITS = 1000
VISIBLE = 10.0
"""How many times the noise an edit moves the outputs, to count."""
COMPILED = 0.1
NAMES = ("False matched", "Clean pairs diverged")
Row = dict[str, Any]


class Edit(NamedTuple):
    """One thing that was changed."""

    words: str
    tensors: tuple[str, ...]
    """What was changed, by the name of a tensor or setting; its module is expected."""

    @property
    def modules(self) -> list[str]:
        """Who is to be named; the root's name is empty."""
        return [each.rpartition(".")[0] for each in self.tensors]


# ------------------------------------------------------------------------------------------ models


def models(torch: Any) -> list[tuple[str, Callable[[int], Any], str]]:
    """Return what there is: a name, a builder from a seed, and how it is driven."""
    from localisation import models as made
    from localisation.sizes import WIDE

    found: list[tuple[str, Callable[[int], Any], str]] = [
        ("llama", lambda seed: made.llama(seed=seed), "text"),
        ("wide llama", lambda seed: made.llama(size=WIDE, seed=seed), "text"),
        ("llama with outliers", lambda seed: made.llama(seed=seed, outliers=True), "text"),
        ("llama, buffers", lambda seed: made.llama("buffers", seed=seed), "decode"),
        ("llama, growing", lambda seed: made.llama("growing", seed=seed), "decode"),
        ("moe", lambda seed: made.moe(seed=seed), "text"),
        ("quantised", lambda seed: made.quantised(seed=seed), "text"),
        ("gpt2", lambda seed: made.gpt2(seed=seed), "text"),
        ("wide gpt2", lambda seed: made.gpt2(size=WIDE, seed=seed), "padded"),
        ("gpt2 with outliers", lambda seed: made.gpt2(seed=seed, outliers=True), "padded"),
        ("convnet", lambda seed: made.convnet(seed=seed), "picture"),
        ("convnet with outliers", lambda seed: made.convnet(seed=seed, outliers=True), "picture"),
        ("vit", lambda seed: made.vit(seed=seed), "picture"),
        ("vit with outliers", lambda seed: made.vit(seed=seed, outliers=True), "picture"),
    ]
    for cell in ("LSTM", "GRU"):
        found.append((cell.lower(), recurrent(torch, cell), "vector"))
    found.append(("encoder layers", encoder(torch), "vector"))
    found.append(("mlp", mlp(torch), "vector"))
    return found + list(of_transformers(torch))


def recurrent(torch: Any, cell: str) -> Callable[[int], Any]:
    class Recurrent(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.cell = getattr(torch.nn, cell)(32, 32, 2, batch_first=True)
            self.head = torch.nn.Linear(32, 20)

        def forward(self, x: Any) -> Any:
            return self.head(self.cell(x)[0])

    return _seeded(torch, Recurrent)


def encoder(torch: Any) -> Callable[[int], Any]:
    def build() -> Any:
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    return _seeded(torch, build)


def mlp(torch: Any) -> Callable[[int], Any]:
    nn = torch.nn

    def build() -> Any:
        parts = (
            nn.Linear(32, 128),
            nn.GELU(),
            nn.LayerNorm(128),
            nn.Linear(128, 16),
            nn.Softmax(-1),
        )
        return nn.Sequential(*parts)

    return _seeded(torch, build)


def _seeded(torch: Any, build: Callable[[], Any]) -> Callable[[int], Any]:
    def seeded(seed: int) -> Any:
        torch.manual_seed(seed)
        return build().eval()

    return seeded


def of_transformers(torch: Any) -> Iterator[tuple[str, Callable[[int], Any], str]]:
    try:
        import transformers
    except ImportError:
        return
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
    for kind in ("Bert", "Qwen2", "GPTNeoX"):

        def build(kind: str = kind) -> Any:
            more = {"num_key_value_heads": 2} if kind == "Qwen2" else {}
            config = getattr(transformers, f"{kind}Config")(**size, **more, intermediate_size=64)
            return getattr(transformers, f"{kind}Model")(config)

        yield kind.lower(), _seeded(torch, build), "hugging face"


def drive_of(torch: Any, kind: str, dtype: Any) -> Callable[[Any], Any]:
    from localisation import drives

    if kind == "vector":
        x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(9)).to(dtype)
        return lambda model: model(x)
    if kind == "hugging face":
        return lambda model: model(drives.tokens(length=12)).last_hidden_state
    return drives.Run(drive=getattr(drives, kind)(dtype))


# ------------------------------------------------------------------------------------------- edits


def edited(torch: Any, model: Any, draw: random.Random) -> Edit:
    """Change one thing in a model; return what."""
    kinds = ("element", "row", "column", "tensor", "exchange", "constant", "buffer", "roll")
    with torch.no_grad():
        for _ in range(50):
            kind = draw.choice(kinds)
            edit = EDIT[kind](torch, model, draw)
            if edit is not None:
                return edit._replace(words=f"{kind}: {edit.words}")
    raise RuntimeError("this model takes none of the edits")


def _tensor(torch: Any, model: Any, draw: random.Random, least: int = 1) -> tuple[str, Any]:
    found = [(name, each) for name, each in model.named_parameters() if each.ndim >= least]
    return draw.choice(found)


def _size(draw: random.Random) -> float:
    return float(draw.choice((-1, 1)) * 10 ** draw.uniform(-3, -0.5))


def _element(torch: Any, model: Any, draw: random.Random) -> Edit:
    name, each = _tensor(torch, model, draw)
    at, size = draw.randrange(each.numel()), _size(draw)
    each.view(-1)[at] += size * each.abs().max()
    return Edit(f"{name}[{at}] by {size:.1e} of the largest", (name,))


def _line(row: bool) -> Callable[..., Edit]:
    def change(torch: Any, model: Any, draw: random.Random) -> Edit:
        name, each = _tensor(torch, model, draw, 2)
        lines = each if row else each.transpose(0, 1)
        at, size = draw.randrange(lines.shape[0]), _size(draw)
        lines[at] *= 1 + size
        return Edit(f"{name}[{at}] by {size:.1e}", (name,))

    return change


def _whole(torch: Any, model: Any, draw: random.Random) -> Edit:
    name, each = _tensor(torch, model, draw)
    size = _size(draw)
    each *= 1 + size
    return Edit(f"{name} by {size:.1e}", (name,))


def _exchange(torch: Any, model: Any, draw: random.Random) -> Edit | None:
    name, each = _tensor(torch, model, draw)
    others = [
        (other, value)
        for other, value in model.named_parameters()
        if value.shape == each.shape and other != name
    ]
    if not others:
        return None
    other, value = draw.choice(others)
    kept = each.clone()
    each.copy_(value)
    value.copy_(kept)
    return Edit(f"{name} and {other}", (name, other))


def _constant(torch: Any, model: Any, draw: random.Random) -> Edit | None:
    found = [
        (name, module, key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, float) and value > 0 and not isinstance(module, torch.nn.Dropout)
    ]
    if not found:
        return None
    name, module, key, value = draw.choice(found)
    factor = draw.choice((0.1, 0.5, 0.9, 1.1, 2.0, 10.0, 1000.0))
    setattr(module, key, value * factor)
    place = f"{name}.{key}" if name else key
    return Edit(f"{place} from {value:.2g} by {factor}", (place,))


def _buffer(torch: Any, model: Any, draw: random.Random) -> Edit | None:
    found = [
        (name, each)
        for name, each in model.named_buffers()
        if each.dtype.is_floating_point and each.numel() > 1
    ]
    if not found:
        return None
    name, each = draw.choice(found)
    size = _size(draw)
    each.view(-1)[draw.randrange(each.numel())] += size * (each.abs().max() + 1e-3)
    return Edit(f"{name} by {size:.1e}", (name,))


def _roll(torch: Any, model: Any, draw: random.Random) -> Edit:
    name, each = _tensor(torch, model, draw)
    each.copy_(each.roll(1, draw.randrange(each.ndim)))
    return Edit(name, (name,))


EDIT: dict[str, Callable[..., Edit | None]] = {
    "element": _element,
    "row": _line(True),
    "column": _line(False),
    "tensor": _whole,
    "exchange": _exchange,
    "constant": _constant,
    "buffer": _buffer,
    "roll": _roll,
}


# ------------------------------------------------------------------------------------------ judging


def outputs(torch: Any, model: Any, kind: str, nudge: int | None = None) -> list[Any]:
    """Return what a copy of a model in float64 puts out."""
    model = copy.deepcopy(model).double()
    if nudge is not None:
        draw = torch.Generator().manual_seed(nudge)
        with torch.no_grad():
            for each in (*model.parameters(), *model.buffers()):
                if each.dtype.is_floating_point:
                    moved = torch.rand(each.shape, generator=draw, dtype=torch.float64)
                    each *= 1 + 2.0**-24 * (2 * moved - 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            found = drive_of(torch, kind, torch.float64)(model)
    finally:
        torch.set_default_dtype(before)
    leaves = found if isinstance(found, list | tuple) else [found]
    return [each.double() for each in leaves]


def apart(ours: list[Any], theirs: list[Any]) -> float:
    gaps = [float((one - two).norm() / two.norm()) for one, two in zip(ours, theirs, strict=True)]
    return max(gaps)


def is_visible(torch: Any, candidate: Any, reference: Any, kind: str) -> bool:
    theirs = outputs(torch, reference, kind)
    noise = apart(outputs(torch, reference, kind, nudge=1), theirs)
    gap = apart(outputs(torch, candidate, kind), theirs)
    return gap > VISIBLE * noise


def rows(torch: Any, count: int, draw: random.Random) -> Iterator[Row]:
    import brickline as bl

    known = models(torch)
    for at in range(count):
        name, build, kind = known[at % len(known)]
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
        reference = build(draw.randrange(2**20)).to(dtype)
        candidate = copy.deepcopy(reference)
        edit = edited(torch, candidate, draw)
        visible = is_visible(torch, candidate, reference, kind)
        if draw.random() < COMPILED and kind in ("vector", "picture"):
            candidate = torch.compile(candidate, backend="aot_eager")
        drive = drive_of(torch, kind, dtype)
        report = bl.check(candidate, drive=drive, reference=reference, repro=False)
        yield {
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "edit": edit.words,
            "right": bool(report.culprits)
            and {finding.name for finding in report.culprits} <= names(candidate, edit),
            "visible": visible,
            "status": str(report.status),
            "named": [finding.name for finding in report.culprits],
            "said": report.headline,
            "peers": peers(torch, reference, candidate, drive),
        }


def names(candidate: Any, edit: Edit) -> set[str]:
    """Return who may be named: the modules whose tensors were changed."""
    root = type(getattr(candidate, "_orig_mod", candidate)).__name__
    return {each or root for each in edit.modules}


def peers(torch: Any, reference: Any, candidate: Any, drive: Any) -> dict[str, bool]:
    """Return which rules say that the outputs differ."""
    from localisation.rules import RULES

    with torch.no_grad():
        pairs = [drive(copy.deepcopy(model)) for model in (candidate, reference)]
    lists = [each if isinstance(each, list | tuple) else [each] for each in pairs]
    return {
        name: any(rule(one.float(), two.float()) for one, two in zip(*lists, strict=True))
        for name, rule in RULES.items()
    }


def clean_rows(torch: Any, count: int, draw: random.Random) -> Iterator[Row]:
    import brickline as bl

    known = models(torch)
    for at in range(count):
        name, build, kind = known[at % len(known)]
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
        reference = build(draw.randrange(2**20))
        candidate = copy.deepcopy(reference).to(dtype)
        drive = drive_of(torch, kind, dtype)
        report = bl.check(candidate, drive=drive, reference=reference, repro=False)
        yield {
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "status": str(report.status),
            "said": report.headline,
        }


# ------------------------------------------------------------------------------------------- claims


def worker(_: int, quick: bool) -> Row:
    """Every edit, in one process."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    draw = random.Random(SEED)
    few = 25 if quick else 1
    with harness.quiet():
        return {
            "edits": list(rows(torch, EDITS // few, draw)),
            "clean": list(clean_rows(torch, EDITS // few // 4, draw)),
        }


def run(quick: bool = False) -> list[Row]:
    """Two claims: no false match, and no false alarm."""
    if not harness.has_torch():
        note = "torch is not installed: pip install torch"
        return [Claim(name, None, "pairs", 0.0, note=note).as_dict() for name in NAMES]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    (found,) = harness.in_processes(__file__, ["--quick"] if quick else [], 1)
    edits = [row for row in found["edits"] if row["visible"]]
    false = [row for row in edits if row["status"] == "matched"]
    counts = Counter(row["status"] for row in edits)
    note = f"{len(edits)} of {len(found['edits'])} edits are visible: "
    note += ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    named = [row for row in edits if row["named"]]
    note += (
        f"; of {len(named)} with a culprit all names are right in {sum(r['right'] for r in named)}"
    )
    for row in false[:10]:
        note += f"; {row['model']} {row['dtype']} {row['edit']}"
    blind = {
        name: float(sum(not row["peers"][name] for row in edits)) for name in edits[0]["peers"]
    }
    alarms = [row for row in found["clean"] if row["status"] == "diverged"]
    clean = Counter(row["status"] for row in found["clean"])
    other = "; ".join(
        f"{row['model']} {row['dtype']} {row['status']}: {row['said']}"
        for row in found["clean"]
        if row["status"] != "matched"
    )
    said = ", ".join(f"{count} {status}" for status, count in sorted(clean.items()))
    return [
        Claim(NAMES[0], float(len(false)), "pairs", 0.0, blind, note).as_dict(),
        Claim(NAMES[1], float(len(alarms)), "pairs", 0.0, {}, f"{said}. {other:.600}").as_dict(),
    ]


if __name__ == "__main__":
    sys.exit(harness.main(run, worker, __doc__))
