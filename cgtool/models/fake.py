"""Replace the tensors of a module, and of the arguments of its example calls, with fake ones.

A factory that runs under a fake mode creates fake tensors. Others come from elsewhere: constants of an imported module,
numpy arrays, and the meta tensors that `hf:` models are built with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cgtool.models._torch import FakeTensorMode, fake_like, is_fake, refer_to_weights


def make_fake(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
    """Replace every parameter, buffer and tensor attribute that is not fake; tied tensors stay tied.

    Meta tensors are placed on `device`; real ones keep their device.
    """
    fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # holds the original too, so that its id is not reused
    for child in module.modules():
        tensors = (
            *child.named_parameters(recurse=False, remove_duplicate=False),
            *child.named_buffers(recurse=False, remove_duplicate=False),
            *((name, value) for name, value in vars(child).items() if isinstance(value, torch.Tensor)),
        )
        for name, tensor in tensors:
            if not is_fake(tensor):
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = tensor, _fake(tensor, mode, device)
                setattr(child, name, fakes[id(tensor)][1])
        refer_to_weights(child)


def fake_arguments(value: Any, mode: FakeTensorMode, device: torch.device) -> Any:
    """Return `value` with fake tensors in its tuples, lists and dicts; everything else is unchanged."""
    if isinstance(value, torch.Tensor):
        return value if is_fake(value) else fake_like(mode, value, device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(fake_arguments(item, mode, device) for item in value))
    if type(value) in (tuple, list):
        return type(value)(fake_arguments(item, mode, device) for item in value)
    if type(value) is dict:
        return {key: fake_arguments(item, mode, device) for key, item in value.items()}
    return value


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """Return a fake tensor like `tensor`; an `nn.Parameter` or `nn.Buffer` for one."""
    with mode:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake_like(mode, tensor.detach(), device), requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Buffer):
            return nn.Buffer(fake_like(mode, tensor, device), persistent=tensor.persistent)
    return fake_like(mode, tensor, device)
