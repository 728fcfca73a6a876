"""What a comparison says: verdicts, findings, reports, and differences that are accepted."""

from brickline.verdict.accepted import apply_accepted, unused_entries
from brickline.verdict.accepted_entries import Accepted, load_accepted, parse_accepted
from brickline.verdict.accepted_proposal import propose_accept, write_accept
from brickline.verdict.answer import Answer, arithmetic_answer
from brickline.verdict.facts import Coverage, Facts
from brickline.verdict.finding import Finding
from brickline.verdict.report import DivergenceReport
from brickline.verdict.table import VerdictRow, VerdictTable
from brickline.verdict.verdicts import CLEAN, GUILTY, Status, Verdict
from brickline.verdict.words import LEAST_SHARE, evidence_lines

__all__ = [
    "CLEAN",
    "GUILTY",
    "LEAST_SHARE",
    "Accepted",
    "Answer",
    "Coverage",
    "DivergenceReport",
    "Facts",
    "Finding",
    "Status",
    "Verdict",
    "VerdictRow",
    "VerdictTable",
    "apply_accepted",
    "arithmetic_answer",
    "evidence_lines",
    "load_accepted",
    "parse_accepted",
    "propose_accept",
    "unused_entries",
    "write_accept",
]
