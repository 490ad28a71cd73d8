"""Chunks that are made in a thread come in order, with their error, and stop when nobody wants them."""

from __future__ import annotations

import threading

import pytest

from cgtool.toolkit.bundle.ahead import ahead


def test_chunks_come_in_order_from_another_thread():
    makers = set()

    def chunks():
        for number in range(100):
            makers.add(threading.current_thread().name)
            yield b"%d" % number

    assert list(ahead(chunks())) == [b"%d" % number for number in range(100)]
    assert makers == {"cgtool-ahead"}


def test_an_error_is_raised_after_the_chunks_before_it():
    def chunks():
        yield b"one"
        raise LookupError

    found = ahead(chunks())
    assert next(found) == b"one"
    with pytest.raises(LookupError):
        next(found)


def test_who_stops_early_leaves_no_thread():
    def chunks():
        while True:
            yield b"more"

    found = ahead(chunks())
    next(found)
    found.close()
    assert "cgtool-ahead" not in {thread.name for thread in threading.enumerate()}
