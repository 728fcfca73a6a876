"""Facts of a recording as text for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from brickline.run.failures import failure_texts
from brickline.run.twin_rows import texts_of_twins


def summary_text(facts: dict[str, Any], path: Path) -> str:
    """Return facts of a recording as text for people."""
    counts = facts["counts"]
    calls = counts.get("root calls", 0)
    lines = [f"{facts['model']} · {calls} {'call' if calls == 1 else 'calls'} · {path}"]
    recorded = [
        f"{counts[name]} {name}"
        for name in ("module calls", "op calls", "backward calls")
        if counts.get(name)
    ]
    if facts["fingerprints"]:
        recorded.append(f"{facts['fingerprints_taken']} fingerprints")
    if facts["tensors_saved"]:
        recorded.append(f"{facts['tensors_saved']} tensors saved")
    lines.append("Recorded: " + (", ".join(recorded) or "time alone") + ".")
    if not calls:
        lines.append(
            "The model was never called here: call it inside the `with` block; where it is called "
            "through torch.compile, record what torch.compile returned."
        )
    left_out = counts.get("calls of the model left out by steps=")
    if left_out:
        lines.append(f"Left out by steps=: {left_out} calls of the model.")
    if facts["unobserved"]:
        lines.append("Not observed:")
        lines += [f"  {number} {reason}" for reason, number in sorted(facts["unobserved"].items())]
    lines += [f"{text}." for text in texts_of_twins(facts)]
    lines += failure_texts(facts.get("failures"))
    return "\n".join(lines)
