"""Capturing all graphs of a model at start-up, and what that cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cgtool.config_values import CUDAGraphMode
from cgtool.events import Event, OnEvent, ignore
from cgtool.host import gc_paused
from cgtool.serving.dispatcher import CudagraphDispatcher
from cgtool.serving.forward_context import BatchDescriptor
from cgtool.serving.model import GraphedModel

_log = logging.getLogger(__name__)

#: Runs the model once, on dummy inputs as large as a descriptor says: (runtime mode, descriptor, capturing).
DummyRun = Callable[[CUDAGraphMode, BatchDescriptor, bool], Any]


@dataclass(frozen=True, kw_only=True)
class CapturedSize:
    """One key that was captured.

    Attributes:
        mode: PIECEWISE or FULL.
        descriptor: The padded batch.
        secs: How long warming up and capturing took.
        pool_bytes: By how much the memory of the pools grew; 0 where a larger graph's memory was used again.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    secs: float
    pool_bytes: int


@dataclass(frozen=True, kw_only=True)
class CaptureReport:
    """What a start-up captured.

    Attributes:
        sizes: In order of capture.
        secs: All of it.
        pool_bytes: What the pools hold.
        pools_are_shared: Whether all graphs share one pool, because outputs are copied; else each has its own.
    """

    sizes: tuple[CapturedSize, ...]
    secs: float
    pool_bytes: int
    pools_are_shared: bool


def capture_cudagraphs(
    model: GraphedModel,
    dispatcher: CudagraphDispatcher,
    dummy_run: DummyRun,
    *,
    num_warmups: int = 1,
    rank: int = 0,
    on_event: OnEvent = ignore,
) -> CaptureReport:
    """Capture a graph for every key of `dispatcher`, largest first, so that smaller ones fit into the memory of larger.

    Args:
        model: What is captured; keys that it has already are skipped.
        dispatcher: Names the keys. It sends batches to graphs once all of them are captured.
        dummy_run: Runs the model on inputs of a size.
        num_warmups: How often each size runs without a graph first: kernels are loaded and workspaces allocated then.
        rank: Only rank 0 shows progress.
        on_event: Is told of each key.

    Raises:
        GraphError: A capture failed; of its key nothing is kept, and the dispatcher stays off.
    """
    dispatcher.enabled = False
    start, sizes, held = time.perf_counter(), [], model.pools.held_bytes()
    model.open_all()
    keys = list(dispatcher.keys())
    with gc_paused():
        for number, (mode, descriptor) in enumerate(keys, 1):
            began, before = time.perf_counter(), held
            for _ in range(num_warmups):
                dummy_run(CUDAGraphMode.NONE, descriptor, False)
            try:
                dummy_run(mode, descriptor, True)
                model.backend.synchronize()
            except BaseException:
                model.drop(mode, descriptor)
                raise
            held, secs = model.pools.held_bytes(), time.perf_counter() - began
            sizes.append(CapturedSize(mode=mode, descriptor=descriptor, secs=secs, pool_bytes=held - before))
            if rank == 0:
                message = f"{mode.name} {descriptor.num_tokens}"
                on_event(Event(phase="capture", message=message, done=number, total=len(keys), secs=secs))
    dispatcher.enabled = True
    report = CaptureReport(
        sizes=tuple(sizes),
        secs=time.perf_counter() - start,
        pool_bytes=held,
        pools_are_shared=model.pools.shared,
    )
    _log.info("Captured %d keys in %.2f s; graphs hold %d bytes.", len(sizes), report.secs, report.pool_bytes)
    return report
