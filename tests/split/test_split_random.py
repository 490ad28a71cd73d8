"""The pieces of random graphs match the whole graph, even with the worst correct compiler."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from split_reference import (
    OPS,
    capture,
    graph_arguments,
    placeholder_order,
    run_split,
    same,
    symbol_values,
    toy_ops_in,
)

from cgtool.split.splitter import split_graph

pytestmark = pytest.mark.torch

# Each step takes the pool of values and two indices, and appends its results to the pool.
# All values are float tensors of at least one element per row; sizes only ever shrink in dimension 1.


def _pick(pool, i):
    return pool[i % len(pool)]


def _mate(pool, value, i):
    """Return another value of the same shape, or else the value itself."""
    fitting = [other for other in pool if other.shape == value.shape]
    return fitting[i % len(fitting)]


def unary(pool, i, j):
    pool.append(_pick(pool, i) * 2 + j)


def binary(pool, i, j):
    a = _pick(pool, i)
    pool.append(a + _mate(pool, a, j))


def view(pool, i, j):
    pool.append(_pick(pool, i).reshape(-1))


def grid(pool, i, j):
    a = _pick(pool, i)
    pool.append(a.t() if a.dim() == 2 else a[None])


def rows(pool, i, j):
    a = _pick(pool, i)
    if a.shape[0] > 12:
        pool.append(a[1:] if j % 2 else a[:-1])


def parts(pool, i, j):
    a = _pick(pool, i)
    if a.shape[0] > 12:
        pool.extend(torch.chunk(a, 2, 0))


def row(pool, i, j):
    a = _pick(pool, i)
    if a.dim() == 2:
        pool.append(a[0])


def best(pool, i, j):
    values, _ = torch.topk(_pick(pool, i), 1)
    pool.append(values)


def add_in_place(pool, i, j):
    a = _pick(pool, i)
    pool.append(a.add_(j + 1))


def increment(pool, i, j):
    a = _pick(pool, i)
    a += _mate(pool, a, j)


def assign(pool, i, j):
    a = _pick(pool, i)
    a[0] = float(j)


def copy_over(pool, i, j):
    a = _pick(pool, i)
    a.copy_(_mate(pool, a, j).clone())


def write_out(pool, i, j):
    a = _pick(pool, i)
    out = torch.empty(a.shape)  # Dynamo takes a contiguous one only
    torch.add(a, 1, out=out)
    pool.append(out)


def buffer(pool, i, j):
    a = _pick(pool, i)
    pool.append(torch.zeros(a.shape[0] * 2 + j))


def scaled_by_size(pool, i, j):
    a = _pick(pool, i)
    pool.append(a * (a.shape[0] + j))


def cut_mix(pool, i, j):
    a = _pick(pool, i)
    pool.append(OPS.mix(a, _mate(pool, a, j)))


def cut_fill(pool, i, j):
    a = _pick(pool, i)
    out = torch.empty_like(a)
    OPS.fill(a, out)
    pool.append(out)


def cut_fill_existing(pool, i, j):
    a = _pick(pool, i)
    OPS.fill(a.clone(), _mate(pool, a, j))


def cut_bump(pool, i, j):
    OPS.bump_(_pick(pool, i))


def cut_pair(pool, i, j):
    pool.extend(OPS.pair(_pick(pool, i)))


def cut_scale(pool, i, j):
    a = _pick(pool, i)
    pool.append(OPS.scale(a, a.shape[0]))


PLAIN = (unary, binary, view, grid, rows, parts, row, best, write_out, buffer, scaled_by_size)
WRITES = (add_in_place, increment, assign, copy_over)
CUTS = (cut_mix, cut_fill, cut_fill_existing, cut_bump, cut_pair, cut_scale)
STEP = st.tuples(
    st.one_of(st.sampled_from(PLAIN), st.sampled_from(WRITES), st.sampled_from(CUTS)),
    st.integers(0, 11),
    st.integers(0, 5),
)


def run_and_compare(program, returned, dynamic) -> None:
    def function(a, b):
        pool = [a, b]
        for step, i, j in program:
            step(pool, i, j)
        found = [_pick(pool, i) for i in returned]
        # Use both, or Dynamo would not pass them.
        return (*found, a.shape[0] + 1, a.sum() + b.sum())

    args = [torch.arange(92.0).reshape(23, 4) / 8, torch.arange(23.0) / 4]
    graph_module = capture(function, *args, dynamic=dynamic)
    names = toy_ops_in(graph_module)
    result = split_graph(graph_module, splitting_ops=names)
    assert split_graph(graph_module, splitting_ops=names) == result
    order = placeholder_order(graph_module, function, args)
    for hostile in (False, True):
        whole, pieces = copy.deepcopy(args), copy.deepcopy(args)
        with torch.no_grad():
            expected = graph_module(*graph_arguments(graph_module, [whole[i] for i in order]))
        own = [pieces[i] for i in order]
        actual = run_split(result, own, symbol_values(graph_module, result, own), hostile=hostile)
        assert len(actual) == len(expected)
        assert all(same(left, right) for left, right in zip(actual, expected, strict=True))
        assert all(same(left, right) for left, right in zip(pieces, whole, strict=True))


@pytest.mark.parametrize("dynamic", [(), ((0, 0), (1, 0))], ids=["static", "dynamic"])
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=st.lists(STEP, min_size=2, max_size=12), returned=st.lists(st.integers(0, 11), min_size=1, max_size=4))
def test_pieces_of_random_graphs_match_the_graph(program, returned, dynamic) -> None:
    run_and_compare(program, returned, dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [(), ((0, 0), (1, 0))], ids=["static", "dynamic"])
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=st.lists(STEP, min_size=2, max_size=16), returned=st.lists(st.integers(0, 11), min_size=1, max_size=4))
def test_pieces_of_many_random_graphs_match_the_graph(program, returned, dynamic) -> None:
    run_and_compare(program, returned, dynamic)
