"""Work done in several threads that begin at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Give each thread its number, and raise what one of them raised."""
    for outcome in outcomes_in_threads(count, work):
        if isinstance(outcome, BaseException):
            raise outcome


def outcomes_in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returned or raised in each thread; a thread is told its number."""
    ready, outcomes = threading.Barrier(count), [None] * count

    def body(number: int) -> None:
        ready.wait()
        try:
            outcomes[number] = work(number)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
