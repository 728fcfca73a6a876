"""The program ``brickline``, and ``python -m brickline``.

Ctrl-C while the commands are still loaded ends the program at once and without a word; once they
are there, they see to it themselves.
"""

from __future__ import annotations

from brickline.interrupts import silent_interrupts


def main() -> None:
    """Load the commands and run the command line."""
    with silent_interrupts():
        from brickline.commands import main as run
    run()


if __name__ == "__main__":
    main()
