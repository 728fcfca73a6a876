"""Claims: a run of a million launches becomes a Perfetto trace, OTLP or metrics within seconds.

Each export is a process of its own, from its start to its end, so that reading the run and
importing everything is counted. Times are CPU time: a busy machine makes an export later, not
costlier. A scrape is one request to a server that is up, as Prometheus makes them.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import look_run
from harness import Claim, main, spread

SCRAPES = 5
PROTOBUF = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
)


@dataclass(frozen=True)
class Took:
    """What one export cost."""

    cpu_s: float
    wall_s: float
    memory_mib: float
    size_mib: float
    said: str


def export(run: Path, form: str, target: Path, *more: str) -> Took:
    """Export as a user does, and measure the process."""
    command = [sys.executable, "-m", "brickline", "export", str(run), "--to", form]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([*command, "-o", str(target), "--force", *more], stderr=said)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        words = said.read().decode()
    if process.returncode:
        raise RuntimeError(f"brickline export {run} --to {form}: {words}")
    return Took(
        cpu_s=used.ru_utime + used.ru_stime,
        wall_s=time.perf_counter() - began,
        memory_mib=used.ru_maxrss / 1024,
        size_mib=sum(each.stat().st_size for each in target.parent.glob(f"{target.name}*")) / 2**20,
        said=words.splitlines()[0] if words else "",
    )


def scrape_s(run: Path) -> tuple[list[float], float]:
    """Return the CPU seconds of scrapes after the first, and the MiB of one answer."""
    from brickline.export.serving import MetricsServer, families_of_path

    took, size = [], 0
    with MetricsServer(lambda: families_of_path(run), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        for _ in range(SCRAPES + 1):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
            began = time.process_time()
            connection.request("GET", "/metrics", headers={"Accept": PROTOBUF})
            size = len(connection.getresponse().read())
            took.append(time.process_time() - began)
            connection.close()
        server.shutdown()
        thread.join()
    return took[1:], size / 2**20


def claims(quick: bool) -> list[Claim]:
    traces = look_run.TRACES // 20 if quick else look_run.TRACES
    run = look_run.million(traces)
    repeats = 1 if quick else 3
    with tempfile.TemporaryDirectory(prefix="brickline-look-") as folder:
        perfetto = [export(run, "perfetto", Path(folder) / "trace") for _ in range(repeats)]
        otlp = [export(run, "otlp", Path(folder) / "otlp") for _ in range(repeats)]
    scrapes, answer_mib = scrape_s(run)
    what = f"Perfetto trace of a run of {traces:,} launches"
    return [
        *_judged(what, perfetto, 30.0),
        *_judged(f"OTLP of a run of {traces:,} launches, 10,000 spans", otlp, 30.0),
        Claim(
            f"scrape of a run of {traces:,} launches",
            min(scrapes),
            "s",
            1.0,
            note=f"{spread(scrapes, 3)} s of CPU; native and classic, {answer_mib:.1f} MiB",
        ),
    ]


def _judged(what: str, took: list[Took], limit_s: float) -> list[Claim]:
    best = min(took, key=lambda each: each.cpu_s)
    walls = spread([each.wall_s for each in took], 1)
    note = f"{walls} s by the wall; {best.size_mib:.0f} MiB"
    return [
        Claim(what, best.cpu_s, "s", limit_s, note=note),
        Claim(f"{what}, memory", best.memory_mib, "MiB", 1024.0, note="largest resident set"),
    ]


def run(quick: bool = False) -> list[dict[str, Any]]:
    return [claim.as_dict() for claim in claims(quick)]


if __name__ == "__main__":
    sys.exit(main(run, description=__doc__))
