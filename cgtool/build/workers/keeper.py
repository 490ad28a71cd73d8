"""The small process above each worker: it outlives nothing, and lets nothing of its worker outlive it.

A worker runs in a process group of its own, together with its compilers. The keeper leads that group: the worker is
forked off it before torch is imported, so that it holds no memory worth speaking of. It ends the group when the process
that started it goes away, whatever ends that one. When the worker ends, the keeper ends and reaps what the worker left,
and then ends in the same way, so that whoever waits for it learns of the signal. SIGTERM, which ends all others of the
group, does not end it: that the keeper is gone means that the group is. Must not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from typing import NoReturn

#: How often the keeper looks whether it was orphaned, should the pipe not tell it, in milliseconds.
_LOOK_MS = 1000
#: How long a compiler gets to remove its half-written output before it is killed, in seconds: a precompiled header that
#: was cut short would spoil every later compile on this machine.
GRACE_SECS = 1.0

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


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
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it died in between
            os._exit(1)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.close(alive)
    os.close(1)  # the worker's alone: a keeper that held it would hide its end
    _keep(child, ended=ended, lifeline=lifeline, above=above)


def _keep(child: int, *, ended: int, lifeline: int, above: int) -> NoReturn:
    watch = select.poll()
    watch.register(lifeline, 0)  # POLLHUP alone: the pipe's data is the worker's
    watch.register(ended, 0)
    while True:
        happened = {descriptor for descriptor, _ in watch.poll(_LOOK_MS)}
        found, status = os.waitpid(child, 0 if ended in happened else os.WNOHANG)
        if found:
            _end_rest()
            _end_as(os.waitstatus_to_exitcode(status))
        if lifeline in happened or os.getppid() != above:
            _end_rest()
            os.killpg(0, signal.SIGKILL)


def _end_rest() -> None:
    """Ask all others of the group to end, and wait for them; not for long."""
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECS
    with contextlib.suppress(ChildProcessError):  # nobody is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.005)


def _end_as(code: int) -> NoReturn:
    """End this process as the worker ended."""
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file of a crash is enough
    signum = signal.Signals(-code)
    if signum != signal.SIGKILL:
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)


def _prctl(option: int, value: int) -> None:
    """Ask the kernel for one thing; where libc has no prctl, what the keeper does by itself remains."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)
