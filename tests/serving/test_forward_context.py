"""The forward context: set, get and reset, nested, in threads and in asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from cgtool.config_values import CUDAGraphMode
from cgtool.errors import UsageError
from cgtool.serving.forward_context import (
    BatchDescriptor,
    DPMetadata,
    ForwardContext,
    get_forward_context,
    reset_forward_context,
    set_forward_context,
)

pytestmark = pytest.mark.torch


def of(name):
    return ForwardContext(attn_metadata=name)


@pytest.fixture(autouse=True)
def clean():
    yield
    reset_forward_context()


def test_between_steps_the_context_is_empty():
    context = get_forward_context()
    assert (context.attn_metadata, context.batch_descriptor) == (None, None)
    assert context.cudagraph_runtime_mode is CUDAGraphMode.NONE
    assert not context.capturing


def test_the_context_lasts_until_reset():
    set_forward_context(of("a"))
    assert get_forward_context().attn_metadata == "a"
    reset_forward_context()
    assert get_forward_context().attn_metadata is None


def test_a_block_restores_the_previous_context_even_after_an_error():
    with set_forward_context(of("outer")):
        with contextlib.suppress(KeyError), set_forward_context(of("inner")):
            assert get_forward_context().attn_metadata == "inner"
            raise KeyError
        assert get_forward_context().attn_metadata == "outer"
    assert get_forward_context().attn_metadata is None


def test_the_context_has_the_descriptor_and_the_mode():
    descriptor = BatchDescriptor(8, 8, uniform=True)
    with set_forward_context(ForwardContext(batch_descriptor=descriptor, cudagraph_runtime_mode=CUDAGraphMode.FULL)):
        assert get_forward_context().batch_descriptor == descriptor
        assert get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL


def test_a_pair_of_modes_is_not_a_runtime_mode():
    with pytest.raises(UsageError, match="is not a mode of a single batch"):
        ForwardContext(cudagraph_runtime_mode=CUDAGraphMode.FULL_AND_PIECEWISE)


def test_threads_have_separate_contexts():
    seen, meet = {}, threading.Barrier(8)

    def serve(name):
        with set_forward_context(of(name)):
            meet.wait(timeout=10)
            seen[name] = get_forward_context().attn_metadata
            meet.wait(timeout=10)
        seen[name, "after"] = get_forward_context().attn_metadata

    with set_forward_context(of("main")):
        threads = [threading.Thread(target=serve, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert get_forward_context().attn_metadata == "main"
    assert seen == {name: name for name in range(8)} | {(name, "after"): None for name in range(8)}


def test_tasks_have_separate_contexts():
    async def serve(name):
        with set_forward_context(of(name)):
            await asyncio.sleep(0)
            inner = get_forward_context().attn_metadata
        await asyncio.sleep(0)
        return inner, get_forward_context().attn_metadata

    async def together():
        with set_forward_context(of("main")):
            return await asyncio.gather(*(serve(name) for name in range(8))), get_forward_context().attn_metadata

    tasks, main = asyncio.run(together())
    assert tasks == [(name, "main") for name in range(8)]
    assert main == "main"


def test_a_block_may_end_in_a_different_task():
    async def steps():
        with set_forward_context(of("inner")):
            yield get_forward_context().attn_metadata

    async def use():
        generator = steps()
        first = await anext(generator)
        await asyncio.create_task(generator.aclose())
        return first

    assert asyncio.run(use()) == "inner"


def test_token_counts_of_data_parallel_ranks():
    metadata = DPMetadata([3, 0, 5])
    assert metadata.max_tokens_across_dp == 5
    assert metadata.cu_tokens_across_dp == (3, 3, 8)
    for counts in ([], [1, -1]):
        with pytest.raises(UsageError, match="num_tokens_across_dp"):
            DPMetadata(counts)
