"""Global state of torch as data: a change affects its own name and no other."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

from cgtool.errors import GuardError
from cgtool.guards import _torch as private
from cgtool.guards import state
from cgtool.plan.pieces import Node, PieceGraph, TensorMeta
from cgtool.runtime.generate import Code

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
        pytest.param(precision, "mkldnn_fp32_precision_matmul", "tf32", id="precision"),
        pytest.param(deterministic, "deterministic", True, id="deterministic"),
        pytest.param(default_dtype, "default_dtype", "bfloat16", id="dtype"),
        pytest.param(lambda: torch.device("meta"), "default_device", "meta", id="device"),
        pytest.param(Mode, "torch_function_mode", [f"{__name__}:Mode"], id="function mode"),
        pytest.param(functorch, "functorch", True, id="functorch"),
    ],
)
def test_a_change_affects_only_its_own_name(context, name, now):
    before = everything()
    with context():
        inside = everything()
    assert inside[name] == now != before[name]
    assert {key for key in before if before[key] != inside[key]} == {name}
    assert everything() == before
    sentence = state.explain_state(name, before[name], now)
    assert "compiled" in sentence


NAMES = tuple({**private.SETTINGS, **dict.fromkeys(state.STATE_NAMES)})


def conditions():
    """Return {name: function that evaluates the condition of each call}, for the current state."""
    found = {}
    for name in NAMES:
        code = Code("state")
        code.add(f"return {state.condition(name, state.current(name), code.constant)}")
        found[name] = code.define("holds")
    return found


@pytest.mark.parametrize(
    "context", [contextlib.nullcontext, lambda: torch.autocast("cpu"), Mode, precision, default_dtype]
)
def test_the_condition_of_a_call_follows_the_state(context):
    before, holds = {name: state.current(name) for name in NAMES}, conditions()
    with context():
        now = {name: state.current(name) for name in NAMES}
        assert {name for name in NAMES if not holds[name]()} == {name for name in NAMES if now[name] != before[name]}
        assert all(function() for function in conditions().values())
    assert all(function() for function in holds.values())


def test_the_default_precision_is_the_same_set_or_unset():
    holds = conditions()
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        for value in ("ieee", "none"):
            torch.backends.mkldnn.matmul.fp32_precision = value
            assert state.current("mkldnn_fp32_precision_matmul") == "ieee"
            assert holds["mkldnn_fp32_precision_matmul"]()
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert not holds["mkldnn_fp32_precision_matmul"]()
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def test_compiled_attention_depends_on_the_enabled_kernels():
    def names(target, device="cpu"):
        meta = TensorMeta(dtype="float32", shape=(2,), stride=(1,), device=device)
        node = Node(kind="function", target=target, args=("%0",), kwargs={})
        graph = PieceGraph(
            symbols=(), facts=(), inputs=(meta,), aliases=(), nodes=(node,), outputs=("%1",), results=(meta,), ops={}
        )
        return state.names_for_pieces([graph])

    assert names("torch.sin") == []
    assert {"sdp_flash", "sdp_math", "sdp_priority"} <= set(names("torch._C._nn.scaled_dot_product_attention"))
    assert names("torch.amp.autocast_mode._enter_autocast") == ["autocast_dtype_cpu", "autocast_dtype_cuda"]
    assert {"cuda_fp32_precision_matmul", "cuda_bf16_reduction"} <= set(names("torch.sin", device="cuda"))


#: What code asks torch by a name of its own, and the state that each call looks at then.
ASKED = {
    "torch.is_grad_enabled()": ["grad_mode"],
    "torch.is_inference_mode_enabled()": ["inference_mode"],
    "torch.get_num_threads()": ["num_threads"],
    "torch.get_autocast_dtype('cpu')": ["autocast_dtype_cpu", "autocast_dtype_cuda"],
    "torch.get_float32_matmul_precision()": ["float32_matmul_precision", "cuda_fp32_precision_matmul"],
    "torch.backends.fp32_precision": ["fp32_precision", "cuda_fp32_precision"],
    "torch.backends.cuda.matmul.fp32_precision": ["cuda_fp32_precision_matmul"],
    "torch.backends.cudnn.conv.fp32_precision": ["cuda_fp32_precision_conv"],
    "torch.backends.cuda.matmul.allow_tf32": ["float32_matmul_precision", "cuda_fp32_precision_matmul"],
    "torch.backends.cudnn.allow_tf32": ["cuda_fp32_precision_conv", "cuda_fp32_precision_rnn"],
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": ["cuda_fp16_reduction"],
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": ["cuda_bf16_reduction"],
    "torch.backends.cuda.matmul.allow_fp16_accumulation": ["cuda_fp16_accumulation"],
    "torch.backends.cuda.flash_sdp_enabled()": ["sdp_flash"],
    "torch.backends.cuda.mem_efficient_sdp_enabled()": ["sdp_mem_efficient"],
    "torch.backends.cuda.math_sdp_enabled()": ["sdp_math"],
    "torch.backends.cuda.cudnn_sdp_enabled()": ["sdp_cudnn"],
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": ["sdp_math_reduction"],
}


@pytest.mark.parametrize("question", ASKED)
def test_state_that_code_reads_by_name_is_checked(question):
    names = compile(question, "", "eval").co_names
    eval(question, {"torch": torch})
    assert set(ASKED[question]) <= set(state.names_for_code(names))
    assert state.names_for_code(["sin"]) == []


def test_names_for_every_model_are_not_added_again():
    always = "autocast autocast_cache default_device default_dtype deterministic deterministic_warn_only mkldnn_enabled"
    assert {*always.split(), "fill_uninitialized", "mkldnn_fp32_precision_matmul"} <= set(state.STATE_NAMES)


def test_grad_and_inference_mode_are_not_checked_by_default():
    before = everything()
    with torch.no_grad():
        assert everything() == before
    with torch.inference_mode():
        assert everything() == before


def test_an_unknown_name_is_refused():
    with pytest.raises(GuardError, match="does not know"):
        state.current("moon_phase")
