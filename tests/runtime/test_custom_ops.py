"""`direct_register_custom_op`: registration, errors, and no heavy imports."""

from __future__ import annotations

import importlib
import itertools
import sys
from textwrap import dedent

import pytest

pytest.importorskip("torch")

import torch
from cli_harness import forked

from cgtool.errors import UsageError
from cgtool.ops import registered_splitting_ops
from cgtool.runtime.custom_ops import direct_register_custom_op

pytestmark = pytest.mark.torch

_numbers = itertools.count()
SCALE = 2.0


@pytest.fixture
def namespace():
    """A namespace for this test only, because registrations last as long as the process."""
    return f"test_custom_ops_{next(_numbers)}"


def double(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def double_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def double_into(x: torch.Tensor, output: torch.Tensor, layer_name: str = "") -> None:
    output.copy_(x * SCALE)


def test_an_op_returns_what_its_kernel_returns(namespace):
    op = direct_register_custom_op("double", double, fake_impl=double_fake, namespace=namespace)
    x = torch.arange(3.0)
    assert torch.equal(getattr(torch.ops, namespace).double(x), 2 * x)
    assert op.name == f"{namespace}::double"
    assert op.schema == "(Tensor x) -> Tensor"
    assert op.module == __name__


def test_an_op_with_an_output_argument_writes_into_it_and_declares_it_in_its_schema(namespace):
    direct_register_custom_op("into", double_into, ["output"], namespace=namespace)
    x, output = torch.arange(3.0), torch.zeros(3)
    getattr(torch.ops, namespace).into(x, output, "layers.0")
    assert torch.equal(output, 2 * x)
    arguments = {a.name: a for a in getattr(torch.ops, namespace).into.default._schema.arguments}
    assert arguments["output"].is_write
    assert not arguments["x"].is_write
    assert arguments["layer_name"].default_value == ""


def test_the_default_namespace_is_cgtool():
    direct_register_custom_op("test_default_namespace", double, fake_impl=double_fake)
    assert torch.equal(torch.ops.cgtool.test_default_namespace(torch.ones(1)), torch.full((1,), 2.0))


def test_the_default_dispatch_key_covers_every_device(namespace):
    op = direct_register_custom_op("double", double, fake_impl=double_fake, namespace=namespace)
    assert op.dispatch_key == "CompositeExplicitAutograd"
    for key in ("CPU", "CUDA", "XPU"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name, key)


def test_a_dispatch_key_leaves_other_devices_without_a_kernel(namespace):
    direct_register_custom_op("double", double, fake_impl=double_fake, namespace=namespace, dispatch_key="CUDA")
    with pytest.raises(NotImplementedError, match="CPU"):
        getattr(torch.ops, namespace).double(torch.ones(1))


def test_the_fake_runs_instead_of_the_kernel(namespace):
    def kernel(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the kernel ran on fake tensors")

    direct_register_custom_op("f", kernel, fake_impl=double_fake, namespace=namespace)
    with torch._subclasses.FakeTensorMode():
        assert getattr(torch.ops, namespace).f(torch.ones(3)).shape == (3,)


def test_an_op_that_returns_nothing_needs_no_fake(namespace):
    def kernel(x: torch.Tensor) -> None:
        raise AssertionError("the kernel ran on fake tensors")

    direct_register_custom_op("f", kernel, ["x"], namespace=namespace)
    with torch._subclasses.FakeTensorMode():
        assert getattr(torch.ops, namespace).f(torch.ones(3)) is None


def test_an_op_without_a_fake_runs_its_kernel_on_fake_tensors(namespace):
    direct_register_custom_op("double", double, namespace=namespace)
    with torch._subclasses.FakeTensorMode():
        assert getattr(torch.ops, namespace).double(torch.ones(3)).shape == (3,)


def test_only_splitting_ops_enter_the_registry(namespace):
    direct_register_custom_op("plain", double, fake_impl=double_fake, namespace=namespace)
    direct_register_custom_op("cut", double, fake_impl=double_fake, namespace=namespace, splitting=True)
    ours = [name for name in registered_splitting_ops() if name.startswith(namespace + "::")]
    assert ours == [f"{namespace}::cut"]


def test_the_callers_library_determines_the_namespace(namespace):
    library = torch.library.Library(namespace, "FRAGMENT")
    op = direct_register_custom_op("double", double, fake_impl=double_fake, namespace="other", target_lib=library)
    assert op.name == f"{namespace}::double"
    assert torch.equal(getattr(torch.ops, namespace).double(torch.ones(1)), torch.full((1,), 2.0))


def test_the_same_registration_again_changes_nothing(namespace):
    first = direct_register_custom_op("into", double_into, ["output"], namespace=namespace)
    assert direct_register_custom_op("into", double_into, ["output"], namespace=namespace) is first


def test_a_module_may_be_imported_again(namespace, tmp_path, monkeypatch):
    name = f"module_of_{namespace}"
    source = dedent(f"""
        import torch
        from cgtool.runtime.custom_ops import direct_register_custom_op
        SCALE = 3.0
        def scale(x: torch.Tensor) -> torch.Tensor:
            return x * SCALE
        def scale_fake(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(x)
        direct_register_custom_op("scale", scale, fake_impl=scale_fake, namespace={namespace!r})
    """)
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(name)
    importlib.reload(module)
    del sys.modules[name]
    importlib.import_module(name)
    assert torch.equal(getattr(torch.ops, namespace).scale(torch.ones(1)), torch.full((1,), 3.0))

    (tmp_path / f"{name}.py").write_text(source.replace("3.0", "4.25"))
    del sys.modules[name]
    with pytest.raises(UsageError, match=r"::scale, which .* already registered with a different kernel"):
        importlib.import_module(name)
    assert torch.equal(getattr(torch.ops, namespace).scale(torch.ones(1)), torch.full((1,), 3.0))


def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def add_doubled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param({"op_func": triple}, "kernel", id="kernel"),
        pytest.param({"op_func": add_doubled}, "schema", id="schema"),
        pytest.param({"mutates_args": ["x"]}, "schema", id="mutation"),
        pytest.param({"fake_impl": double}, "fake implementation", id="fake"),
        pytest.param({"fake_impl": None}, "fake implementation", id="no-fake"),
        pytest.param({"dispatch_key": "CPU"}, "dispatch key", id="dispatch-key"),
    ],
)
def test_another_op_of_the_same_name_is_refused_and_the_first_stays(namespace, change, what):
    first = {"op_func": double, "mutates_args": (), "fake_impl": double_fake}
    direct_register_custom_op("f", **first, namespace=namespace)
    with pytest.raises(UsageError, match=f"already registered with a different {what}"):
        direct_register_custom_op("f", **(first | change), namespace=namespace)
    assert torch.equal(getattr(torch.ops, namespace).f(torch.ones(1)), torch.full((1,), 2.0))


def test_kernels_with_different_closures_differ(namespace):
    def make(held):
        def kernel(x: torch.Tensor) -> torch.Tensor:
            return x * held

        return kernel

    direct_register_custom_op("constant", make(2), namespace=namespace)
    direct_register_custom_op("constant", make(2), namespace=namespace)
    with pytest.raises(UsageError, match="different kernel"):
        direct_register_custom_op("constant", make(3), namespace=namespace)
    direct_register_custom_op("tensor", make(torch.tensor(2)), namespace=namespace)
    with pytest.raises(UsageError, match="different kernel"):
        direct_register_custom_op("tensor", make(torch.tensor(3)), namespace=namespace)


def test_an_op_registered_elsewhere_is_left_alone(namespace):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    with pytest.raises(UsageError, match="not by direct_register_custom_op"):
        direct_register_custom_op("f", double, namespace=namespace)


def no_annotation(x):
    return x


@pytest.mark.parametrize(
    ("op_name", "function", "mutates"),
    [
        pytest.param("f", no_annotation, (), id="no-annotation"),
        pytest.param("f", double, ("y",), id="no-such-argument"),
        pytest.param("a::f", double, (), id="namespace-in-the-name"),
        pytest.param("", double, (), id="empty"),
    ],
)
def test_a_function_without_a_schema_is_refused_and_not_registered(namespace, op_name, function, mutates):
    with pytest.raises(UsageError):
        direct_register_custom_op(op_name, function, mutates, namespace=namespace)
    assert not hasattr(getattr(torch.ops, namespace), "f")


def test_a_registration_that_fails_halfway_leaves_the_name_free(namespace):
    with pytest.raises(UsageError, match="torch rejected"):
        direct_register_custom_op("f", double, fake_impl=double_fake, namespace=namespace, dispatch_key="Nonsense")
    direct_register_custom_op("f", double, fake_impl=double_fake, namespace=namespace)
    assert torch.equal(getattr(torch.ops, namespace).f(torch.ones(1)), torch.full((1,), 2.0))


@pytest.mark.parametrize("name", ["with space", "a.b", "", "prim"])
def test_a_namespace_that_torch_does_not_accept_is_refused(name):
    with pytest.raises(UsageError, match="namespace"):
        direct_register_custom_op("f", double, namespace=name)


def test_dynamo_traces_the_op_as_one_node(namespace):
    direct_register_custom_op("into", double_into, ["output"], namespace=namespace, splitting=True)
    targets = []

    def backend(gm, _inputs):
        targets.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm

    def model(x):
        output = torch.empty_like(x)
        getattr(torch.ops, namespace).into(x, output, "layers.0")
        return output + 1

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
    assert f"{namespace}.into" in " ".join(targets)


def test_neither_registering_nor_calling_imports_dynamo():
    code = """
        import sys
        import torch
        from cgtool.runtime.custom_ops import direct_register_custom_op
        def f(x: torch.Tensor, output: torch.Tensor, name: str) -> None:
            output.copy_(x * 2)
        def g(x: torch.Tensor) -> torch.Tensor:
            return x * 2
        direct_register_custom_op("f", f, ["output"], namespace="fresh", splitting=True)
        direct_register_custom_op("g", g, [], g, namespace="fresh")
        direct_register_custom_op("f", f, ["output"], namespace="fresh", splitting=True)
        x, output = torch.ones(2), torch.empty(2)
        with torch.no_grad():
            torch.ops.fresh.f(x, output, "layers.0")
        with torch.inference_mode():
            torch.ops.fresh.f.default(x, output, "layers.0")
        assert output.tolist() == [2.0, 2.0] and torch.ops.fresh.g(x).tolist() == [2.0, 2.0]
        heavy = ("torch._dynamo", "torch._inductor", "sympy", "triton")
        print([name for name in sys.modules if name.startswith(heavy)])
    """
    done = forked(dedent(code))
    assert done.out.strip() == "[]", done.err
