"""How MXNet compiles, runs and exports graphs: those with operators of ours, and those that keep their gradients."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvstore_hvd.mxnet_compat.arrays import context_of
from kvstore_hvd.mxnet_compat.hooks import children_of, holding, is_wrapped, surround, with_subclasses, wrap

#: What MXNet knows the operator of `SyncBatchNorm` by.
SYNC_BATCH_NORM = "kvstore_hvd_sync_batch_norm"

# Attribute of a block: the graph that MXNet compiled, and ours (None without `SyncBatchNorm`).
_COMPILED = "_kvstore_hvd_compiled"
# Variables of graphs for training.
_UNUSED = "kvstore_hvd_unused_statistics"

# Whether this process has compiled a graph that keeps its gradient arrays.
_static_graphs = False
# Whether there were graphs before this package could see their flags.
_early_graphs = False


def may_keep_gradients(may_be_used: bool) -> bool:
    """Whether a graph may keep gradient arrays that a backward pass may have used, as far as the caller knows."""
    return _static_graphs and (may_be_used or _early_graphs)


def has_static_shape(flags: Iterable[tuple[str, Any]]) -> bool:
    """Whether the flags of a graph have MXNet prepare its operators for arrays that stay where they are."""
    return any(_is_static_shape(*flag) for flag in flags)


def checked_flags(symbol: Any, flags: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The flags that a graph is to be compiled with: without ``static_shape`` where `SyncBatchNorm` is in it."""
    # MXNet does not take note there that an operator changes its auxiliary states. If such a graph were applied twice,
    # both forward passes of a layer would run at the same time, and each worker would number them in an order of its
    # own.
    flags = list(flags)
    if has_static_shape(flags) and SYNC_BATCH_NORM in symbol.tojson():  # also where it is part of another operator
        return [flag for flag in flags if not _is_static_shape(*flag)]
    return flags


def _is_static_shape(name: str, value: Any) -> bool:
    return name == "static_shape" and str(value).lower() in ("true", "1")


def patch(mxnet: Any) -> None:
    """Let blocks with `SyncBatchNorm` infer and export without it, and take arrays without rows; look at flags."""

    def init(original: Callable[..., Any], self: Any, sym: Any, flags: Any = (), *args: Any, **kwargs: Any) -> None:
        global _static_graphs
        flags = checked_flags(sym, flags)
        _static_graphs = _static_graphs or has_static_shape(flags)
        original(self, sym, flags, *args, **kwargs)

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        def call_cached_op(self: Any, *args: Any) -> Any:
            compiled = self._cached_op
            if not (_has_sync_batch_norm(self) if compiled is None else _compiled_of(mxnet, self)) or self._callback:
                return original(self, *args)
            if any(getattr(each, "size", None) == 0 for each in args):
                # The layer's graph cannot take such arrays; the layer itself can.
                with holding(self, _active=False):
                    return self.forward(*args)
            if compiled is None:
                self._build_cache(*args)
            ours = _compiled_of(mxnet, self)
            if ours is None:  # a layer with use_global_stats exchanges nothing
                return original(self, *args)
            with holding(self, _cached_op=ours[mxnet.autograd.is_training()]):
                return original(self, *args)

        return call_cached_op

    def export(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        graph = self._cached_graph
        if graph and SYNC_BATCH_NORM in graph[1].tojson():
            graph = graph[0], _without_exchange(mxnet, graph[1])
        with holding(self, _cached_graph=graph):
            return original(self, *args, **kwargs)

    global _static_graphs, _early_graphs
    cached_op = mxnet.ndarray.CachedOp
    is_late = not is_wrapped(cached_op.__init__) and any(type(each) is cached_op for each in gc.get_objects())
    try:
        surround(cached_op, "__init__", init)
    except TypeError:  # a class of Cython's
        is_late = True
    if is_late:
        _static_graphs = _early_graphs = True
    for kind in with_subclasses(mxnet.gluon.HybridBlock):  # MXNet 2 copies inherited methods into classes
        wrap(kind, "_call_cached_op", calling)
        surround(kind, "export", export)


def _has_sync_batch_norm(block: Any) -> bool:
    return hasattr(block, "_synchronized") or any(map(_has_sync_batch_norm, children_of(block)))


def _compiled_of(mxnet: Any, block: Any) -> Any:
    """The graphs of a block for inference and for training, which take the arguments of the one that MXNet compiled."""
    # None without an exchange.
    known = vars(block).get(_COMPILED)
    if known is None or known[0] is not block._cached_op:
        symbol = block._cached_graph[1]
        ours = None
        if SYNC_BATCH_NORM in symbol.tojson():
            inference = _compile(mxnet, block, _without_exchange(mxnet, symbol), {})
            ours = inference, _compile(mxnet, block, *_with_unused_statistics(mxnet, symbol))
        known = block._cached_op, ours
        setattr(block, _COMPILED, known)
    return known[1]


def _compile(mxnet: Any, block: Any, symbol: Any, unused: dict[str, str]) -> Callable[..., Any]:
    """A graph with `unused` variables, which get copies of the arguments named."""
    data, whole = block._cached_graph
    names, given = symbol.list_inputs(), whole.list_inputs()
    places = [given.index(unused.get(name, name)) for name in names]
    of_data = [place for place, name in enumerate(names) if name in {each.name for each in data}]
    flags = {**dict(block._flags), "data_indices": of_data}
    flags["param_indices"] = [place for place in range(len(names)) if place not in of_data]
    compiled = mxnet.ndarray.CachedOp(symbol, list(flags.items()))
    copies: dict[tuple[str, str], Any] = {}

    def run(*args: Any) -> Any:
        chosen = [args[place] for place in places]
        for place, name in enumerate(names):
            if name in unused:
                key = name, str(context_of(chosen[place]))
                if key not in copies:
                    with mxnet.autograd.pause():
                        copies[key] = chosen[place].copy()
                chosen[place] = copies[key]
        return compiled(*chosen)

    return run


def _with_unused_statistics(mxnet: Any, symbol: Any) -> tuple[Any, dict[str, str]]:
    """The graph with variables of its own as the running statistics of MXNet's BatchNorm, and what they stand for."""
    # The exchange updates the running statistics. BatchNorm would make NaN of them in the backward pass of an iteration
    # in which the exchange has failed.
    graph = json.loads(symbol.tojson())
    nodes = graph["nodes"]
    places = [(node, place) for node, _, _ in _normalizing(nodes) for place in (3, 4)]
    unused = {f"{_UNUSED}{n}": nodes[node["inputs"][place][0]]["name"] for n, (node, place) in enumerate(places)}
    for entry in (*graph["heads"], *(entry for node in nodes for entry in node["inputs"])):
        entry[0] += len(unused)  # the variables come first
    for n, (node, place) in enumerate(places):
        node["inputs"][place] = [n, 0, 0]
    graph["nodes"] = [{"op": "null", "name": name, "inputs": []} for name in unused] + nodes
    graph["arg_nodes"] = [n for n, node in enumerate(graph["nodes"]) if node["op"] == "null"]
    del graph["node_row_ptr"]
    return _load(mxnet, graph, symbol), unused


def _without_exchange(mxnet: Any, symbol: Any) -> Any:
    """The graph with MXNet's BatchNorm in the place of `SyncBatchNorm`, whose inference is the same."""
    graph = json.loads(symbol.tojson())
    for node, shifted, exchange in _normalizing(graph["nodes"]):
        gamma, beta = exchange["inputs"][-4:-2]  # before the running statistics
        node["inputs"][:3] = shifted["inputs"][1], gamma, beta
        node["attrs"].update({name: exchange["attrs"][name] for name in ("fix_gamma", "momentum")})
    return _load(mxnet, graph, symbol)


def _normalizing(nodes: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], ...]]:
    """Of each layer of `SyncBatchNorm`: MXNet's BatchNorm, where its data comes from, and the exchange."""
    for node in nodes:
        if node["op"] == "BatchNorm":
            shifted, exchange = (nodes[node["inputs"][place][0]] for place in (0, 1))
            if exchange.get("attrs", {}).get("op_type") == SYNC_BATCH_NORM and shifted["op"] == "reshape_like":
                yield node, shifted, exchange


def _load(mxnet: Any, graph: dict[str, Any], like: Any) -> Any:
    load = getattr(mxnet.symbol, "load_json", None) or mxnet.symbol.fromjson  # MXNet 2 has renamed it
    symbol = load(json.dumps(graph))
    return symbol.as_np_ndarray() if isinstance(like, mxnet.symbol.numpy._Symbol) else symbol
