"""What the operations must give, in NumPy and by the words of the documentation; knows neither MXNet nor the engine.

Reductions are formed in the order of ranks, on several hosts in that of each host's and then in that of the hosts:
float32 and float64 in their own precision, halves in float32 and rounded once (once for each host, too). Floats scale
in that precision too; integers in float64, truncated and, where they do not fit, clamped. An average is a sum whose
postscale is divided by the number of members. So nothing is left to rounding, and results are compared bit by bit.

Arrays of bfloat16 are arrays of float32 here, with values that bfloat16 has.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fuzz.programs import FLOATS, Operation, Program, Shape
from support.arrays import by_host

Array = Any  # numpy.ndarray of any dtype

SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.0)


def rounded_to_bfloat16(array: Array) -> Array:
    """The nearest values that bfloat16 has, ties to even, as float32; every NaN becomes the positive quiet one."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(array), np.float32(np.nan), rounded).reshape(np.shape(array))


def values(seed: int, operation: Operation, tensor: int, rank: int, device: int, shape: Shape) -> Array:
    """What a rank contributes: other values for each rank and element."""
    generator = np.random.default_rng([seed, operation.index, tensor, rank, device])
    if operation.dtype not in FLOATS:
        dtype = np.dtype(operation.dtype)
        info = np.iinfo(dtype)
        few = generator.random() < 0.3
        low, high = (max(-9, int(info.min)), 9) if few else (info.min, info.max)
        return generator.integers(low, high, shape, dtype, endpoint=True)
    array = np.asarray(generator.standard_normal(shape) * 10.0 ** generator.integers(-2, 3))
    if operation.special and array.size:
        places = generator.integers(0, array.size, 1 + array.size // 4)
        array.reshape(-1)[places] = generator.choice(SPECIAL, places.shape)
    if operation.dtype == "bfloat16":
        return rounded_to_bfloat16(array.astype(np.float32))
    if operation.kind == "sparse_allreduce":
        array = np.abs(array) + 1  # no zeros but in the rows that the rank does not have
        array[generator.random(len(array)) < generator.choice((0.0, 0.5, 0.9, 1.0))] = 0
    return array.astype(operation.dtype)


def object_of(seed: int, operation: Operation, rank: int) -> Any:
    generator = np.random.default_rng([seed, operation.index, rank])
    length = int(generator.choice((0, 1, 30, 3000, 200_000)))
    return {"rank": rank, "text": "é" * (rank + 1), "bytes": generator.bytes(length), "nested": [(1, None), {2.5}]}


def share(rows: int, place: int, count: int) -> slice:
    """The rows that a member keeps of what was reduced."""
    each, rest = divmod(rows, count)
    first = each * place + min(place, rest)
    return slice(first, first + each + (place < rest))


class Model:
    def __init__(self, program: Program) -> None:
        self._program = program
        self.seed = program.seed
        # The arrays of each device, of each tensor, that a rank gives to an operation.
        self.inputs = functools.cache(self._make_inputs)
        # One array for each tensor that the operation gives a rank, were there no fault.
        self.outputs = functools.cache(self._make_outputs)

    def _make_inputs(self, index: int, rank: int) -> list[list[Array]]:
        operation = self._program.operations[index]
        if operation.source is not None:
            return [self.outputs(operation.source, rank)]
        seed, place = self._program.seed, operation.members.index(rank)
        shapes = list(operation.shapes)
        if operation.rows:
            shapes = [(rows[place], *shape[1:]) for rows, shape in zip(operation.rows, shapes)]
        return [
            [values(seed, operation, tensor, rank, device, shape) for device in range(operation.devices)]
            for tensor, shape in enumerate(shapes)
        ]

    def _make_outputs(self, index: int, rank: int) -> list[Array]:
        operation = self._program.operations[index]
        members = operation.members
        place = members.index(rank)
        if operation.kind in ("broadcast", "store_broadcast", "broadcast_parameters"):
            return [devices[0] for devices in self.inputs(index, operation.root)]
        everybody = [self.inputs(index, member) for member in members]
        tensors = range(len(everybody[0]))
        if "allgather" in operation.kind:
            return [np.concatenate([each[tensor][0] for each in everybody]) for tensor in tensors]
        if operation.kind == "alltoall":
            return [np.concatenate([each[0][0][self._sent(operation, m, place)] for m, each in enumerate(everybody)])]
        as_half = operation.store == 2
        results = []
        for tensor in tensors:
            local = [_sum_of_devices(operation, each[tensor], as_half and len(members) > 1) for each in everybody]
            result = _reduce(operation, local, as_half)
            if "reducescatter" in operation.kind:
                result = result[share(len(result), place, len(members))]
            results.append(result)
        return results

    def received(self, index: int, rank: int) -> list[int]:
        """How many rows come from each member, with `alltoall`."""
        operation = self._program.operations[index]
        return [splits[operation.members.index(rank)] for splits in operation.splits]

    def _sent(self, operation: Operation, sender: int, receiver: int) -> slice:
        if not operation.splits:
            rows = operation.rows[0][sender] // len(operation.members)
            return slice(rows * receiver, rows * (receiver + 1))
        start = sum(operation.splits[sender][:receiver])
        return slice(start, start + operation.splits[sender][receiver])


def _sum_of_devices(operation: Operation, arrays: Sequence[Array], as_half: bool) -> Array:
    if len(arrays) == 1:
        return arrays[0]
    return fold(operation.dtype, "sum", arrays, 1.0, 1.0, as_half)


def _reduce(operation: Operation, arrays: Sequence[Array], as_half: bool) -> Array:
    prescale, postscale, op = operation.prescale, operation.postscale, operation.op
    if op == "average":
        op, postscale = "sum", postscale / len(arrays)
    if len(arrays) == 1 and prescale == 1.0 and postscale == 1.0:
        return arrays[0]
    return fold_of_ranks(operation.dtype, op, by_host(list(arrays), operation.members), prescale, postscale, as_half)


def fold_of_ranks(
    dtype: str, op: str, of_hosts: list[list[Array]], prescale: float, postscale: float, as_half: bool = False
) -> Array:
    """As `fold`: of the ranks of each host, and of what comes of it."""
    if len(of_hosts) == 1:
        return fold(dtype, op, of_hosts[0], prescale, postscale, as_half)
    folded = [fold(dtype, op, of_host, prescale, 1.0, as_half) for of_host in of_hosts]
    return fold(dtype, op, folded, 1.0, postscale, as_half)


def fold(dtype: str, op: str, arrays: Sequence[Array], prescale: float, postscale: float, as_half: bool) -> Array:
    """What becomes of arrays, one after the other, and of the factors, where an average is a sum."""
    if as_half and dtype in ("float32", "float64"):
        with np.errstate(all="ignore"):
            halves = [array.astype(np.float32).astype(np.float16) for array in arrays]
            return fold("float16", op, halves, prescale, postscale, False).astype(dtype)
    with np.errstate(all="ignore"):
        if dtype in FLOATS:
            wide: Any = np.float64 if dtype == "float64" else np.float32
            scaled = [array.astype(wide) * wide(prescale) for array in arrays]
            if prescale != 1.0 and dtype == "bfloat16":  # the products of halves are rounded, too
                scaled = [rounded_to_bfloat16(product) for product in scaled]
            elif prescale != 1.0:
                scaled = [product.astype(dtype).astype(wide) for product in scaled]
            result = functools.reduce(_FLOAT_OPS[op], scaled) * wide(postscale)
            if dtype == "bfloat16":
                return rounded_to_bfloat16(result)
            return np.where(np.isnan(result), np.nan, result).astype(dtype)
        scaled = [_scaled_integers(array, prescale) for array in arrays]
        total = functools.reduce(_INTEGER_OPS[op], scaled)
        return _scaled_integers(np.asarray(total, dtype), postscale)


def _scaled_integers(array: Array, factor: float) -> Array:
    if factor == 1.0:
        return array
    info = np.iinfo(array.dtype)
    product = np.trunc(array.astype(np.float64) * factor)
    # The maximum of int64 is not a float64: what rounds to it or is larger must not be converted.
    inside = (product > float(info.min)) & (product < float(info.max))
    result = np.where(inside, product, 0).astype(array.dtype)
    result = np.where(product <= float(info.min), array.dtype.type(info.min), result)
    return np.where(product >= float(info.max), array.dtype.type(info.max), result)


def _minimum(a: Array, b: Array) -> Array:
    """IEEE 754-2019 `minimum`: a NaN stays one, and -0 is less than 0."""
    less = np.where(a == b, np.where(np.signbit(a), a, b), np.where(a < b, a, b))
    return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), less)


_INTEGER_OPS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
_FLOAT_OPS = {**_INTEGER_OPS, "min": _minimum, "max": lambda a, b: -_minimum(-a, -b)}


def checksum(arrays: Sequence[Array]) -> int:
    """A number that tells these arrays from others."""
    return functools.reduce(lambda sum_, array: zlib.crc32(np.ascontiguousarray(array).tobytes(), sum_), arrays, 1)
