"""Watching a live process: what it records, folded as far as it is shown, in a terminal.

Reads spools and the machine's load, and draws them; it never writes to the process or its run.
`app`, `panels` and `screens` are textual through and through and are loaded only for the full
interface; `plain` needs rich alone. Nothing else in brickline imports this room but its command.
"""
