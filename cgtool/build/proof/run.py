"""One proof, in the child: draw, run eagerly, run in float64, run the artifact, compare.

Must not import torch._dynamo, torch._inductor or sympy; an adaptor that is not ours alone may.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cgtool.build.proof import judge
from cgtool.build.proof.inputs import STYLES, Drawn, draw
from cgtool.build.proof.record import ProofRecord
from cgtool.build.proof.reference import filled, lowest_dtype, takes_steps, widened
from cgtool.build.proof.sizes import Limits, shapes_to_prove
from cgtool.config import EAGER
from cgtool.errors import ArtifactError, CompileError, NoRoomError, ProofMismatchError
from cgtool.pieces import PieceGraph
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.pieces import piece_function

_AOT = "aot_inductor"
#: How often a shape that does not fit into memory is made smaller.
_NUM_SHRINKS = 4


@dataclass(frozen=True, kw_only=True)
class _Given:
    """A piece that ran op by op.

    Args:
        drawn: Its inputs, untouched.
        inputs: The inputs that eager ran on.
        outputs: What eager gave.
        undefined: For each output, where it holds memory that nothing wrote to; None where nothing is so.
    """

    drawn: Drawn
    inputs: Drawn
    outputs: list[torch.Tensor]
    undefined: list[torch.Tensor | None]


class _NotRunnableError(Exception):
    """The piece itself cannot be run on any inputs that were tried."""


class _NoMemoryError(Exception):
    """The piece could not be run here and now, at the smallest size that was tried."""


class _Prover:
    def __init__(
        self, data: bytes, adaptor: str, graph: PieceGraph, device_index: int | None, stage: Callable[[str], None]
    ) -> None:
        self._graph = graph
        self._defined = filled(graph, 1.0)
        self._device_index = device_index
        self._stage = stage
        self._adaptor = adaptor
        self._data = data
        self._limits = Limits.usual(on_accelerator=any(meta.device != "cpu" for meta in graph.inputs))
        self._steps = takes_steps(graph)
        self._lowest = lowest_dtype(graph)
        self._worst = 0.0

    def prove(self, guards: tuple[str, ...]) -> ProofRecord:
        started = time.perf_counter()
        self._stage("open")
        with torch.no_grad():
            run = self._open()
        reason: Exception | None = None
        try:
            shapes = self._shapes(run, guards)
        except (_NotRunnableError, _NoMemoryError) as error:
            shapes, reason = [], error
        return ProofRecord(
            shapes=tuple(shapes),
            worst_error=self._worst,
            secs=time.perf_counter() - started,
            reason=None if reason is None else f"not proved: {reason}",
            may_pass_later=isinstance(reason, _NoMemoryError),
        )

    def _shapes(self, run: Boxed, guards: tuple[str, ...]) -> list[dict[str, int]]:
        limits = self._limits
        done: list[dict[str, int]] = []
        for _ in range(_NUM_SHRINKS):
            try:
                wanted = shapes_to_prove(self._graph, guards, limits)
            except CompileError as error:
                raise _NotRunnableError(str(error)) from error
            try:
                for sizes in wanted:
                    if sizes not in done:
                        self._at(run, sizes)
                        done.append(sizes)
            except (MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                limits = limits.smaller()
            else:
                return done
        if not done:
            msg = "there was not enough memory to run the piece"
            raise _NoMemoryError(msg)
        return done

    def _open(self) -> Boxed:
        try:
            if self._adaptor == EAGER:
                return _open_eager(self._data, self._graph, self._device_index)
            if self._adaptor == _AOT:
                from cgtool.runtime.packages import open_package

                return open_package(self._data, self._graph, device_index=self._device_index)
            # what needs Inductor brings it along
            from cgtool.build.adaptors import get_adaptor

            return get_adaptor(self._adaptor).load(self._data, self._graph)
        except NoRoomError:  # it says nothing of the artifact
            raise
        except ArtifactError as error:
            raise ProofMismatchError(f"the artifact cannot be opened: {error}", actual=str(error)) from error

    def _at(self, run: Boxed, sizes: Mapping[str, int]) -> None:
        with torch.no_grad():
            self._stage("eager")
            with _one_thread():
                given = self._given(sizes)
                reference = self._reference(given)
            self._synchronise()
            self._stage("run")
            inputs = given.drawn.tensors()
            found = self._run(run, inputs, sizes)
            self._stage("eager")
            with _one_thread():
                self._compare(found, inputs, given, reference, sizes)

    def _given(self, sizes: Mapping[str, int]) -> _Given:
        """Run the piece op by op, on the first inputs that it takes and that give no NaN."""
        function = piece_function(self._defined, device_index=self._device_index)
        first: _Given | None = None
        failure: Exception | None = None
        for style in STYLES:
            try:
                drawn = draw(self._graph, sizes, device_index=self._device_index, style=style)
                inputs = drawn.copy()
                outputs = list(function(inputs.tensors()))
            except Exception as error:  # whatever the user's ops say to drawn values
                if _is_out_of_memory(error):
                    raise
                failure = failure or error
                continue
            given = _Given(drawn=drawn, inputs=inputs, outputs=outputs, undefined=self._undefined(drawn, outputs))
            if not any(_has_nan(tensor) for tensor in outputs):
                return given
            first = first or given
        if first is None:
            msg = f"the piece does not run on seeded inputs ({type(failure).__name__}: {_first_line(failure)})"
            raise _NotRunnableError(msg)
        return first

    def _undefined(self, drawn: Drawn, outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return where outputs depend on what uninitialised memory holds."""
        if self._defined is self._graph:
            return [None] * len(outputs)
        other = piece_function(filled(self._graph, 0.0), device_index=self._device_index)
        again = list(other(drawn.copy().tensors()))
        differ = [(one != two) & ~(one.isnan() & two.isnan()) for one, two in zip(outputs, again, strict=True)]
        return [place if bool(place.any()) else None for place in differ]

    def _reference(self, given: _Given) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """Return outputs and inputs of the piece in float64; None where it does not run so, or is another one so."""
        wide = widened(self._defined)
        inputs = given.drawn.widened()
        if wide is None or inputs is None:
            return None
        tensors = inputs.tensors()
        try:
            with _default_dtype(torch.float64):
                outputs = list(piece_function(wide, device_index=self._device_index)(list(tensors)))
        except Exception as error:  # an op that has no float64, say
            if _is_out_of_memory(error):
                raise
            return None
        pairs = zip(outputs, given.outputs, strict=True)
        return (outputs, tensors) if all(_is_near(one, other) for one, other in pairs) else None

    def _run(self, run: Boxed, inputs: list[torch.Tensor], sizes: Mapping[str, int]) -> list[torch.Tensor]:
        try:
            found = list(run(list(inputs)))
            self._synchronise()
        except Exception as error:  # whatever it is, it is what the user would meet
            if _is_out_of_memory(error):
                raise
            what = f"fails where the piece runs: {type(error).__name__}: {_first_line(error)}"
            raise judge.mismatch(what, sizes) from error
        return found

    def _compare(
        self,
        found: list[torch.Tensor],
        inputs: list[torch.Tensor],
        given: _Given,
        reference: tuple[list[torch.Tensor], list[torch.Tensor]] | None,
        sizes: Mapping[str, int],
    ) -> None:
        eager_inputs = given.inputs.tensors()
        judge.check_metas(found, self._graph.results, sizes, self._device_index)
        judge.check_overlaps(found, inputs, given.outputs, eager_inputs, sizes)
        exact = reference or (given.outputs, eager_inputs)
        tolerance = judge.tolerance_of(self._lowest, takes_steps=self._steps, has_reference=reference is not None)
        rows: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for n, row in enumerate(zip(found, given.outputs, exact[0], strict=True)):
            places = given.undefined[n]
            ours, theirs, wide = row if places is None else (tensor[~places] for tensor in row)
            rows.append((f"gives output {n}: it", ours, theirs, wide))
        for n, row in enumerate(zip(inputs, eager_inputs, exact[1], strict=True)):
            if not _same_bytes(row[0], row[1]):  # most inputs are only read
                rows.append((f"leaves input {n}: it", *row))
        for label, ours, theirs, wide in rows:
            error = judge.check_numbers(label, ours, theirs, wide, tolerance=tolerance, sizes=sizes)
            self._worst = max(self._worst, error)

    def _synchronise(self) -> None:
        if any(meta.device != "cpu" for meta in self._graph.inputs) and torch.accelerator.is_available():
            torch.accelerator.synchronize()


def prove_artifact(
    data: bytes,
    *,
    adaptor: str,
    graph: PieceGraph,
    guards: tuple[str, ...] = (),
    device_index: int | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> ProofRecord:
    """Run an artifact and its piece on the same inputs and compare what they give.

    Args:
        data: The artifact's bytes.
        adaptor: What compiled it.
        graph: The piece at the artifact's shape.
        guards: What the compiler relies on beyond the graph's facts.
        device_index: What a device without an index means; None is the current one.
        stage: Told "open", "eager" and "run" before each.

    Returns:
        What was proved, or why nothing was.

    Raises:
        ProofMismatchError: The artifact does not give what the piece gives.
    """
    return _Prover(data, adaptor, graph, device_index, stage).prove(guards)


def _open_eager(data: bytes, graph: PieceGraph, device_index: int | None) -> Boxed:
    try:
        found = PieceGraph.from_json(json.loads(data))
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"An eager artifact is torn: {error}. Warm again.", actual=str(error)) from error
    if found != graph:
        raise ArtifactError("An eager artifact holds another piece than its manifest says. Warm again.")
    return piece_function(found, device_index=device_index)


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


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point() and one.dtype.itemsize == 1:  # torch compares few of the small floats
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text or "out of memory" in text
    )


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [""])[0]
