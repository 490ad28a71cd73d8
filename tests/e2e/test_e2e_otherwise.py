"""`otherwise`: calls that no variant covers; also functions as models, and progress of a compile."""

from __future__ import annotations

import functools
import logging
import os
import pty
import re
import threading
from collections.abc import Callable

import pytest
from cli_harness import environment, forked, server

pytest.importorskip("torch")

import torch

import cgtool
from cgtool import CacheMissError, CompilationConfig, GuardError, counters, support_torch_compile
from cgtool.errors import ConfigError, ModelError, TraceError, UsageError
from cgtool.runtime.otherwise import MOST_WARMS

pytestmark = pytest.mark.torch

CONFIG = CompilationConfig(adaptor="eager")
FACTOR = 3


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def made(tmp_path):
    """Compiles for an example of one row; calls with more rows depend on `otherwise`."""

    def make(model, otherwise, rows=1, config=CONFIG):
        example = None if rows is None else (torch.ones(rows, 4),)
        return cgtool.compile(model, example_args=example, config=config, cache_dir=tmp_path, otherwise=otherwise)

    return make


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).relu()


class Breaks(Model):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.fixture
def model():
    return Model().eval()


def rows(count):
    return torch.arange(4.0 * count).reshape(count, 4)


def happened(do: Callable[[], object]) -> dict[str, int]:
    before = counters()
    do()
    return {name: value - before[name] for name, value in counters().items() if value != before[name]}


def test_eager_runs_the_model_itself_and_warns_once_for_each_cause(made, model, caplog):
    served = made(model, "eager")

    def calls():
        for count in (1, 2, 3, 2, 3):
            assert torch.equal(served(rows(count)), model(rows(count)))
        served(rows(2).double().float().T.contiguous().T)  # the same cause: a size
        with pytest.raises(RuntimeError, match="dtype"):
            served(rows(1).double())  # the model's own error, and another cause

    assert happened(calls) == {"eager_calls": 6}
    messages = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == 2
    assert messages[0].startswith(
        "A call of Model.forward runs eagerly: the size of x in dimension 0 is 2 and must be 1."
    )
    assert "has dtype float64 and was traced with float32" in messages[1]


@pytest.mark.parametrize("otherwise", ["eager", "background"])
def test_calls_that_train_or_need_gradients_run_the_model(made, model, otherwise):
    served = made(model, otherwise)
    with torch.enable_grad():
        assert served(rows(1)).requires_grad
    served.train()
    assert torch.equal(served(rows(1)), model(rows(1)))


def test_warm_compiles_missing_variants_and_keeps_using_them(made, model, caplog):
    caplog.set_level(logging.INFO, logger="cgtool")
    served = made(model, "warm")

    def calls():
        for count in (1, 2, 3, 2, 3, 1):
            assert torch.equal(served(rows(count)), model(rows(count)))

    assert happened(calls)["traces"] == 2
    again = [record.message for record in caplog.records if "again" in record.message]
    assert [message.split(".")[0] for message in again[:1]] == ["Compiling Model"]
    assert "the size of x in dimension 0 is 2 and must be 1" in again[0]
    assert happened(calls) == {}
    # The next process finds all variants.
    fresh = made(model, "warm")
    assert happened(lambda: [fresh(rows(count)) for count in (1, 2, 3)]).keys() == {"opens"}


def test_after_many_variants_the_rest_runs_eagerly(made, model):
    served = made(model, "warm", config=CONFIG.replace(proof=False))
    more = MOST_WARMS + 2
    done = happened(lambda: [served(rows(count)) for count in range(1, more + 1)])
    assert (done["traces"], done["eager_calls"]) == (MOST_WARMS - 1, 2)


def test_a_model_that_cannot_be_compiled_for_a_call_is_an_error_of_that_call(made):
    served = made(Breaks().eval(), "warm", rows=None)
    for _ in range(2):
        with pytest.raises(TraceError, match="graph_break"):
            served(rows(1))


def ended(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(timeout=120)


def test_calls_do_not_wait_for_a_compile_in_the_background(made, model, caplog):
    served = made(model, "background", rows=None)

    def first():
        assert torch.equal(served(rows(1)), model(rows(1)))

    assert happened(first)["eager_calls"] == 1
    ended("cgtool-warm")
    assert happened(first).get("eager_calls", 0) == 0
    assert torch.equal(served(rows(2)), model(rows(2)))
    ended("cgtool-warm")
    assert happened(lambda: (served(rows(1)), served(rows(2)))).get("eager_calls", 0) == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_failed_compile_in_the_background_is_reported_once_and_not_retried(made, caplog):
    served = made(Breaks().eval(), "background", rows=None)
    served(rows(1))
    ended("cgtool-warm")
    done = happened(lambda: [served(rows(count)) for count in (1, 2, 3)])
    assert done == {"eager_calls": 3}
    (message,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert message.startswith("A call of Breaks.forward runs eagerly: The model cannot be compiled:")


class Counts(torch.nn.Module):
    """Counts its calls in an attribute, which a trace sets as a call would."""

    def __init__(self):
        super().__init__()
        self.count = torch.zeros(4)

    def forward(self, x):
        self.count = self.count + 1
        return x * 0 + self.count


def test_a_model_that_stores_values_is_not_traced_in_the_background(made, caplog):
    served = made(Counts().eval(), "background", rows=None)
    counts = [served(rows(1))[0, 0].item()]
    while any(thread.name == "cgtool-warm" for thread in threading.enumerate()):
        counts.append(served(rows(1))[0, 0].item())
    counts.append(served(rows(1))[0, 0].item())
    assert counts == [float(number + 1) for number in range(len(counts))]
    (message,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert re.search(
        r"Calls store values in count.*\n.*: self\.count = self\.count \+ 1\nPass otherwise='warm'", message
    )


def test_calls_of_a_model_that_stores_values_wait_for_a_warm(made):
    served = made(Counts().eval(), "warm")
    counts, ends = [], threading.Event()

    def call():
        with torch.no_grad():
            while not ends.is_set():
                counts.append(served(rows(1))[0, 0].item())

    thread = threading.Thread(target=call)
    thread.start()
    counts_here = [served(rows(count))[0, 0].item() for count in (2, 3)]  # each is compiled
    ends.set()
    thread.join()
    assert sorted(counts + counts_here) == [float(number + 1) for number in range(len(counts) + 2)]


def test_only_the_first_of_several_threads_compiles(made, model):
    served = made(model, "warm")
    barrier, answers = threading.Barrier(4), []

    def call():
        with torch.no_grad():
            barrier.wait()
            answers.append(served(rows(5)))

    def all_at_once():
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert happened(all_at_once)["traces"] == 1
    assert all(torch.equal(answer, model(rows(5))) for answer in answers)
    assert len(answers) == 4


def test_load_can_run_eagerly_but_never_compiles(made, model, tmp_path):
    made(model, "raise")
    with pytest.raises(GuardError, match="must be 1"):
        cgtool.load(model, cache_dir=tmp_path)(rows(2))
    served = cgtool.load(model, cache_dir=tmp_path, otherwise="eager")
    assert torch.equal(served(rows(2)), model(rows(2)))
    assert served.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(UsageError, match=r"Call cgtool\.compile"):
        cgtool.load(model, cache_dir=tmp_path, otherwise="warm")


@pytest.mark.parametrize("otherwise", ["eager", "warm", "background"])
def test_the_decorator_takes_otherwise(tmp_path, otherwise):
    @support_torch_compile(dynamic_arg_dims={"x": {1: "width"}}, config=CONFIG, cache_dir=tmp_path, otherwise=otherwise)
    class Decorated(torch.nn.Module):
        def forward(self, x):
            return x.relu() + 1

    model = Decorated().eval()
    for count in (1, 2, 1, 3):
        assert torch.equal(model(rows(count)), rows(count).relu() + 1)
        ended("cgtool-warm")
    model.recheck()
    done = happened(lambda: [model(rows(count)) for count in (1, 2, 3)])
    assert done == ({"eager_calls": 2} if otherwise == "eager" else {})


def scaled(x, by=2):
    return x * FACTOR * by


def shifted(x, by=2):
    return x + FACTOR * by


def test_a_function_is_identified_by_its_code(made, tmp_path, monkeypatch):
    served = made(scaled, "raise")
    assert torch.equal(served(rows(1)), scaled(rows(1)))
    assert torch.equal(cgtool.load(scaled, cache_dir=tmp_path)(rows(1)), scaled(rows(1)))
    with pytest.raises(CacheMissError, match="scaled"):
        cgtool.load(shifted, cache_dir=tmp_path)
    with pytest.raises(GuardError, match="by"):
        served(rows(1), by=4)
    monkeypatch.setitem(globals(), "FACTOR", 5)
    with pytest.raises(CacheMissError, match="FACTOR"):
        cgtool.load(scaled, cache_dir=tmp_path)
    assert torch.equal(made(scaled, "raise")(rows(1)), scaled(rows(1)))


def test_a_function_may_close_over_a_model(made, model):
    other = Model().eval()

    def both(x):
        return model(x) + other.layer(x)

    served = made(both, "warm")
    assert torch.equal(served(rows(1)), both(rows(1)))
    other.layer.weight.data.mul_(2)
    other.layer.bias = torch.nn.Parameter(torch.ones(4))
    assert torch.equal(served(rows(1)), both(rows(1)))
    assert torch.equal(served(rows(3)), both(rows(3)))


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda model: functools.partial(model.forward), "is a partial. cgtool compiles a torch.nn.Module"),
        (lambda _: None, "is a NoneType. cgtool compiles a torch.nn.Module"),
        (lambda model: torch.jit.trace(model, rows(1)), "Dynamo does not trace TorchScript"),
        (torch.compile, "pass the model itself, its _orig_mod"),
    ],
    ids=["a partial", "nothing", "TorchScript", "what torch.compile returned"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_objects_that_are_not_models_are_refused(made, model, tmp_path, wrap, message):
    for use in (lambda given: made(given, "raise"), lambda given: cgtool.load(given, cache_dir=tmp_path)):
        with pytest.raises(ModelError, match=re.escape(message)):
            use(wrap(model))


@pytest.mark.parametrize("otherwise", ["raise", "eager"])
def test_what_is_compiled_already_is_refused_with_a_hint_to_its_module(made, model, tmp_path, otherwise):
    served = made(model, otherwise)
    for use in (cgtool.load, cgtool.compile):
        with pytest.raises(ModelError, match="pass the model itself, its module"):
            use(served, cache_dir=tmp_path)
    assert served.module is model


def test_a_wrapper_for_training_is_refused_with_a_hint_to_its_module(model, tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        for use in (cgtool.load, cgtool.compile):
            with pytest.raises(ModelError, match="pass its module"):
                use(wrapped, cache_dir=tmp_path)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("given", [{"adaptor": "eager"}, "eager"], ids=["a dict", "a name"])
def test_a_config_of_another_type_is_refused(model, tmp_path, given):
    for use in (
        lambda: cgtool.load(model, config=given, cache_dir=tmp_path),
        lambda: cgtool.compile(model, config=given, cache_dir=tmp_path),
        lambda: support_torch_compile(Model, dynamic_arg_dims={"x": 0}, config=given),
    ):
        with pytest.raises(ConfigError, match=f"config must be a cgtool.CompilationConfig, not {type(given).__name__}"):
            use()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"example_args": rows(1)}, "example_args must be a tuple, such as (x,) for the call model(x), not Tensor"),
        (
            {"example_kwargs": [rows(1)]},
            'example_kwargs must be a dict, such as {"x": x} for the call model(x=x), not list',
        ),
        ({"dynamic": True}, 'dynamic must be {"argument": {0: "name"}}'),
        ({"dynamic": {"x": 0}}, "dynamic['x'] must be {0: \"name\"}"),
        ({"dynamic": {"x": {0: 3}}}, "dynamic['x'][0] is 3. Use the integer index of a dimension"),
        ({"otherwise": "egaer"}, "otherwise must be one of 'raise', 'eager', 'warm', 'background', not 'egaer'"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_malformed_arguments_are_refused_with_the_expected_form(made, model, tmp_path, given, message):
    made(model, "raise", config=CONFIG.replace(proof=False))  # a matching entry must not bypass the check
    asked = {"example_args": (rows(1),), "config": CONFIG, "cache_dir": tmp_path, **given}
    with pytest.raises(UsageError, match=re.escape(message)):
        cgtool.compile(model, **asked)


@pytest.mark.parametrize(
    ("cls", "given", "message"),
    [
        (Model, {"dynamic_arg_dims": ["x"]}, "dynamic_arg_dims must be"),
        (Model, {"dynamic_arg_dims": {"x": "n"}}, "dynamic_arg_dims['x'] must be"),
        (Model, {"dynamic_arg_dims": {"x": 0}, "otherwise": "egaer"}, "otherwise must be one of"),
        (Model(), {"dynamic_arg_dims": {"x": 0}}, "decorates a class of models, not Model: call cgtool.compile"),
    ],
    ids=["a list", "a name", "otherwise", "a model"],
)
def test_the_decorator_refuses_malformed_arguments_immediately(cls, given, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        support_torch_compile(cls, **given)


@pytest.mark.parametrize("call", [torch.ones(3, 4), torch.tensor(1.0), [1.0]], ids=["two", "none", "a list"])
def test_a_missing_dimension_of_a_decorated_call_is_named(tmp_path, call):
    cls = type("Other", (Model,), {})
    support_torch_compile(cls, dynamic_arg_dims={"x": [-1, 7]}, config=CONFIG, cache_dir=tmp_path)
    with pytest.raises(ModelError, match=r"dynamic_arg_dims names dimension (7|-1) of 'x', but .* has"):
        cls().eval()(call)


def test_a_scalar_annotated_as_a_tensor_has_no_dynamic_dimension(tmp_path):
    @support_torch_compile(config=CONFIG, cache_dir=tmp_path)
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor):
            return x * scale

    served = Scaled().eval()
    assert torch.equal(served(rows(3), torch.tensor(2.0)), rows(3) * 2)
    before = counters()
    assert torch.equal(served(rows(5), torch.tensor(3.0)), rows(5) * 3)
    assert counters() == before


def test_variadic_arguments_cannot_be_dynamic(tmp_path):
    def total(*terms):
        return terms[0] + terms[1]

    example = (rows(1), rows(1))
    served = cgtool.compile(total, example_args=example, config=CONFIG, cache_dir=tmp_path)
    assert torch.equal(served(*example), total(*example))
    with pytest.raises(ModelError, match="collects arguments without names"):
        cgtool.compile(total, example_args=example, dynamic={"terms": {0: "n"}}, config=CONFIG, cache_dir=tmp_path)


PROGRAM = """
import sys, torch, cgtool
class Model(torch.nn.Module):
    def forward(self, x):
        return x.relu() + 1
served = cgtool.compile(Model().eval(), config=cgtool.CompilationConfig(adaptor="eager"), cache_dir=sys.argv[1])
with torch.no_grad():
    print(served(torch.ones(3)).tolist())
"""


def test_a_terminal_shows_progress_and_a_log_has_lines(tmp_path, made, model, caplog):
    shown, terminal = pty.openpty()
    program = tmp_path / "program.py"
    program.write_text(f"import os; os.dup2(1, 2)\n{PROGRAM}")  # stdout is the terminal
    root = str(tmp_path / "cache")
    first = server(None, with_torch=True).run(str(program), tmp_path, environment(), [root], terminal)
    assert first.code == 0, first.err
    os.close(terminal)
    text = read_all(shown)
    assert "\x1b[2KCompiling Model.forward, trace 0/1: default" in text
    assert text.endswith("\r\x1b[2K[2.0, 2.0, 2.0]\r\n")
    second = forked(PROGRAM, root)
    assert (second.code, second.out, second.err) == (0, "[2.0, 2.0, 2.0]\n", "")  # a hit reports nothing
    caplog.set_level(logging.INFO, logger="cgtool")
    made(model, "raise")
    assert any(message.startswith("Compiling Model.forward, trace 1/1: default (") for message in caplog.messages)


def read_all(descriptor: int) -> str:
    """Return the output to a terminal whose other end is closed."""
    text = b""
    try:
        while more := os.read(descriptor, 4096):
            text += more
    except OSError:  # Linux reports EIO at the end of a terminal
        pass
    finally:
        os.close(descriptor)
    return text.decode()
