"""Every setter of the installed torch is in the table, with the guard that covers it or the reason for none."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import types
from collections.abc import Iterator

import pytest
import torch
import torch.distributed
import torch.nn.attention
from torch_setters import GUARDED, IRRELEVANT

from cgtool.guards import _torch as private
from cgtool.guards import state

pytestmark = pytest.mark.torch

REASONS = {setter: reason for reason, setters in IRRELEVANT.items() for setter in setters}


def setters_of_c(module=torch._C, name="torch._C") -> Iterator[str]:
    for attribute, value in vars(module).items():
        if isinstance(value, types.ModuleType):
            yield from setters_of_c(value, f"{name}.{attribute}")
        elif re.match(r"_?set_", attribute):
            yield f"{name}.{attribute}"


def names_in(owner) -> list[str]:
    """Return the attributes of a module; objects of torch.backends replace the modules that they were built from."""
    return sorted({*dir(owner), *dir(type(owner)), *dir(vars(owner).get("m"))})


def public_setters() -> Iterator[str]:
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != "torch" or re.search(r"\._", name) or not isinstance(module, types.ModuleType):
            continue
        for attribute in names_in(module):
            if re.match(r"(set|use)_", attribute):
                value = getattr(module, attribute)
                if callable(value) and (getattr(value, "__module__", None) or "torch").startswith("torch"):
                    yield f"{name}.{attribute}"


def switches_of_backends() -> Iterator[str]:
    for info in pkgutil.walk_packages(torch.backends.__path__, "torch.backends."):
        if not re.search(r"\._|xeon", info.name):
            importlib.import_module(info.name)
    for name, module in sorted(sys.modules.items()):
        if re.match(r"torch\.backends(\.|$)", name) and isinstance(module, types.ModuleType):
            yield from switches_of(module, name)


def switches_of(owner, name: str) -> Iterator[str]:
    """Yield assignable names: attributes with a setter, and names that one of torch's `__setattr__` handles."""
    for attribute in names_in(owner):
        if any(hasattr(vars(kind).get(attribute), "__set__") for kind in type(owner).__mro__[:-2]):
            yield f"{name}.{attribute}"
            continue
        value = getattr(owner, attribute, None)
        looks = vars(type(value)).get("__setattr__")
        if type(value).__module__.startswith("torch.backends") and isinstance(looks, types.FunctionType):
            texts = [text for text in looks.__code__.co_consts if isinstance(text, str) and is_there(value, text)]
            yield from (f"{name}.{attribute}.{text}" for text in texts if text not in {"backend", "op"})


def is_there(value, attribute: str) -> bool:
    try:
        getattr(value, attribute)
    except (AttributeError, AssertionError, RuntimeError):  # a cache of a device that this machine lacks
        return False
    return True


def is_listed(setter: str) -> bool:
    owners = [setter.rsplit(".", number)[0] + ".*" for number in range(1, setter.count(".") + 1)]
    return setter in GUARDED or any(name in REASONS for name in (setter, *owners))


@pytest.mark.parametrize("setters", [setters_of_c, public_setters, switches_of_backends])
def test_every_setter_of_this_torch_is_guarded_or_has_a_reason(setters):
    found = set(setters())
    assert len(found) > 15
    assert sorted(setter for setter in found if not is_listed(setter)) == []


def test_a_setter_is_guarded_or_irrelevant_and_not_both():
    listed = [setter for setters in IRRELEVANT.values() for setter in setters]
    assert len(listed) == len(set(listed))
    assert not GUARDED.keys() & set(listed)


def test_the_table_uses_only_known_state_names():
    setters = {*setters_of_c(), *public_setters(), *switches_of_backends()}
    seen = {name for setter in setters for name in GUARDED.get(setter, ())}  # another torch has others
    assert all(isinstance(state.current(name), object) for name in seen)
    modes = {"torch_function_mode", "inference_mode", "recursion_limit"}  # entered, or set by Python itself
    assert set(private.SETTINGS) | set(state.STATE_NAMES) == seen | (modes & {*private.SETTINGS, *state.STATE_NAMES})


#: Setters whose new value says which it is, each as a person would call it.
CHANGES = {
    "torch.set_autocast_cache_enabled": lambda: torch.set_autocast_cache_enabled(False),
    "torch.set_autocast_dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "torch.set_autocast_enabled": lambda: torch.set_autocast_enabled("cpu", True),
    "torch.set_default_device": lambda: torch.set_default_device("meta"),
    "torch.set_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.set_deterministic_debug_mode": lambda: torch.set_deterministic_debug_mode("warn"),
    "torch.set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "torch.use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
    "torch._C._set_deterministic_fill_uninitialized_memory": lambda: setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "torch._C._set_sdp_use_flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "torch._C._set_sdp_use_math": lambda: torch.backends.cuda.enable_math_sdp(False),
    "torch._C._set_sdp_use_mem_efficient": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "torch._C._set_sdp_use_cudnn": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "torch._C._set_math_sdp_allow_fp16_bf16_reduction": lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(
        True
    ),
    "torch.backends.mkldnn.set_flags": lambda: torch.backends.mkldnn.set_flags(_enabled=False),
    **{
        f"torch.backends.{name}": lambda name=name: exec(f"torch.backends.{name} = 'tf32'", {"torch": torch})
        for name in ("fp32_precision", "cuda.matmul.fp32_precision", "mkldnn.matmul.fp32_precision")
    },
    **{
        f"torch.backends.cuda.matmul.{name}": lambda name=name: setattr(
            torch.backends.cuda.matmul, name, not getattr(torch.backends.cuda.matmul, name)
        )
        for name in ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")
    },
}


@pytest.mark.parametrize("setter", CHANGES)
def test_a_setter_changes_one_of_the_names_that_cover_it(setter):
    import multiprocessing  # a fork: what is set for good, is set there

    def changed(connection):
        before = {name: state.current(name) for name in names}
        CHANGES[setter]()
        connection.send([name for name in names if state.current(name) != before[name]])

    names = tuple({**private.SETTINGS, **dict.fromkeys(state.STATE_NAMES)})
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=changed, args=(there,))
    process.start()
    found = here.recv()
    process.join()
    assert set(found) & set(GUARDED[setter])
