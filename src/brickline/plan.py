"""Plan: launches over buffers, in the order of a program, with edges that follow from memory.

A plan is checked while it is built: arguments, shapes, dtypes, aliasing, launch shapes, and what
each launch reads and writes. It belongs to no device and executes nothing; `prepare` makes of it
something that runs. Hazards are `hazards`' part, files that of `plan_files`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from brickline.bricks import BrickId
from brickline.buffers import Buffer, as_buffer
from brickline.dtypes import dtype_of
from brickline.errors import BricklineError, KernelError, LaunchError, PlanError, SymbolicError
from brickline.hazards import Hazard, Tracker
from brickline.kernel import Kernel, Param
from brickline.kernel_checks import check_name
from brickline.plan_arguments import Arguments, brick_name, checked_number, layer_number
from brickline.plan_buffers import Extent, PlanBuffer, Storage, checked_shape
from brickline.plan_launches import FloatVariable, Launch
from brickline.plan_names import nearest
from brickline.plan_words import counted, explain_pair, explain_plan
from brickline.symbolic import Variable
from brickline.symbolic_values import integer_of

if TYPE_CHECKING:
    import os

    from brickline.device.base import Device
    from brickline.executor.prepared import PreparedPlan


class Plan:
    """Launches over buffers, in the order of a program.

    Example:
        >>> from brickline.kernels.catalog import residual
        >>> plan = Plan("twice")
        >>> x = plan.buffer("x", 4, "f32")
        >>> y = plan.buffer("y", 4, "f32")
        >>> plan.launch(residual(), a=x, b=x, y=y, n=4).waits_for
        ()
        >>> plan.launch(residual(), a=y, b=y, y=x, n=4).waits_for
        (0,)
    """

    def __init__(self, name: str = "plan") -> None:
        """Begin an empty plan.

        Args:
            name: What reports call it.

        Raises:
            PlanError: The name is no text, or has characters that no file can hold.
        """
        if not isinstance(name, str) or not name or not name.isprintable():
            raise PlanError(f"expected a plan's name as printable text, got {name!r:.80}")
        self.name = name
        self._storages: list[Storage] = []
        self._variables: dict[str, Variable] = {}
        self._defaults: dict[str, int | float] = {}
        self._floats: dict[str, FloatVariable] = {}
        self._launches: list[Launch] = []
        self._names: set[str] = set()
        self._tracker = Tracker()
        self._protected = Tracker()
        self._views: list[PlanBuffer] = []
        self._arguments = Arguments(self, self._variables, self._floats, self._of_array)
        self._given: dict[tuple[Any, ...], PlanBuffer] = {}

    # ------------------------------------------------------------------------------ what it is over

    @property
    def launches(self) -> Sequence[Launch]:
        """Its launches, in order."""
        return tuple(self._launches)

    @property
    def storages(self) -> Sequence[Storage]:
        """Its pieces of memory, in the order of their numbers."""
        return tuple(self._storages)

    @property
    def variables(self) -> Mapping[str, Variable | FloatVariable]:
        """What may change from run to run, by name."""
        return {**self._variables, **self._floats}

    @property
    def defaults(self) -> Mapping[str, int | float]:
        """The values that variables have where a run gives none; others must be given."""
        return dict(self._defaults)

    def variable(
        self,
        name: str,
        low: SupportsIndex | None = None,
        high: SupportsIndex | None = None,
        *,
        default: float | None = None,
        dtype: str = "i64",
    ) -> Any:
        """Declare a number that may change from run to run.

        Args:
            name: Its name, by which a run is given its value.
            low: The smallest value of an integer.
            high: The largest value of an integer.
            default: Its value where a run gives none. Default: `low`, or 0.0 of a float.
            dtype: "i64" (default) for an integer, which expressions may use, or "f32" or "f64".

        Returns:
            A `Variable`, or a `FloatVariable`: pass it to `launch`, an integer also inside an
            expression such as ``position + 1``.

        Raises:
            PlanError: The name is taken, or a value contradicts the bounds.
        """
        self._check_name(name)
        dtype = _dtype(dtype, f"variable {name}")
        if dtype in ("f32", "f64"):
            if low is not None or high is not None:
                raise PlanError(f"variable {name}: a float has no bounds; leave low and high out")
            value = checked_number(0.0 if default is None else default, f"variable {name}")
            made = FloatVariable(name, value)
            self._floats[name] = made
            self._defaults[name] = made.default
            self._names.add(name)
            return made
        if dtype not in ("i64", "i32") or low is None or high is None:
            raise PlanError(
                f"variable {name}: expected dtype i64, f32 or f64 and, for an integer, its bounds "
                f"low and high, got {dtype!r}, {low!r} and {high!r}"
            )
        try:
            variable = Variable(name, low, high)
        except SymbolicError as error:
            raise PlanError(f"variable {name}: {error}") from error
        number = variable.low if default is None else integer_of(default)
        if number is None or not variable.low <= number <= variable.high:
            raise PlanError(
                f"variable {name}: expected a default from {variable.low} to {variable.high}, got "
                f"{default!r}"
            )
        self._variables[name] = variable
        self._defaults[name] = number
        self._names.add(name)
        return variable

    def buffer(
        self,
        name: str,
        shape: Sequence[Extent] | Extent | None = None,
        dtype: object = None,
        *,
        array: Any = None,
        read_only: bool = False,
    ) -> PlanBuffer:
        """Declare memory.

        Args:
            name: Its name, by which it is bound, written and read.
            shape: Its sizes; expressions over the plan's variables keep room for the largest.
            dtype: Of its elements.
            array: Memory to use: an array of NumPy, a tensor of torch, a Buffer. Shape and dtype
                are then its own. On another device than the plan's, `prepare` copies it there.
            read_only: Whether no launch may write to it, as to weights. Default False.

        Raises:
            PlanError: The name is taken, or shape or dtype is missing or contradicts the array.
        """
        self._check_name(name)
        where = f"buffer {name}"
        if array is None:
            if shape is None or dtype is None:
                given = f"{type(shape).__name__} as shape and {dtype!r:.80} as dtype"
                hint = "; give an array by name, array=..." if _is_array(shape) else ""
                raise PlanError(
                    f"{where}: expected a shape and a dtype, or an array, got {given}{hint}"
                )
            return self._store(name, checked_shape(shape, where), _dtype(dtype, where), read_only)
        memory = _memory(array, where)
        if shape is not None and checked_shape(shape, where) != memory.shape:
            raise PlanError(
                f"{where}: expected the array's shape {list(memory.shape)}, got {shape!r}"
            )
        if dtype is not None and _dtype(dtype, where) != memory.dtype:
            raise PlanError(f"{where}: expected the array's dtype {memory.dtype}, got {dtype}")
        return self._store(name, memory.shape, memory.dtype, read_only, memory, array)

    def protect(self, buffer: PlanBuffer) -> PlanBuffer:
        """Declare that no launch writes to a buffer or view, before or after.

        Raises:
            PlanError: A launch that is planned already writes there.
        """
        self._check_mine(buffer, "protect")
        self._check_unwritten(buffer)
        self._protected.write(buffer.storage.number, *buffer.range)
        self._views.append(buffer)
        return buffer

    @property
    def protected(self) -> Sequence[PlanBuffer]:
        """The buffers and views that `protect` was given."""
        return tuple(self._views)

    def _check_unwritten(self, buffer: PlanBuffer) -> None:
        writer = self._tracker.writer(*buffer.range)
        if writer is not None:
            raise PlanError(
                f"{buffer!r} cannot be read-only: {self._launches[writer]} writes there"
            )

    def _store(
        self,
        name: str,
        shape: tuple[Extent, ...],
        dtype: str,
        read_only: bool,
        memory: Buffer | None = None,
        source: Any = None,
    ) -> PlanBuffer:
        self._arguments.check_variables(shape, f"buffer {name}")
        storage = Storage(len(self._storages), name, shape, dtype, read_only, memory, source)
        if storage.nbytes >= 2**62:
            sizes = ", ".join(map(str, shape))
            raise PlanError(
                f"buffer {name}: expected a size that memory can have, got {storage.nbytes} bytes "
                f"of {dtype}[{sizes}]"
            )
        made = PlanBuffer(self, storage, 0, shape, dtype)
        if read_only:
            self._check_unwritten(made)
        self._storages.append(storage)
        self._names.add(name)
        if read_only:
            self._protected.write(storage.number, *made.range)
        return made

    def _check_name(self, name: str) -> None:
        try:
            check_name(name, "the name of a variable or buffer of a plan")
        except KernelError as error:
            raise PlanError(f"plan {self.name}: {error}") from error
        if name == "stream":
            raise PlanError("stream is what a run is launched into; name it otherwise")
        if name in self._names:
            raise PlanError(f"{name} is a variable or buffer of plan {self.name} already")

    def _check_mine(self, buffer: PlanBuffer, where: str) -> None:
        if not isinstance(buffer, PlanBuffer) or buffer.plan is not self:
            raise PlanError(f"{where}: expected a buffer of plan {self.name}, got {buffer!r:.80}")

    # ------------------------------------------------------------------------------------- launches

    def launch(
        self,
        kernel: Kernel,
        /,
        *unnamed: Any,
        brick: str | BrickId | None = None,
        layer: int | None = None,
        **arguments: Any,
    ) -> Launch:
        """Append a launch.

        Args:
            kernel: What to launch.
            *unnamed: Nothing: arguments are given by name.
            brick: The unit of model work that it belongs to. Default the kernel's name.
            layer: The layer that it belongs to. Default none.
            **arguments: Every argument of the kernel by name. Buffers are those of the plan,
                views of them, or arrays; scalars are numbers, variables of the plan or
                expressions over them.

        Raises:
            PlanError: An argument is missing, does not fit or aliases another; the message names
                the launch. Nothing is appended.
        """
        if not isinstance(kernel, Kernel):
            made = "; call it to make one" if callable(kernel) else ""
            raise PlanError(f"expected a Kernel, got {type(kernel).__name__}{made}")
        where = f"launch {len(self._launches)} ({kernel.name})"
        if unnamed:
            names = ", ".join(f"{each.name}=" for each in kernel.signature)
            raise PlanError(f"{where}: expected arguments by name, {names}, got one without")
        known = len(self._storages)
        try:
            bound, given, buffers = self._arguments.check(kernel, arguments, where)
            self._check_protected(buffers, where)
            named, number = brick_name(brick, kernel, where), layer_number(layer, where)
        except PlanError:
            self._forget_storages(known)
            raise
        hazards = self._track(buffers)
        made = Launch(
            len(self._launches),
            kernel,
            tuple(given),
            bound.sizes,
            named,
            number,
            hazards,
            tuple(sorted({hazard.earlier for hazard in hazards})),
            bound.work,
        )
        self._launches.append(made)
        return made

    def _of_array(self, value: Any, param: Param, place: str) -> PlanBuffer:
        """Return the storage of an array, the same one for the same memory."""
        memory = _memory(value, place)
        key = (memory.device, memory.address, memory.nbytes, memory.dtype, memory.shape)
        found = self._given.get(key)
        if found is None:
            name, count = param.name, 0
            while name in self._names:
                count += 1
                name = f"{param.name}_{count}"
            found = self._given[key] = self.buffer(name, array=value)
        return found

    def _forget_storages(self, known: int) -> None:
        """Let go of the arrays that a refused launch brought with it."""
        for storage in self._storages[known:]:
            self._names.discard(storage.name)
        del self._storages[known:]
        self._given = {
            key: each for key, each in self._given.items() if each.storage.number < known
        }

    def _check_protected(self, buffers: Sequence[tuple[Param, PlanBuffer]], where: str) -> None:
        for param, buffer in buffers:
            if not param.access.writes:
                continue
            whose = self._protected.writer(*buffer.range)
            if whose is not None:
                raise PlanError(
                    f"{where} writes to {param.name}, {buffer!r}, which overlaps what of "
                    f"{self._storages[whose].name} is declared read-only; write elsewhere, or do "
                    "not declare it so"
                )

    def _track(self, buffers: Sequence[tuple[Param, PlanBuffer]]) -> tuple[Hazard, ...]:
        number, found = len(self._launches), []
        for param, buffer in buffers:
            if param.access.reads:
                found += self._tracker.read(number, *buffer.range)
        for param, buffer in buffers:
            if param.access.writes:
                found += self._tracker.write(number, *buffer.range)
        return tuple(found)

    # ----------------------------------------------------------------------------- what comes of it

    def prepare(
        self,
        device: str | Device = "CPU",
        executor: str = "serial",
        **options: Any,
    ) -> PreparedPlan:
        """Compile and place everything, and return what runs.

        Args:
            device: ``"CPU"``, ``"CUDA:n"``, or ``"NULL"``, which checks and executes nothing.
            executor: "serial" (default), "parallel", "megakernel" or, on CUDA, "graph".
            **options: bind, cache, threads, checked, profiler, fingerprints and, of "megakernel",
                workers, max_wall_time, trace, lineage and dedupe; see
                `brickline.executor.prepared.prepare`.

        Raises:
            PlanError: The plan has no launches, or something that it is given does not fit.
            CompileError: A compiler refuses a source.
            DeviceError: The device is absent.
        """
        from brickline.executor.prepared import prepare

        known = prepare.__kwdefaults__ or {}
        for name in options:
            if name not in known:
                hint = nearest(name, known)
                if name in self._names:
                    hint = f"; a run is given it, prepared({name}=...), or bind={{...}} a buffer"
                raise PlanError(
                    f"plan {self.name}: prepare has no option {name!r}; it takes device, executor, "
                    f"{', '.join(known)}{hint}"
                )
        return prepare(self, device, executor, **options)

    def explain(self, first: int | None = None, second: int | None = None) -> str:
        """Say why each edge is there, or why two launches may or may not overlap."""
        if first is None and second is None:
            return explain_plan(self)
        if first is None or second is None:
            given = second if first is None else first
            raise PlanError(f"expected the numbers of two launches, or none, got {given!r:.80}")
        return explain_pair(self, first, second)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the plan to a file: declarations and sources, no memory and no code of Python."""
        from brickline.plan_files import save_plan

        save_plan(self, path, overwrite=overwrite)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: The file is damaged, of a newer version, or no plan.
        """
        from brickline.plan_files import load_plan

        return load_plan(path)

    def __repr__(self) -> str:
        launches = counted(len(self._launches), "launch")
        return f"<Plan {self.name}, {launches} over {counted(len(self._storages), 'buffer')}>"


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__")


def _memory(value: Any, where: str) -> Buffer:
    try:
        return as_buffer(value)
    except LaunchError as error:
        raise PlanError(f"{where}: {error}") from error


def _dtype(dtype: object, where: str) -> str:
    try:
        return dtype_of(dtype).name
    except BricklineError as error:
        raise PlanError(f"{where}: {error}") from error
