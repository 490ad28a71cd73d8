"""Several threads call one loaded model at once, while another swaps its weights: each answer is one of eager's."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hold_harness import fixture_spec

pytest.importorskip("torch")

import torch

import cgtool

pytestmark = pytest.mark.torch

THREADS = 8
CALLS = 12
NEAR = 2e-5


def arguments(index, call):
    """Other tokens and another number of them for each thread and call; some of one token."""
    tokens = 1 + (index * 7 + call * 5) % 40
    seed = torch.Generator().manual_seed(1000 * index + call)
    return torch.randint(0, 256, (tokens,), generator=seed), torch.arange(tokens)


def at_once(work):
    """Run `work(index)` in as many threads as there are, all started together; raise what any of them raised."""
    ready = threading.Barrier(THREADS)

    def run(index):
        ready.wait(timeout=60)
        work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run, index) for index in range(THREADS)]:
            done.result(timeout=240)


def same(found, expected):
    return found.shape == expected.shape and (found - expected).abs().max().item() < NEAR


@pytest.fixture(params=["aot_inductor", "eager"])
def loaded(request, aot_cache, eager_cache):
    module = fixture_spec("llama").module
    root = aot_cache("llama") if request.param == "aot_inductor" else eager_cache
    with torch.no_grad():
        yield cgtool.load(module, cache_dir=root)


def test_threads_get_their_own_answers(loaded):
    expected = {}
    with torch.no_grad():
        for index in range(THREADS):
            for call in range(CALLS):
                expected[index, call] = loaded.module(*arguments(index, call))

    def work(index):
        mode = torch.inference_mode if index % 2 else torch.no_grad  # grad mode is each thread's own
        with mode():
            for call in range(CALLS):
                assert same(loaded(*arguments(index, call)), expected[index, call]), (index, call)

    at_once(work)


def test_a_thread_that_forgets_no_grad_is_told(loaded):
    """Grad mode is on in a new thread, whatever the one that loaded had chosen."""

    def work(_):
        with pytest.raises(cgtool.GuardError, match=r"call the model under torch\.no_grad\(\)"):
            loaded(*arguments(1, 1))

    at_once(work)


def test_weights_that_are_assigned_meanwhile_are_the_old_or_the_new_ones(loaded):
    """What is promised: a call reads each tensor once, at its start, and assignment writes into none that it holds."""
    module, name = loaded.module, "norm.weight"
    with torch.no_grad():
        old = module.get_parameter(name).detach().clone()
        new = old * -3
        calls = [arguments(index, 3) for index in range(THREADS)]
        answers = [[module(*call)] for call in calls]
        loaded_with(module, name, new)
        for call, both in zip(calls, answers, strict=True):
            both.append(module(*call))
    stop = threading.Event()
    seen = [set() for _ in range(THREADS)]

    def swap():
        while not stop.is_set():
            for value in (old, new):
                loaded_with(module, name, value)
                time.sleep(0.0005)

    def work(index):
        with torch.inference_mode():
            for call in range(400):
                found = loaded(*calls[index])
                fits = [i for i, answer in enumerate(answers[index]) if same(found, answer)]
                assert fits, index
                seen[index].update(fits)
                if len(seen[index]) == 2 and call > 40:
                    break

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        at_once(work)
    finally:
        stop.set()
        swapper.join()
    assert {0, 1} == set.union(*seen)


def loaded_with(module, name, value):
    module.load_state_dict({name: value}, strict=False, assign=True)
