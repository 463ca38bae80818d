"""From an operation of a program to a call of the public interface, right or with its fault."""

import random
import threading
from collections.abc import Callable
from typing import Any, Optional

import mxnet as mx
import numpy as np

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from fuzz.arrays import Arrays, make_array
from fuzz.model import Model, object_of
from fuzz.programs import OF_STORES, Fault, Operation
from kvstore_hvd.errors import HorovodInternalError
from kvstore_hvd.mxnet_compat import context_of

Array = Any  # numpy.ndarray of any dtype

_OPS = {"average": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}
_IN_PLACE = ("allreduce", "numpy_allreduce", "grouped_allreduce", "broadcast")


def _of_library(kind: str, values: Array, dtype: str) -> Any:
    """An array of NumPy, or a row_sparse one of MXNet."""
    return values.copy() if kind == "numpy_allreduce" else mx.nd.array(values, dtype=dtype).tostype("row_sparse")


class Calls:
    """The calls of one rank; `set_of` gives the process set of members."""

    def __init__(self, rank: int, size: int, set_of: Callable[[tuple[int, ...]], Any]) -> None:
        self._rank, self._size, self._set_of = rank, size, set_of
        self._stores = [mx.kv.create("horovod") for _ in range(3)]
        self._stores[2].set_gradient_compression({"type": "fp16"})

    def check(self, members: tuple[int, ...]) -> None:
        """Raise what any call on the set would raise: the error of an operation that nobody has read."""
        self._set_of(members)._world("check").check()

    def prepare(
        self, operation: Operation, model: Model, draw: random.Random, fault: Optional[Fault], source: Any
    ) -> Arrays:
        """Make the arrays of an operation, with what they have to hold when it is over."""
        arrays = Arrays(model)
        if "barrier" in operation.kind or "_object" in operation.kind:
            return arrays
        place = operation.members.index(self._rank)
        world = self._set_of(operation.members)._world("prepare")
        adapter = world.adapter_for_gradients() if operation.memory[place] == "arena" else None
        given = model.inputs(operation.index, self._rank)
        healthy = self._healthy_tensors(operation, len(given))
        for tensor, devices in enumerate(given):
            result = model.outputs(operation.index, self._rank)[tensor] if tensor in healthy else None
            changed = [self._changed(operation, tensor, values, fault) for values in devices]
            other = tensor * (operation.index % 2)  # of some groups every second array
            context = mx.cpu((operation.device[place] + other) % 2 if operation.kind not in OF_STORES else 0)
            if operation.kind in ("numpy_allreduce", "sparse_allreduce"):
                inputs = [_of_library(operation.kind, *each) for each in changed]
                self._expect(arrays, operation, inputs, changed, result, fault)
                arrays.inputs.append(inputs)
                continue
            inputs = [
                source
                if source is not None
                else make_array(arrays, values, dtype, draw, mx.cpu(d) if d else context, adapter)
                for d, (values, dtype) in enumerate(changed)
            ]
            if fault is not None and fault.kind == "input" and tensor == 0:
                inputs[0] = mx.nd.random.normal(0, -1, shape=changed[0][0].shape)  # fails when it is executed
                changed[0] = (None, changed[0][1])
            self._expect(arrays, operation, inputs, changed, result, fault)
            arrays.inputs.append(inputs)
        arrays.is_replicated = operation.kind not in ("alltoall", "reducescatter", "grouped_reducescatter")
        return arrays

    def _healthy_tensors(self, operation: Operation, count: int) -> range:
        """The tensors that do not fail with an operation: of a store, each key is by itself."""
        if not operation.fails:
            return range(count)
        is_first = operation.fault and operation.fault.kind in ("shape", "dtype", "input")
        return range(1, count) if is_first and operation.kind in OF_STORES else range(0)

    def _changed(self, operation: Operation, tensor: int, values: Array, fault: Optional[Fault]) -> tuple[Array, str]:
        """Values and dtype as the culprit gives them."""
        shape = values.shape
        if fault is None or tensor != 0:
            return values, operation.dtype
        if fault.kind == "shape":
            return np.ones((shape[0] + 1, *shape[1:]) if shape else (2,), values.dtype), operation.dtype
        if fault.kind == "width":
            wider = (*shape[:-1], shape[-1] + 1) if len(shape) > 1 else (*shape, 2)
            return np.ones(wider, values.dtype), operation.dtype
        if fault.kind == "dimensions":
            return np.ones((*shape, 1), values.dtype), operation.dtype
        if fault.kind == "dtype":
            dtype = "float64" if operation.dtype != "float64" else "float32"
            return np.ones(shape, dtype), dtype
        return values, operation.dtype

    def _expect(
        self,
        arrays: Arrays,
        operation: Operation,
        inputs: list[Any],
        given: list[tuple[Array, str]],
        result: Optional[Array],
        fault: Optional[Fault],
    ) -> None:
        """Note what the arrays have to hold; a failed operation leaves them as they were."""
        outs = []
        if operation.kind in OF_STORES:
            device = iter((mx.cpu(), mx.cpu(1), mx.cpu()))
            values, dtype = given[0]
            for number, chosen in enumerate(operation.outs):
                name = dtype if chosen == operation.dtype else chosen
                # When an operation fails and its error is read at once, MXNet may still copy to further outs what the
                # first one held, or what the root gave.
                broadcasts = operation.kind == "store_broadcast" or (fault is not None and fault.kind == "kind")
                copied = name != dtype or (broadcasts and (number > 0 or self._rank == 0))
                before = np.zeros(inputs[0].shape, "float32" if name == "bfloat16" else name)
                out = make_array(Arrays(arrays.model), before, name, random.Random(0), next(device))
                outs.append(out)
                with np.errstate(all="ignore"):
                    wanted = before if result is None else np.asarray(result).astype(before.dtype)
                arrays.expected.append((out, None if result is None and copied else wanted, "out"))
                arrays.results.append(out)
        arrays.outs.append(outs)
        writes = operation.in_place and operation.kind in _IN_PLACE
        writes = writes or operation.kind == "broadcast_parameters" or (operation.kind in OF_STORES and not outs)
        writes = writes and operation.kind != "push_and_pull"
        for array, (values, _) in zip(inputs, given):
            if writes and result is not None:
                arrays.expected.append((array, np.asarray(result), "result"))
                arrays.results.append(array)
            elif values is not None and not operation.overwritten and operation.source is None:
                arrays.expected.append((array, np.asarray(values), "input"))
            else:
                arrays.expected.append((array, None, ""))

    def submit(self, operation: Operation, arrays: Arrays, draw: random.Random, fault: Optional[Fault]) -> None:
        """Call the operation; what it returns is added to `arrays`."""
        if operation.kind in OF_STORES:
            self._call_store(operation, arrays, draw, fault)
        elif operation.kind == "store_barrier":
            draw.choice((self._stores[0].barrier, self._stores[0]._barrier))()
        elif operation.kind == "barrier":
            hvd.barrier(self._set_of(operation.members))
        elif "_object" in operation.kind:
            self._call_with_objects(operation, arrays, fault)
        elif operation.kind == "broadcast_parameters":
            tensors = [each[0] for each in arrays.inputs]
            named: Any = {f"p{i}": each for i, each in enumerate(tensors)} if operation.root % 2 else tensors
            hvd.broadcast_parameters(named, operation.root, process_set=self._set_of(operation.members))
        else:
            self._call_with_tensors(operation, arrays, draw, fault)

    def _call_with_tensors(
        self, operation: Operation, arrays: Arrays, draw: random.Random, fault: Optional[Fault]
    ) -> None:
        kind = fault.kind if fault is not None else ""
        tensors = [each[0] for each in arrays.inputs]
        more: dict[str, Any] = {"process_set": self._set_of(operation.members), "priority": operation.priority}
        name = operation.name
        if "reduce" in operation.kind:
            op = operation.op
            if kind == "op":
                op = {"sum": "average", "average": "sum", "min": "max", "max": "min", "product": "sum"}[op]
            more["op"] = _OPS[op]
            more["prescale_factor"] = 0.7 if kind == "scale" else operation.prescale
            more["postscale_factor"] = operation.postscale
        if operation.kind == "broadcast":
            more["root_rank"] = operation.root
            if kind == "root":
                more["root_rank"] = next(rank for rank in operation.members if rank != operation.root)
        if operation.kind == "alltoall" and operation.splits:
            splits = operation.splits[operation.members.index(self._rank)]
            more["splits"] = draw.choice((splits, np.array(splits, np.int32)))
        if kind == "refused":
            if operation.kind == "alltoall" and draw.random() < 0.5:
                more["splits"] = [-1, *[0] * (len(operation.members) - 1)]
            else:
                tensors[0] = draw.choice((tensors[0].asnumpy(), mx.np.ones((2, 2), dtype="bool"), 3))
        if kind == "count":
            tensors.append(mx.nd.ones(2))
        if kind == "kind":
            if operation.kind == "allreduce":
                hvd.broadcast_(tensors[0], operation.root, name=name, process_set=more["process_set"])
            else:
                tensors[0] = tensors[0].tostype("default") if "sparse" in operation.kind else tensors[0]
                hvd.allreduce_(tensors[0], name=name, process_set=more["process_set"])
            if operation.waits:
                # The others wait; the error may come with this read or with a later call.
                arrays.expected.append((tensors[0], None, ""))
            return
        if operation.kind == "numpy_allreduce":
            assert name is not None
            out, factors = tensors[0] if operation.in_place else None, (more["prescale_factor"], operation.postscale)
            returned = kvstore_hvd.allreduce(tensors[0], name, more["op"].name.lower(), out, *factors)
        elif operation.recorded:
            returned = self._recorded(operation, arrays, name, more)
        else:
            suffix = "_" if operation.in_place and operation.kind in _IN_PLACE else ""
            call = getattr(hvd, operation.kind.replace("sparse_", "") + suffix)
            returned = call(tensors if operation.kind.startswith("grouped") else tensors[0], name=name, **more)
        self._returned(operation, arrays, returned)

    def _recorded(self, operation: Operation, arrays: Arrays, name: Any, more: dict[str, Any]) -> Any:
        """The gradient of what a rank gave is that array again: so it is reduced to what the array was."""
        tensor = arrays.inputs[0][0]
        tensor.attach_grad()
        with mx.autograd.record():
            result = hvd.allreduce(tensor, name=name, **more)
        result.backward(tensor.copy())
        arrays.expected.append((tensor.grad, arrays.model.outputs(operation.index, self._rank)[0], "gradient"))
        return result

    def _returned(self, operation: Operation, arrays: Arrays, returned: Any) -> None:
        model = arrays.model
        if operation.kind == "alltoall" and operation.splits:
            returned, received = returned
            wanted = model.received(operation.index, self._rank)
            if received.asnumpy().tolist() != wanted or received.dtype != np.int32:
                arrays.differences.append(f"received_splits {received.asnumpy().tolist()} instead of {wanted}")
        if not operation.kind.startswith("grouped"):
            returned = [returned]
        if operation.in_place and operation.kind in _IN_PLACE:
            if any(a is not b[0] for a, b in zip(returned, arrays.inputs)) or len(returned) != len(arrays.inputs):
                arrays.differences.append("the operation in place returns other arrays")
            return
        healthy = self._healthy_tensors(operation, len(returned))
        for tensor, array in enumerate(returned):
            wanted = model.outputs(operation.index, self._rank)[tensor] if tensor in healthy else None
            arrays.expected.append((array, None if wanted is None else np.asarray(wanted), "result"))
            arrays.results.append(array)
            if type(array) is not type(arrays.inputs[tensor][0]):
                arrays.differences.append(f"the result is a {type(array).__name__}")
            elif operation.kind != "numpy_allreduce" and context_of(array) != context_of(arrays.inputs[tensor][0]):
                arrays.differences.append(f"the result lies on {context_of(array)}")

    def _call_store(self, operation: Operation, arrays: Arrays, draw: random.Random, fault: Optional[Fault]) -> None:
        store = self._stores[operation.store]
        count = len(arrays.inputs)
        keys: Any = [self._key(operation, tensor) for tensor in range(count)]
        values: Any = [draw.choice((list, tuple))(each) for each in arrays.inputs]
        outs: Any = [list(each) for each in arrays.outs] if operation.outs else None
        if draw.random() < 0.5:
            values = [each[0] if len(each) == 1 else each for each in values]
        if count == 1 and draw.random() < 0.7:
            keys, values, outs = keys[0], values[0], None if outs is None else outs[0]
        broadcasts = operation.kind == "store_broadcast"
        if fault is not None and fault.kind == "kind":
            broadcasts = not broadcasts
            if broadcasts and operation.devices > 1:
                keys = [self._key(operation, tensor) for tensor in range(count)]
                values = [each[0] for each in arrays.inputs]
                outs = [list(each) for each in arrays.outs] if operation.outs else None
        if broadcasts:
            store.broadcast(keys, values, out=outs, priority=operation.priority)
        elif operation.kind == "push_and_pull":
            try:
                store.push(keys, values, priority=operation.priority)
            except HorovodInternalError:
                raise
            except Exception as error:  # of another operation: the pull may tell of one, too
                arrays.errors.append(error)
            if outs is not None:
                store.pull(keys, out=outs)
        else:
            store.pushpull(keys, values, out=outs, priority=operation.priority)

    def _key(self, operation: Operation, tensor: int) -> Any:
        assert operation.name is not None
        if operation.fault is None and operation.index % 3 == 0:
            return int(operation.name[1:]) * 10 + tensor
        return f"{operation.name}.{tensor}"

    def _call_with_objects(self, operation: Operation, arrays: Arrays, fault: Optional[Fault]) -> None:
        process_set = self._set_of(operation.members)
        mine = object_of(arrays.model.seed, operation, self._rank)
        kind = fault.kind if fault is not None else ""
        sent = {"lock": threading.Lock()} if kind == "refused" else mine
        if operation.kind == "allgather_object":
            got = hvd.allgather_object(sent, name=operation.name, process_set=process_set)
            wanted: Any = [object_of(arrays.model.seed, operation, rank) for rank in operation.members]
        else:
            root = operation.root
            if kind == "root":
                root = next(rank for rank in operation.members if rank != operation.root)
            got = hvd.broadcast_object(sent, root, name=operation.name, process_set=process_set)
            wanted = object_of(arrays.model.seed, operation, operation.root)
        if got != wanted:
            arrays.differences.append(f"{str(got)[:100]} instead of {str(wanted)[:100]}")

    def call_as_outsider(self, operation: Operation) -> None:
        process_set = self._set_of(operation.members)
        ones, root = mx.nd.ones((4,)), operation.members[0]
        calls: dict[str, Callable[[], Any]] = {
            "broadcast": lambda: hvd.broadcast(ones, root, name=operation.name, process_set=process_set),
            "broadcast_parameters": lambda: hvd.broadcast_parameters([ones], root, process_set=process_set),
            "barrier": lambda: hvd.barrier(process_set),
            "broadcast_object": lambda: hvd.broadcast_object(1, root, process_set=process_set),
            "allgather_object": lambda: hvd.allgather_object(1, process_set=process_set),
        }
        one: Any = getattr(hvd, operation.kind.replace("sparse_", ""), None)
        tensors: Any = [ones] if operation.kind.startswith("grouped") else ones
        calls.get(operation.kind, lambda: one and one(tensors, name=operation.name, process_set=process_set))()

    def call_with_wrong_arguments(self, operation: Operation, draw: random.Random) -> None:
        """Call the operation with an argument that this rank can see to be wrong."""
        ones = mx.nd.ones((len(operation.members),))
        if operation.kind in OF_STORES:
            store, key = self._stores[operation.store], self._key(operation, 0)
            call = store.broadcast if operation.kind == "store_broadcast" else store.pushpull
            wrong: list[Callable[[], Any]] = [
                lambda: call(1.5, ones),
                lambda: call(key, ones.asnumpy()),
                lambda: call(key, []),
                lambda: call([key, 7], [ones, ones]) if isinstance(key, str) else call(None, ones),
                lambda: call(key, ones, priority="high"),
                lambda: call(key, ones, out=mx.nd.ones(99)),
                lambda: call(key, mx.np.ones((2,), dtype="bool")),
                lambda: call([key], [ones, ones]),
            ]
        else:
            one = getattr(hvd, operation.kind)
            tensors: Any = [ones] if operation.kind.startswith("grouped") else ones
            given: dict[str, Any] = {"name": operation.name, "process_set": self._set_of(operation.members)}
            if operation.kind == "broadcast":
                given["root_rank"] = operation.root
            wrong = [
                lambda: one(tensors, **{**given, "priority": "high"}),
                lambda: one(tensors, **{**given, "priority": 2**40}),
                lambda: one(tensors, **{**given, "name": 3}),
            ]
            if "reduce" in operation.kind:
                wrong += [
                    lambda: one(tensors, **given, op=17),
                    lambda: one(tensors, **given, op=hvd.Adasum),
                    lambda: one(tensors, **given, prescale_factor="a"),
                ]
            if operation.kind == "broadcast":
                wrong.append(lambda: one(tensors, **{**given, "root_rank": 99}))
            if not operation.waits:
                wrong.append(lambda: one([np.ones(3)] if isinstance(tensors, list) else np.ones(3), **given))
        draw.choice(wrong)()
