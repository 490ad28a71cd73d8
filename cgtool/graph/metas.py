"""What a tensor is, as a record: dtype, shape, stride and device of real and fake tensors.

Sizes that hold symbols become text through `cgtool.graph.sympy_text`, which is imported only when one is met: that
module needs sympy, and whoever has a symbolic size has imported it already. Must not import torch._dynamo or
torch._inductor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from cgtool.errors import ArtifactError
from cgtool.plan.pieces import Dim, TensorMeta

_DEVICE = r"([a-z]+)(?::([+-][0-9]{1,3}))?"


def dtype_text(dtype: torch.dtype) -> str:
    """Return "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(text: str) -> torch.dtype:
    """Return the dtype that `dtype_text` called `text`.

    Raises:
        ArtifactError: This torch has no such dtype.
    """
    found = getattr(torch, text, None) if isinstance(text, str) else None
    if not isinstance(found, torch.dtype):
        raise ArtifactError(f"this torch has no dtype {text!r}; warm again", actual=text)
    return found


def device_text(device: torch.device | str, base: int | None = None) -> str:
    """Return a device without the index that it has in this process.

    Args:
        device: The device.
        base: The index that counts as the first; None: whatever the index, it is the only one of its type.

    Returns:
        "cpu", "cuda", or "cuda:+1" for the index after `base`.
    """
    device = torch.device(device)
    if device.index is None or base is None or device.index == base or device.type == "cpu":
        return device.type
    return f"{device.type}:{device.index - base:+d}"


def device_of(text: str, base: int | None = None) -> torch.device:
    """Return the device that `device_text` called `text`.

    Args:
        text: "cpu", "cuda", "cuda:+1".
        base: The index that counts as the first; None: the current device where an order is given, else no index.

    Raises:
        ArtifactError: `text` is not a device.
    """
    match = re.fullmatch(_DEVICE, text) if isinstance(text, str) else None
    message = f"{text!r} is not a device that this torch knows; warm again"
    if match is None:
        raise ArtifactError(message, actual=text)
    kind, offset = match.groups()
    try:
        if offset is None:
            return torch.device(kind) if base is None or kind == "cpu" else torch.device(kind, base)
        first = torch.accelerator.current_device_index() if base is None else base
        return torch.device(kind, first + int(offset))
    except RuntimeError as error:
        raise ArtifactError(message, actual=text) from error


def tensor_meta(tensor: torch.Tensor, names: Mapping[str, str] | None = None, base: int | None = None) -> TensorMeta:
    """Return the record of a real or fake tensor.

    Args:
        tensor: A strided tensor.
        names: ShapeEnv symbol → the name to write. Only needed for symbolic sizes.
        base: See `device_text`.

    Raises:
        SplitError: A size holds something that the grammar of expressions has no word for.
    """
    renamed = names or {}
    return TensorMeta(
        dtype=dtype_text(tensor.dtype),
        shape=tuple(dim_of(size, renamed) for size in tensor.shape),
        stride=tuple(dim_of(step, renamed) for step in tensor.stride()),
        device=device_text(tensor.device, base),
    )


def dim_of(size: Any, names: Mapping[str, str]) -> Dim:
    """Return one size as an int, or as the text of an expression over `names`' values.

    Raises:
        SplitError: It holds something that the grammar of expressions has no word for.
    """
    if type(size) is int:
        return size
    if not isinstance(size, torch.SymInt):
        return int(size)
    # sympy comes with symbolic sizes only, and is kept out of the load path.
    from cgtool.graph.sympy_text import expression_text

    text = expression_text(size.node.expr, names)
    return int(text) if text.lstrip("-").isdigit() else text
