"""Aliasing hazards: which pieces must run eagerly, and which must not."""

from __future__ import annotations

import pytest
import torch
from split_reference import OPS, check_split

pytestmark = pytest.mark.torch


def x() -> torch.Tensor:
    return torch.arange(24.0).reshape(6, 4) / 7


def test_an_out_buffer_of_the_previous_piece_is_no_hazard() -> None:
    def function(a):
        out = torch.empty_like(a)
        OPS.fill(a * 2, out)
        return out + 1

    assert check_split(function, x()).eager_pieces == {}


def test_a_view_of_an_out_buffer_is_recomputed_where_it_is_used() -> None:
    def function(a):
        q = a * 2
        out = torch.empty(a.shape[0], 4)
        OPS.fill(q.view(-1, 2, 2), out.view(-1, 2, 2))
        return out + 1

    result = check_split(function, x(), dynamic=[(0, 0)])
    assert result.eager_pieces == {}
    splitting = result.graphs[result.steps[1].graph]
    assert [node.target for node in splitting.nodes if node.kind == "method"] == ["view"]
    assert len(splitting.inputs) == 2


def test_writing_to_one_unaliased_input_is_no_hazard() -> None:
    def function(a, cache):
        cache[1:3] = a[1:3] * 2
        b = OPS.mix(cache, a)
        cache.add_(1)
        return b + cache

    assert check_split(function, x(), x()).eager_pieces == {}


def test_views_without_writes_are_no_hazard() -> None:
    def function(a):
        q, k, v = (a @ torch.ones(4, 12)).chunk(3, 1)
        b = OPS.mix(q, k)
        return b + v + q

    assert check_split(function, x()).eager_pieces == {}


def test_parts_written_in_their_own_piece_are_no_hazard() -> None:
    def function(a):
        q, k = (a @ torch.ones(4, 8)).chunk(2, 1)
        q.mul_(2)
        k.add_(1)
        return OPS.mix(q, k) + q

    assert check_split(function, x()).eager_pieces == {}


def test_parts_written_by_a_splitting_op_are_no_hazard() -> None:
    def function(a):
        q, k = (a @ torch.ones(4, 8)).chunk(2, 1)
        OPS.bump_(q)
        return q + k

    assert check_split(function, x()).eager_pieces == {}


def test_a_write_to_memory_that_two_inputs_share_makes_a_piece_eager() -> None:
    def function(keys, values):
        keys.add_(1)
        c = OPS.mix(keys, values)
        return c + values

    buffer = torch.arange(48.0)  # parts of one buffer, as a user may pass them
    result = check_split_of_views(function, buffer[:24].view(6, 4), buffer[24:].view(6, 4))
    assert result.eager_pieces == {}, "each piece takes one of the two, or only reads"

    def both(keys, values):
        keys.add_(values)
        return OPS.mix(keys, values)

    result = check_split_of_views(both, buffer[:24].view(6, 4), buffer[24:].view(6, 4))
    (reason,) = result.eager_pieces.values()
    assert "add_" in reason
    assert "share" in reason
    assert "test_split_alias.py" in reason, "a person finds the line"


def check_split_of_views(function, *args):
    result = check_split(function, *args)
    assert len({arg.untyped_storage().data_ptr() for arg in args}) == 1
    return result


def test_a_view_that_cannot_be_recomputed_makes_its_piece_eager() -> None:
    def function(a):
        b = a + 1
        c = b.view_as(a * 1)  # two tensors: no plain view
        OPS.mix(a, a)
        c.add_(1)
        return b * 2, c

    result = check_split(function, x())
    assert set(result.eager_pieces) == {0, 2}
    assert "later piece" in result.eager_pieces[0]
    assert not any(step.splitting for step in result.steps if step.piece in result.eager_pieces)


def test_a_piece_without_used_results_is_not_compiled() -> None:
    def function(a):
        b = OPS.mix(a, a)
        a.sin().exp()
        return (b,)

    assert list(check_split(function, x()).eager_pieces.values()) == ["its results are not used"]
