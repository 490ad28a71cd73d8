"""Fixtures for every graph backend: the double on the CPU, and CUDA if there is a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["double", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cpu" if request.param == "double" else "cuda")


@pytest.fixture
def backend(device):
    from graph_double import DoubleGraphs

    from cgtool.serving.graphs import CudaGraphs

    return DoubleGraphs() if device.type == "cpu" else CudaGraphs(device)


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: with tiny tensors, synchronizing threads on a busy machine takes longer than the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
