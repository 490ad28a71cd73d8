"""The callable that runs a model from its plan and opened artifacts."""

from __future__ import annotations

import abc
import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from cgtool.errors import ArtifactError, GuardError, UsageError
from cgtool.guards.signature import CallSignature
from cgtool.guards.sources import Place, Roots, leads_to
from cgtool.guards.table import failures_of
from cgtool.host import variables_now
from cgtool.plan.pieces import Graphs, PieceGraph
from cgtool.plan.records import Guard, GuardTable, Input, Plan, Variant, source_words
from cgtool.runtime._torch import in_dual_level, is_traced
from cgtool.runtime.call_guards import Accept, AcceptWriter, check_symbols
from cgtool.runtime.dispatch import Boxed, PiecewiseBackend, ShapeTable
from cgtool.runtime.generate import decode_literal, hole_value
from cgtool.runtime.op_by_op import piece_maker
from cgtool.runtime.program import Program, ProgramWriter, WrapPiece, check_steps, pieces_of
from cgtool.runtime.weights import StructureChangedError, Weights, is_weight, place_of
from cgtool.threads import ForkedLock

#: Methods that return the module for chaining; through the callable they return the callable.
_CHAINED = frozenset(
    {"eval", "train", "to", "cpu", "cuda", "half", "float", "double", "bfloat16", "type", "requires_grad_", "apply"}
    | {"share_memory", "zero_grad"}
)


class AsModule(abc.ABC):
    """Forwards attributes to `module`: `state_dict`, `parameters`, `eval`, `to`, `config`, ...

    Setting or deleting an attribute sets or deletes it on the module, so that calls see it: `served.cache = None`.

    Attributes:
        module: The live model.
    """

    module: nn.Module
    #: Attributes that are stored on this object rather than on the module.
    _OWN: frozenset[str] = frozenset()

    @abc.abstractmethod
    def recheck(self) -> None:
        """Check all guards on the model and on globals again, after a deliberate change to the model.

        Raises:
            GuardError: A guard no longer holds; the message names it.
        """

    def __getattr__(self, name: str) -> Any:
        if name == "module" or name.startswith("__"):  # not set yet, or looked up by copy and pickle
            raise AttributeError(name)
        value = getattr(self.module, name)
        if name not in _CHAINED:
            return value

        @functools.wraps(value)
        def chained(*args: Any, **kwargs: Any) -> Any:
            value(*args, **kwargs)
            return self

        return chained

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN or name.startswith("__"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)


#: Returned by an attempt if no variant accepts the call.
NOT_SERVED: Any = object()

_INFERENCE_ONLY = "Compiled models are for inference only"


class LoadedModel(AsModule):
    """A model that runs from compiled pieces, with the arguments and the return value of its method.

    Each call is checked against the guards of the variants in plan order, and the first variant that accepts it runs.
    Parameters and buffers are read at every call; `cgtool.runtime.weights` describes what may change after load.
    Several threads may call one object at once. A variant's functions are generated when a call first reaches the
    variant; those of the first variant are generated at once.

    Args:
        module: The live model, whose guards the loader has checked.
        plan: The plan.
        opened: (variant index, piece index) → the functions of that piece. Splitting pieces are absent.
        device_index: The device that a device without an index refers to; None means the current device.
        variables: The environment variables that the model reads, with their values at compile time.
        recheck_calls: Whether each call makes all the checks of `recheck`.

    Raises:
        ArtifactError: The plan violates its grammar, or a piece was not opened.
        GuardError: A tensor of the model has a different dtype, shape or layout than when it was compiled.
        ModelError: The method has no signature that can be inspected.
    """

    _OWN = frozenset(
        {"module", "plan", "_signature", "_bind", "_device_index", "_opened", "_environment", "_recheck_calls"}
        | {"_graphs", "_eager", "_makers", "_lock", "_wrap", "_variants"}
    )

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        opened: Mapping[tuple[int, int], PiecewiseBackend],
        *,
        device_index: int | None = None,
        variables: Mapping[str, str | None] = MappingProxyType({}),
        recheck_calls: bool = False,
    ) -> None:
        self.module = module
        self.plan = plan
        self._signature = CallSignature.of(getattr(module, plan.method))
        self.__signature__ = self._signature.outer
        self.__name__ = plan.method
        self.__doc__ = getattr(self._signature.method, "__doc__", None)
        self._bind = self._signature.binder
        self._device_index = device_index
        self._opened = dict(opened)
        self._environment = dict(variables)
        self._recheck_calls = recheck_calls
        self._graphs = plan.graphs if isinstance(plan.graphs, Graphs) else _as_graphs(plan.graphs)
        self._eager: dict[str, Boxed] = {}
        self._makers: dict[int, Callable[..., Boxed]] = {}
        self._lock = ForkedLock()  # held while a variant's functions are generated: variants share their parts
        self._wrap: WrapPiece | None = None
        self._variants = self._bind_variants()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            TypeError: The arguments do not match the signature of the model's method.
            GuardError: No variant accepts this call, the model is in training mode, gradients are needed, or the model
                changed since it was compiled.
            ArtifactError: An op's result differs from what its fake implementation promised, or an artifact that this
                call is the first to need cannot be opened on this machine.
        """
        answer = self.attempt(*args, **kwargs)
        if answer is NOT_SERVED:
            raise self.refusal(args, kwargs)
        return answer

    def attempt(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, or return `NOT_SERVED` if no variant accepts this call. Otherwise raises as a call does."""
        values = self._bind(*args, **kwargs)
        if self.module.training:
            msg = f"The model is in training mode. {_INFERENCE_ONLY}: call model.eval() first."
            raise GuardError(msg, path="training", expected=False, actual=True)
        if is_traced():
            msg = (
                "torch.jit.trace cannot see ops inside compiled code and would record the result as a constant. "
                "Trace the original model instead."
            )
            raise GuardError(msg, path="jit.trace", expected=False, actual=True)
        if self._recheck_calls:
            self._check_live()
        try:
            return self._run(values)
        except StructureChangedError:
            self.recheck()
        try:
            return self._run(values)
        except StructureChangedError as error:
            msg = "The model's modules changed during a call. Change them only between calls."
            raise GuardError(msg) from error

    def serves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether any variant's guards accept this call, without running it."""
        values = self._bind(*args, **kwargs)
        for served in self._variants:
            accepted = self._prepare(served).accept(*values)
            if accepted is not None and served.table.choose(accepted[1]) is not None:
                return True
        return False

    def _run(self, values: tuple[Any, ...]) -> Any:
        for served in self._variants:
            if not served.is_ready:
                self._prepare(served)
            accepted = served.accept(*values)
            if accepted is None:
                continue
            tensors, sizes, passed = accepted
            table = served.table.choose(sizes)
            if table is None:
                continue
            weights, needs_grad = served.bound.read()
            if torch.is_grad_enabled():
                self._refuse_gradients(served, tensors, weights, needs_grad=needs_grad)
            if in_dual_level():
                msg = (
                    f"A dual level of torch.autograd.forward_ad is active. {_INFERENCE_ONLY}: exit the dual level "
                    "before the call."
                )
                raise GuardError(msg, path="forward_ad", expected=False, actual=True)
            try:
                answer = served.program(tensors, sizes, passed, weights, table)
            except RuntimeError as error:
                from cgtool.runtime.explain import call_failure  # imported lazily: only failures need it

                failure = call_failure(error, self.plan.method, served.variant, sizes, (*tensors, *weights))
                if failure is None:
                    raise
                raise failure from error
            answer, *left = answer if served.kept else (answer,)
            for place, value in (*served.settled, *zip(served.kept, left, strict=True)):
                place.set(value)
            return answer
        return NOT_SERVED

    def recheck(self) -> None:
        """Check all guards on the model and on globals again; see `AsModule.recheck`."""
        self._check_live()
        # Replaced as a whole: a call that is running keeps the variants it started with.
        self._variants = self._bind_variants()

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Return the current tensors that calls read from the model rather than from their arguments, by source.

        Raises:
            GuardError: A tensor is gone or has a different dtype, shape or layout, or the module tree differs from the
                one that was compiled.
        """
        try:
            return self._live_tensors()
        except StructureChangedError:
            self.recheck()
        return self._live_tensors()

    def _live_tensors(self) -> dict[str, torch.Tensor]:
        return dict(itertools.chain.from_iterable(served.bound.named() for served in self._variants))

    @property
    def assigned_places(self) -> tuple[str, ...]:
        """The sources of the model's attributes and items that calls assign to."""
        return tuple(dict.fromkeys(write.place for variant in self.plan.variants for write in variant.kept))

    def open_all(self) -> None:
        """Open every artifact and generate every variant's functions now, so that no call has to wait for them.

        Raises:
            ArtifactError: An artifact cannot be opened on this machine.
        """
        for backend in self._opened.values():
            backend.open_all()
        for served in self._variants:
            self._prepare(served)

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedModel:
        model = LoadedModel(
            copy.deepcopy(self.module, memo),
            self.plan,
            self._opened,
            device_index=self._device_index,
            variables=self._environment,
            recheck_calls=self._recheck_calls,
        )
        model.recheck()  # a model's own __deepcopy__ may change it
        return model

    def __copy__(self) -> LoadedModel:
        model = LoadedModel.__new__(LoadedModel)
        vars(model).update(vars(self))
        return model

    def __reduce__(self) -> Any:
        msg = "A loaded model cannot be pickled. Send the original model, and call cgtool.load in the other process."
        raise UsageError(msg, path="pickle")

    def only_variant(self, variant: int) -> LoadedModel:
        """Return a copy that accepts only the calls of one variant."""
        model = copy.copy(self)
        model._variants = [self._variants[variant]]  # noqa: SLF001 - an object of this class
        return model

    def wrap_pieces(self, wrap: WrapPiece) -> None:
        """Replace the function of each compiled piece by what `wrap` returns for it, from now on.

        Args:
            wrap: Called once for each function of each piece, when a call first needs it.
        """
        self._wrap = wrap
        self._variants = self._bind_variants()

    def _check_live(self) -> None:
        """Check the guards on live objects, and the environment variables that the model reads."""
        roots = Roots(self.module, self._signature.method)
        failures = failures_of((variant.model_guards for variant in self.plan.variants), roots)
        problems = [(source_words(failure.guard.source), failure.sentence) for failure in failures]
        if self._environment != (now := variables_now(self._environment)):
            from cgtool.store.key import difference_between  # imported lazily: a hit does not need it

            changed = difference_between("variables", self._environment, now)
            problems += [(difference.path, difference.sentence) for difference in changed]
        if problems:
            path, first = problems[0]
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            msg = f"{first.rstrip('.')}{more}. Undo the change, or warm the model again."
            raise GuardError(msg, path=path, actual=tuple(sentence for _, sentence in problems))

    def _bind_variants(self) -> list[_Served]:
        shared: dict[Any, Weights] = {}
        variants = []
        # Variants that share an input share its record, so its id identifies it.
        distinct = {id(item): item for variant in self.plan.variants for item in variant.inputs}
        kept = self.assigned_places  # a call assigns to these, so the next call checks them as it checks its arguments
        are_weights = {at for at, item in distinct.items() if is_weight(item) and not leads_to(item.source, kept)}
        for index, variant in enumerate(self.plan.variants):
            weights = [i for i, item in enumerate(variant.inputs) if id(item) in are_weights]
            calls = sorted(set(range(len(variant.inputs))).difference(weights))
            # Bound now: weights record the module tree, whose guards were just checked.
            bound = self._bound(variant, tuple([variant.inputs[i] for i in weights]), shared)
            variants.append(_Served(index, variant, calls, weights, bound))
        self._prepare(variants[0])
        return variants

    def _prepare(self, served: _Served) -> _Served:
        """Return a variant after generating its functions, if that has not been done.

        Raises:
            ArtifactError: The plan violates its grammar, or a piece is missing or cannot be opened.
            SourceError: An object on the path to a guard's source is gone.
        """
        with self._lock:
            if not served.is_ready:
                self._write(served)
                served.is_ready = True
        return served

    def _refuse_gradients(
        self, served: _Served, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *, needs_grad: bool
    ) -> None:
        if not needs_grad and not any(tensor.requires_grad for tensor in tensors):
            return
        items = [*served.call_inputs, *(served.variant.inputs[i] for i in served.weights)]
        requiring = (item for item, tensor in zip(items, (*tensors, *weights), strict=True) if tensor.requires_grad)
        name = self._signature.display_name(next(requiring).source)
        msg = f"{name} requires grad and grad mode is on. {_INFERENCE_ONLY}: call the model under torch.no_grad()."
        raise GuardError(msg, path=name)

    def refusal(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception:
        """Return the error that explains why no variant accepts a call: a `GuardError`, or a `TypeError`."""
        from cgtool.runtime.explain import Explainer, refusal  # imported lazily: only refused calls need it

        values = self._bind(*args, **kwargs)
        misfit = self._signature.bind_error(args, kwargs)
        if misfit is not None:
            return TypeError(f"{self.plan.method}() {misfit}")
        explainers = [
            Explainer(
                served.variant,
                served.call_inputs,
                variants=self.plan.variants,
                signature=self._signature,
                module=self.module,
                device_index=self._device_index,
            )
            for served in self._variants
        ]
        arguments = dict(zip(self._signature.names, values, strict=True))
        return refusal(explainers, arguments, lambda index: self._variants[index].uncovered())

    def _write(self, served: _Served) -> None:
        """Generate a variant's functions: to accept a call, to choose and open its pieces, and to run them."""
        variant = served.variant
        symbols = check_symbols(variant)
        program = ProgramWriter(variant, self._graphs, symbols, self._eager)
        writer = AcceptWriter(
            variant,
            served.call_inputs,
            passed=program.passed,
            names=self._signature.names,
            module=self.module,
            method=self._signature.method,
            device_index=self._device_index,
        )
        check_steps(variant, self._graphs, symbols)
        for step in variant.steps:
            if step.splitting and step.graph not in self._eager:
                self._eager[step.graph] = self._op_by_op(step.graph)
        function = program.function(served.calls, served.weights)
        served.program = function if self._device_index is None else _on_device(function, self._device_index)
        backends = [_piece(self._opened, served.index, step.piece) for step in variant.steps if not step.splitting]
        if (wrap := self._wrap) is None:
            served.table = ShapeTable(symbols, backends)
        else:
            pieces = pieces_of(variant, self._graphs)
            served.table = ShapeTable(symbols, backends, lambda position, function: wrap(pieces[position], function))
        roots = Roots(self.module, self._signature.method)
        served.settled = tuple((place_of(roots, write.place), decode_literal(write.after)) for write in variant.settled)
        served.kept = tuple(place_of(roots, write.place) for write in variant.kept)
        served.accept = writer.function()

    def _op_by_op(self, identity: str) -> Boxed:
        """Return the function of a piece that is never compiled; graphs with the same frame share its code."""
        number, frame, constants = self._graphs.parts_of(identity)
        if number not in self._makers:
            self._makers[number] = piece_maker(frame, num_holes=len(constants), device_index=self._device_index)
        return self._makers[number](*map(hole_value, constants))

    def _bound(self, variant: Variant, inputs: tuple[Input, ...], shared: dict[Any, Weights]) -> Weights:
        same = _guards_of_identity(variant.model_guards)
        key = (*map(id, inputs), *map(id, same.groups if isinstance(same, GuardTable) else same))
        if key not in shared:
            shared[key] = Weights(self.module, self._signature.method, inputs, same, self._device_index)
        return shared[key]


def _on_device(program: Program, index: int) -> Program:
    """Return a program that runs with a device made current: native code uses the current device's stream."""

    def run(*values: Any) -> Any:
        if torch.accelerator.current_device_index() == index:
            return program(*values)
        with torch.accelerator.device_index(index):
            return program(*values)

    return run


def _as_graphs(graphs: Mapping[str, PieceGraph]) -> Graphs:
    from cgtool.plan.writing import graph_rows  # imported lazily: a plan read from disk already has this form

    return Graphs(graph_rows(graphs))


class _Served:
    """One variant with its functions; `accept`, `table` and `program` are set once it is ready.

    Args:
        index: The variant's index in the plan.
        variant: The variant.
        calls: Positions of the inputs that come from the call.
        weights: Positions of the inputs that come from the model.
        bound: The reader of the inputs that come from the model.
    """

    accept: Accept
    table: ShapeTable
    program: Program

    def __init__(self, index: int, variant: Variant, calls: list[int], weights: list[int], bound: Weights) -> None:
        self.index = index
        self.variant = variant
        self.calls = calls
        self.weights = weights
        self.bound = bound
        self.call_inputs = [variant.inputs[i] for i in calls]
        #: The places that each call sets to a constant of the plan, with that constant.
        self.settled: tuple[tuple[Place, Any], ...] = ()
        #: The places that each call sets to values that the program returns beside the output.
        self.kept: tuple[Place, ...] = ()
        self.is_ready = False

    def uncovered(self) -> str:
        if self.table.covers_all:
            return "the model's attributes that this call reads have moved since load; recheck() reports which"
        return f"this call's sizes were not compiled (compiled sizes: {self.table.covered()})"


def _piece(opened: Mapping[tuple[int, int], PiecewiseBackend], variant: int, piece: int) -> PiecewiseBackend:
    backend = opened.get((variant, piece))
    if backend is None:
        msg = (
            f"The cache entry is incomplete: piece {piece} of variant {variant} has no artifact. Warm the model again."
        )
        raise ArtifactError(msg, path=(variant, piece))
    return backend


def _guards_of_identity(guards: Sequence[Guard]) -> Sequence[Guard]:
    if isinstance(guards, GuardTable):
        return GuardTable(guards.texts, (group for group in guards.groups if group.kind.startswith("same:")))
    return tuple(guard for guard in guards if guard.kind.startswith("same:"))
