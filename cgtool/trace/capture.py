"""One trace: the model's method on one example at one variant's sizes becomes a graph and what it rests on."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from cgtool.errors import TraceError
from cgtool.guards.kinds import check, describe
from cgtool.guards.signature import CallSignature
from cgtool.guards.sources import Roots
from cgtool.guards.state import STATE_NAMES, current
from cgtool.host import count
from cgtool.plan.pieces import Json
from cgtool.plan.records import Guard, Settled
from cgtool.trace import _torch as private
from cgtool.trace.breaks import explained, line_of_return
from cgtool.trace.files import function_guards
from cgtool.trace.guards import GuardRecorder, combined, module_frame, split_guards
from cgtool.trace.installed import Asked, listening
from cgtool.trace.outputs import MarkedSizes, TemplateReader, mark_outputs
from cgtool.trace.public_ops import hold_arrays, write_publicly
from cgtool.trace.questions import question_guards, shown_steps
from cgtool.trace.refusals import (
    ALWAYS,
    refuse_identities,
    refuse_side_effects,
    refuse_subclasses,
    refuse_surroundings,
)
from cgtool.trace.sources import Frame, source_text
from cgtool.trace.touched import touched
from cgtool.trace.writes import inherited_guards, settled_guards, writes_of


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one trace gave.

    Args:
        graph_module: Dynamo's full graph; each node has `meta["example_value"]`.
        input_sources: The source of each tensor placeholder, in the graph's order.
        dims: (name, source, dimension) of each dynamic dimension, where `source` is one of `input_sources`.
        model_guards: What must hold of the model and of globals.
        call_guards: What must hold of each call, sizes and tensors aside.
        codes: The code that the trace went through.
        classes: The classes of the objects that it touched.
        variables: The variables of the environment that Dynamo guarded.
        asked: The modules and distributions that the code asked for.
        output: The template of what the method returned; graph outputs are `["out", position]`.
        shape_env: Dynamo's ShapeEnv: ranges of symbols and relations between them.
        settled: The plain attributes of the model that a call sets.
        lines: The user's line that sets each, by source.
    """

    graph_module: fx.GraphModule
    input_sources: tuple[str, ...]
    dims: tuple[tuple[str, str, int], ...]
    model_guards: tuple[Guard, ...]
    call_guards: tuple[Guard, ...]
    codes: tuple[types.CodeType, ...]
    classes: tuple[type, ...]
    variables: frozenset[str]
    asked: Asked
    output: Json
    shape_env: Any
    settled: tuple[Settled, ...] = ()
    lines: Mapping[str, str] = field(default_factory=dict)


_Held = tuple[Any, str, Any]
_ABSENT = object()


class _Capture:
    """The backend that keeps what Dynamo made of one frame."""

    def __init__(self, roots: Roots, marked: list[tuple[torch.Tensor, int, str]]) -> None:
        self._roots = roots
        self._marked = marked
        self.graph_module: fx.GraphModule | None = None
        self.frame: Frame | None = None
        self.codes: list[types.CodeType] = []
        self.settled: tuple[Settled, ...] = ()
        self.lines: Mapping[str, str] = {}
        self.inherited: tuple[Settled, ...] = ()
        #: Module, attribute and value, as they are before Dynamo's bytecode sets them: what settles, and the others.
        self.plain: list[_Held] = []
        self.unchanged: list[_Held] = []
        self.inputs: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        self.returned: tuple[Guard, ...] = ()
        self.held: tuple[Guard, ...] = ()
        self.outputs: list[Any] = []
        self.sizes = MarkedSizes([tensor for tensor, _, _ in marked])
        self.shape_env: Any = None

    def __call__(self, graph_module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        output = private.current_output()
        write_publicly(graph_module)
        self.graph_module = graph_module
        self.frame = module_frame(self._roots.method, output, self._roots)
        self.codes = [code for code in private.TracingContext.get().traced_code if code.co_filename != private.__file__]
        self.shape_env = output.shape_env
        self.held = tuple(hold_arrays(graph_module, self.frame))
        self.inputs = _placeholder_sources(graph_module, self.frame)
        writes = writes_of(output, self.frame, self.inputs)
        refuse_side_effects(writes.changed, writes.lines)
        self.settled, self.lines = tuple(writes.settled), writes.lines
        self.plain = self._held((one.source, one.name) for one in writes.settled)
        self.unchanged = self._held(writes.renewed)
        self.inherited = tuple(writes.inherited)
        self.unchanged += [(self._roots.resolve(one.source), one.name, _ABSENT) for one in writes.inherited]
        self.others = _other_arguments(output, self.frame, self.inputs)
        fakes = {**self.inputs, **self.others}
        private.fix_strides(fakes.values())
        known = _known_tensors(fakes, self._roots)
        equal: dict[str, list[Any]] = {}
        for name, source, dim in _named_dims(self._marked, known):
            equal.setdefault(name, []).append(fakes[source].shape[dim])
        for sizes in equal.values():
            private.make_equal(sizes)
        self.returned = _returned_constants(self.frame)
        promised = [node.meta["example_value"] for node in _output_nodes(graph_module)]

        def run(*_values: Any) -> list[Any]:
            # Nothing is computed: the model's buffers and the caller's tensors stay as they are, and no time is spent.
            self.outputs = mark_outputs(promised)
            self.sizes.begin()
            return self.outputs

        return run

    def _held(self, names: Iterable[tuple[str, str]]) -> list[_Held]:
        owners = [(self._roots.resolve(source), name) for source, name in names]
        return [(owner, name, getattr(owner, name)) for owner, name in owners]

    def takes(self, source: str) -> bool:
        """Return whether `source` is a tensor that the plan checks as an input."""
        return source in self.inputs or source in self.others

    def current_frame(self) -> Frame:
        if self.frame is None:
            msg = "Nothing in this model's forward works on tensors, so there is nothing to compile. Leave it as it is."
            raise TraceError(msg)
        return self.frame


def capture(
    module: torch.nn.Module,
    method: Callable[..., Any],
    signature: CallSignature,
    arguments: Mapping[str, Any],
    marked: list[tuple[torch.Tensor, int, str]],
) -> Trace:
    """Trace `method` on these root locals, and once more where it sets plain attributes; the model stays as it was.

    Args:
        module: The model.
        method: Its method: bound, or a function that was set on the model.
        signature: Its signature.
        arguments: The root locals, as `signature.bind` gives them.
        marked: (tensor, dimension, name) of each dimension that must stay symbolic.

    Raises:
        GraphBreakError: The model holds something that Dynamo cannot trace.
        TraceError: Something that the graph rests on, or that it returns, cannot be kept as data.
    """
    undo: list[_Held] = []
    try:
        trace = _captured(module, method, signature, arguments, marked, undo=undo)
        if trace.settled:
            trace = as_before_and_after(trace, _captured(module, method, signature, arguments, marked, undo=undo))
    finally:
        _put_back(undo)
    if trace.settled:
        _check_at_once(trace.model_guards, Roots(module, method))
    return trace


def _captured(
    module: torch.nn.Module,
    method: Callable[..., Any],
    signature: CallSignature,
    arguments: Mapping[str, Any],
    marked: list[tuple[torch.Tensor, int, str]],
    *,
    undo: list[_Held],
) -> Trace:
    count("traces")
    refuse_surroundings(Roots(module, method))
    roots = Roots(module, method, arguments)
    captured = _Capture(roots, marked)
    recorder = GuardRecorder(frame=captured.current_frame, is_input=captured.takes)
    mode = private.detect_fake_mode(_tensors(arguments)) or contextlib.nullcontext()
    state = tuple(Guard(source=f"state:{name}", kind="state", expected=current(name)) for name in STATE_NAMES)
    with torch.no_grad(), private.quiet_tracing(), explained(method), listening() as asked:
        compiled = private.trace_frame(method, captured, recorder.filter)
        with mode, captured.sizes, private.marked_dynamic((tensor, dim) for tensor, dim, _ in marked):
            try:
                result = signature.call(compiled, arguments)
            finally:
                undo += captured.plain
                _put_back(captured.unchanged)
    graph_module = captured.graph_module
    if graph_module is None:
        captured.current_frame()
        raise AssertionError
    refuse_identities(captured.codes)
    refuse_subclasses({**captured.inputs, **captured.others})
    _add_placeholders(graph_module, captured.others)
    sources = (*captured.inputs, *captured.others)
    known = _known_tensors(sources, roots)
    guarded = (*recorder.finish(), *captured.returned, *captured.held)
    seen = touched(captured.codes, (*(guard.source for guard in guarded), *sources), roots)
    asked.add_imported(seen.names)
    tensors = {source: roots.resolve(source) for source in sources}
    questions = question_guards(captured.codes, seen.names, {**tensors, **seen.objects})
    shown = shown_steps(graph_module, {**captured.inputs, **captured.others}, captured.shape_env)
    steps = [Guard(source=s, kind="steps_of_one", expected=describe("steps_of_one", tensors[s])) for s in shown]
    model_guards, call_guards = split_guards(combined((*guarded, *questions, *steps), seen.guards))
    functions = function_guards(captured.codes)
    model_guards = (*ALWAYS, *_own_method(Roots(module, method)), *model_guards, *functions)
    model_guards = tuple(settled_guards(inherited_guards(model_guards, captured.inherited), captured.settled))
    _check_at_once(model_guards, Roots(module, method))
    return Trace(
        graph_module=graph_module,
        input_sources=sources,
        dims=_named_dims(marked, known),
        model_guards=model_guards,
        call_guards=(*state, *call_guards),
        codes=tuple(captured.codes),
        classes=seen.classes,
        variables=frozenset(recorder.variables),
        asked=asked,
        output=_template(TemplateReader(captured.outputs, known, captured.sizes), result, method),
        shape_env=captured.shape_env,
        settled=captured.settled,
        lines=captured.lines,
    )


def _template(reader: TemplateReader, result: Any, method: Callable[..., Any]) -> Json:
    try:
        return reader.read(result)
    except TraceError as error:
        raise TraceError(f"{error}{line_of_return(method)}", path=error.path, actual=error.actual) from error


def _put_back(held: Sequence[_Held]) -> None:
    for owner, name, value in reversed(held):
        if value is not _ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)


def as_before_and_after(first: Trace, again: Trace) -> Trace:
    """Return the trace of a model that sets plain attributes: it serves the model as it was, and as it is from then on.

    Args:
        first: The trace of the model as it was.
        again: The trace of the model with these attributes set.

    Raises:
        TraceError: They are two graphs, or the attributes change with each call.
    """
    if again.settled or _graph_words(first) != _graph_words(again):
        refuse_side_effects([f"{one.source}.{one.name}" for one in first.settled], first.lines)
    guards = {(guard.source, guard.kind): guard for trace in (first, again) for guard in trace.model_guards}
    calls = {(guard.source, guard.kind): guard for trace in (first, again) for guard in trace.call_guards}
    return replace(
        again,
        model_guards=tuple(settled_guards(guards.values(), first.settled)),
        call_guards=tuple(calls.values()),
        codes=tuple(dict.fromkeys((*first.codes, *again.codes))),
        classes=tuple(dict.fromkeys((*first.classes, *again.classes))),
        variables=first.variables | again.variables,
        settled=first.settled,
    )


def _graph_words(trace: Trace) -> tuple[Any, ...]:
    """Return what two equal traces have in common; a graph that holds a constant tensor equals none."""
    graph_module = trace.graph_module
    placeholders = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
    constants = [object() for _ in graph_module.named_buffers()]
    shapes = [(str(tuple(t.shape)), str(t.stride())) for t in placeholders if isinstance(t, torch.Tensor)]
    return graph_module.code, shapes, constants, trace.input_sources, trace.dims, trace.output


def _own_method(roots: Roots) -> tuple[Guard, ...]:
    """Return guards on whether the method is the class's, or one that was set on the model itself."""
    name = roots.method.__name__
    kind = f"absent:{name}"
    is_absent = describe(kind, roots.module)
    guard = Guard(source="self", kind=kind, expected=is_absent)
    if is_absent:
        return (guard,)
    return (guard, Guard(source=f"self.{name}", kind="value", expected=describe("value", getattr(roots.module, name))))


def slow_ops(names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the ops (`ns.op` or `ns.op.overload`) whose first call imports Dynamo, as `ns::op`."""
    spelled = dict.fromkeys("::".join(name.split(".")[:2]) for name in names)
    return tuple(name for name in spelled if private.made_by_custom_op(name))


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = private.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _placeholder_sources(graph_module: fx.GraphModule, frame: Frame) -> dict[str, Any]:
    """Return {source: fake tensor} of the graph's tensor inputs, in order."""
    found: dict[str, Any] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            found[source_text(node.meta["grapharg"].source, frame)] = value
    return found


def _output_nodes(graph_module: fx.GraphModule) -> list[fx.Node]:
    # Dynamo's graphs return a tuple of nodes.
    return list(cast("tuple[fx.Node, ...]", graph_module.graph.output_node().args[0]))


def _returned_constants(frame: Frame) -> tuple[Guard, ...]:
    """Return a guard on each plain value that the model hands from where it was found to its output.

    Dynamo has no guard on what it only passes through; the output template holds the value.
    """
    guards = []
    for source, value in private.passed_through():
        guards.append(Guard(source=source_text(source, frame), kind="value", expected=describe("value", value)))
    return tuple(guards)


def _other_arguments(output: Any, frame: Frame, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return {source: fake tensor} of the tensor arguments that the graph does not take.

    A tensor of which the graph uses nothing but its shape is no placeholder of Dynamo's, yet its size is.
    """
    found: dict[str, Any] = {}
    for tracked in output.tracked_fakes:
        if isinstance(tracked.fake, torch.Tensor) and not private.is_of_numpy(tracked.source):
            text = source_text(tracked.source, frame)
            if text.startswith("arg:") and text not in known and not text.endswith("._base"):
                found[text] = tracked.fake
    return found


def _add_placeholders(graph_module: fx.GraphModule, others: Mapping[str, Any]) -> None:
    """Let the graph take these tensors too, after all that it takes already."""
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    for index, fake in enumerate(others.values()):
        insert = graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(None)
        with insert:
            node = graph.placeholder(f"only_shape_{index}")
        node.meta["example_value"] = fake
        placeholders.append(node)
    graph_module.recompile()


def _known_tensors(inputs: Iterable[str], roots: Roots) -> dict[int, str]:
    return {id(roots.resolve(source)): source for source in inputs}


def _named_dims(
    marked: list[tuple[torch.Tensor, int, str]], known: Mapping[int, str]
) -> tuple[tuple[str, str, int], ...]:
    return tuple((name, known[id(t)], dim % t.dim()) for t, dim, name in marked if id(t) in known)


def _check_at_once(guards: tuple[Guard, ...], roots: Roots) -> None:
    """Check every guard against the very model that was traced: one that fails now would make every load a miss."""
    failures = check(guards, roots)
    if failures:
        shown = "\n  ".join(f"{f.guard.source} {f.guard.kind}: {f.sentence}" for f in failures[:5])
        msg = f"{len(failures)} facts about this model changed while it was traced:\n  {shown}\nMake them constant."
        raise TraceError(msg, actual=tuple(f.sentence for f in failures))
