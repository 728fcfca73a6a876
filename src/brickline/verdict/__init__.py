"""What a comparison says: verdicts, findings, reports, and differences that are accepted."""

from brickline.verdict.accepted import apply_accepted, unused_entries
from brickline.verdict.accepted_entries import Accepted, load_accepted, parse_accepted
from brickline.verdict.accepted_proposal import propose_accept, write_accept
from brickline.verdict.verdicts import (
    CLEAN,
    GUILTY,
    Coverage,
    DivergenceReport,
    Finding,
    Status,
    Verdict,
    VerdictRow,
    VerdictTable,
)

__all__ = [
    "CLEAN",
    "GUILTY",
    "Accepted",
    "Coverage",
    "DivergenceReport",
    "Finding",
    "Status",
    "Verdict",
    "VerdictRow",
    "VerdictTable",
    "apply_accepted",
    "load_accepted",
    "parse_accepted",
    "propose_accept",
    "unused_entries",
    "write_accept",
]
