"""The double and the real graph backend: every behavior that tests rely on, for both."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.torch


def captured(backend, function, *, pool):
    with backend.capture(pool=pool) as graph:
        output = function()
    return graph, output


def test_a_capture_runs_nothing(backend, device):
    x, seen = torch.ones(4, device=device), torch.zeros(4, device=device)
    captured(backend, lambda: seen.copy_(x * 2), pool=backend.new_pool())
    backend.synchronize()
    assert seen.tolist() == [0, 0, 0, 0]


def test_a_replay_uses_the_addresses_of_the_capture(backend, device):
    x, weight = torch.ones(4, device=device), torch.full((4,), 3.0, device=device)
    graph, output = captured(backend, lambda: (x + 1) * weight, pool=backend.new_pool())
    graph.replay()
    assert output.tolist() == [6, 6, 6, 6]
    x.fill_(2)
    graph.replay()
    assert output.tolist() == [9, 9, 9, 9]


def test_a_replay_repeats_in_place_writes(backend, device):
    cache, slots = torch.zeros(8, device=device), torch.tensor([1, 2], device=device)
    ones = torch.ones(2, device=device)
    graph, _ = captured(backend, lambda: cache.index_copy_(0, slots, ones), pool=backend.new_pool())
    slots.copy_(torch.tensor([5, 6], device=device))
    graph.replay()
    assert cache.tolist() == [0, 0, 0, 0, 0, 1, 1, 0]


def test_views_of_an_output_follow_it(backend, device):
    x = torch.arange(6.0, device=device).view(2, 3)
    graph, (left, right) = captured(backend, lambda: (x * 2).t().split([1, 2]), pool=backend.new_pool())
    graph.replay()
    assert (left.tolist(), right.tolist()) == ([[0, 6]], [[2, 8], [4, 10]])


def test_free_memory_is_reused_by_the_next_capture_in_the_pool(backend, device):
    x, pool = torch.ones(1024, device=device), backend.new_pool()
    first, output = captured(backend, lambda: x * 2, pool=pool)
    lent = backend.borrow(output)
    del output
    second, _other = captured(backend, lambda: x * 3, pool=pool)
    first.replay()
    assert lent[0].item() == 2
    second.replay()
    assert lent[0].item() == 3, "the corruption that the field reports: one pool, and an output handed out weakly"


def test_memory_in_use_is_not_reused(backend, device):
    x, pool = torch.ones(1024, device=device), backend.new_pool()
    first, output = captured(backend, lambda: x * 2, pool=pool)
    second, other = captured(backend, lambda: x * 3, pool=pool)
    first.replay()
    second.replay()
    assert (output[0].item(), other[0].item()) == (2, 3)


def test_pools_do_not_share_memory(backend, device):
    x = torch.ones(1024, device=device)
    first, output = captured(backend, lambda: x * 2, pool=backend.new_pool())
    lent = backend.borrow(output)
    del output
    second, _other = captured(backend, lambda: x * 3, pool=backend.new_pool())
    first.replay()
    second.replay()
    assert lent[0].item() == 2


def test_a_replay_ignores_a_replaced_input(backend, device):
    x = torch.ones(4, device=device)
    kept = x
    graph, output = captured(backend, lambda: x * 2, pool=backend.new_pool())
    x = torch.full((4,), 5.0, device=device)
    graph.replay()
    assert output.tolist() == [2, 2, 2, 2]
    assert kept.tolist() == [1, 1, 1, 1]


def test_a_sync_fails_the_capture_and_the_next_capture_works(backend, device):
    x = torch.ones(4, device=device)
    with pytest.raises(RuntimeError):
        captured(backend, lambda: x.sum().item(), pool=backend.new_pool())
    graph, output = captured(backend, lambda: x * 2, pool=backend.new_pool())
    graph.replay()
    assert output.tolist() == [2, 2, 2, 2]


def test_a_pool_without_graphs_cannot_be_reused_but_other_pools_can(backend, device):
    x, pool = torch.ones(4, device=device), backend.new_pool()
    graphs = [captured(backend, lambda: x * 2, pool=pool)[0] for _ in range(2)]
    graphs[0].reset()
    graphs[0], _ = captured(backend, lambda: x * 2, pool=pool)
    for graph in graphs:
        graph.reset()
    with pytest.raises(RuntimeError):
        captured(backend, lambda: x * 2, pool=pool)
    torch.nn.init.uniform_(x)
    graph, output = captured(backend, lambda: x * 2, pool=backend.new_pool())
    graph.replay()
    assert torch.equal(output, x * 2)


def test_a_pool_reports_its_size(backend, device):
    x, pool, empty = torch.ones(1 << 16, device=device), backend.new_pool(), backend.new_pool()
    _graph, _output = captured(backend, lambda: x * 2, pool=pool)
    assert backend.pool_bytes(pool) >= 4 << 16
    assert backend.pool_bytes(empty) == 0
