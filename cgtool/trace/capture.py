"""Traces the model's method once, on one example at one variant's sizes, into a graph and the facts it depends on."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from cgtool.errors import TraceError
from cgtool.guards.kinds import check, describe
from cgtool.guards.signature import CallSignature
from cgtool.guards.sources import Place, Roots, leads_to
from cgtool.guards.state import STATE_NAMES, current
from cgtool.host import count
from cgtool.ops import is_torch_op
from cgtool.plan.pieces import Json
from cgtool.plan.records import Guard, Settled, source_words
from cgtool.trace import _torch as private
from cgtool.trace.breaks import explain_errors, line_of_return
from cgtool.trace.files import function_guards
from cgtool.trace.groups import name_groups
from cgtool.trace.guards import GuardRecorder, combined, module_frame, split_guards
from cgtool.trace.installed import Asked, recorded_lookups
from cgtool.trace.kept import (
    Held,
    NextState,
    State,
    absent_attributes,
    can_be_kept,
    looked_at,
    put_back,
    unique_sources,
)
from cgtool.trace.local_tensors import to_local_tensors
from cgtool.trace.outputs import MarkedSizes, TemplateReader, mark_outputs
from cgtool.trace.public_ops import embed_numpy_arrays, replace_private_ops
from cgtool.trace.questions import question_guards, shown_steps
from cgtool.trace.refusals import (
    ALWAYS,
    refuse_beside_calls,
    refuse_identities,
    refuse_side_effects,
    refuse_subclasses,
    refuse_surroundings,
)
from cgtool.trace.sources import Frame, source_text
from cgtool.trace.touched import find_touched
from cgtool.trace.writes import Writes, computed_guards, inherited_guards, writes_of


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The result of one trace.

    Args:
        graph_module: Dynamo's full graph; each node has `meta["example_value"]`.
        input_sources: The source of each tensor placeholder, in the graph's order.
        dims: (name, source, dimension) of each dynamic dimension, where `source` is one of `input_sources`.
        model_guards: Conditions on the model and on globals.
        call_guards: Conditions on each call, other than sizes and tensors.
        codes: The traced code.
        classes: The user's classes that the trace could have read.
        variables: The environment variables that Dynamo guarded.
        asked: The modules and distributions that the code looked up.
        output: The template of the method's result; graph outputs are `["out", position]`.
        shape_env: Dynamo's ShapeEnv: ranges of symbols and relations between them.
        settled: The plain attributes of the model that a call sets once and for all.
        kept: The template of the value that a call leaves in each of these places of the model, by source.
        lines: The user's line that sets each of them, by source.
        looked_at: The sources in the model that Dynamo read.
        state: The state of the model during the trace.
        left: The state in which the call leaves the model; None if it leaves nothing.
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
    settled: tuple[Settled, ...]
    kept: Mapping[str, Json]
    lines: Mapping[str, str]
    looked_at: tuple[str, ...]
    state: State
    left: State | None


class _Capture:
    """The Dynamo backend that captures the graph of the frame; `left` are the places in which calls left values."""

    def __init__(self, roots: Roots, marked: list[tuple[torch.Tensor, int, str]], left: Collection[str]) -> None:
        self._roots = roots
        self._left = left
        self._marked = marked
        self.graph_module: fx.GraphModule | None = None
        self.frame: Frame | None = None
        self.codes: list[types.CodeType] = []
        self.writes = Writes()
        #: The values, before the call, of places that Dynamo's bytecode sets: those that the call changes, and others.
        self.lasting: list[Held] = []
        self.unchanged: list[Held] = []
        #: The graph's outputs as fake tensors.
        self.promised: list[Any] = []
        #: Source → fake tensor of the inputs that the plan checks, and of those that the graph does not take yet.
        self.fakes: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        self.returned: tuple[Guard, ...] = ()
        self.held: tuple[Guard, ...] = ()
        self.outputs: list[Any] = []
        self.sizes = MarkedSizes([tensor for tensor, _, _ in marked])
        self.shape_env: Any = None

    def __call__(self, graph_module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        output = private.current_output()
        graph_module = to_local_tensors(graph_module)
        replace_private_ops(graph_module)
        self.graph_module = graph_module
        self.frame = module_frame(output, self._roots)
        self.codes = [code for code in private.TracingContext.get().traced_code if code.co_filename != private.__file__]
        self.shape_env = output.shape_env
        self.held = tuple(embed_numpy_arrays(graph_module, self.frame))
        inputs = _placeholder_sources(graph_module, self.frame)
        self.writes = writes = writes_of(output, self.frame, inputs)
        refuse_side_effects(writes.changed, writes.lines)
        lasting = (*(one.place for one in writes.settled), *writes.kept)
        refuse_beside_calls(lasting, writes.lines)
        self.lasting = self._held(lasting)
        self.unchanged = self._held((*(one.place for one in writes.inherited), *writes.renewed))
        self.others = _other_arguments(output, self.frame, inputs, self._left)
        self.fakes = fakes = {**inputs, **self.others}
        private.fix_strides(fakes.values())
        known = {id(self._roots.resolve(source)): source for source in fakes}
        equal: dict[str, list[Any]] = {}
        for name, source, dim in _named_dims(self._marked, known):
            equal.setdefault(name, []).append(fakes[source].shape[dim])
        for sizes in equal.values():
            private.make_equal(sizes)
        self.returned = _returned_constants(self.frame)
        self.promised = promised = [node.meta["example_value"] for node in _output_nodes(graph_module)]

        def run(*_values: Any) -> list[Any]:
            # Nothing is computed, so the model's buffers and the caller's tensors stay unchanged, and it takes no time.
            self.outputs = mark_outputs(promised)
            self.own = {id(value): {*vars(value)} for value in self.outputs if isinstance(value, torch.Tensor)}
            self.sizes.begin()
            return self.outputs

        return run

    def _held(self, sources: Iterable[str]) -> list[Held]:
        return [(place, place.get()) for place in (Place(self._roots, source) for source in sources)]

    def current_frame(self) -> Frame:
        if self.frame is None:
            msg = "This model's forward does nothing with tensors, so there is nothing to compile. Leave it as it is."
            raise TraceError(msg)
        return self.frame


def trace_once(
    module: torch.nn.Module,
    method: Callable[..., Any],
    signature: CallSignature,
    arguments: Mapping[str, Any],
    marked: list[tuple[torch.Tensor, int, str]],
    *,
    state: State,
) -> Trace:
    """Trace `method` of a model in this state, which it stays in; `cgtool.trace.states.capture` has the arguments."""
    count("traces")
    marked = [*marked, *((tensor, dim, "") for tensor, dim in state.dynamic)]
    refuse_surroundings(Roots(module, method))
    roots = Roots(module, method, arguments)
    captured = _Capture(roots, marked, [place.text for place, _ in state.held])
    recorder = GuardRecorder(frame=captured.current_frame, is_input=lambda source: source in captured.fakes)
    mode = private.detect_fake_mode(_tensors(arguments)) or contextlib.nullcontext()
    settings = tuple(Guard(source=f"state:{name}", kind="state", expected=current(name)) for name in STATE_NAMES)
    with torch.no_grad(), private.quiet_tracing(), explain_errors(method), recorded_lookups() as asked:
        compiled = private.trace_frame(method, captured, recorder.filter)
        with mode, captured.sizes, private.marked_dynamic((tensor, dim) for tensor, dim, _ in marked):
            try:
                result = signature.call(compiled, arguments)
                left = [(place, place.get()) for place, _ in captured.lasting]
            finally:
                put_back((*captured.lasting, *captured.unchanged))
    graph_module, writes = captured.graph_module, captured.writes
    if graph_module is None:
        captured.current_frame()
        raise AssertionError
    refuse_identities(captured.codes)
    refuse_subclasses(captured.fakes)
    _add_placeholders(graph_module, captured.others)
    tensors = {source: roots.resolve(source) for source in captured.fakes}
    known = {id(tensor): source for source, tensor in tensors.items()}
    recorded = recorder.finish()
    guarded = (*recorded, *captured.returned, *captured.held)
    seen = find_touched(captured.codes, (*(guard.source for guard in guarded), *tensors), roots)
    asked.add_imported(seen.names)
    questions = question_guards(captured.codes, seen.names, {**tensors, **seen.objects})
    shown = shown_steps(graph_module, captured.fakes, captured.shape_env)
    steps = [Guard(source=s, kind="steps_of_one", expected=describe("steps_of_one", tensors[s])) for s in shown]
    model_guards, call_guards = split_guards(combined((*guarded, *questions, *steps), seen.guards))
    functions = function_guards(captured.codes)
    model_guards = (*ALWAYS, *_own_method(Roots(module, method)), *model_guards, *functions)
    model_guards = tuple(computed_guards(inherited_guards(model_guards, writes.inherited), module, seen.names))
    model_guards = tuple(name_groups(graph_module, model_guards, call_guards, captured.codes))
    check_at_once(model_guards, Roots(module, method))
    whole = {id(value): source for source, value in seen.objects.items() if source.startswith(("arg:", "self"))}
    reader = TemplateReader(captured.outputs, captured.own, whole | known, captured.sizes)
    held = unique_sources(module, arguments, [place.text for place, _ in left])
    templates = _templates(
        TemplateReader(captured.outputs, captured.own, held | known, captured.sizes), left, writes.lines
    )
    # attributes that are set to a non-tensor, or to the value that they already have
    other_writes = [source for source in writes.written if source not in writes.kept]
    with mode:
        after = NextState(captured.promised, roots, marked).after(state, left, templates)
    return Trace(
        graph_module=graph_module,
        input_sources=tuple(tensors),
        dims=_named_dims(marked, known),
        model_guards=model_guards,
        call_guards=(*settings, *call_guards),
        codes=tuple(captured.codes),
        classes=seen.classes,
        variables=frozenset(recorder.variables),
        asked=asked,
        output=_template(reader, result, "output", line_of_return(method)),
        shape_env=captured.shape_env,
        settled=tuple(writes.settled),
        kept={source: templates[source] for source in writes.kept},
        lines=writes.lines,
        looked_at=looked_at((*tensors, *other_writes, *absent_attributes(seen.guards, captured.codes)), recorded),
        state=state,
        left=after if left else None,
    )


def _template(reader: TemplateReader, value: Any, name: str, line: str) -> Json:
    try:
        return reader.read(value, name)
    except TraceError as error:
        raise TraceError(f"{error}{line}", path=error.path, actual=error.actual) from error


def _templates(reader: TemplateReader, left: Iterable[Held], lines: Mapping[str, str]) -> dict[str, Json]:
    """Return the template of the value left in each place, by source; refuse values that a call cannot leave there."""
    found: dict[str, Json] = {}
    for place, value in left:
        if not can_be_kept(value):
            refuse_side_effects([place.text], lines)
        found[place.text] = _template(reader, value, source_words(place.text), lines.get(place.text, ""))
    return found


def _own_method(roots: Roots) -> tuple[Guard, ...]:
    """Return guards on whether the method comes from the class or was set on the model itself."""
    name = roots.method.__name__
    kind = f"absent:{name}"
    is_absent = describe(kind, roots.module)
    guard = Guard(source="self", kind=kind, expected=is_absent)
    if is_absent:
        return (guard,)
    return (guard, Guard(source=f"self.{name}", kind="value", expected=describe("value", getattr(roots.module, name))))


def slow_ops(names: Iterable[str]) -> tuple[str, ...]:
    """Return the ops (`ns.op` or `ns.op.overload`) whose first call imports Dynamo, as `ns::op`."""
    spelled = dict.fromkeys("::".join(name.split(".")[:2]) for name in names)
    return tuple(name for name in spelled if private.made_by_custom_op(name) and not is_torch_op(name))


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
    """Return a guard on each plain value that the model passes through to its output.

    Dynamo has no guard on such a value, and the output template contains it.
    """
    guards = []
    for source, value in private.passed_through():
        guards.append(Guard(source=source_text(source, frame), kind="value", expected=describe("value", value)))
    return tuple(guards)


def _other_arguments(output: Any, frame: Frame, known: Mapping[str, Any], left: Collection[str]) -> dict[str, Any]:
    """Return {source: fake tensor} of arguments, and of tensors left by other calls, that the graph does not take.

    If the graph uses only the shape of a tensor, Dynamo makes placeholders of its sizes, but not of the tensor.
    """
    found: dict[str, Any] = {}
    for tracked in output.tracked_fakes:
        if isinstance(tracked.fake, torch.Tensor) and not private.is_of_numpy(tracked.source):
            text = source_text(tracked.source, frame)
            is_of_call = text.startswith("arg:") or leads_to(text, left)
            if is_of_call and text not in known and not text.endswith("._base"):
                found[text] = tracked.fake
    return found


def _add_placeholders(graph_module: fx.GraphModule, others: Mapping[str, Any]) -> None:
    """Add placeholders for these tensors after the existing ones."""
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    for index, fake in enumerate(others.values()):
        insert = graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(None)
        with insert:
            node = graph.placeholder(f"only_shape_{index}")
        node.meta["example_value"] = fake
        placeholders.append(node)
    graph_module.recompile()


def _named_dims(
    marked: list[tuple[torch.Tensor, int, str]], known: Mapping[int, str]
) -> tuple[tuple[str, str, int], ...]:
    return tuple((name, known[id(t)], dim % t.dim()) for t, dim, name in marked if name and id(t) in known)


def check_at_once(guards: tuple[Guard, ...], roots: Roots) -> None:
    """Check every guard against the traced model: a guard that fails now would make every load a miss."""
    failures = check(guards, roots)
    if failures:
        shown = "\n  ".join(f"{f.guard.source} {f.guard.kind}: {f.sentence}" for f in failures[:5])
        msg = f"{len(failures)} guarded values changed while the model was traced:\n  {shown}\nMake them constant."
        raise TraceError(msg, actual=tuple(f.sentence for f in failures))
