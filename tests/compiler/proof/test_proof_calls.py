"""Whole calls are compared with the model before an entry is published."""

import copy
import dataclasses
import os
import signal
import subprocess
import sys

import pytest
from cli_harness import environment

pytest.importorskip("torch")

import torch
from msgspec.structs import replace

import cgtool
from cgtool.compiler import pipeline
from cgtool.compiler.pipeline import warm
from cgtool.compiler.proof import beside, calls
from cgtool.compiler.proof._torch import indices_checked
from cgtool.errors import CallMismatchError, ProofCrashError
from cgtool.runtime import program
from cgtool.runtime.call import LoadedModel

pytestmark = pytest.mark.torch

CONFIG = cgtool.CompilationConfig(adaptor="eager", jobs=0)
WIDTH = 8


def scaled(x: torch.Tensor, bank: torch.Tensor) -> torch.Tensor:
    """Stands in for attention: writes into a bank, and returns a tensor with transposed strides."""
    bank.add_(x.sum(0))
    return (x * 2).t().contiguous().t()


cgtool.direct_register_custom_op(
    "scaled",
    scaled,
    mutates_args=["bank"],
    fake_impl=lambda x, bank: torch.empty_like(x),
    namespace="cgtool_whole_call",
    splitting=True,
)


class Stack(torch.nn.Module):
    """Two layers with a splitting op after each, a buffer that is written to, and two outputs."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bank", torch.zeros(WIDTH))

    def forward(self, x, out):
        y = torch.ops.cgtool_whole_call.scaled(torch.tanh(self.first(x)), self.bank)
        z = torch.ops.cgtool_whole_call.scaled(torch.tanh(self.second(y)), self.bank)
        out.copy_(y + z)
        return z + x, y - x


GENERAL = {"x": {0: ("rows", 2, None)}, "out": {0: ("rows", 2, None)}}
#: With a second variant, for one row.
TWO_VARIANTS = {"x": {0: "rows"}, "out": {0: "rows"}}


@pytest.fixture
def spec():
    torch.manual_seed(1)
    call = cgtool.ExampleCall(args=(torch.randn(4, WIDTH), torch.zeros(4, WIDTH)))
    return cgtool.ModelSpec(module=Stack().eval().requires_grad_(requires_grad=False), calls=[call], dynamic=GENERAL)


def of(function, *args, dynamic=None):
    module = type("Small", (torch.nn.Module,), {"forward": function})().eval()
    return cgtool.ModelSpec(module=module, calls=[cgtool.ExampleCall(args=args)], dynamic=dynamic or {})


def mutated(monkeypatch, change):
    """Change the plan between its trace and its proof."""
    encode = pipeline.encode_plan
    monkeypatch.setattr(pipeline, "encode_plan", lambda plan: encode(change(plan)))


def each_variant(change):
    return lambda plan: replace(plan, variants=tuple(map(change, plan.variants)))


def swapped_weights(variant):
    first, second = (
        next(n for n, item in enumerate(variant.inputs) if item.source == f"self.{name}.weight")
        for name in ("first", "second")
    )
    inputs = list(variant.inputs)
    pairs = ((first, second), (second, first))
    inputs[first], inputs[second] = (replace(inputs[n], source=inputs[m].source) for n, m in pairs)
    return replace(variant, inputs=tuple(inputs))


def stale(variant):
    """Give the second op the inputs of the first."""
    ops = [n for n, step in enumerate(variant.steps) if step.splitting]
    steps = list(variant.steps)
    steps[ops[1]] = replace(steps[ops[1]], inputs=steps[ops[0]].inputs)
    return replace(variant, steps=tuple(steps))


def swapped_outputs(variant):
    kind, parts = variant.output
    return replace(variant, output=[kind, parts[::-1]])


def without_a_write(variant):
    """Make the second op write into the first layer's bias instead of the bank."""
    ops = [n for n, step in enumerate(variant.steps) if step.splitting]
    bias = next(n for n, item in enumerate(variant.inputs) if item.source == "self.first.bias")
    bank = next(n for n, item in enumerate(variant.inputs) if item.source == "self.bank")
    steps = list(variant.steps)
    given = tuple(bias if value == bank else value for value in steps[ops[1]].inputs)
    steps[ops[1]] = replace(steps[ops[1]], inputs=given)
    return replace(variant, steps=tuple(steps))


def test_a_correct_entry_is_published_with_the_sizes_it_was_proved_at(spec, tmp_path):
    result = warm(dataclasses.replace(spec, dynamic=TWO_VARIANTS), config=CONFIG, cache_dir=tmp_path)
    general, one = result.manifest.variants
    assert [sizes["rows"] for sizes in general.proved_at][:2] == [4, 2]
    assert 100 < general.proved_at[2]["rows"] < 20_000  # limited to a megabyte, including intermediate values
    assert one.proved_at == ({"rows": 1},)
    assert result.notes == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(swapped_weights, r"output\[\d\] is ", id="swapped input"),
        pytest.param(stale, r"output\[\d\] is ", id="stale value"),
        pytest.param(swapped_outputs, r"output\[0\] is ", id="swapped outputs"),
        pytest.param(without_a_write, "bank is ", id="dropped write"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_difference_and_not_published(spec, tmp_path, monkeypatch, change, message):
    mutated(monkeypatch, each_variant(change))
    with pytest.raises(CallMismatchError, match=message) as raised:
        warm(spec, config=CONFIG, cache_dir=tmp_path)
    assert "variant default, rows=4" in str(raised.value)
    assert "Nothing new was published" in str(raised.value)
    with pytest.raises(cgtool.CacheMissError):
        cgtool.load(spec.module, cache_dir=tmp_path)


def test_a_plan_that_load_would_refuse_is_not_published(spec, tmp_path, monkeypatch):
    mutated(monkeypatch, each_variant(lambda variant: replace(variant, output=["expr", "s99"])))
    with pytest.raises(
        CallMismatchError, match=r"The compiled code cannot be opened: .*s99.*Nothing new was published"
    ):
        warm(spec, config=CONFIG, cache_dir=tmp_path)


def test_a_wrong_restride_is_refused(spec, tmp_path, monkeypatch):
    def wrongly(_graph):
        return lambda tensor, dtype, shape, stride: tensor.as_strided(shape, stride)

    monkeypatch.setattr(program, "repairer", wrongly)
    with pytest.raises(CallMismatchError, match=r"output\[\d\] is "):
        warm(spec, config=CONFIG, cache_dir=tmp_path)


def test_outputs_have_eager_strides_even_if_the_trace_has_others(spec, tmp_path):
    warm(dataclasses.replace(spec, dynamic=TWO_VARIANTS), config=CONFIG, cache_dir=tmp_path)
    loaded = cgtool.load(spec.module, cache_dir=tmp_path)
    for rows in (1, 2, 5):
        args = torch.randn(rows, WIDTH), torch.zeros(rows, WIDTH)
        for ours, theirs in zip(loaded(*args), spec.module(*args), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert rows == 1 or ours.stride() == theirs.stride() == (1, rows)


VIEWS = {
    "an argument": (lambda self, x: (x, x + 1), lambda own: lambda tensors, *rest: own([tensors[0].clone()], *rest)),
    "another output": (
        lambda self, x: (y := x + 1, y[1:]),
        lambda own: lambda *given: tuple(part.clone() for part in own(*given)),
    ),
    "nothing": (lambda self, x: (x.clone(), x + 2), lambda own: lambda *given: (given[0][0], own(*given)[1])),
}


@pytest.mark.parametrize("what", VIEWS)
def test_an_output_with_different_aliasing_from_eager_is_refused(tmp_path, monkeypatch, what):
    forward, change = VIEWS[what]
    warm(of(forward, torch.ones(3)), config=CONFIG, cache_dir=tmp_path / "right")
    run = program.ProgramWriter.function
    monkeypatch.setattr(program.ProgramWriter, "function", lambda self, *given: change(run(self, *given)))
    with pytest.raises(CallMismatchError, match=r"output\[\d\] shares memory with"):
        warm(of(forward, torch.ones(3)), config=CONFIG, cache_dir=tmp_path / "wrong")


def test_a_lost_write_to_an_argument_is_refused(tmp_path, monkeypatch):
    def forward(self, x, out):
        out.copy_(x + 1)
        return x * 2

    run = program.ProgramWriter.function

    def on_a_copy(self, *given):
        made = run(self, *given)
        return lambda tensors, *rest: made([tensor.clone() for tensor in tensors], *rest)

    monkeypatch.setattr(program.ProgramWriter, "function", on_a_copy)
    with pytest.raises(CallMismatchError, match="out is "):
        warm(of(forward, torch.ones(3), torch.zeros(3)), config=CONFIG, cache_dir=tmp_path)


def test_a_model_that_checks_is_compiling_is_refused_with_that_reason(tmp_path):
    def forward(self, x):
        return x + 1 if torch.compiler.is_compiling() else x - 1

    with pytest.raises(CallMismatchError, match=r"checks whether it is being compiled \(torch.compiler.is_compiling\)"):
        warm(of(forward, torch.ones(3)), config=CONFIG, cache_dir=tmp_path)
    unproved = warm(of(forward, torch.ones(3)), config=CONFIG.replace(proof=False), cache_dir=tmp_path)
    assert unproved.manifest.variants[0].proved_at == ()


def test_random_numbers_match_eager_for_the_same_seed(tmp_path):
    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    before = torch.random.get_rng_state()
    result = warm(of(forward, torch.ones(300)), config=CONFIG, cache_dir=tmp_path)
    assert result.manifest.variants[0].proved_at == ({},)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_uninitialized_memory_is_not_compared(tmp_path):
    def forward(self, x):
        out = torch.empty(2, *x.shape)
        out[0] = x
        return out

    result = warm(of(forward, torch.ones(300)), config=CONFIG, cache_dir=tmp_path)
    assert result.manifest.variants[0].proved_at == ({},)


def test_a_model_that_does_not_run_eagerly_is_noted_and_stored(tmp_path):
    def forward(self, x):
        if not torch.compiler.is_compiling():
            raise ValueError("only compiled")
        return x + 1

    spec = of(forward, torch.ones(3))
    result = warm(spec, config=CONFIG, cache_dir=tmp_path)
    gap = "not run: the model itself does not run on these inputs (ValueError: only compiled)"
    assert result.manifest.variants[0].proof_gap == gap
    assert result.notes == (f"The whole call of variant default was {gap}",)


def test_a_model_that_cannot_run_in_a_fork_is_called_in_this_process(tmp_path):
    """A torch with CUDA cannot compute gradients in a fork of a process that has computed some, as a trace does."""
    here = os.getpid()

    def forward(self, x):
        if not torch.compiler.is_compiling() and os.getpid() != here:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        return torch.func.grad(lambda y: y.sin().sum())(x)

    result = warm(of(forward, torch.randn(4), dynamic={"x": {0: "n"}}), config=CONFIG, cache_dir=tmp_path)
    assert [bool(variant.proved_at) for variant in result.manifest.variants] == [True, True]
    assert result.notes == ()


def test_a_crash_of_compiled_code_is_an_error_and_a_crash_of_the_model_a_gap(spec, tmp_path, monkeypatch):
    def crash(*_args, **_kwargs):
        os.kill(os.getpid(), signal.SIGSEGV)

    with monkeypatch.context() as patched:
        patched.setattr(LoadedModel, "attempt", crash)
        with pytest.raises(ProofCrashError, match="crashed with SIGSEGV in compiled code"):
            warm(spec, config=CONFIG, cache_dir=tmp_path)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            crash()
        return x + 1

    (note,) = warm(of(forward, torch.ones(3)), config=CONFIG, cache_dir=tmp_path).notes
    assert "crashed with SIGSEGV while it ran the model itself" in note


def test_a_call_that_never_returns_is_abandoned(tmp_path, monkeypatch):
    def forward(self, x):
        while not torch.compiler.is_compiling():
            pass
        return x + 1

    monkeypatch.setattr(calls, "_TIMEOUT_SECS", 0.5)
    result = warm(of(forward, torch.ones(3)), config=CONFIG, cache_dir=tmp_path)
    assert "took longer than 0.5 s" in result.notes[0]
    assert result.manifest.variants[0].proof_gap == ""


@pytest.fixture
def calls_ahead(monkeypatch):
    """Call variants while others compile, as for a model on an accelerator; return the list of their proofs."""
    made = []
    proofs = calls.CallsAhead.proofs

    def recorded(self, found):
        made.append(proofs(self, found))
        return made[-1]

    monkeypatch.setattr(calls.CallsAhead, "proofs", recorded)
    monkeypatch.setattr(pipeline._Warm, "_calls_ahead", lambda self, found, _: calls.CallsAhead(found, self._spec))
    return made


def test_variants_are_called_while_others_compile(spec, tmp_path, calls_ahead):
    spec = dataclasses.replace(spec, dynamic=TWO_VARIANTS)
    ahead = warm(spec, config=CONFIG, cache_dir=tmp_path / "ahead").manifest.variants
    assert [[proof.proved_at for proof in each] for each in calls_ahead] == [[variant.proved_at for variant in ahead]]
    calls_ahead.clear()
    assert ahead == warm(spec, config=CONFIG, cache_dir=tmp_path / "after").manifest.variants


@pytest.mark.parametrize("change", [swapped_weights, stale, swapped_outputs, without_a_write])
@pytest.mark.usefixtures("calls_ahead")
def test_a_wrong_plan_is_refused_by_calls_made_ahead(spec, tmp_path, monkeypatch, change):
    mutated(monkeypatch, each_variant(change))
    with pytest.raises(CallMismatchError, match=r"variant default, rows=4.*Nothing new was published"):
        warm(spec, config=CONFIG, cache_dir=tmp_path)


def test_a_variant_that_was_not_called_ahead_is_called_at_the_end(spec, tmp_path, monkeypatch, calls_ahead):
    offer = calls.CallsAhead.offer
    monkeypatch.setattr(calls.CallsAhead, "offer", lambda self, variant, rows: variant or offer(self, variant, rows))
    result = warm(dataclasses.replace(spec, dynamic=TWO_VARIANTS), config=CONFIG, cache_dir=tmp_path)
    assert calls_ahead == [None]
    assert all(variant.proved_at for variant in result.manifest.variants)


@pytest.mark.parametrize("here", [False, True], ids=["in a copy of the process", "in this process"])
def test_the_model_keeps_its_tensors_and_their_values(spec, tmp_path, request, here):
    if here:
        request.getfixturevalue("calls_ahead")
    own = {name: (id(tensor), tensor.clone()) for name, tensor in spec.module.state_dict(keep_vars=True).items()}
    given = copy.deepcopy(spec.calls[0].args)
    result = warm(spec, config=CONFIG, cache_dir=tmp_path)
    assert len(result.manifest.variants[0].proved_at) == 3
    for name, tensor in spec.module.state_dict(keep_vars=True).items():
        assert id(tensor) == own[name][0]
        assert torch.equal(tensor, own[name][1])
    assert all(map(torch.equal, given, spec.calls[0].args))


def test_state_that_a_call_leaves_is_reset_before_the_next(tmp_path):
    layer = torch.nn.GRU(
        4, 4
    ).eval()  # keeps weak references to its weights, and makes a new list of them when they change
    result = warm(
        cgtool.ModelSpec(module=layer, calls=[cgtool.ExampleCall(args=(torch.ones(3, 4),))]),
        config=CONFIG,
        cache_dir=tmp_path,
    )
    assert result.manifest.variants[0].proved_at == ({},)


def test_drawn_weights_stay_tied_and_share_memory_as_in_the_model(tmp_path):
    from cgtool.models import resolve_model

    path = tmp_path / "tied.py"
    path.write_text(
        "import cgtool, torch\n"
        "class Tied(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed, self.head = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32, bias=False)\n"
        "        self.head.weight = self.embed.weight\n"
        "        self.register_buffer('whole', torch.zeros(4, 8))\n"
        "        self.register_buffer('row', self.whole[1])\n"
        "    def forward(self, ids):\n"
        "        self.row.add_(1)\n"
        "        return self.head(self.embed(ids)) + self.whole.sum()\n"
        "def build():\n"
        "    call = cgtool.ExampleCall(args=(torch.zeros(4, dtype=torch.long),))\n"
        "    return cgtool.ModelSpec(module=Tied(), calls=[call], dynamic={'ids': {0: ('n', 2, None)}})\n"
    )
    result = warm(resolve_model(f"{path}:build"), config=CONFIG, cache_dir=tmp_path / "cache")
    assert len(result.manifest.variants[0].proved_at) == 3


def test_a_call_that_needs_more_memory_than_there_is_is_not_made(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "num_fake_bytes", lambda _: 10**15)
    (note,) = warm(spec, config=CONFIG, cache_dir=tmp_path).notes
    assert "seeded ones of 1000000.0 GB do not fit (--weights real uses the real ones)" in note


def test_a_compiled_size_is_proved_at_that_size(spec, tmp_path):
    result = warm(spec, config=CONFIG.replace(compile_sizes=(6,)), cache_dir=tmp_path)
    assert {"rows": 6} in result.manifest.variants[0].proved_at


@pytest.mark.slow
def test_wrong_fake_strides_of_an_op_in_a_script_are_detected_by_the_whole_call(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import cgtool, torch\n"
        "def wrongly(x: torch.Tensor) -> torch.Tensor:\n"
        "    return (x * 2).t().contiguous().t()\n"
        "cgtool.direct_register_custom_op('wrongly', wrongly, mutates_args=[],\n"
        "    fake_impl=lambda x: torch.empty_like(x), namespace='of_a_script')\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.ops.of_a_script.wrongly(x.sin()) + x\n"
        "torch.set_grad_enabled(False)\n"
        "cgtool.compile(Model().eval(), example_args=(torch.randn(5, 8),), config=cgtool.CompilationConfig(jobs=0))\n"
    )
    ran = subprocess.run(
        [sys.executable, script],
        env=environment(CGTOOL_CACHE_DIR=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode != 0
    assert "CallMismatchError: The compiled call does not match the model itself" in ran.stderr
    assert "other shapes or strides than its kernel: of_a_script" in ran.stderr


def test_added_artifacts_are_proved_before_the_manifest_names_them(spec, tmp_path, monkeypatch):
    first = warm(spec, config=CONFIG, cache_dir=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(LoadedModel, "attempt", lambda *_, **__: (torch.zeros(()), torch.zeros(())))
        with pytest.raises(CallMismatchError):
            warm(spec, config=CONFIG.replace(compile_sizes=(6,)), cache_dir=tmp_path)
    assert warm(spec, config=CONFIG, cache_dir=tmp_path).manifest == first.manifest
    added = warm(spec, config=CONFIG.replace(compile_sizes=(6,)), cache_dir=tmp_path)
    assert added.manifest.hash == first.manifest.hash
    assert {"rows": 6} in added.manifest.variants[0].proved_at


def test_a_later_warm_adds_a_skipped_proof(spec, tmp_path):
    spec = dataclasses.replace(spec, dynamic=TWO_VARIANTS)
    warm(spec, config=CONFIG.replace(proof=False), cache_dir=tmp_path)
    result = warm(spec, config=CONFIG, cache_dir=tmp_path)
    assert result.reasons == ("2 variants have not been compared with the model yet",)
    assert all(variant.proved_at for variant in result.manifest.variants)
    assert warm(spec, config=CONFIG, cache_dir=tmp_path).hit


def test_rounded_changes_each_number_by_one_rounding():
    own = torch.linspace(-3, 3, 1000)
    moved = beside.rounded(own, torch.float32)
    assert not torch.equal(moved, own)
    torch.testing.assert_close(moved, own, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("run", "fits", "wrong"),
    [
        (lambda x, index: torch.nn.functional.embedding(index, x), [0, 3], [[4], [-1]]),
        (lambda x, index: x[index], [-4, 3], [[4], [-5]]),
        (lambda x, index: x[:, index], [-2, 1], [[2], [-3]]),
        (lambda x, index: x[x[:, 0] > -1, index], [0, 1, 0, 1], [[2] * 4]),
        (lambda x, index: x.index_put((index,), torch.tensor(1.0)), [0, 3], [[4]]),
        (lambda x, index: x.gather(1, index[:, None]), [0, 1], [[2, 0], [0, -1]]),
        (lambda x, index: x.scatter(0, index[:, None], 1.0), [0, 3], [[4]]),
        (lambda x, index: x.clone().scatter_add_(0, index[:, None], x), [0, 3], [[4]]),
        (lambda x, index: x.index_select(0, index), [3], [[4]]),
        (lambda x, index: x.index_add(1, index, x[:, :1]), [1], [[2]]),
        (lambda x, index: x[0, 0].gather(0, index[0]), [0], [[1]]),
    ],
)
def test_an_index_out_of_range_raises_before_a_gpu_sees_it(run, fits, wrong):
    x = torch.ones(4, 2)
    with indices_checked("cuda"):
        run(x, torch.tensor(fits))
        for index in wrong:
            with pytest.raises(IndexError, match="is out of range for a dimension of size"):
                run(x, torch.tensor(index))
