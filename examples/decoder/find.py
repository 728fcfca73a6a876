"""Which launch of my decoder is wrong? Each is run again by the other's kernel on my inputs."""

from llama import mine, stock

import brickline as bl

report = bl.check(
    mine(executor="parallel").prepared,
    reference=stock().prepared,
    drive=lambda plan: [plan(position=position) for position in range(3)],
    repro=False,
)
print(report.headline)
for finding in report.findings:
    print(finding.name, finding.verdict.value, f"in call {finding.position}")
