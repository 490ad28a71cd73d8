"""`op_digest` covers what a compiler relies on of an op, and nothing else."""

# ruff: noqa: PLW0108 - that Dynamo or torch sees a call of its own is what these lambdas are for
from __future__ import annotations

import pytest
import torch

from cgtool.errors import SplitError
from cgtool.guards.code import op_digest
from cgtool.ops import is_torch_op

pytestmark = pytest.mark.torch

FACTOR = 2


def helper(x):
    return torch.empty_like(x)


def digest(schema: str, fake=None, kernel=lambda x: x + 1) -> str:
    library = torch.library.Library("toydigest", "FRAGMENT")
    library.define(schema)
    library.impl("op", kernel, "CPU")
    if fake is not None:
        library._register_fake("op", fake)
    try:
        return op_digest("toydigest::op")
    finally:
        library._destroy()


PLAIN = "op(Tensor x) -> Tensor"


def test_equal_ops_have_equal_digests() -> None:
    assert digest(PLAIN, lambda x: torch.empty_like(x)) == digest(PLAIN, lambda x: torch.empty_like(x))


def test_the_schema_and_the_fake_implementation_change_the_digest() -> None:
    seen = {
        digest(PLAIN, lambda x: torch.empty_like(x)),
        digest(PLAIN, lambda x: x.new_empty(x.shape)),
        digest(PLAIN, lambda x: torch.zeros_like(x)),
        digest(PLAIN),
        digest("op(Tensor x, int n=1) -> Tensor", lambda x, n=1: torch.empty_like(x)),
        digest("op(Tensor(a!) x) -> Tensor", lambda x: torch.empty_like(x)),
    }
    assert len(seen) == 6


def test_the_tags_change_the_digest() -> None:
    def tagged(*tags: torch.Tag) -> str:
        library = torch.library.Library("toydigest", "FRAGMENT")
        library.define(PLAIN, tags=tags)
        try:
            return op_digest("toydigest::op")
        finally:
            library._destroy()

    assert tagged() != tagged(torch.Tag.needs_fixed_stride_order) != tagged(torch.Tag.flexible_layout)


def test_the_kernel_may_change_freely() -> None:
    def fake(x):
        return torch.empty_like(x)

    assert digest(PLAIN, fake, lambda x: x + 1) == digest(PLAIN, fake, lambda x: x + 2)


def test_helpers_and_constants_of_the_fake_implementation_change_the_digest(monkeypatch) -> None:
    def fake(x):
        return helper(x).new_empty(FACTOR)

    seen = [digest(PLAIN, fake)]
    monkeypatch.setitem(globals(), "FACTOR", 3)
    seen.append(digest(PLAIN, fake))
    monkeypatch.setitem(globals(), "helper", lambda x: x.new_empty(4))
    seen.append(digest(PLAIN, fake))
    assert len(set(seen)) == 3


def test_an_op_made_with_custom_op_has_a_stable_digest() -> None:
    @torch.library.custom_op("toydigest::made", mutates_args=())
    def made(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    bare = op_digest("toydigest::made")

    @made.register_fake
    def _(x):
        return torch.empty_like(x)

    one = op_digest("toydigest::made.default")
    torch.compile(lambda x: torch.ops.toydigest.made(x), backend="eager")(torch.ones(2))
    assert bare != one == op_digest("toydigest::made")

    @made.register_fake
    def _(x):
        return torch.empty_like(x).t()

    assert op_digest("toydigest::made") != one


def test_an_unknown_op_is_an_error() -> None:
    with pytest.raises(SplitError, match="toydigest::absent"):
        op_digest("toydigest::absent")


def test_ops_of_torch_have_different_digests() -> None:
    assert is_torch_op("aten::mm.default")
    assert is_torch_op("_c10d_functional::all_reduce")
    assert not is_torch_op("vllm::unified_attention")
