"""The whole-call proof: what `load` would serve is called beside the model itself, and both must give the same.

Pieces are proved one by one; this proves what joins them: the plan, the program, restrides, values, writes. The model
is an object of this very process, and native code that crashes must not take the warm along. So the calls are made in a
copy of the process. Where the model is on an accelerator, which a fork has no part in, they are made here, with a copy
of the modules over the same tensors. So they are where the process is in a group with others, which a fork has no part
in either: all ranks make the same calls in step, and a collective is a real one; and where the model asks for gradients
in a process that did so before, for then its copy cannot.
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
from cgtool.runtime.call import first_index
from cgtool.runtime.find import Found
from cgtool.store.records import Row

_log = logging.getLogger(__name__)

#: How long all calls may take, in seconds, where no limit is set.
_TIMEOUT_SECS = 600.0
_COLLECTIVES = ("c10d", "torch.distributed")
#: Ends its parent, and says why, where that writes nothing for so long, though it is not stopped.
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
    """What came of each variant, or how a call is wrong."""

    variants: tuple[CallProof, ...] = ()
    wrong: str = ""


class _NoReplicaError(Exception):
    """The model cannot be copied; the message says why."""


def prove_calls(
    found: Found,
    spec: ModelSpec,
    *,
    timeout_secs: float | None,
    ranks: Ranks | None,
) -> tuple[CallProof, ...]:
    """Call what `load` would serve beside the model itself, and compare; the entry need not be published.

    Raises:
        CallMismatchError: A call gives something else than the model.
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
    stage = mmap.mmap(-1, 1)  # a copy of this process shares it
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
    """Leave torch's random generators as they are after calls in this process."""
    if device == "cpu":
        return torch.random.fork_rng([])
    index = first_index(spec.module, plan)
    indices = [torch.accelerator.current_device_index() if index is None else index]
    return torch.random.fork_rng(indices, device_type=device)


def _device_of(plan: Plan) -> str:
    devices = {item.meta.device for variant in plan.variants for item in variant.inputs}
    return next((name for name in sorted(devices) if name != "cpu"), "cpu")


class CallsAhead:
    """Makes the calls of each variant in a thread as soon as it is compiled, while other variants still compile.

    Only for a model on an accelerator, outside a process group: then the calls are made in this process anyway.

    Args:
        found: The entry, without rows.
        spec: The model and its example calls.
    """

    def __init__(self, found: Found, spec: ModelSpec) -> None:
        self._found = found
        self._spec = spec
        self._rows: dict[int, tuple[Row, ...]] = {}
        self._compiled: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._made: dict[int, CallProof] = {}
        self._wrong = ""
        self._thread = threading.Thread(target=self._make, name="cgtool-calls", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, found: Found, spec: ModelSpec) -> CallsAhead | None:
        """Return what makes the calls of an entry ahead; None where they have to wait for all of it."""
        device = _device_of(found.plan)
        together = private.exchanges() and _may_exchange(found)
        return None if device == "cpu" or together or _why_not(found, spec, device) else cls(found, spec)

    def offer(self, variant: int, rows: tuple[Row, ...]) -> None:
        """Have a variant called; its artifacts are in place."""
        self._rows[variant] = rows
        self._compiled.put(variant)

    def close(self) -> None:
        """Make no calls beyond those of the variants that were offered."""
        self._compiled.put(None)

    def proofs(self, found: Found) -> tuple[CallProof, ...] | None:
        """Wait for the calls and return the proof of each variant; None where some were not made of these artifacts.

        Raises:
            CallMismatchError: A call gives something else than the model.
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
        except Exception as error:  # noqa: BLE001 - the calls are made again after the compile, and the reason is kept
            _log.info("No calls were made ahead: %s", brief(error))


@contextlib.contextmanager
def _ended_if_it_hangs(secs: float) -> Iterator[None]:
    """Have this process ended, with a sentence, where native code holds Python's lock for too long.

    A package that waits for a collective does, and where a thread of the collective wants the lock, they wait for ever.
    """
    words = (
        f"Error: For {secs:g} s (compile_timeout), native code held Python's lock as whole calls were proved, so this "
        "process hung. A package with collectives can do that: have splitting_ops leave them out of packages, or warm "
        "with --no-proof."
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
    """Return a spec of a copy of the model over the same tensors, for the model itself may be in use.

    A function that a module was given is no other one in a copy, and what it closes over is not copied. Where that are
    modules, as in what transformers splits among ranks, the main thread, which others wait for, takes the model itself.

    Raises:
        _NoReplicaError: It cannot be copied.
    """
    if any(map(_closes_over_modules, spec.module.modules())):
        if threading.current_thread() is threading.main_thread():
            return spec
        msg = "the model cannot be copied: functions that its modules were given close over modules"
        raise _NoReplicaError(msg)
    memo: dict[int, object] = {**over_same_memory(spec.module)}
    held = (value for module in spec.module.modules() for value in vars(module).values())
    memo |= {id(value): value for value in held if private.shared_by_processes(value) is not None}
    try:
        return dataclasses.replace(spec, module=copy.deepcopy(spec.module, memo))
    except Exception as error:  # whatever the model holds may refuse
        msg = f"the model cannot be copied ({brief(error)})"
        raise _NoReplicaError(msg) from error


def _closes_over_modules(module: torch.nn.Module) -> bool:
    functions = [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
    held = [value for function in functions for value in inspect.getclosurevars(function).nonlocals.values()]
    return any(isinstance(getattr(value, "__self__", value), torch.nn.Module) for value in held)


def _why_not(found: Found, spec: ModelSpec, device: str) -> str | None:
    """Return why nothing can be called here."""
    if _has_collectives(found) and not private.exchanges():
        return "not run: it has collectives, which other processes take part in"
    if device != "cpu" and not torch.accelerator.is_available():
        return f"not run: there is no {device} device here"
    needed = num_fake_bytes(spec.module)
    if needed > room_for_weights(device):
        size = f"{needed / 1e9:.1f} GB"
        return f"not run: its weights are fake, and there is no room to draw {size} (--weights real runs it with them)"
    return None


def _has_collectives(found: Found) -> bool:
    targets = {str(node.target) for graph in found.plan.graphs.values() for node in graph.every_node()}
    return any(mark in target for target in targets for mark in _COLLECTIVES)


def _may_exchange(found: Found) -> bool:
    """Return whether a call may have collectives: a custom op may hide one."""
    return _has_collectives(found) or any(graph.ops for graph in found.plan.graphs.values())


def _why_not_together(found: Found, spec: ModelSpec, ranks: Ranks, reason: str | None) -> tuple[str | None, bool]:
    """Return why the ranks cannot make the calls together, and whether a later warm may; this one's reason first."""
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
    """Return what a copy that ended early says of the calls; a ProofCrashError where it was at compiled code."""
    ending = error.ending
    crashed = ending.signal_name is not None and ending.signal_name != "SIGKILL"
    if crashed and stage == "compiled":
        raise ProofCrashError(
            f"The process that makes the whole call {ending.how} in what was compiled. A custom op whose "
            "fake implementation gives other shapes or strides than its kernel does that. "
            f"{_ANYHOW}{format_log(ending.log)}",
            signal_name=ending.signal_name,
            actual=ending.code,
        )
    where = " as it ran the model itself" if stage == "model" else ""
    said = f": {ending.key_line}" if ending.key_line and not crashed else ""
    return CallProof(gap=f"not run: the process that makes it {ending.how}{where}{said}", later=not crashed)


def _in_copy(work: Callable[[], _Answer]) -> bytes:
    # The threads of OpenMP's pool are not in the copy, and who gives them work waits for ever.
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).omp_set_max_active_levels(0)  # compiled code asks for a number of threads of its own
    return encode(work())


def _answer(found: Found, spec: ModelSpec, device: str, stage: mmap.mmap, ranks: Ranks | None = None) -> _Answer:
    def tell(name: StageName) -> None:
        stage[0] = STAGES.index(name)

    try:
        proofs = [proof for _, proof in sorted(Calls(found, spec, device, tell, ranks).proofs().items())]
        again = any(proof.restrides for proof in proofs)
        if ranks is not None:  # or one would publish what another one refuses, or make calls again alone
            again = "again" in ranks.meet("all calls are right", "again" if again else "")
        return _Answer(variants=tuple(msgspec.structs.replace(proof, again=again) for proof in proofs))
    except CallMismatchError as error:
        return _Answer(wrong=str(error))
    except RankLostError:
        raise
    except RankAbsentError as error:
        gap = f"not run: it has collectives, and {error}"
        return _Answer(variants=(CallProof(gap=gap, later=True),) * len(found.plan.variants))
    except Exception as error:  # noqa: BLE001 - nothing was learnt of the calls, and the record says so
        traceback.print_exc()
        gap = f"not run: {brief(error)}"
        return _Answer(variants=(CallProof(gap=gap, later=True),) * len(found.plan.variants))
