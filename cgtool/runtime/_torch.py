"""The private names of torch that the runtime needs, each read in 2.13.0 and unchanged since 2.11."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def tensors_unchanged(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a check that takes as many tensors and says whether each is of the same make as the one it stands for.

    The make is class, dispatch keys, dtype, device, requires_grad, sizes and strides. Dispatch keys follow inference
    mode, so a check holds only in the inference mode that it was made in.
    """
    # The class that Dynamo's guards are made of is part of torch's C extension: nothing of torch._dynamo is imported.
    make: Any = torch._C._dynamo.guards.TensorGuards
    guards = make(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    check: Callable[..., bool] = guards.check
    return check
