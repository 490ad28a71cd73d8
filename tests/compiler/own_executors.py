"""Executors of another distribution: threads and processes of this machine, and one that lies."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor


def threads(url):
    """`threads:2`."""
    return ThreadPoolExecutor(int(url.partition(":")[2]))


def processes(url):
    """`processes:2`."""
    return ProcessPoolExecutor(int(url.partition(":")[2]), mp_context=multiprocessing.get_context("spawn"))


def liars(url):
    """Return an executor whose worker proves one artifact and returns another."""
    return _Liars(1)


def nothing(url):
    return url


class _Liars(ThreadPoolExecutor):
    def submit(self, call, *args):
        return super().submit(lambda: call(*args)[:-1] + b"!")


assert issubclass(_Liars, Executor)
