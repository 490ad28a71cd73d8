"""Never a wrong hit: whatever is changed after warm, the cache is missed, and the first reason names what changed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import sweep_subject as subject
import torch
import torch.nn.functional as F  # noqa: N812 - what everyone calls it
from torch import nn

import cgtool
from cgtool import host
from cgtool.build.pipeline import warm
from cgtool.cache import key as cache_key
from cgtool.config import CompilationConfig
from cgtool.errors import CacheMissError, GuardError
from cgtool.guards import environment

pytestmark = pytest.mark.torch

EAGER = CompilationConfig(adaptor="eager")
Change = Callable[[subject.Subject, pytest.MonkeyPatch], None]


@pytest.fixture(scope="session")
def warm_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("sweep") / "cache"
    with torch.no_grad():
        warm(subject.build(), config=EAGER, cache_dir=root)
    return root


def first_reason(module: nn.Module, root: Path, **fields) -> str:
    with pytest.raises(CacheMissError) as caught:
        cgtool.load(module, cache_dir=root, **fields)
    assert caught.value.reasons
    return str(caught.value.reasons[0])


def alter(path: str, value: object) -> Change:
    """Set `path` of the model ("layers.0.eps")."""

    def change(module, patch):
        owner, _, name = path.rpartition(".")
        patch.setattr(functools.reduce(_part, owner.split("."), module) if owner else module, name, value)

    return change


def _part(owner, name):
    return owner[int(name)] if name.isdigit() else getattr(owner, name)


def run(function: Callable[[nn.Module], object]) -> Change:
    return lambda module, patch: function(module)


def on_class(kind: type, name: str, value: object) -> Change:
    return lambda module, patch: patch.setattr(kind, name, value)


def new_default(function) -> Change:
    return lambda module, patch: patch.setattr(function, "__defaults__", (0.625,))


def nothing(*args):
    return None


def rebound(make: Callable[[], object]) -> Change:
    def change(module, patch):
        patch.setattr(module.closure.__closure__[0], "cell_contents", make())

    return change


def plus_one(self, x):
    return x + 1


CHANGES: dict[str, tuple[Change, str]] = {
    # constants of the model
    "a constant on a submodule": (alter("layers.1.eps", 1e-5), r"layers\.1\.eps was 1e-06 .* 1e-05"),
    "behind a property": (alter("_hidden", 4.0), r"_hidden was 3\.0"),
    "a dataclass field": (alter("settings", subject.Settings(eps=1e-4)), r"settings\.eps was 0\.001"),
    "an enum": (alter("mode", subject.Mode.TWO), r"mode was .*ONE"),
    "a partial's argument": (alter("partial", functools.partial(subject.helper, factor=0.8)), r"partial.*0\.9.*0\.8"),
    "a lambda": (alter("thunk", lambda value: value + 3), "thunk"),
    "a closure": (alter("closure", subject.make_closure(0.5)), r"closure was"),
    "a closed-over variable": (rebound(lambda: 0.5), r"closure was"),
    "a submodule's own constant of torch": (alter("builtin.1.eps", 1e-3), r"builtin\.1\.eps"),
    "a submodule of another class": (run(lambda m: m.builtin.__setitem__(0, nn.ReLU())), r"builtin.*SiLU.*ReLU"),
    "modules in another order": (
        run(lambda m: m.named.__setattr__("_modules", dict(reversed(m.named._modules.items())))),
        r"named.*(keys|aliased)",
    ),
    "a module removed": (run(lambda m: m.builtin.__delitem__(0)), "builtin"),
    "training of a submodule": (run(lambda m: m.builtin[2].train()), r"builtin\.2.*training"),
    "training": (run(lambda m: m.train()), "training"),
    # tensors
    "a parameter's shape": (alter("first", nn.Linear(8, 9)), r"first\.bias.*\[8\].*\[9\]|first\.weight.*8, 8.*9, 8"),
    "a parameter's dtype": (run(lambda m: m.layers[0].linear.half()), r"layers\.0\.linear.*float32.*float16"),
    "a parameter's device": (run(lambda m: m.layers[1].to("meta")), r"layers\.1\.linear.*cpu.*meta"),
    "a buffer's dtype": (alter("offset", torch.zeros(8, dtype=torch.float64)), r"offset.*float32.*float64"),
    "a parameter's strides": (
        alter("layers.0.linear.weight", nn.Parameter(torch.zeros(8, 8).t().contiguous().t())),
        r"layers\.0\.linear\.weight.*strides",
    ),
    "a plain tensor's shape": (run(lambda m: m.table.__setitem__(1, torch.ones(1))), r"table.*shape"),
    "a plain tensor's dtype": (run(lambda m: m.table.__setitem__(1, torch.ones(8).double())), r"table.*float64"),
    "an added layer": (run(lambda m: m.layers.append(subject.Inner().eval())), r"layers\.2"),
    "a weight untied": (
        alter("last.weight", nn.Parameter(torch.zeros(8, 8))),
        r"tied\.last\.weight was \"first\.weight\" and is gone",
    ),
    "a weight tied": (
        run(lambda m: m.layers[1].linear.__setattr__("weight", m.layers[0].linear.weight)),
        r"tied\.layers\.1\.linear\.weight is \"layers\.0\.linear\.weight\" now",
    ),
    "a parametrization": (
        run(lambda m: nn.utils.parametrizations.weight_norm(m.layers[0].linear)),
        r"layers\.0\.linear",
    ),
    # hooks
    "a hook on the model": (run(lambda m: m.register_forward_hook(nothing)), "the model had no hooks"),
    "a pre-hook on the model": (run(lambda m: m.register_forward_pre_hook(nothing)), "the model had no hooks"),
    "a hook on a submodule": (run(lambda m: m.layers[0].register_forward_hook(nothing)), r"layers\.0 .*hook"),
    "a pre-hook on a submodule": (
        run(lambda m: m.layers[0].linear.register_forward_pre_hook(nothing)),
        r"layers\.0\.linear .*hook",
    ),
    "a hook with keywords": (
        run(lambda m: m.named["local"].register_forward_hook(nothing, with_kwargs=True)),
        r"named\.local .*hook",
    ),
    # code
    "a helper": (lambda m, p: p.setattr(subject, "helper", subject.other_helper), "helper"),
    "a helper's code": (lambda m, p: p.setattr(subject.helper, "__code__", subject.other_helper.__code__), "helper"),
    "a default argument": (new_default(subject.helper), "helper"),
    "a module global": (lambda m, p: p.setattr(subject, "SCALE", 2.5), r"SCALE was 1\.5 .* 2\.5"),
    "a global's item": (lambda m, p: p.setitem(subject.TABLE, "shift", 0.5), r"TABLE.*shift.*0\.25.*0\.5"),
    "a global list": (lambda m, p: p.setitem(subject.TABLE, "names", ["a"]), r"TABLE.*names"),
    "a method on a class": (on_class(subject.Inner, "act", subject.Inner.other_act), r"Inner\.act"),
    "forward of a class": (on_class(subject.Inner, "forward", plus_one), r"Inner\.forward"),
    "forward of the model": (on_class(subject.Subject, "forward", lambda self, x, *, gain=2.0: x), r"Subject\.forward"),
    "__call__ of the model": (on_class(subject.Subject, "__call__", lambda self, x: x), "__call__"),
    "__call__ of a submodule": (on_class(subject.Inner, "__call__", plus_one), r"__call__"),
    "a method of a local class": (
        on_class(subject.Local, "forward", subject.Local.otherwise),
        r"named\.local.*forward|Local",
    ),
    "a decorated method": (on_class(subject.Decorated, "forward", subject.Decorated.otherwise), r"forward|Decorated"),
    "an aliased method": (on_class(subject.Aliased, "forward", subject.Aliased._otherwise), r"forward|Aliased"),
    "a wrapped method": (on_class(subject.Subject, "wrapped", subject.decorated(lambda self, x: x)), r"wrapped"),
    "a property": (on_class(subject.Subject, "hidden", property(lambda self: 9.0)), r"hidden"),
    "a static method": (on_class(subject.Subject, "fixed", staticmethod(lambda x: x)), r"fixed"),
    "a class method": (on_class(subject.Subject, "shared", classmethod(lambda cls, x: x)), r"shared"),
    "forward of torch's class": (on_class(nn.Linear, "forward", lambda self, x: x), r"Linear\.forward"),
    "forward of torch's activation": (on_class(nn.SiLU, "forward", lambda self, x: x), r"SiLU\.forward"),
    "forward on an instance": (
        lambda m, p: p.setattr(m.layers[0], "forward", lambda x: x, raising=False),
        r"layers\.0\.forward",
    ),
    "forward on the model": (lambda m, p: p.setattr(m, "forward", lambda x: x, raising=False), r"forward"),
    "a method on an instance": (
        lambda m, p: p.setattr(m.layers[0], "act", lambda x: x, raising=False),
        r"layers\.0\.act",
    ),
    "torch.nn.functional": (lambda m, p: p.setattr(F, "silu", F.relu), r"silu"),
    "torch.nn.functional by the user": (lambda m, p: p.setattr(F, "linear", lambda x, w, b=None: x), r"linear"),
    "a property shadowed on a subclass": (
        lambda m, p: p.setattr(
            m.layers[0],
            "__class__",
            type("Inner", (subject.Inner,), {"act": plus_one, "__module__": "sweep_subject", "__qualname__": "Inner"}),
        ),
        r"act",
    ),
    # ops
    "a fake implementation inside a piece": (
        lambda m, p: p.setattr(subject._inside_fake, "__code__", (lambda x: torch.empty_like(x * 1)).__code__),
        r"cgtool_sweep::inside",
    ),
    "the splitting op's fake implementation": (
        lambda m, p: p.setattr(subject._cut_fake, "__code__", (lambda x: torch.empty_like(x * 1)).__code__),
        r"cgtool_sweep::cut",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_warm_is_a_miss_that_names_it(name, warm_root, monkeypatch):
    change, words = CHANGES[name]
    module = subject.build().module
    change(module, monkeypatch)
    reason = first_reason(module, warm_root)
    assert re.search(words, reason), reason


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_load_is_seen_by_recheck(name, warm_root, monkeypatch):
    change, _ = CHANGES[name]
    module = subject.build().module
    loaded = cgtool.load(module, cache_dir=warm_root)
    change(module, monkeypatch)
    if name not in HARMLESS:
        with pytest.raises(GuardError):
            loaded.recheck()


#: Compiled code does not look at a fake implementation again, and weights that only became one are read as two.
HARMLESS = {"a fake implementation inside a piece", "the splitting op's fake implementation", "a weight tied"}


@pytest.fixture
def global_hook(request) -> Iterator[None]:
    handle = getattr(nn.modules.module, request.param)(nothing)
    yield
    handle.remove()


@pytest.mark.parametrize(
    "global_hook",
    ["register_module_forward_hook", "register_module_forward_pre_hook"],
    indirect=True,
)
def test_a_global_module_hook_is_a_miss(global_hook, warm_root):
    assert re.search("forward.*hooks was empty", first_reason(subject.build().module, warm_root))


CONFIGS = {
    "level": ({"level": 2}, r"config\.(level|splitting_ops)"),
    "splitting_ops": ({"splitting_ops": ("cgtool_sweep::inside",)}, r"config\.splitting_ops"),
    "adaptor": ({"adaptor": "inductor_standalone"}, r"config\.adaptor"),
    "use_inductor": ({"adaptor": "", "use_inductor": True}, r"config\.adaptor"),  # what it says is said by the adaptor
    "inductor_compile_config": (
        {"inductor_compile_config": {"epilogue_fusion": False}},
        r"config\.inductor_compile_config",
    ),
}


def test_every_key_field_is_swept():
    from cgtool.config import FIELD_KINDS

    assert set(CONFIGS) == {name for name, kind in FIELD_KINDS.items() if kind == "key"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_key_field_of_the_configuration_is_a_miss(name, warm_root):
    fields, words = CONFIGS[name]
    config = CompilationConfig(**{"adaptor": "eager", **fields})
    module = subject.build().module
    assert re.search(words, first_reason(module, warm_root, config=config))
    with pytest.raises(CacheMissError) as caught:
        warm(subject.build(), config=config, cache_dir=warm_root, check=True)
    assert re.search(words, str(caught.value.reasons[0]))


@pytest.mark.parametrize(
    ("asked", "value", "words"),
    [
        (
            (environment, "_torch_build"),
            {"version": "9.9.9", "version_git": "0", "with_cuda": None, "with_hip": None},
            r"torch\.version .*9\.9\.9",
        ),
        ((host, "triton_version"), "9.9.9", r"triton.*9\.9\.9"),
        ((host, "compiler_version"), "g++ 99.1", r"compiler.*99\.1"),
        (
            (environment, "_cpu"),
            {"machine": "riscv", "capability": "DEFAULT", "instructions": None},
            r"target.*riscv|target\.cpu",
        ),
        ((environment, "_accelerators"), ["sm_90 x132"], r"target\.accelerators"),
    ],
)
def test_another_environment_is_a_miss(asked, value, words, warm_root, monkeypatch):
    monkeypatch.setattr(*asked, lambda: value)
    assert re.search(words, first_reason(subject.build().module, warm_root))


def test_another_python_is_a_miss(warm_root, monkeypatch):
    # every digest of code differs too; the version is what a person understands
    monkeypatch.setattr("sys.version_info", (3, 99, 0, "final", 0))
    monkeypatch.setattr(host, "python_name", lambda: "cpython 3.99")
    assert re.search(r"python.*3\.99", first_reason(subject.build().module, warm_root))


def test_an_inductor_setting_is_a_miss(warm_root):
    import torch._inductor.config as inductor

    with inductor.patch(epilogue_fusion=not inductor.epilogue_fusion):
        assert re.search("inductor.*epilogue_fusion", first_reason(subject.build().module, warm_root))


@pytest.fixture
def restored_state() -> Iterator[None]:
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)


STATES = {
    "float32 matmul precision": (lambda: torch.set_float32_matmul_precision("medium"), r"precision.*medium"),
    "deterministic": (lambda: torch.use_deterministic_algorithms(True), "determinis"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_global_setting_is_a_miss_and_a_refused_call(name, warm_root, restored_state):
    change, words = STATES[name]
    module = subject.build().module
    loaded = cgtool.load(module, cache_dir=warm_root)
    change()
    assert re.search(words, first_reason(subject.build().module, warm_root))
    with torch.no_grad(), pytest.raises(GuardError, match=words.split(".*")[0]):
        loaded(subject.example())


def test_a_call_in_another_state_is_refused(warm_root, restored_state):
    module = subject.build().module
    loaded = cgtool.load(module, cache_dir=warm_root)
    x = subject.example()
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(GuardError, match="autocast is on"),
    ):
        loaded(x)
    with torch.enable_grad(), pytest.raises(GuardError, match="requires grad and grad mode is on"):
        loaded(x)
    torch.set_default_dtype(torch.float64)
    with torch.no_grad(), pytest.raises(GuardError, match="default dtype is 'float64'"):
        loaded(x)
    torch.set_default_dtype(torch.float32)
    module.train()
    with torch.no_grad(), pytest.raises(GuardError, match="training"):
        loaded(x)
    module.eval()
    with torch.no_grad(), pytest.raises(GuardError, match=r"gain was 2\.0 .* 3\.0"):
        loaded(x, gain=3.0)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(x), module(x))


def test_the_order_of_reasons_covers_every_factor():
    assert set(environment.environment_factors()) <= set(cache_key.FACTOR_ORDER) | {"precision", "inductor_environment"}
