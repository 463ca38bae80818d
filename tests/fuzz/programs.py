"""Random programs: what all ranks are to do together, drawn from a seed; every rank draws the same one.

A program is a list of operations, each by the members of some process set. Asynchronous operations may be submitted in
any order, which differs between ranks (see `ordering`); operations that wait come in the order of the list. What may
differ between ranks is drawn from `differences`. Some operations have a fault: something that one rank, the culprit,
does wrong.
"""

import math
import random
from dataclasses import dataclass, field, fields
from typing import Optional

from fuzz.differences import drawn
from support.arrays import DTYPES

Shape = tuple[int, ...]

FLOATS = ("float16", "bfloat16", "float32", "float64")
OPS = ("average", "sum", "min", "max", "product")
FACTORS = (0.5, 2.0, 1 / 3, -1.5, 3.0, 0.0, 1e-3, 1e300, math.inf, math.nan)
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}
# In bytes: where the engine changes its way, or begins another chunk.
BORDERS = (2 << 10, 4 << 10, 64 << 10, 128 << 10, 256 << 10)

# Of each kind: how often it is drawn, whether it waits for the others, and what can go wrong.
_MISMATCHES = ("shape", "dtype", "op", "scale", "kind", "input", "arguments", "clock")
_ROWS = ("dtype", "width", "dimensions", "refused", "kind", "arguments", "clock")
KINDS: dict[str, tuple[int, bool, tuple[str, ...]]] = {
    "allreduce": (30, False, _MISMATCHES),
    "grouped_allreduce": (10, False, ("shape", "dtype", "op", "scale", "arguments", "clock")),
    "numpy_allreduce": (6, True, ("shape", "dtype", "op", "scale", "clock")),
    "sparse_allreduce": (5, True, ("shape", "dtype", "kind", "clock")),
    "broadcast": (10, False, ("shape", "dtype", "root", "kind", "input", "arguments", "clock")),
    "broadcast_parameters": (3, False, ("clock",)),
    "pushpull": (20, False, ("shape", "dtype", "kind", "input", "arguments", "clock")),
    "store_broadcast": (6, False, ("shape", "dtype", "kind", "arguments", "clock")),
    "push_and_pull": (4, False, ("clock",)),
    "allgather": (8, True, _ROWS),
    "grouped_allgather": (3, True, ("dtype", "width", "count", "refused", "clock")),
    "alltoall": (6, True, ("dtype", "width", "refused", "kind", "arguments", "clock")),
    "reducescatter": (6, True, ("shape", "dtype", "op", "scale", "refused", "kind", "arguments", "clock")),
    "grouped_reducescatter": (3, True, ("shape", "dtype", "count", "refused", "clock")),
    "broadcast_object": (3, True, ("root", "refused", "clock")),
    "allgather_object": (3, True, ("refused", "clock")),
    "barrier": (2, True, ("clock",)),
    "store_barrier": (1, True, ("clock",)),
    "wait": (4, True, ()),
}
_FAULTS = [(kind, fault) for kind, (_, _, faults) in KINDS.items() for fault in faults]
_DTYPES = {"numpy_allreduce": DTYPES, "sparse_allreduce": ("float16", "float32", "float64")}
OF_STORES = ("pushpull", "store_broadcast", "push_and_pull")


@dataclass(frozen=True)
class Fault:
    """What the culprit, a rank, does differently: one of the words in `KINDS`."""

    kind: str
    culprit: int

    @property
    def fails(self) -> bool:
        """Whether the operation fails for everybody; otherwise the culprit corrects itself."""
        return self.kind != "arguments"


@dataclass
class Operation:
    """One operation; the meaning of what is optional depends on the kind."""

    index: int  # its place in the program
    kind: str  # a key of `KINDS`
    members: tuple[int, ...]  # ranks that take part, in ascending order
    name: Optional[str] = None  # None: matched by counting
    dtype: str = "float32"
    shapes: list[Shape] = field(default_factory=list)  # of its tensors; gathered ones: but for `rows`
    rows: list[list[int]] = field(default_factory=list)  # of each tensor the number of rows of each member
    splits: list[list[int]] = field(default_factory=list)  # rows from each member to each; none: equally many
    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    priority: int = 0
    in_place: bool = False
    recorded: bool = False  # by autograd: the gradient is reduced as the array was
    special: bool = False  # infinities, NaNs and the like among the values
    source: Optional[int] = None  # the operation whose result is the input, or that is waited for
    overwritten: bool = False  # by an operation that takes its result, in place
    store: int = 0
    devices: int = 1
    outs: tuple[str, ...] = ()  # dtypes of the store's outs; none: in place
    fault: Optional[Fault] = None
    memory: tuple[str, ...] = ()  # of each member's arrays; see `differences`, as for the next two
    device: tuple[int, ...] = ()
    clock: tuple[float, ...] = ()  # none: nobody is late
    outsiders: bool = False  # ranks that are no members call it too, and are refused

    def __str__(self) -> str:
        shown = [f"{self.index}: {self.kind} of {self.members}"]
        for each in fields(self)[3:]:
            value = getattr(self, each.name)
            if value != each.default and value != []:
                shown.append(f"{each.name}={value!r}")
        return " ".join(shown)

    @property
    def waits(self) -> bool:
        """Whether the call waits for the other members."""
        return KINDS[self.kind][1]

    @property
    def fails(self) -> bool:
        """Whether it fails for all members."""
        return self.fault is not None and self.fault.fails


@dataclass
class Program:
    seed: int
    size: int
    sets: list[tuple[int, ...]]  # process sets besides that of all ranks
    operations: list[Operation]
    wrong_set: str = ""  # what is wrong with an attempt to add or remove a set at the beginning
    leaver: Optional[int] = None  # a rank that gives up in the middle and calls `reset`, whereupon all have to

    def __str__(self) -> str:
        lines = [f"program {self.seed} of {self.size} ranks: sets {self.sets}"]
        lines += [f"  wrong set: {self.wrong_set}"] if self.wrong_set else []
        lines += [f"  rank {self.leaver} gives up in the middle"] if self.leaver is not None else []
        return "\n".join([*lines, *(f"  {operation}" for operation in self.operations)])


def generate(seed: int, size: int, leavers: bool = True) -> Program:
    """Draw a program; in it a rank may give up in the middle where `leavers` says so."""
    return _Generator(seed, size).program(leavers)


class _Generator:
    def __init__(self, seed: int, size: int) -> None:
        self._seed, self._size = seed, size
        self._draw = random.Random(f"program {seed} of {size}")
        self._differ = random.Random(f"differences {seed} of {size}")
        self._operations: list[Operation] = []
        self._sets = [tuple(range(size))]
        self._faulty = False

    def program(self, leavers: bool) -> Program:
        draw, size = self._draw, self._size
        for _ in range(draw.choice((0, 0, 1, 2, 3)) if size > 1 else draw.choice((0, 0, 0, 1))):
            members = tuple(sorted(draw.sample(range(size), draw.randint(1, size))))
            if members not in self._sets:
                self._sets.append(members)
        faulty = self._faulty = self._seed % 2 == 1
        names = [f"w{i}" for i in range(80)]
        draw.shuffle(names)
        weights = [weight for weight, _, _ in KINDS.values()]
        for _ in range(draw.choice((1, 2, 4, 6, 8, 12, 16))):
            (kind,) = draw.choices(list(KINDS), weights)
            operation = self._operation(kind, names)
            if operation is not None:
                if faulty and draw.random() < 0.3:
                    self._fault(operation)
                self._operations.append(operation)
        # Fifty programs in a row have every fault of every kind.
        for i in range(4 if faulty and size > 1 else 0):
            kind, fault = _FAULTS[(self._seed // 2 * 4 + i) % len(_FAULTS)]
            for _ in range(50):
                operation = self._operation(kind, names[:1], chained=False)
                if operation is not None and self._fault(operation, fault):
                    self._operations.append(operation)
                    names = names[1:]
                    break
        program = Program(self._seed, size, self._sets[1:], self._operations)
        if draw.random() < 0.05:
            wrong = ("foreign", "empty", "twice", *(("different", "remove") if size > 1 else ()))
            program.wrong_set = draw.choice(wrong)
        if leavers and size > 1 and draw.random() < 0.01:
            program.leaver = draw.randrange(size)
        return program

    def _operation(self, kind: str, names: list[str], chained: bool = True) -> Optional[Operation]:
        draw = self._draw
        members = self._sets[0]
        if kind not in (*OF_STORES, "store_barrier", "numpy_allreduce"):
            members = draw.choice(self._sets)
        operation = Operation(len(self._operations), kind, members)
        operation.priority = draw.choice((0, 0, -operation.index, draw.randint(-(2**31), 2**31 - 1)))
        operation.root = draw.choice(members) if kind not in OF_STORES else 0
        if kind == "wait":
            asked = [each for each in self._operations if not each.waits]
            if not asked:
                return None
            operation.source = draw.choice(asked).index
            operation.members = self._operations[operation.source].members
            return operation
        operation.memory = drawn("memory", self._differ, len(members))
        operation.device = drawn("device", self._differ, len(members))
        operation.dtype = draw.choice(_DTYPES.get(kind, (*DTYPES, "bfloat16")))
        operation.special = operation.dtype in FLOATS and draw.random() < 0.15
        if "barrier" not in kind and kind != "broadcast_parameters":
            operation.name = names.pop()
        if kind in OF_STORES:
            self._of_store(operation)
        elif "reduce" in kind:
            operation.op = draw.choice(OPS if "allreduce" in kind and kind != "sparse_allreduce" else OPS[:2])
            if draw.random() < 0.3 and kind != "sparse_allreduce":
                factors = draw.choice(FACTORS), draw.choice((1.0, draw.choice(FACTORS)))
                operation.prescale, operation.postscale = draw.sample(factors, 2)
        tensors = draw.randint(0, 4) if kind.startswith("grouped") else draw.choice((1, 1, 1, 2, 3))
        if kind not in (*OF_STORES, "broadcast_parameters") and not kind.startswith("grouped"):
            tensors = 1
        operation.shapes = [self._shape(operation) for _ in range(tensors)]
        if kind in ("allgather", "grouped_allgather", "alltoall"):
            self._rows(operation)
        operation.in_place = draw.random() < 0.5 and kind != "sparse_allreduce"
        if kind == "grouped_allreduce" and operation.in_place and draw.random() < 0.7:
            # Gradients of layers: they travel together, from the arena on some ranks and from elsewhere on others.
            operation.dtype, operation.special = "float32", False
            operation.shapes = [(draw.randint(1100, 25000),) for _ in range(draw.randint(8, 24))]
        operation.outsiders = len(members) < self._size and draw.random() < 0.3 and kind not in OF_STORES
        has_name = operation.name and "_object" not in kind and kind != "numpy_allreduce"
        if has_name and draw.random() < 0.1 and kind not in OF_STORES:
            operation.name = None
        if chained:
            self._chain(operation)
        # Beside faults the call may raise the error of another operation: then there is nothing to go back from.
        is_new = not self._faulty and operation.source is None and operation.name and not operation.in_place
        has_gradient = kind == "allreduce" and operation.op in OPS[:2]
        if is_new and has_gradient and operation.shapes[0] and 0 not in operation.shapes[0] and draw.random() < 0.3:
            operation.recorded, operation.dtype = True, draw.choice(("float32", "float64"))
        return operation

    def _of_store(self, operation: Operation) -> None:
        draw = self._draw
        operation.store = draw.choice((0, 0, 1, 2))
        # A worker alone sums with MXNet's operators, which do not round to bfloat16.
        several = operation.kind != "store_broadcast" and (self._size > 1 or operation.dtype != "bfloat16")
        operation.devices = draw.choice((1, 1, 1, 2)) if several else 1
        wider = {"float16": "float32", "float32": "float64", "int32": "int64", "float64": "float32"}
        choices = ["", operation.dtype, f"{operation.dtype} {operation.dtype}"]
        if operation.dtype in wider:
            choices.append(f"{operation.dtype} {wider[operation.dtype]}")
        operation.outs = tuple(draw.choice(choices).split())

    def _shape(self, operation: Operation) -> Shape:
        draw = self._draw
        chance = draw.random()
        item = ITEM_BYTES[operation.dtype]
        if chance < 0.08:
            count = 0 if operation.dtype != "bfloat16" else 1
        elif chance < 0.2:
            count = 1
        elif chance < 0.55:
            count = draw.randint(2, 67)
        elif chance < 0.8:
            count = draw.randint(100, 5000)
        elif chance < 0.98:
            count = max(1, draw.choice(BORDERS) * draw.choice((1, 1, 2)) // item + draw.randint(-3, 3))
        else:
            count = draw.randint(1 << 20, 3 << 20) // item
        if operation.kind.endswith(("gather", "scatter", "alltoall")) or operation.kind == "sparse_allreduce":
            width = draw.choice(((), (1,), (3,), (2, 2)))
            least = 1 if operation.dtype == "bfloat16" or operation.kind == "sparse_allreduce" else 0
            return (max(least, count // math.prod(width)), *width)
        if count == 1 and draw.random() < 0.3 and operation.dtype != "bfloat16":
            return ()
        if count and count % 2 == 0 and draw.random() < 0.3:
            return (2, count // 2)
        if count == 0 and draw.random() < 0.5:
            return (3, 0)
        return (count,)

    def _rows(self, operation: Operation) -> None:
        """Give every member another number of rows, around that of the shape."""
        draw, members = self._draw, operation.members
        for shape in operation.shapes:
            least = 1 if operation.dtype == "bfloat16" else 0
            operation.rows.append([max(least, shape[0] + more) for more in drawn("rows", draw, len(members))])
        if operation.kind == "alltoall":
            if draw.random() < 0.3:
                operation.rows = [[len(members) * max(1, rows // len(members)) for rows in operation.rows[0]]]
            else:
                for rows in operation.rows[0]:
                    ends = [0, *sorted(draw.randint(0, rows) for _ in members[1:]), rows]
                    operation.splits.append([b - a for a, b in zip(ends, ends[1:])])

    def _chain(self, operation: Operation) -> None:
        """Let the operation take the result of an earlier one, now and then."""
        if operation.kind not in ("allreduce", "broadcast", "pushpull", "allgather") or self._draw.random() > 0.2:
            return
        for source in reversed(self._operations):
            fits = set(operation.members) <= set(source.members) and not source.fails and not source.overwritten
            own = source.in_place and source.kind in ("allreduce", "broadcast") and source.source is None
            if own and fits and (operation.kind != "allgather" or source.shapes[0]):
                operation.source = source.index
                operation.dtype, operation.shapes = source.dtype, list(source.shapes)
                operation.special = source.special
                if operation.kind == "pushpull":
                    operation.devices, operation.outs = 1, ()
                if operation.kind == "allgather":
                    operation.rows = [[source.shapes[0][0]] * len(operation.members)]
                    operation.in_place = False
                source.overwritten = operation.in_place or operation.kind == "pushpull"
                return

    def _fault(self, operation: Operation, wanted: str = "") -> bool:
        """Draw a fault, or the one that is wanted if it is possible; returns whether there is one."""
        draw = self._draw
        kinds = list(KINDS[operation.kind][2])
        if len(operation.members) == 1:
            kinds = [kind for kind in kinds if kind in ("clock", "arguments")]
        if operation.name is None or not operation.shapes or operation.recorded:
            kinds = [kind for kind in kinds if kind == "clock"]
        if operation.source is not None:
            kinds = [kind for kind in kinds if kind in ("op", "scale", "root", "kind", "clock", "arguments")]
        if "input" in kinds and (operation.dtype != "float32" or 0 in (*operation.shapes[0], len(operation.shapes[0]))):
            kinds.remove("input")
        if operation.kind in ("reducescatter", "grouped_reducescatter") and any(0 in each for each in operation.shapes):
            # Nothing is reduced, so nobody learns what was to be done with it.
            kinds = [kind for kind in kinds if kind not in ("op", "scale")]
        if not kinds or (wanted and wanted not in kinds):
            return False
        operation.fault = Fault(wanted or draw.choice(kinds), draw.choice(operation.members))
        if operation.fault.kind == "clock":
            operation.fault, operation.clock = None, drawn("clock", self._differ, len(operation.members))
            return True
        if operation.fault.kind in ("refused", "input") and "broadcast" in operation.kind:
            operation.fault = Fault(operation.fault.kind, operation.root)  # nobody else's is looked at
        if operation.fails and operation.source is not None:
            self._operations[operation.source].overwritten = True  # it may have been passed on with an error
        return True
