"""Capture all CUDA graphs of a model at start-up, and report the time and memory they took."""

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

#: Runs the model once on dummy inputs of the descriptor's size: (runtime mode, descriptor, capturing).
DummyRun = Callable[[CUDAGraphMode, BatchDescriptor, bool], Any]


@dataclass(frozen=True, kw_only=True)
class CapturedSize:
    """One captured key.

    Attributes:
        mode: PIECEWISE or FULL.
        descriptor: The padded batch.
        secs: The time that warm-up and capture took.
        pool_bytes: The growth of the pools' memory; 0 if the graph reuses a larger graph's memory.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    secs: float
    pool_bytes: int


@dataclass(frozen=True, kw_only=True)
class CaptureReport:
    """The captures of a start-up.

    Attributes:
        sizes: The captured keys, in order of capture.
        secs: The total time.
        pool_bytes: The memory of the pools.
        pools_are_shared: Whether all graphs share one pool, because outputs are copied; otherwise each has a pool.
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
    """Capture a graph for every key of `dispatcher`, largest first, so that smaller graphs reuse the larger's memory.

    Args:
        model: The model to capture; keys that it has already captured are skipped.
        dispatcher: Provides the keys. It is enabled once all graphs are captured.
        dummy_run: Runs the model on inputs of a given size.
        num_warmups: The number of runs without a graph before each capture, which load kernels and allocate workspaces.
        rank: Only rank 0 reports progress.
        on_event: Called after each key.

    Raises:
        GraphError: A capture failed. Nothing is kept for its key, and the dispatcher stays disabled.
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
