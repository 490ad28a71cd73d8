"""The program of the child that proves: draw, run eagerly, run in float64, run the artifact, compare.

Must not import torch._dynamo, torch._inductor or sympy; an adaptor that is not ours alone may.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from cgtool.child import Channel
from cgtool.compiler.adaptors.interface import get_adaptor
from cgtool.compiler.proof import judge
from cgtool.compiler.proof._torch import Settled, indices_checked
from cgtool.compiler.proof.inputs import STYLES, Drawn, draw, index_bound, rounded, writes_by_index
from cgtool.compiler.proof.prover import ProofRecord, ProofRequest, Stage, StageName
from cgtool.compiler.proof.reference import leaves_open, lowest_dtype, sorts, takes_steps, widened
from cgtool.compiler.request import apply_settings, import_providers
from cgtool.compiler.sizes import Limits, Sizes, sizes_to_prove
from cgtool.errors import ArtifactError, CompileError, NoRoomError, ProofMismatchError, brief
from cgtool.plan.pieces import AOT_INDUCTOR, PieceGraph
from cgtool.runtime.aoti_package import open_package
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.op_by_op import piece_function

#: How often sizes that are too large for the piece or the memory are halved.
_NUM_HALVINGS = 12
_ADVICE = "the piece can be compiled by another adaptor, or run eagerly (adaptor 'eager')"

_Tensors = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class _Given:
    """A piece that ran op by op: its inputs untouched, those that eager ran on, and what it gave."""

    drawn: Drawn
    inputs: _Tensors
    outputs: _Tensors


class NotRunnableError(Exception):
    """A piece, or a model, cannot itself be run on the inputs that were tried.

    Args:
        later: Whether it may be at another time: what it lacked is memory, or another rank.
    """

    def __init__(self, message: str, *, later: bool = False) -> None:
        super().__init__(message)
        self.later = later


def main(channel: Channel) -> None:
    """Prove artifacts until the parent lets go."""
    for request, data in channel.requests(ProofRequest):
        found = _answer(request, data, channel)
        # what failed on an accelerator may have left its context unusable
        spoiled = _on_accelerator(request.graph) and not found.proved
        channel.answer(found, last=spoiled)
        if spoiled:
            return


def _answer(request: ProofRequest, data: bytes, channel: Channel) -> ProofRecord:
    try:
        import_providers(request.imports)
        apply_settings(request.settings)
        if _on_accelerator(request.graph) and request.device_index is not None:
            torch.accelerator.set_device_index(request.device_index)
        return prove_artifact(
            data,
            adaptor=request.adaptor,
            graph=request.graph,
            guards=request.guards,
            device_index=request.device_index,
            stage=lambda name: channel.note(Stage(name=name)),
        )
    except ProofMismatchError as error:
        return ProofRecord(verdict="wrong", reason=str(error))
    except NoRoomError as error:
        return ProofRecord(verdict="no room", reason=str(error))
    except Exception as error:  # noqa: BLE001 - nothing was learnt of the artifact, and the record says so
        traceback.print_exc()
        words = " ".join(str(error).split()) or type(error).__name__
        return ProofRecord(verdict="later", reason=f"not proved: {type(error).__name__}: {words}")


def prove_artifact(
    data: bytes,
    *,
    adaptor: str,
    graph: PieceGraph,
    guards: tuple[str, ...] = (),
    device_index: int | None = None,
    stage: Callable[[StageName], None] = lambda _: None,
) -> ProofRecord:
    """Run an artifact and its piece on the same inputs and compare; `stage` is told of each part before it begins.

    Raises:
        ProofMismatchError: The artifact does not give what the piece gives.
    """
    started = time.perf_counter()
    stage("open")
    with torch.no_grad():
        run = open_artifact(data, adaptor, graph, device_index)
    proof = _Proof(run, graph, device_index, stage)
    try:
        proof.at_the_ends(guards)
        found = ProofRecord()
    except NotRunnableError as error:
        found = ProofRecord(verdict="later" if error.later else "unknown", reason=f"not proved: {error}")
    return structs.replace(
        found, shapes=tuple(proof.shapes), worst_error=proof.worst_error, secs=time.perf_counter() - started
    )


def open_artifact(data: bytes, adaptor: str, graph: PieceGraph, device_index: int | None) -> Boxed:
    """Return an artifact as a callable.

    Raises:
        NoRoomError: Nothing can be opened here, which says nothing of the artifact.
        ProofMismatchError: It cannot be opened.
    """
    try:
        if adaptor == AOT_INDUCTOR:
            return open_package(data, graph, device_index=device_index)
        # what needs Inductor brings it along
        return get_adaptor(adaptor).load(data, graph)
    except NoRoomError:
        raise
    except ArtifactError as error:
        raise ProofMismatchError(f"the artifact cannot be opened: {error}", actual=str(error)) from error


class _Proof:
    """One artifact and its piece, run at one size after the other.

    Attributes:
        shapes: Where they gave the same.
        worst_error: The largest relative error so far.
    """

    def __init__(
        self, run: Boxed, graph: PieceGraph, device_index: int | None, stage: Callable[[StageName], None]
    ) -> None:
        self._artifact = run
        self._graph = graph
        self._leaves_open = leaves_open(graph)
        self._device_index = device_index
        self._stage = stage
        self.shapes: list[Sizes] = []
        self.worst_error = 0.0

    def at_the_ends(self, guards: tuple[str, ...]) -> None:
        """Run at the smallest sizes and at the largest; where those are too large for the piece, at half of them."""
        limits = limits_of(self._graph)
        for _ in range(_NUM_HALVINGS):
            try:
                wanted = sizes_to_prove(self._graph, guards, limits)
            except CompileError as error:
                raise NotRunnableError(str(error)) from error
            try:
                for sizes in wanted:
                    if sizes not in self.shapes:
                        self._at(sizes)
                        self.shapes.append(sizes)
            except NotRunnableError:
                if not self.shapes:
                    raise
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                return
            limits = replace(limits, num_bytes=limits.num_bytes // 2, num_flops=limits.num_flops / 2)
        if not self.shapes:
            msg = "there was not enough memory to run the piece"
            raise NotRunnableError(msg, later=True)

    def _at(self, sizes: Sizes) -> None:
        try:
            with torch.no_grad():
                self._stage("eager")
                with _one_thread():
                    given = self._given(sizes)
                self._synchronise()
                self._stage("run")
                inputs = given.drawn.copy().tensors()
                found = self._run(inputs)
                self._stage("eager")
                with _one_thread():
                    self._compare(found, inputs, given, sizes)
        except judge.WrongError as error:
            at = ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "the piece's sizes"
            msg = f"the artifact is wrong at {at}: it {error}; {_ADVICE}"
            raise ProofMismatchError(msg, actual=str(error)) from error

    def _function(self, graph: PieceGraph, inputs: _Tensors, *, other: bool = False) -> _Tensors:
        """Run a graph op by op; what its ops leave open is settled, one way or the other."""
        settled: AbstractContextManager[object] = Settled(other=other) if self._leaves_open else nullcontext()
        with settled, indices_checked("cuda" if _on_accelerator(graph) else "cpu"):
            return list(piece_function(graph, device_index=self._device_index)(list(inputs)))

    def _given(self, sizes: Sizes) -> _Given:
        """Run the piece op by op, on the first inputs that it takes and that give no NaN."""
        first: _Given | None = None
        failures: list[Exception] = []
        for style in STYLES:
            try:
                drawn = draw(self._graph, sizes, device_index=self._device_index, style=style)
                inputs = drawn.copy().tensors()
                given = _Given(drawn=drawn, inputs=inputs, outputs=self._function(self._graph, inputs))
            except Exception as error:  # whatever the user's ops say to drawn values
                if is_out_of_memory(error):
                    raise
                failures.append(error)
                continue
            if not any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in given.outputs):
                return given
            first = first or given
        if first is None:
            msg = f"the piece does not run on seeded inputs ({brief(failures[0])})"
            raise NotRunnableError(msg)
        return first

    def _again(self, given: _Given) -> _Tensors:
        """Return outputs of the piece with what ops leave open settled the other way."""
        if not self._leaves_open:
            return given.outputs
        return self._function(self._graph, given.drawn.copy().tensors(), other=True)

    def _reference(self, given: _Given) -> tuple[_Tensors, _Tensors] | None:
        """Return outputs and inputs of the piece in float64; None where it does not run so, or is another one so."""
        wide, drawn = widened(self._graph), given.drawn.widened()
        if wide is None or drawn is None:
            return None
        inputs = drawn.tensors()
        try:
            with _default_dtype(torch.float64):
                outputs = self._function(wide, inputs)
        except Exception as error:  # an op that has no float64, say
            if is_out_of_memory(error):
                raise
            return None
        pairs = zip(outputs, given.outputs, strict=True)
        return (outputs, inputs) if all(_is_near(one, other) for one, other in pairs) else None

    def _nearby(self, given: _Given) -> tuple[_Tensors, _Tensors]:
        """Return outputs and inputs of the piece for floats one rounding away, or what it gave for its own."""
        inputs = given.drawn.copy().tensors()
        for tensor in inputs:
            if tensor.is_floating_point():
                with suppress(RuntimeError):  # elements that share memory cannot be written to
                    tensor.copy_(rounded(tensor, tensor.dtype))
        try:
            nearby = self._function(self._graph, inputs)
        except Exception as error:  # whatever the user's ops say to these numbers
            if is_out_of_memory(error):
                raise
            return given.outputs, given.inputs
        return nearby, inputs

    def _run(self, inputs: _Tensors) -> _Tensors:
        try:
            found = list(self._artifact(list(inputs)))
            self._synchronise()
        except Exception as error:  # whatever it is, it is what the user would meet
            if is_out_of_memory(error):
                raise
            msg = f"fails where the piece runs: {brief(error)}"
            raise judge.WrongError(msg) from error
        return found

    def _compare(self, found: _Tensors, inputs: _Tensors, given: _Given, sizes: Sizes) -> None:
        judge.check_metas(found, self._graph.results, sizes, self._device_index)
        judge.check_overlaps(found, inputs, given.outputs, given.inputs)
        again, reference = self._again(given), self._reference(given)
        exact = reference or (given.outputs, given.inputs)
        nearby = exact if reference is not None or all(map(same_bytes, found, given.outputs)) else self._nearby(given)
        tolerance = judge.Tolerance.of(
            lowest_dtype(self._graph), takes_steps=takes_steps(self._graph), has_reference=reference is not None
        )
        rows: list[tuple[str, judge.Tolerance, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def within(near: torch.Tensor, eager: torch.Tensor) -> judge.Tolerance:
            usual = 0.0 if reference is not None else judge.roundings(near, eager, tolerance)
            return replace(tolerance, usual=usual)

        for n, (ours, theirs, wide) in enumerate(zip(found, given.outputs, exact[0], strict=True)):
            places = judge.left_open(theirs, again[n], sorts=sorts(self._graph))
            eager = judge.farther(theirs, again[n], wide)
            rows.append((f"gives output {n}: it", within(nearby[0][n], theirs), places, ours, eager, wide))
        for n, row in enumerate(zip(inputs, given.inputs, exact[1], strict=True)):
            if not same_bytes(row[0], row[1]):  # most inputs are only read
                rows.append((f"leaves input {n}: it", within(nearby[1][n], row[1]), None, *row))
        for label, allowed, places, ours, theirs, wide in rows:
            try:
                error = judge.check_numbers(ours, theirs, wide, tolerance=allowed, but=places)
            except judge.WrongError as wrong:
                msg = f"{label} {wrong}"
                raise judge.WrongError(msg) from wrong
            self.worst_error = max(self.worst_error, error)

    def _synchronise(self) -> None:
        if _on_accelerator(self._graph) and torch.accelerator.is_available():
            torch.accelerator.synchronize()


def limits_of(graph: PieceGraph, *steps: PieceGraph) -> Limits:
    """Return limits under which a proof of a piece, or of a call of these steps, takes a fraction of a second."""
    attends = any("attention" in str(node.target) for one in (graph, *steps) for node in one.every_node())
    if not _on_accelerator(graph):
        return Limits(num_bytes=1 << 20, num_flops=4e8, attends=attends)
    # an accelerator does not survive an index that is out of range
    num_places = index_bound(graph) if writes_by_index(graph) else None
    return Limits(num_bytes=64 << 20, num_flops=2e11, attends=attends, num_places=num_places)


def _on_accelerator(graph: PieceGraph) -> bool:
    return any(meta.device != "cpu" for meta in graph.inputs)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch's ops in this thread alone: compilers fill the other cores, and an op would wait for each of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_near(wide: torch.Tensor, narrow: torch.Tensor) -> bool:
    """Return whether the piece in float64 is the same piece: it may look at its own precision."""
    if wide.shape != narrow.shape:
        return False
    if not narrow.is_floating_point() or not narrow.numel():
        return True
    one, other = wide.double().reshape(-1), narrow.double().reshape(-1)
    if not math.isfinite(float((one + other).sum())):
        both = torch.isfinite(one) & torch.isfinite(other)
        one, other = one[both], other[both]
    return float((one - other).norm()) <= 0.5 * float(one.norm()) + 1e-6


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one make are equal; NaN is not."""
    if one.is_floating_point() and one.dtype.itemsize == 1:  # torch compares few of the small floats
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory, in whatever words."""
    text = str(error)
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text or "out of memory" in text
    )
