"""Ctrl-C while the program is still loading: it ends at once and without a word.

Knows no command, and loads next to nothing itself: it is there before everything else.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process here, where it would else show a traceback of imports.

    A handler that somebody else has set stays, and so does everything outside the main thread.
    """
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not ours:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
