from __future__ import annotations

import pytest
import torch

from cgtool.runtime.factors import state_of

pytestmark = pytest.mark.torch


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_buffers_that_have_no_strides_are_facts_as_others_are():
    module = torch.nn.Linear(2, 2)
    module.register_buffer("table", torch.eye(3).to_sparse_csr())
    assert state_of(module)["tensors"]["table"] == "float32[3, 3] cpu torch.sparse_csr"
