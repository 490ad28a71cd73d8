"""Programs for children in tests; each request names an action."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

from cgtool.plan.grammar import Record


class Do(Record, frozen=True, kw_only=True):
    deed: str


class Told(Record, frozen=True, kw_only=True):
    word: str


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def main(channel):
    for request, data in channel.requests(Do):
        say("doing", request.deed)
        word = DEEDS[request.deed]()
        channel.note(Told(word=f"did {request.deed}"))
        channel.answer(Told(word=str(word)), data * 2, last=request.deed == "last")
        if request.deed == "last":
            return


def set_up(channel):
    """Answer with the setup."""
    setup = channel.setup(Told)
    for _ in channel.requests(Do):
        channel.answer(setup)


def _leave():
    sys.stderr.write("some last words\n")
    os._exit(7)


def _start_far():
    """Start a process in another session that ignores SIGTERM, and exit."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", f"import signal, time; {deaf}"]
    far = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    far.stdout.readline()
    say("far", far.pid)
    os._exit(7)


def _hold_the_lock():
    """Sleep in C while holding the GIL, ignoring SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(600)


DEEDS = {
    "nothing": os.getpid,
    "last": os.getpid,
    "print": lambda: [say("line", number) for number in range(50)],
    "crash": lambda: ctypes.string_at(0),
    "be killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leave": _leave,
    "sleep": lambda: time.sleep(600),
    "hold the lock": _hold_the_lock,
    "start far": _start_far,
}
