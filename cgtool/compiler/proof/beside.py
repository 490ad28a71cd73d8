"""The calls of the whole-call proof: each variant is called compiled and eagerly, and the results are compared.

A variant is called with the example that it was traced from, at its smallest sizes, at its largest within the limits
of a proof, and at each size that was compiled. Outputs and in-place writes are compared. A whole model has no float64
reference. Instead, it is called again with every float changed by one rounding, which shows how far roundings carry.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from msgspec.structs import replace

from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.compiler.proof import _torch, judge
from cgtool.compiler.proof.inputs import STYLES, index_bound, rounded
from cgtool.compiler.proof.prove import NotRunnableError, is_out_of_memory, limits_of
from cgtool.compiler.proof.reference import eps_of, leaves_open, lowest_dtype, sorts, takes_steps
from cgtool.compiler.proof.restride import Order, order_of
from cgtool.compiler.proof.runs import Run, check_sharing, differing_tensors
from cgtool.compiler.proof.twins import Twins, leaves_of, num_fake_bytes, tensors_of
from cgtool.compiler.ranks import Ranks
from cgtool.compiler.sizes import sizes_to_prove
from cgtool.dims import Dims
from cgtool.errors import ArtifactError, CallMismatchError, CompileError, GuardError, NoRoomError, brief
from cgtool.graph.expressions import rename, symbols_of
from cgtool.guards.signature import CallSignature
from cgtool.guards.sources import Place, Roots
from cgtool.machine import free_bytes
from cgtool.model import ExampleCall, ModelSpec
from cgtool.plan.grammar import Record, canonical_json, decode
from cgtool.plan.pieces import PieceGraph
from cgtool.plan.records import Variant, source_words
from cgtool.plan.shapes import of_sizes, shape_text
from cgtool.runtime.call import NOT_SERVED, LoadedModel
from cgtool.runtime.find import MatchedEntry, open_entry
from cgtool.runtime.generate import strides_matter
from cgtool.store.records import Row
from cgtool.trace.examples import arguments_for, sizes_of

StageName = Literal["start", "model", "compiled"]
STAGES: tuple[StageName, ...] = ("start", "model", "compiled")

#: After so many seconds of calls, no further size is tried.
_ENOUGH_SECS = 60.0
_SEED = 20260101
#: The share of free memory for seeded or perturbed weights.
_SHARE = 0.25
_ASKS = (
    "The model checks whether it is being compiled (torch.compiler.is_compiling) and then computes something else, "
    "under torch.compile too. Call it with arguments for which both agree, or change that code."
)
_OPS = "A likely cause is an op whose fake implementation returns other shapes or strides than its kernel: {ops}."
_OURS = "Each piece by itself is correct. Unless the model checks whether it is being compiled, please report this."


class CallProof(Record, frozen=True, kw_only=True):
    """The result of one variant's calls."""

    #: The sizes of its dynamic dimensions at which the compiled call matched the model.
    proved_at: tuple[dict[str, int], ...] = ()
    #: Output name → eager's order of dimensions, for outputs that differ in their strides only.
    restrides: dict[str, Order] = msgspec.field(default_factory=dict)
    #: Whether to repeat all calls with these restrides, on this or another rank.
    again: bool = False
    #: Why `proved_at` is empty.
    gap: str = ""
    #: Whether a later warm may succeed.
    later: bool = False


def room_for_weights(device: str) -> int:
    """Return how many bytes of weights may be allocated on a type of device; 0 if its free memory is unknown."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else free_bytes()
    return int(_SHARE * (free or 0))


class Calls:
    """The calls of the variants of an entry, which need not be published yet.

    Ranks make the same calls in the same order, together.
    """

    def __init__(
        self,
        found: MatchedEntry,
        spec: ModelSpec,
        device: str,
        stage: Callable[[StageName], None],
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._found = found
        self._spec = spec
        self._stage = stage
        self._method = getattr(spec.module, spec.method)
        self._signature = CallSignature.of(self._method)
        self._dims = Dims.of(spec.dynamic)
        self._calls = {call.name: call for call in spec.calls}
        self._device = device
        graphs = list(found.plan.graphs.values())
        self._dtype = max(map(lowest_dtype, graphs), key=eps_of, default=torch.float64)
        self._tolerance = judge.Tolerance.of(
            self._dtype, takes_steps=any(map(takes_steps, graphs)), has_reference=False
        )
        self._ops = sorted({name for graph in graphs for name in graph.ops})
        self._leaves_open = any(map(leaves_open, graphs))
        self._sorts = any(map(sorts, graphs))
        given = [[call.args, call.kwargs] for call in spec.calls]
        #: The restrides of the current variant.
        self._restrides: dict[str, Order] = {}
        #: Whether some tensors are fake, so that numbers are drawn for them.
        self._draws = num_fake_bytes(spec.module) > 0 or any(
            _torch.is_fake(tensor) for _, tensor in tensors_of(given, "")
        )
        self._until = time.monotonic() + _ENOUGH_SECS

    def proofs(self, compiled: Iterable[tuple[int, Sequence[Row]]] | None = None) -> dict[int, CallProof]:
        """Return the proof of each variant; inputs are drawn differently if the model does not run on them.

        Args:
            compiled: The variants to call, each with its rows; the iterator may block until the next variant is
                compiled. None calls all variants of the entry.
        """
        rows = self._found.entry.manifest.rows
        todo = compiled if compiled is not None else [(i, rows) for i in range(len(self._found.plan.variants))]
        proofs: dict[int, CallProof] = {}
        failures: dict[int, NotRunnableError] = {}
        bound = index_bound(_as_graph(self._found.plan.variants[0], self._found.plan.graphs))
        for style in STYLES if self._draws else STYLES[:1]:
            again: list[tuple[int, Sequence[Row]]] = []
            with Twins(self._spec.module, style=style, bound=bound) as twins:
                for index, variant_rows in self._untimed(todo):
                    try:
                        proofs[index] = self._prove_variant(index, variant_rows, twins)
                    except NotRunnableError as error:
                        failures.setdefault(index, error)
                        again.append((index, variant_rows))
            todo = again
            if not todo:
                break
        for index, failure in failures.items():
            gap = f"not run: the model itself does not run on {'seeded' if self._draws else 'these'} inputs ({failure})"
            proofs.setdefault(index, CallProof(gap=gap, later=failure.later))
        return proofs

    def _untimed(self, todo: Iterable[tuple[int, Sequence[Row]]]) -> Iterator[tuple[int, Sequence[Row]]]:
        """Yield from `todo` without counting the wait for the next variant as time spent on calls."""
        items = iter(todo)
        while True:
            began = time.monotonic()
            item = next(items, None)
            self._until += time.monotonic() - began
            if item is None:
                return
            yield item

    def _opened(self, index: int, rows: Sequence[Row]) -> LoadedModel:
        """Return what `load` would return for this entry, restricted to one variant, whose artifacts are opened."""
        variants = self._found.plan.variants
        variant_rows = tuple(replace(row, variant=0) for row in rows if row.variant == index)
        entry = replace(self._found.entry, manifest=replace(self._found.entry.manifest, rows=variant_rows))
        plan = replace(self._found.plan, variants=(variants[index], *variants[:index], *variants[index + 1 :]))
        try:
            return open_entry(replace(self._found, entry=entry, plan=plan), self._spec.module, _open).only_variant(0)
        except ArtifactError as error:
            msg = f"The compiled code cannot be opened: {error}"
            raise CallMismatchError(msg) from error

    def _prove_variant(self, index: int, rows: Sequence[Row], twins: Twins) -> CallProof:
        loaded = self._opened(index, rows)
        variant = loaded.plan.variants[0]
        proved: list[dict[str, int]] = []
        failure: NotRunnableError | None = None
        refused: dict[str, int] | None = None  # sizes that the compiled call does not accept
        self._restrides = {}
        for sizes in self._common_sizes(variant.name, list(self._sizes(variant, index, rows))):
            if not self._all("there is time for another call", yes=time.monotonic() < self._until):
                break
            try:
                at, is_served = self._compare_at(variant, loaded, sizes, twins)
            except NotRunnableError as error:
                failure = failure or error
                continue
            if not is_served:
                refused = at
            elif at not in proved:
                proved.append(at)
        if proved:
            return CallProof(proved_at=tuple(proved), restrides=self._restrides)
        if failure is not None:
            raise failure
        if refused is not None:
            return CallProof(gap=f"not run: it rejects the sizes that were tried ({shape_text(of_sizes(refused))})")
        return CallProof(gap=f"not run: the calls before it took {_ENOUGH_SECS:g} s", later=True)

    def _all(self, about: str, *, yes: bool) -> bool:
        """Return whether all ranks agree: a rank that leaves the others would have them wait in a collective."""
        return yes if self._ranks is None else self._ranks.agree(about, yes=yes)

    def _check_runs(self, failure: NotRunnableError | None) -> None:
        """Tell all ranks whether the model runs here: if it fails on one, the collectives of the others fail too."""
        if self._ranks is not None:
            word = "runs" if failure is None else "later" if failure.later else "fails"
            words = self._ranks.meet("whether the model itself runs", word)
            if set(words) != {"runs"}:
                msg = "it does not run on another rank" if failure is None else str(failure)
                raise NotRunnableError(msg, later="fails" not in words)

    def _common_sizes(self, name: str, sizes: list[Mapping[str, int] | None]) -> list[Mapping[str, int] | None]:
        """Return the sizes that all ranks have chosen for a variant."""
        if self._ranks is None:
            return sizes
        texts = self._ranks.meet(f"the sizes to call variant {name} at", canonical_json(sizes).decode())
        wanted = [decode(text.encode(), list[dict[str, int] | None]) for text in texts]
        return [one for one in wanted[0] if all(one in others for others in wanted)]

    def _sizes(self, variant: Variant, index: int, rows: Sequence[Row]) -> Iterator[Mapping[str, int] | None]:
        """Yield the sizes of a variant's dynamic dimensions to call it at; None means the sizes of its example."""
        yield None
        if not variant.dims.keys() - variant.fixed.keys():
            return
        graph = _as_graph(variant, self._found.plan.graphs)
        limits = limits_of(graph, *(self._found.plan.graphs[step.graph] for step in variant.steps))
        names = {name: symbols[0] for name, symbols in variant.dims.items() if symbols}
        with contextlib.suppress(CompileError):
            for sizes in sizes_to_prove(graph, (), limits):
                yield {name: sizes[symbol] for name, symbol in names.items() if symbol in sizes}
        shapes = {repr(row.shape): row.shape for row in rows if row.variant == index}
        for shape in shapes.values():
            sizes = {name: low for name, (low, high) in shape.items() if name not in variant.fixed}
            at = {symbol: sizes[name] for name, symbol in names.items() if name in sizes}
            if at and len(at) == len(graph.symbols) and limits.hold(graph, at):
                yield sizes

    def _compare_at(
        self, variant: Variant, loaded: LoadedModel, sizes: Mapping[str, int] | None, twins: Twins
    ) -> tuple[dict[str, int], bool]:
        """Compare both at these sizes; return all sizes of the call, and whether the compiled code accepts it."""
        call = self._calls[variant.name]
        own = sizes_of(call, self._signature, self._dims)
        at = {**own, **(sizes or {}), **variant.fixed}
        try:
            run, eager = self._model_at(call, variant, sizes, twins)
        except NotRunnableError as error:
            self._check_runs(error)
            raise
        self._check_runs(None)
        ours: Run | None = None
        try:
            ours = self._ours(run, loaded)
            if not self._all("the compiled call runs", yes=ours is not None) or ours is None:
                return at, False
            self._compare(run, ours, eager, self._tolerance.with_sums(max(at.values(), default=1), self._dtype))
        except judge.WrongError as error:
            place = f"variant {variant.name}" + (f", {shape_text(of_sizes(at))}" if at else "")
            advice = _OPS.format(ops=", ".join(self._ops)) if self._ops else _OURS
            if self._ranks is None and ours is not None and self._checks_is_compiling(run, ours):
                advice = _ASKS
            msg = f"The compiled call does not match the model itself ({place}): {error}. {advice}"
            raise CallMismatchError(msg) from error
        return at, True

    def _model_at(
        self, call: ExampleCall, variant: Variant, sizes: Mapping[str, int] | None, twins: Twins
    ) -> tuple[Callable[..., Run], Run]:
        """Return a function that calls a callable at these sizes, and the run of the model itself.

        Raises:
            NotRunnableError: The model does not run at these sizes.
        """
        try:
            given, _ = arguments_for(call, self._signature, self._dims, variant.fixed, sizes)
            given = twins.arguments(given)
            before = given
            if variant.sizes_before is not None:
                before, _ = arguments_for(call, self._signature, self._dims, {}, variant.sizes_before)
                before = twins.arguments(before)
        except Exception as error:  # inputs of these sizes cannot be made, for whatever reason
            raise NotRunnableError(brief(error)) from error
        run = functools.partial(self._run, given, twins, variant, before)
        eager = self._eager(run)
        if self._draws and any(map(_has_nan, eager.outputs.values())):
            msg = "it returns NaN"
            raise NotRunnableError(msg)
        return run, eager

    def _compare(self, run: Callable[..., Run], ours: Run, eager: Run, tolerance: judge.Tolerance) -> None:
        """Raise a WrongError if two runs differ by more than roundings."""
        unequal = dict(differing_tensors(ours, eager))
        self._compare_places(ours, eager)
        if self._all("nothing differs", yes=not unequal):
            return
        undefined = self._undefined(run) if self._leaves_open else {}
        nearby = self._eager(functools.partial(run, dtype=self._dtype))
        for name, (mine, theirs) in unequal.items():
            beside = {**nearby.outputs, **nearby.writes}.get(name)
            if not isinstance(beside, torch.Tensor) or beside.shape != theirs.shape:
                beside = theirs
            try:
                judge.check_numbers(mine, beside, theirs, tolerance=tolerance, but=undefined.get(name))
            except judge.WrongError as error:
                msg = f"{name} {error}"
                raise judge.WrongError(msg) from error

    def _compare_places(self, ours: Run, eager: Run) -> None:
        """Compare how tensors share memory, and record outputs that differ from eager's in their strides only."""
        check_sharing(ours, eager)
        shared = eager.sharing()
        for name, tensor in eager.outputs.items():
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.layout is not torch.strided
                or not strides_matter(ours.outputs[name], tensor.stride())
            ):
                continue
            order = order_of(tensor)
            if order is None or len(shared[name]) > 1 or self._restrides.setdefault(name, order) != order:
                msg = f"{name} has the strides {ours.outputs[name].stride()} where the model's has {tensor.stride()}"
                raise judge.WrongError(msg)

    def _eager(self, run: Callable[..., Run]) -> Run:
        self._stage("model")
        try:
            with _torch.indices_checked(self._device):
                ran = run(self._method)
        except Exception as error:  # the user's code may raise anything on these inputs
            raise NotRunnableError(brief(error), later=_torch.failed_in_exchange(error)) from error
        finally:
            self._stage("start")
        return ran

    def _ours(self, run: Callable[..., Run], loaded: LoadedModel) -> Run | None:
        """Run the compiled code; return None if no guard accepts the call."""
        self._stage("compiled")
        try:
            ran = run(loaded.attempt)
        except (GuardError, NoRoomError):
            raise
        except Exception as error:  # whatever it is, the user would see it
            if is_out_of_memory(error):
                raise
            self._all("the compiled call runs", yes=False)  # raises if it failed because another rank is gone
            msg = f"it fails where the model runs ({brief(error)})"
            raise judge.WrongError(msg) from error
        finally:
            self._stage("start")
        return None if ran.outputs.get("output") is NOT_SERVED else ran

    def _run(
        self,
        given: Mapping[str, Any],
        twins: Twins,
        variant: Variant,
        before: Mapping[str, Any],
        function: Callable[..., Any],
        *,
        dtype: torch.dtype | None = None,
        within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Run:
        """Call a function on fresh copies of the arguments and of the model's tensors.

        Args:
            given: The arguments, by name.
            twins: The model's tensors.
            variant: The variant; the model itself makes the calls that precede it.
            before: The arguments of those calls.
            function: What to call.
            dtype: Change every float by one rounding of this dtype.
            within: Enters a context around the calls.
        """
        twins.renew()
        for _ in range(variant.calls_before):
            args, kwargs = self._signature.arguments(twins.arguments(before))
            with torch.no_grad(), within():
                self._method(*args, **kwargs)
        arguments = twins.arguments(given)
        if dtype is not None:
            twins.perturb(dtype, room_for_weights(self._device))
            for _, tensor in tensors_of(arguments, ""):
                if tensor.is_floating_point():
                    with contextlib.suppress(RuntimeError):  # elements that share memory cannot be written
                        tensor.copy_(rounded(tensor, dtype))
        args, kwargs = self._signature.arguments(arguments)
        torch.default_generator.manual_seed(_SEED)
        if self._device == "cuda":
            torch.cuda.manual_seed(_SEED)
        with torch.no_grad(), within():
            output = function(*args, **kwargs)
        if self._device != "cpu":
            torch.accelerator.synchronize()
        passed = (item for name, value in arguments.items() for item in tensors_of(value, name))
        roots = Roots(self._spec.module, self._method)
        kept = [
            item for one in variant.kept for item in leaves_of(Place(roots, one.place).get(), source_words(one.place))
        ]
        return Run(outputs=dict(leaves_of(output, "output")), writes={**dict(passed), **twins.written(), **dict(kept)})

    def _undefined(self, run: Callable[..., Run]) -> dict[str, torch.Tensor | None]:
        """Return, by name, where tensors depend on results that ops leave undefined."""
        ways = (functools.partial(_torch.Settled, other=other) for other in (False, True))
        one, other = (self._eager(functools.partial(run, within=way)) for way in ways)
        return {name: judge.left_open(a, b, sorts=self._sorts) for name, (a, b) in differing_tensors(one, other)}

    def _checks_is_compiling(self, run: Callable[..., Run], ours: Run) -> bool:
        """Return whether the model matches the compiled code while `is_compiling` returns True."""
        try:
            told = self._eager(functools.partial(run, within=_torch.told_that_it_compiles))
            for mine, theirs in dict(differing_tensors(ours, told)).values():
                judge.check_numbers(mine, theirs, theirs, tolerance=self._tolerance)
        except (judge.WrongError, NotRunnableError):
            return False
        return True


def _has_nan(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any())


def _as_graph(variant: Variant, graphs: Mapping[str, PieceGraph]) -> PieceGraph:
    """Return a variant as a graph without nodes: its inputs, the symbols in their shapes, the results of its steps."""
    metas = tuple(item.meta for item in variant.inputs)
    shown = {name for meta in metas for dim in meta.shape for name in symbols_of(dim)}
    given = []
    for step in variant.steps:
        for meta in graphs[step.graph].results:
            shape = tuple(rename(dim, step.symbols) for dim in meta.shape)
            if all(set(symbols_of(dim)) <= shown for dim in shape):
                given.append(replace(meta, shape=shape, stride=shape))
    return PieceGraph(
        symbols=tuple(symbol for symbol in variant.symbols if symbol.name in shown),
        facts=tuple(text for text in variant.relations if set(symbols_of(text)) <= shown),
        inputs=metas,
        aliases=(),
        nodes=(),
        outputs=(),
        results=tuple(given),
        ops={},
    )


def _open(adaptor: str, data: bytes, graph: PieceGraph) -> Any:
    return get_adaptor(adaptor).load(data, graph)
