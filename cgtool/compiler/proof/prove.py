"""The program of the proving child: draws inputs, runs the piece eagerly and in float64, runs the artifact, compares.

Must not import torch._dynamo, torch._inductor or sympy; only the adaptor of an artifact may.
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

#: How often the limits are halved if sizes are too large for the piece or the memory.
_NUM_HALVINGS = 12
_ADVICE = "the piece can be compiled by another adaptor, or run eagerly (adaptor 'eager')"

_Tensors = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class _EagerRun:
    """A run of a piece op by op.

    Args:
        drawn: The inputs before the run.
        inputs: The inputs after the run, which may have written to them.
        outputs: The outputs.
    """

    drawn: Drawn
    inputs: _Tensors
    outputs: _Tensors


class NotRunnableError(Exception):
    """A piece or a model cannot be run on the inputs that were tried.

    Args:
        later: Whether it may succeed another time, because memory or another rank was missing.
    """

    def __init__(self, message: str, *, later: bool = False) -> None:
        super().__init__(message)
        self.later = later


def main(channel: Channel) -> None:
    """Prove artifacts until the parent hangs up."""
    for request, data in channel.requests(ProofRequest):
        record = _answer(request, data, channel)
        # a failure on an accelerator may have left its context unusable: end, so that a fresh child takes over
        is_last = _on_accelerator(request.graph) and not record.proved
        channel.answer(record, last=is_last)
        if is_last:
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
    except Exception as error:  # noqa: BLE001 - not a fault of the artifact, and recorded as such
        traceback.print_exc()
        message = " ".join(str(error).split()) or type(error).__name__
        return ProofRecord(verdict="later", reason=f"not proved: {type(error).__name__}: {message}")


def prove_artifact(
    data: bytes,
    *,
    adaptor: str,
    graph: PieceGraph,
    guards: tuple[str, ...] = (),
    device_index: int | None = None,
    stage: Callable[[StageName], None] = lambda _: None,
) -> ProofRecord:
    """Run an artifact and its piece on the same inputs and compare the results.

    Args:
        data: The artifact's bytes.
        adaptor: The adaptor that compiled it.
        graph: The piece.
        guards: The facts that the compiler relies on beyond the graph's facts.
        device_index: The index of devices that have none in the graph; None is the current device.
        stage: Called with the name of each stage before it begins.

    Raises:
        ProofMismatchError: The artifact does not compute what the piece computes.
    """
    started = time.perf_counter()
    stage("open")
    with torch.no_grad():
        run = open_artifact(data, adaptor, graph, device_index)
    proof = _Proof(run, graph, device_index, stage)
    try:
        proof.run(guards)
        record = ProofRecord()
    except NotRunnableError as error:
        record = ProofRecord(verdict="later" if error.later else "unknown", reason=f"not proved: {error}")
    return structs.replace(
        record, shapes=tuple(proof.shapes), worst_error=proof.worst_error, secs=time.perf_counter() - started
    )


def open_artifact(data: bytes, adaptor: str, graph: PieceGraph, device_index: int | None) -> Boxed:
    """Return an artifact as a callable.

    Raises:
        NoRoomError: No artifact can be opened on this machine.
        ProofMismatchError: This artifact cannot be opened.
    """
    try:
        if adaptor == AOT_INDUCTOR:
            return open_package(data, graph, device_index=device_index)
        return get_adaptor(adaptor).load(data, graph)  # may import Inductor
    except NoRoomError:
        raise
    except ArtifactError as error:
        raise ProofMismatchError(f"the artifact cannot be opened: {error}", actual=str(error)) from error


class _Proof:
    """The comparison of one artifact with its piece.

    Attributes:
        shapes: The sizes at which the results agreed.
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

    def run(self, guards: tuple[str, ...]) -> None:
        """Compare at the smallest and the largest sizes; halve the limits if the piece or the memory needs it."""
        limits = limits_of(self._graph)
        for _ in range(_NUM_HALVINGS):
            try:
                wanted = sizes_to_prove(self._graph, guards, limits)
            except CompileError as error:
                raise NotRunnableError(str(error)) from error
            try:
                for sizes in wanted:
                    if sizes not in self.shapes:
                        self._run_at(sizes)
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

    def _run_at(self, sizes: Sizes) -> None:
        try:
            with torch.no_grad():
                self._stage("eager")
                with _one_thread():
                    eager = self._run_eagerly(sizes)
                self._synchronize()
                self._stage("run")
                inputs = eager.drawn.copy().tensors()
                outputs = self._run_artifact(inputs)
                self._stage("eager")
                with _one_thread():
                    self._compare(outputs, inputs, eager, sizes)
        except judge.WrongError as error:
            at = ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "the piece's sizes"
            msg = f"the artifact is wrong at {at}: it {error}; {_ADVICE}"
            raise ProofMismatchError(msg, actual=str(error)) from error

    def _run_graph(self, graph: PieceGraph, inputs: _Tensors, *, other: bool = False) -> _Tensors:
        """Run a graph op by op, with undefined results made deterministic (see `Settled`)."""
        settled: AbstractContextManager[object] = Settled(other=other) if self._leaves_open else nullcontext()
        with settled, indices_checked("cuda" if _on_accelerator(graph) else "cpu"):
            return list(piece_function(graph, device_index=self._device_index)(list(inputs)))

    def _run_eagerly(self, sizes: Sizes) -> _EagerRun:
        """Run the piece op by op, on the first inputs that it accepts and that give no NaN."""
        first: _EagerRun | None = None
        failures: list[Exception] = []
        for style in STYLES:
            try:
                drawn = draw(self._graph, sizes, device_index=self._device_index, style=style)
                inputs = drawn.copy().tensors()
                eager = _EagerRun(drawn=drawn, inputs=inputs, outputs=self._run_graph(self._graph, inputs))
            except Exception as error:  # the user's ops may reject the drawn values
                if is_out_of_memory(error):
                    raise
                failures.append(error)
                continue
            if not any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in eager.outputs):
                return eager
            first = first or eager
        if first is None:
            msg = f"the piece does not run on seeded inputs ({brief(failures[0])})"
            raise NotRunnableError(msg)
        return first

    def _run_again(self, eager: _EagerRun) -> _Tensors:
        """Return the piece's outputs with the other values for undefined results."""
        if not self._leaves_open:
            return eager.outputs
        return self._run_graph(self._graph, eager.drawn.copy().tensors(), other=True)

    def _reference(self, eager: _EagerRun) -> tuple[_Tensors, _Tensors] | None:
        """Return outputs and inputs of the piece in float64; None if it does not run or differs in float64."""
        wide, drawn = widened(self._graph), eager.drawn.widened()
        if wide is None or drawn is None:
            return None
        inputs = drawn.tensors()
        try:
            with _default_dtype(torch.float64):
                outputs = self._run_graph(wide, inputs)
        except Exception as error:  # for example, an op without a float64 kernel
            if is_out_of_memory(error):
                raise
            return None
        pairs = zip(outputs, eager.outputs, strict=True)
        return (outputs, inputs) if all(_is_near(wide, narrow) for wide, narrow in pairs) else None

    def _nearby(self, eager: _EagerRun) -> tuple[_Tensors, _Tensors]:
        """Return outputs and inputs of the piece for inputs one rounding away; if that fails, those of `eager`."""
        inputs = eager.drawn.copy().tensors()
        for tensor in inputs:
            if tensor.is_floating_point():
                with suppress(RuntimeError):  # tensors whose elements overlap cannot be written to
                    tensor.copy_(rounded(tensor, tensor.dtype))
        try:
            nearby = self._run_graph(self._graph, inputs)
        except Exception as error:  # the user's ops may reject the changed values
            if is_out_of_memory(error):
                raise
            return eager.outputs, eager.inputs
        return nearby, inputs

    def _run_artifact(self, inputs: _Tensors) -> _Tensors:
        try:
            outputs = list(self._artifact(list(inputs)))
            self._synchronize()
        except Exception as error:  # users would see it too
            if is_out_of_memory(error):
                raise
            msg = f"fails where the piece runs: {brief(error)}"
            raise judge.WrongError(msg) from error
        return outputs

    def _compare(self, found: _Tensors, inputs: _Tensors, given: _EagerRun, sizes: Sizes) -> None:
        judge.check_metas(found, self._graph.results, sizes, self._device_index)
        judge.check_overlaps(found, inputs, given.outputs, given.inputs)
        again, reference = self._run_again(given), self._reference(given)
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

    def _synchronize(self) -> None:
        if _on_accelerator(self._graph) and torch.accelerator.is_available():
            torch.accelerator.synchronize()


def limits_of(graph: PieceGraph, *steps: PieceGraph) -> Limits:
    """Return limits under which a proof of a piece, or of a call of several steps, takes a fraction of a second."""
    nodes = (node for piece in (graph, *steps) for node in piece.every_node())
    attends = any("attention" in str(node.target) for node in nodes)
    if not _on_accelerator(graph):
        return Limits(num_bytes=1 << 20, num_flops=4e8, attends=attends)
    # on an accelerator, an index out of range would make the context unusable
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
    """Run torch's ops in one thread, since they would wait for the cores on which compilers run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_near(wide: torch.Tensor, narrow: torch.Tensor) -> bool:
    """Return whether results in float64 agree roughly; they do not if the piece depends on its precision."""
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
    """Return whether two tensors of the same dtype and shape are equal; NaN is unequal to itself."""
    if one.is_floating_point() and one.dtype.itemsize == 1:  # torch cannot compare all 8-bit floats
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out."""
    text = str(error)
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text or "out of memory" in text
    )
