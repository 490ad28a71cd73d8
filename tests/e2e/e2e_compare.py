"""Loads a model from a cache, compares it with eager, and prints a JSON report.

    python e2e_compare.py '{"model": MODEL, "root": CACHE, "calls": [{"batch": 2}, ...], "arguments": {}, "config": {}}'

prints {"calls": how many equal eager, "failures": [[sizes, message]...], "worst": the largest difference, relative to
the largest value, "imported": the compiler's modules that `load` and the calls imported}.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

import cgtool
from cgtool.models import resolve_model

#: The largest difference from eager, relative to a tensor's largest value: fused kernels round less often.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "sympy", "triton")


def resized(spec, sizes):
    """Return the arguments of the first example call by name, with dynamic dimensions at these sizes."""
    call = spec.calls[0]
    names = list(spec.dynamic)
    arguments = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    for name, dims in spec.dynamic.items():
        tensor = arguments[name]
        shape = list(tensor.shape)
        for index, dim in dims.items():
            shape[index] = sizes.get(dim if isinstance(dim, str) else dim[0], shape[index])
        arguments[name] = filled(name, shape, tensor.dtype)
    return arguments


def filled(name, shape, dtype):
    """Return a tensor whose values depend on the sizes, so that no call is a prefix of another."""
    seed = torch.Generator().manual_seed(sum(size * 31**place for place, size in enumerate(shape)))
    if name == "attention_mask":
        keep = torch.randint(1, shape[-1] + 1, (shape[0], 1), generator=seed)
        return (torch.arange(shape[-1]) < keep).to(dtype)
    if name == "positions":
        return torch.arange(shape[0], dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=seed).to(dtype)
    return torch.randint(0, 100, shape, generator=seed, dtype=dtype)


def difference(actual, expected, path="output"):
    """Return the largest relative difference of two nested outputs; raise if their types or shapes differ."""
    if type(actual) is not type(expected):
        raise TypeError(f"{path} is {type(actual)} and was {type(expected)}")
    if isinstance(expected, torch.Tensor):
        return tensor_difference(actual, expected, path)
    if dataclasses.is_dataclass(expected):
        keys = [field.name for field in dataclasses.fields(expected)]
        pairs = [(f"{path}.{key}", getattr(actual, key, None), getattr(expected, key, None)) for key in keys]
    elif isinstance(expected, dict):
        if list(actual) != list(expected):
            raise TypeError(f"{path} has the keys {list(actual)} and had {list(expected)}")
        pairs = [(f"{path}[{key!r}]", actual[key], expected[key]) for key in expected]
    elif isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            raise TypeError(f"{path} has {len(actual)} parts and had {len(expected)}")
        pairs = [(f"{path}[{i}]", one, two) for i, (one, two) in enumerate(zip(actual, expected, strict=True))]
    else:
        if actual != expected:
            raise ValueError(f"{path} is {actual!r} and was {expected!r}")
        return 0.0
    return max((difference(one, two, where) for where, one, two in pairs), default=0.0)


def tensor_difference(actual, expected, path):
    for what in ("dtype", "shape", "device"):
        if getattr(actual, what) != getattr(expected, what):
            raise ValueError(f"{path}.{what} is {getattr(actual, what)} and was {getattr(expected, what)}")
    if expected.numel() == 0:
        return 0.0
    if not expected.is_floating_point():
        if not torch.equal(actual, expected):
            raise ValueError(f"{path} differs")
        return 0.0
    if not torch.equal(actual.isfinite(), expected.isfinite()):
        raise ValueError(f"{path} is finite at other indices than it was")
    off = (actual.double() - expected.double()).abs().nan_to_num().max() / expected.double().abs().nan_to_num().max()
    if off > TOLERANCE[expected.dtype]:
        raise ValueError(f"{path} differs by {off:.2e} of its largest value")
    return off.item()


def main():
    request = json.loads(sys.argv[1])
    spec = resolve_model(request["model"], factory_args=request.get("arguments") or {}, weights="real")
    config = request.get("config")
    config = None if config is None else cgtool.CompilationConfig(**config)
    torch.set_grad_enabled(False)
    before = set(sys.modules)
    run = cgtool.load(spec.module, cache_dir=request["root"], config=config)
    equal, failures, worst = 0, [], 0.0
    for sizes in request["calls"]:
        arguments = resized(spec, sizes)
        expected = getattr(spec.module, spec.method)(**arguments)
        try:
            worst = max(worst, difference(run(**arguments), expected))
            equal += 1
        except Exception as error:  # noqa: BLE001 - every failure is reported
            failures.append([sizes, f"{type(error).__name__}: {error}"])
    imported = [name for name in COMPILERS if name in sys.modules and name not in before]
    json.dump({"calls": equal, "failures": failures, "worst": worst, "imported": imported}, sys.stdout)


if __name__ == "__main__":
    main()
