"""Global state of torch as data: each name sees its own change and nothing else does."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

from cgtool.errors import GuardError
from cgtool.guards import state

pytestmark = pytest.mark.torch


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


@contextlib.contextmanager
def precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def functorch():
    from torch._C._functorch import _vmap_decrement_nesting, _vmap_increment_nesting

    _vmap_increment_nesting(2, "error")
    try:
        yield
    finally:
        _vmap_decrement_nesting()


def everything():
    return {name: state.current(name) for name in state.STATE_NAMES}


@pytest.mark.parametrize(
    ("context", "name", "now"),
    [
        pytest.param(lambda: torch.autocast("cpu", torch.bfloat16), "autocast", {"cpu": "bfloat16"}, id="autocast"),
        pytest.param(precision, "float32_matmul_precision", "high", id="precision"),
        pytest.param(deterministic, "deterministic", True, id="deterministic"),
        pytest.param(default_dtype, "default_dtype", "bfloat16", id="dtype"),
        pytest.param(lambda: torch.device("meta"), "default_device", "meta", id="device"),
        pytest.param(Mode, "torch_function_mode", [f"{__name__}:Mode"], id="function mode"),
        pytest.param(functorch, "functorch", True, id="functorch"),
    ],
)
def test_a_change_is_seen_under_its_own_name_only(context, name, now):
    before = everything()
    with context():
        inside = everything()
    assert inside[name] == now != before[name]
    assert {key for key in before if before[key] != inside[key]} == {name}
    assert everything() == before
    sentence = state.explain_state(name, before[name], now)
    assert "compiled" in sentence


def test_grad_and_inference_mode_are_no_state():
    before = everything()
    with torch.no_grad():
        assert everything() == before
    with torch.inference_mode():
        assert everything() == before


def test_an_unknown_name_is_refused():
    with pytest.raises(GuardError, match="does not know"):
        state.current("moon_phase")
