"""Every exception that brickline raises on purpose.

::

    BricklineError
    ├── UsageError                the caller can mend it
    │   ├── CountError            a count that is negative, not finite or too large
    │   ├── TimerError            a timer stopped twice, or by a profiler that did not start it
    │   ├── GraphError            unbalanced scopes, cycles, unknown nodes
    │   ├── BudgetError           a budget file that cannot be understood
    │   ├── AcceptError           accepted differences that cannot be understood
    │   ├── DeviceError           a device or clock that is unknown or absent here
    │   ├── SymbolicError         a launch shape: a variable missing or out of range, overflow
    │   ├── KernelError           a kernel whose declaration contradicts itself
    │   ├── LaunchError           arguments that do not fit the kernel
    │   │   └── DeadlineReached   a run was ended by its max_wall_time; the report is partial
    │   ├── PlanError             a plan that contradicts itself, its file, or what it is given
    │   └── QueueError            a queue of a megakernel cannot take what it is given
    ├── RunError                  a run that cannot be written or read
    │   ├── RunExists             the path is taken and overwriting was not asked for
    │   ├── NotARun               the path holds something else, or nothing
    │   ├── RunDamaged            truncated or inconsistent contents
    │   └── RunVersion            written by a newer brickline
    ├── CompileError              the compiler refused a source; its words are in the message
    ├── CacheError                a cache directory that cannot be trusted or used
    │   └── CacheUnavailable      there is none, and none can be made
    ├── ProcessError              a process that is gone, not ours, or records nothing
    ├── DeviceHung                an item of a megakernel never returned; its engine is dead
    ├── ExportError               an export that could not be written, sent or served
    └── InternalError             a bug in brickline; never a subclass of UsageError

A divergence or an exceeded budget is a result, not an exception. Messages give what was
expected, what was found, where, and the next step.
"""


class BricklineError(Exception):
    """Base of every error below."""


class UsageError(BricklineError):
    """The call or its arguments are wrong; the caller can mend it."""


class CountError(UsageError, ValueError):
    """A count is negative, not finite, or larger than a record can hold."""


class TimerError(UsageError):
    """A timer was stopped twice, or by a profiler that did not start it."""


class GraphError(UsageError):
    """A graph call breaks the graph: unbalanced scope, cycle, unknown node."""


class BudgetError(UsageError):
    """A budget file cannot be understood."""


class AcceptError(UsageError):
    """A file or list of accepted differences cannot be understood."""


class DeviceError(UsageError):
    """A device or its clock is unknown, or absent on this machine."""


class SymbolicError(UsageError, ValueError):
    """An expression or a variable of a launch shape is missing, out of range or overflows."""


class KernelError(UsageError, ValueError):
    """The declaration of a kernel contradicts itself."""


class LaunchError(UsageError):
    """The arguments of a launch do not fit its kernel or its device."""


class DeadlineReached(LaunchError):  # noqa: N818 - what happened, as the names of runs' errors
    """A run was ended by its deadline: what had finished stays, and the report is partial."""


class PlanError(UsageError):
    """A plan cannot be built, read, prepared or run as it was asked for."""


class QueueError(UsageError):
    """A queue of a megakernel cannot take what it is given; the message has a stable code."""


class RunError(BricklineError):
    """A run cannot be written or read."""


class RunExists(RunError):  # noqa: N818 - reads as a fact, like FileExistsError's cause
    """The path is taken, and overwriting was not asked for."""


class NotARun(RunError):  # noqa: N818
    """The path holds something other than a run, or nothing."""


class RunDamaged(RunError):  # noqa: N818
    """The run is truncated or contradicts itself."""


class RunVersion(RunError):  # noqa: N818
    """The run was written by a newer brickline."""


class CompileError(BricklineError):
    """The compiler refused a source: `log` holds its words, `command` how it was called."""

    def __init__(self, message: str, log: str = "", command: str = "") -> None:
        super().__init__(message, log, command)
        self.log = log
        self.command = command

    def __str__(self) -> str:
        return str(self.args[0])


class CacheError(BricklineError):
    """A cache directory cannot be trusted or used."""


class CacheUnavailable(CacheError):  # noqa: N818
    """There is no cache directory, and none can be made; `KernelCache` then does without."""


class ProcessError(BricklineError):
    """A process is gone, belongs to someone else, or records no bricks."""


class DeviceHung(BricklineError):  # noqa: N818
    """An item never returned: `task`, `item`, `worker`, and `missing`, which others wait for."""

    # What runs cannot be ended from outside: the engine is dead, and what it works on must stay.

    def __init__(
        self,
        message: str,
        task: int | None = None,
        item: int | None = None,
        worker: int | None = None,
        missing: int | None = None,
    ) -> None:
        super().__init__(message, task, item, worker, missing)
        self.task = task
        self.item = item
        self.worker = worker
        self.missing = missing

    def __str__(self) -> str:
        return str(self.args[0])


class ExportError(BricklineError):
    """An export could not be written, sent or served."""


class InternalError(BricklineError):
    """A bug in brickline itself; please report it."""
