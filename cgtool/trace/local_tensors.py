"""Rewrites a graph on DTensors as a graph on this rank's local tensors and collectives.

Dynamo's graph calls ops on DTensors, as the model does. Each such call is repeated on fake tensors and replaced by the
ops that DTensor runs: ATen ops on local tensors, and functional collectives. All other calls stay unchanged. A
parameter that is a DTensor becomes an input whose source is its local tensor.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import fx

from cgtool.errors import TraceError
from cgtool.trace import _torch as private
from cgtool.trace.breaks import line_of

#: The attribute in which a DTensor keeps this rank's local tensor.
LOCAL = "_local_tensor"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def to_local_tensors(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return an equivalent graph without DTensors; a graph that has none is returned unchanged.

    Raises:
        TraceError: A DTensor is returned, or passed to an op with a nested graph.
    """
    values = {node: node.meta.get("example_value") for node in graph_module.graph.nodes}
    if not any(map(private.has_dtensor, values.values())):
        return graph_module
    return _Writer(graph_module, values).written()


class _Writer:
    """Goes through a graph in order and copies each node, or runs it and records the ops that it calls."""

    def __init__(self, graph_module: fx.GraphModule, values: dict[fx.Node, Any]) -> None:
        self._old = graph_module
        #: The value of each node: Dynamo's example value, until the node is run.
        self._values = values
        self._copies: dict[fx.Node, fx.Node] = {}
        #: The open autocast regions.
        self._regions: list[Any] = []
        self._calls = private.RecordedCalls(graph_module, values.values())

    def written(self) -> fx.GraphModule:
        try:
            for node in self._old.graph.nodes:
                self._write(node)
        finally:
            for region in reversed(self._regions):
                private.EXIT_AUTOCAST(region)
        for node in reversed(self._calls.graph.nodes):
            if node.op == "call_function" and not node.users and private.is_size(node.meta.get("example_value")):
                self._calls.graph.erase_node(node)  # DTensor compares many sizes as it is run
        return fx.GraphModule(self._old, self._calls.graph)

    def _write(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._place(node)
        elif any(private.has_dtensor(self._values[one]) for one in (node, *node.all_input_nodes)):
            self._run(node)
        else:
            self._copy(node)
        function: Any = node.target
        if function is private.ENTER_AUTOCAST:
            self._regions.append(function(*node.args))
        elif function is private.EXIT_AUTOCAST:
            private.EXIT_AUTOCAST(self._regions.pop())

    def _copy(self, node: fx.Node) -> None:
        self._copies[node] = self._calls.graph.node_copy(node, self._new)
        self._calls.know(self._copies[node])

    def _new(self, node: fx.Node) -> Any:
        """Return the new graph's node, or the number, for a node of the old graph."""
        return self._copies[node] if node in self._copies else self._calls.node_of(self._values[node])

    def _place(self, node: fx.Node) -> None:
        value = self._values[node]
        if private.has_dtensor(value):
            new = self._calls.graph.node_copy(node)
            grapharg = new.meta["grapharg"] = copy.copy(node.meta["grapharg"])
            grapharg.source = private.dynamo_source.AttrSource(grapharg.source, LOCAL)
            new.meta["example_value"] = getattr(value, LOCAL)
            self._calls.know(new)
        else:
            self._copy(node)
            self._values[node] = private.real_object(value)

    def _run(self, node: fx.Node) -> None:
        if node.op == "output":
            returned = next(one for one in node.all_input_nodes if private.has_dtensor(self._values[one]))
            raise _refused(returned, "The model returns a DTensor")
        if any(one.op == "get_attr" for one in node.all_input_nodes):
            raise _refused(node, f"{node.name} runs a nested graph on DTensors")
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        function: Any = node.target
        if node.op == "call_method":
            function, args = getattr(args[0], str(node.target)), args[1:]
        self._values[node] = self._calls.run(function, args, kwargs, node.meta.get("stack_trace"))


def _refused(node: fx.Node, what: str) -> TraceError:
    frames = [(file, int(line), name) for file, line, name in _FRAME.findall(node.meta.get("stack_trace") or "")]
    advice = "Use this rank's part (`.to_local()`), or the whole tensor (`.full_tensor()`)."
    return TraceError(f"{what}.{line_of(frames)}\n{advice}", path=node.name)
