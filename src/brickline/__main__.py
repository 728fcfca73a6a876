"""The program ``brickline``, and ``python -m brickline``.

Ctrl-C while the commands are still loaded ends the program at once and without a word; once they
are there, they see to it themselves.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Load the commands and run the command line."""
    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from brickline.commands import main as run

    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
