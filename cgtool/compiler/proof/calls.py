"""The whole-call proof: the callable that `load` would return is compared with the model itself.

Pieces are proved one by one; this proves what joins them: the plan, the program, restrides, values and writes. The
model lives in this process, and a crash in native code must not end the warm, so the calls are made in a fork. In three
cases they are made in this process instead, on a copy of the modules over the same tensors:

- The model is on an accelerator, which a fork cannot use. Variants are then called while others still compile.
- The process is in a process group, which a fork cannot use either. All ranks make the same calls in step, with real
  collectives.
- The model computes gradients in a process that has done so before, which a fork cannot do.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import inspect
import logging
import mmap
import os
import queue
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator

import msgspec
import torch

from cgtool.compiler.proof._torch import is_lost_in_copy
from cgtool.compiler.proof.beside import STAGES, CallProof, Calls, StageName, room_for_weights
from cgtool.compiler.proof.twins import num_fake_bytes, over_same_memory
from cgtool.compiler.ranks import RankAbsentError, RankLostError, Ranks
from cgtool.errors import CallMismatchError, ProofCrashError, brief
from cgtool.guards import _torch as private
from cgtool.model import ModelSpec
from cgtool.plan.grammar import Record, decode, encode
from cgtool.plan.records import Plan
from cgtool.processes import ChildEndedError, format_log, run_in_copy
from cgtool.runtime.find import MatchedEntry
from cgtool.runtime.weights import first_index
from cgtool.store.records import Row

_log = logging.getLogger(__name__)

#: The limit in seconds for all calls, if none is configured.
_TIMEOUT_SECS = 600.0
_COLLECTIVES = ("c10d", "torch.distributed")
#: Kills its parent with a message if it writes nothing for some seconds, although it is not stopped.
_END_PARENT = """
import os, select, signal, sys
parent, secs, words = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
while os.getppid() == parent:
    if select.select([0], [], [], secs)[0]:
        if not os.read(0, 64):
            break
    elif open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[0] not in "tT":
        print(words, file=sys.stderr, flush=True)
        os.kill(parent, signal.SIGKILL)
"""
_ANYHOW = "Nothing new was published; --no-proof publishes it all the same."


class _Answer(Record, frozen=True, kw_only=True):
    """The proof of each variant, or what is wrong with a call."""

    variants: tuple[CallProof, ...] = ()
    wrong: str = ""


class _NoReplicaError(Exception):
    """The model cannot be copied, for the given reason."""


def prove_calls(
    found: MatchedEntry,
    spec: ModelSpec,
    *,
    timeout_secs: float | None,
    ranks: Ranks | None,
) -> tuple[CallProof, ...]:
    """Compare the callable that `load` would return with the model itself; the entry need not be published.

    Raises:
        CallMismatchError: A compiled call does not match the model.
        ProofCrashError: The compiled call crashed.
        RankLostError: Another rank failed or died.
    """
    count = len(found.plan.variants)
    device = _device_of(found.plan)
    reason = _why_not(found, spec, device)
    exchanges = private.exchanges() and _may_exchange(found)
    twin: ModelSpec | None = None  # what is called in this process
    if (exchanges or device != "cpu") and reason is None:
        try:
            twin = replica(spec)
        except _NoReplicaError as error:
            reason = f"not run: {error}"
    if exchanges and ranks is not None and threading.current_thread() is threading.main_thread():
        reason, later = _why_not_together(found, spec, ranks, reason)
    elif exchanges:
        reason, later = "not run: its collectives need all ranks, which this warm is not part of", True
    else:
        later = False
    if reason is not None:
        return (CallProof(gap=reason, later=later),) * count
    stage = mmap.mmap(-1, 1)  # shared with the fork
    work = functools.partial(_answer, found, spec, device, stage)
    try:
        if twin is None:
            timeout_secs = timeout_secs or _TIMEOUT_SECS
            answer = decode(run_in_copy(functools.partial(_in_copy, work), timeout_secs=timeout_secs), _Answer)
            if any(is_lost_in_copy(proof.gap) for proof in answer.variants):
                with contextlib.suppress(_NoReplicaError):
                    twin = replica(spec)
        if twin is not None:
            with (
                _ended_if_it_hangs(timeout_secs or _TIMEOUT_SECS) if exchanges else contextlib.nullcontext(),
                _random_state_kept(found.plan, spec, device),
            ):
                answer = _answer(found, twin, device, stage, ranks if exchanges else None)
    except ChildEndedError as error:
        return (_of_ending(error, STAGES[stage[0]]),) * count
    finally:
        stage.close()
    if answer.wrong:
        raise _mismatch(answer.wrong)
    return answer.variants


def _mismatch(wrong: str) -> CallMismatchError:
    return CallMismatchError(f"{wrong} {_ANYHOW}", actual=wrong)


def _random_state_kept(plan: Plan, spec: ModelSpec, device: str) -> contextlib.AbstractContextManager[None]:
    """Restore torch's random generators after calls in this process."""
    if device == "cpu":
        return torch.random.fork_rng([])
    index = first_index(spec.module, plan)
    indices = [torch.accelerator.current_device_index() if index is None else index]
    return torch.random.fork_rng(indices, device_type=device)


def _device_of(plan: Plan) -> str:
    devices = {item.meta.device for variant in plan.variants for item in variant.inputs}
    return next((name for name in sorted(devices) if name != "cpu"), "cpu")


class CallsAhead:
    """Calls each variant in a thread as soon as it is compiled, while other variants still compile.

    Only for a model on an accelerator, outside a process group: its calls are made in this process anyway.

    Args:
        found: The entry, without rows.
        spec: The model and its example calls.
    """

    def __init__(self, found: MatchedEntry, spec: ModelSpec) -> None:
        self._found = found
        self._spec = spec
        self._rows: dict[int, tuple[Row, ...]] = {}
        self._compiled: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._made: dict[int, CallProof] = {}
        self._wrong = ""
        self._thread = threading.Thread(target=self._make, name="cgtool-calls", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, found: MatchedEntry, spec: ModelSpec) -> CallsAhead | None:
        """Start the calls of an entry; None if they have to wait until all of it is compiled."""
        device = _device_of(found.plan)
        together = private.exchanges() and _may_exchange(found)
        return None if device == "cpu" or together or _why_not(found, spec, device) else cls(found, spec)

    def offer(self, variant: int, rows: tuple[Row, ...]) -> None:
        """Queue a variant, whose artifacts are in place."""
        self._rows[variant] = rows
        self._compiled.put(variant)

    def close(self) -> None:
        """Make no further calls than those of the queued variants."""
        self._compiled.put(None)

    def proofs(self, found: MatchedEntry) -> tuple[CallProof, ...] | None:
        """Wait for the calls and return the proof of each variant; None if some are missing or used other artifacts.

        Raises:
            CallMismatchError: A compiled call does not match the model.
        """
        self.close()
        self._thread.join()
        if self._wrong:
            raise _mismatch(self._wrong)
        called = self._found.entry.manifest.with_rows(row for index in self._made for row in self._rows[index])
        if len(self._made) < len(found.plan.variants) or called.rows != found.entry.manifest.rows:
            return None
        again = any(proof.restrides for proof in self._made.values())
        return tuple(msgspec.structs.replace(proof, again=again) for _, proof in sorted(self._made.items()))

    def _make(self) -> None:
        device = _device_of(self._found.plan)
        try:
            with _random_state_kept(self._found.plan, self._spec, device):
                calls = Calls(self._found, replica(self._spec), device, lambda _: None)
                self._made = calls.proofs((variant, self._rows[variant]) for variant in iter(self._compiled.get, None))
        except CallMismatchError as error:
            self._wrong = str(error)
        except Exception as error:  # noqa: BLE001 - the calls are made again after the compile, which reports the reason
            _log.info("No calls were made ahead: %s", brief(error))


@contextlib.contextmanager
def _ended_if_it_hangs(secs: float) -> Iterator[None]:
    """Kill this process, with a message, if native code holds the GIL for too long.

    A package that waits for a collective holds it, and deadlocks if a thread of the collective needs it.
    """
    words = (
        f"Error: Native code held Python's lock for {secs:g} s (compile_timeout) while whole calls were proved: a "
        "deadlock. Packages with collectives can cause it: use splitting_ops to keep collectives out of packages, "
        "or warm with --no-proof."
    )
    command = (sys.executable, "-ISc", _END_PARENT, str(os.getpid()), str(secs), words)
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0) as ender:  # noqa: S603 - this very Python
        left = threading.Event()

        def live() -> None:
            while not left.wait(min(1.0, secs / 4)) and ender.stdin is not None:
                with contextlib.suppress(OSError):
                    ender.stdin.write(b".")

        thread = threading.Thread(target=live, daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()
            ender.kill()


def replica(spec: ModelSpec) -> ModelSpec:
    """Return a spec with a copy of the model over the same tensors, since the model itself may be in use.

    Functions assigned to modules are not copied, nor is what they close over. If they close over modules, as in models
    that transformers splits among ranks, the main thread uses the model itself.

    Raises:
        _NoReplicaError: It cannot be copied.
    """
    if any(map(_closes_over_modules, spec.module.modules())):
        if threading.current_thread() is threading.main_thread():
            return spec
        msg = "the model cannot be copied: functions assigned to its modules close over modules"
        raise _NoReplicaError(msg)
    memo: dict[int, object] = {**over_same_memory(spec.module)}
    held = (value for module in spec.module.modules() for value in vars(module).values())
    memo |= {id(value): value for value in held if private.shared_by_processes(value) is not None}
    try:
        return dataclasses.replace(spec, module=copy.deepcopy(spec.module, memo))
    except Exception as error:  # any attribute of the model may refuse to be copied
        msg = f"the model cannot be copied ({brief(error)})"
        raise _NoReplicaError(msg) from error


def _closes_over_modules(module: torch.nn.Module) -> bool:
    functions = [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
    held = [value for function in functions for value in inspect.getclosurevars(function).nonlocals.values()]
    return any(isinstance(getattr(value, "__self__", value), torch.nn.Module) for value in held)


def _why_not(found: MatchedEntry, spec: ModelSpec, device: str) -> str | None:
    """Return why nothing can be called here, if so."""
    if _has_collectives(found) and not private.exchanges():
        return "not run: it has collectives, which need the other processes"
    if device != "cpu" and not torch.accelerator.is_available():
        return f"not run: there is no {device} device here"
    needed = num_fake_bytes(spec.module)
    if needed > room_for_weights(device):
        size = f"{needed / 1e9:.1f} GB"
        return (
            f"not run: its weights are fake, and seeded ones of {size} do not fit (--weights real uses the real ones)"
        )
    return None


def _has_collectives(found: MatchedEntry) -> bool:
    targets = {str(node.target) for graph in found.plan.graphs.values() for node in graph.every_node()}
    return any(mark in target for target in targets for mark in _COLLECTIVES)


def _may_exchange(found: MatchedEntry) -> bool:
    """Return whether a call may contain collectives; a custom op may hide one."""
    return _has_collectives(found) or any(graph.ops for graph in found.plan.graphs.values())


def _why_not_together(
    found: MatchedEntry, spec: ModelSpec, ranks: Ranks, reason: str | None
) -> tuple[str | None, bool]:
    """Return why the ranks cannot make the calls together, if so, and whether a later warm may succeed."""
    try:
        about = f"whether to call {spec.name or type(spec.module).__name__}, {len(found.plan.variants)} variants"
        reasons = ranks.meet(about, reason or "")
    except RankAbsentError as error:
        return reason or f"not run: it has collectives, and {error}", reason is None
    except RankLostError as error:
        if ranks.ends_process:
            raise
        return reason or f"not run: it has collectives, and other ranks do not take part. {error}", reason is None
    first = next((f"{said} (rank {rank})" for rank, said in enumerate(reasons) if said), None)
    return reason or first, False


def _of_ending(error: ChildEndedError, stage: StageName) -> CallProof:
    """Return the proof if the fork ended early; raise a ProofCrashError if it was running compiled code."""
    ending = error.ending
    crashed = ending.signal_name is not None and ending.signal_name != "SIGKILL"
    if crashed and stage == "compiled":
        raise ProofCrashError(
            f"The process that makes the whole call {ending.how} in compiled code. A custom op whose fake "
            "implementation returns other shapes or strides than its kernel causes this. "
            f"{_ANYHOW}{format_log(ending.log)}",
            signal_name=ending.signal_name,
            actual=ending.code,
        )
    where = " while it ran the model itself" if stage == "model" else ""
    said = f": {ending.key_line}" if ending.key_line and not crashed else ""
    return CallProof(gap=f"not run: its process {ending.how}{where}{said}", later=not crashed)


def _in_copy(work: Callable[[], _Answer]) -> bytes:
    # A fork lacks the threads of OpenMP's pool, and would wait for them forever.
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).omp_set_max_active_levels(0)  # compiled code sets its own number of threads
    return encode(work())


def _answer(found: MatchedEntry, spec: ModelSpec, device: str, stage: mmap.mmap, ranks: Ranks | None = None) -> _Answer:
    def tell(name: StageName) -> None:
        stage[0] = STAGES.index(name)

    try:
        proofs = [proof for _, proof in sorted(Calls(found, spec, device, tell, ranks).proofs().items())]
        again = any(proof.restrides for proof in proofs)
        if ranks is not None:  # else one rank would publish what another rejects, or repeat its calls alone
            again = "again" in ranks.meet("all calls are right", "again" if again else "")
        return _Answer(variants=tuple(msgspec.structs.replace(proof, again=again) for proof in proofs))
    except CallMismatchError as error:
        return _Answer(wrong=str(error))
    except RankLostError:
        raise
    except RankAbsentError as error:
        gap = f"not run: it has collectives, and {error}"
        return _Answer(variants=(CallProof(gap=gap, later=True),) * len(found.plan.variants))
    except Exception as error:  # noqa: BLE001 - recorded as a gap in the proof
        traceback.print_exc()
        gap = f"not run: {brief(error)}"
        return _Answer(variants=(CallProof(gap=gap, later=True),) * len(found.plan.variants))
