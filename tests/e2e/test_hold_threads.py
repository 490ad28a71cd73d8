"""Threads that call one loaded model at the same time, also while another thread replaces its weights."""

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
    """Return different tokens, and a different number of them, for each thread and call."""
    tokens = 2 + (index * 7 + call * 5) % 40
    seed = torch.Generator().manual_seed(1000 * index + call)
    return torch.randint(0, 256, (tokens,), generator=seed), torch.arange(tokens)


def at_once(work):
    """Run `work(index)` in all threads, started together, and raise the first error of any of them."""
    ready = threading.Barrier(THREADS)

    def run(index):
        ready.wait(timeout=60)
        work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run, index) for index in range(THREADS)]:
            done.result(timeout=240)


def same(output, expected):
    return output.shape == expected.shape and (output - expected).abs().max().item() < NEAR


@pytest.fixture(params=["aot_inductor", "eager"])
def loaded(request):
    cache = request.getfixturevalue("native_llama" if request.param == "aot_inductor" else "eager_llama")
    with torch.no_grad():
        yield cgtool.load(fixture_spec("llama").module, cache_dir=cache.root)


def test_threads_get_their_own_results(loaded):
    expected = {}
    with torch.no_grad():
        for index in range(THREADS):
            for call in range(CALLS):
                expected[index, call] = loaded.module(*arguments(index, call))

    def work(index):
        mode = torch.inference_mode if index % 2 else torch.no_grad  # grad mode is per thread
        with mode():
            for call in range(CALLS):
                assert same(loaded(*arguments(index, call)), expected[index, call]), (index, call)

    at_once(work)


def test_a_thread_without_no_grad_gets_an_error_that_names_it(loaded):
    """Grad mode is on in a new thread, whatever the mode of the thread that loaded the model."""

    def work(_):
        with pytest.raises(cgtool.GuardError, match=r"call the model under torch\.no_grad\(\)"):
            loaded(*arguments(1, 1))

    at_once(work)


def test_each_call_uses_the_old_or_the_new_weights_while_they_are_assigned(loaded):
    """A call reads each tensor once, at its start, and assignment does not write to tensors that a call holds."""
    module, name = loaded.module, "norm.weight"
    with torch.no_grad():
        old = module.get_parameter(name).detach().clone()
        new = old * -3
        calls = [arguments(index, 3) for index in range(THREADS)]
        outputs = [[module(*call)] for call in calls]
        assign(module, name, new)
        for call, both in zip(calls, outputs, strict=True):
            both.append(module(*call))
    stop = threading.Event()
    seen = [set() for _ in range(THREADS)]

    def swap():
        while not stop.is_set():
            for value in (old, new):
                assign(module, name, value)
                time.sleep(0.0005)

    def work(index):
        with torch.inference_mode():
            for call in range(400):
                output = loaded(*calls[index])
                matches = [i for i, expected in enumerate(outputs[index]) if same(output, expected)]
                assert matches, index
                seen[index].update(matches)
                if len(seen[index]) == 2 and call > 40:
                    break

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        at_once(work)
    finally:
        stop.set()
        swapper.join()
    assert set.union(*seen) == {0, 1}


def assign(module, name, value):
    module.load_state_dict({name: value}, strict=False, assign=True)
