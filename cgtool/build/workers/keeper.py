"""The small process above each worker: it outlives nothing, and lets nothing of its worker outlive it.

A worker leads a process group of its own, in which its compilers run. The keeper is that group's leader: it is forked
off before torch is imported, holds no memory worth speaking of, and does two things. When the process that started the
worker goes away, whatever ends it, the keeper ends the group. When the worker ends, the keeper ends what it left and
then ends in the same way, so that whoever waits for it learns of the signal. Must not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import NoReturn

#: How often the keeper looks whether it was orphaned, should the pipe not tell it, in milliseconds.
_LOOK_MS = 1000
#: How long a compiler gets to remove its half-written output before it is killed, in seconds.
GRACE_SECS = 1.0

_PR_SET_PDEATHSIG = 1


def split_off(lifeline: int) -> None:
    """Fork: the child returns and becomes the worker, the parent stays as its keeper and never returns.

    Args:
        lifeline: The reading end of a pipe whose writing end the process above holds open as long as it lives.
    """
    above = os.getppid()
    keeper = os.getpid()
    ended, alive = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ended)  # the other end stays open in the worker until it ends, and tells the keeper of that
        _die_with_parent(keeper)
        return
    os.close(alive)
    os.close(1)  # the worker's alone: a keeper that held it would hide its end
    _keep(child, ended=ended, lifeline=lifeline, above=above)


def _keep(child: int, *, ended: int, lifeline: int, above: int) -> None:
    watch = select.poll()
    watch.register(lifeline, 0)  # POLLHUP alone: the pipe's data is the worker's
    watch.register(ended, 0)
    while True:
        happened = {descriptor for descriptor, _ in watch.poll(_LOOK_MS)}
        found, status = os.waitpid(child, 0 if ended in happened else os.WNOHANG)
        if found:
            _end_as(os.waitstatus_to_exitcode(status))
        if lifeline in happened or os.getppid() != above:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end_group(os.getpid(), is_over=lambda: False)


def _end_as(code: int) -> NoReturn:
    """End what is left of the group, then this process as the worker ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGTERM)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file of a crash is enough
    signum = signal.Signals(-code)
    if signum not in {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)


def end_group(group: int, *, is_over: Callable[[], bool]) -> None:
    """End all processes of a group: at once, but compilers may remove their half-written files first.

    A precompiled header that was cut short would spoil every later compile on this machine.

    Args:
        group: The group's leader, a keeper.
        is_over: Asked again and again whether nobody of it is left.
    """
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECS
        while not is_over():
            if time.monotonic() > deadline:
                os.killpg(group, signal.SIGKILL)
                break
            time.sleep(0.01)


def _die_with_parent(keeper: int) -> None:
    """Have the kernel kill this process when its keeper dies. Without prctl the kill of the group remains."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper:  # it died in between
        os._exit(1)
