"""`resolve_model` on the user's files and modules: what is built, module names, and errors."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from cgtool.errors import ModelError, UsageError
from cgtool.model import ModelSpec
from cgtool.models import resolve_model
from cgtool.models._torch import is_fake, new_fake_mode
from cgtool.models.fake import make_fake

pytestmark = pytest.mark.torch

_numbers = itertools.count()

HEAD = """
    import torch
    from torch import nn
    from cgtool.model import ExampleCall, ModelSpec
"""

GOOD = (
    HEAD
    + """
    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, width)
            self.register_buffer("scale", torch.arange(width, dtype=torch.get_default_dtype()))
        def forward(self, x):
            return self.linear(x) * self.scale

    def build(width=4):
        return ModelSpec(
            module=Net(width), calls=[ExampleCall(args=(torch.ones(2, width),))], dynamic={"x": {0: "batch"}}
        )

    def pair(width=4):
        return Net(width), (torch.ones(2, width),)
    """
)


@pytest.fixture
def clean_imports():
    """Undo the imports of a resolution, which a command leaves in its process."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("user_model", "package_of_user", "not-a-plain-name")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path, clean_imports):
    """Write a user's file under a name that no other test imports."""

    def write(source, name=None):
        file = tmp_path / (name or f"user_model_{next(_numbers)}.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(source))
        return file

    return write


def line_of(file: Path, text: str) -> str:
    """Return `path:line` of the only line that contains `text`."""
    (number,) = [number for number, line in enumerate(file.read_text().splitlines(), 1) if text in line]
    return f"{file}:{number}"


def tensors_of(spec):
    call = spec.calls[0]
    return [*spec.module.parameters(), *spec.module.buffers(), *call.args, *call.kwargs.values()]


class TestWhatIsBuilt:
    def test_by_default_all_tensors_are_fake_and_of_one_mode(self, write):
        spec = resolve_model(f"{write(GOOD)}:build")
        assert isinstance(spec, ModelSpec)
        assert [is_fake(tensor) for tensor in tensors_of(spec)] == [True] * 4
        assert len({id(tensor.fake_mode) for tensor in tensors_of(spec)}) == 1
        assert spec.dynamic == {"x": {0: "batch"}}

    def test_real_weights_have_values_and_the_model_runs(self, write):
        spec = resolve_model(f"{write(GOOD)}:build", weights="real")
        assert not any(is_fake(tensor) for tensor in tensors_of(spec))
        assert spec.module(*spec.calls[0].args).shape == (2, 4)

    def test_the_module_is_in_eval_mode_and_its_parameters_still_require_gradients(self, write):
        spec = resolve_model(f"{write(GOOD)}:build")
        assert not spec.module.training
        assert not spec.module.linear.training
        assert all(parameter.requires_grad for parameter in spec.module.parameters())

    def test_arguments_reach_the_factory_by_name(self, write):
        spec = resolve_model(f"{write(GOOD)}:build", factory_args={"width": 8}, weights="real")
        assert spec.module.linear.weight.shape == (8, 8)

    def test_a_pair_becomes_a_spec_without_dynamic_dimensions(self, write):
        spec = resolve_model(f"{write(GOOD)}:pair")
        assert [call.name for call in spec.calls] == ["default"]
        assert spec.calls[0].args[0].shape == (2, 4)
        assert spec.dynamic == {}
        assert spec.splitting_ops is None

    def test_the_caller_can_override_the_dynamic_dimensions(self, write):
        spec = resolve_model(f"{write(GOOD)}:pair", dynamic={"x": {0: ("batch", 1, 8)}})
        assert spec.dynamic == {"x": {0: ("batch", 1, 8)}}

    def test_the_default_dtype_is_set_only_inside_the_factory(self, write):
        before = torch.get_default_dtype()
        for dtype in ("bfloat16", "torch.bfloat16", torch.bfloat16):
            spec = resolve_model(f"{write(GOOD)}:build", dtype=dtype)
            assert {tensor.dtype for tensor in tensors_of(spec)} == {torch.bfloat16}
        assert torch.get_default_dtype() == before
        with pytest.raises(ModelError):
            resolve_model(f"{write(GOOD + 'x = build(width=-1)')}:build", dtype="float64")
        assert torch.get_default_dtype() == before

    @pytest.mark.parametrize("weights", ["fake", "real"])
    def test_the_default_device_is_set_only_inside_the_factory(self, write, weights):
        spec = resolve_model(f"{write(GOOD)}:build", device="cpu", weights=weights)
        assert {tensor.device.type for tensor in tensors_of(spec)} == {"cpu"}
        assert torch.ones(1).device.type == "cpu"

    def test_no_fake_mode_stays_active(self, write):
        resolve_model(f"{write(GOOD)}:build")
        assert not is_fake(torch.ones(1))

    def test_tensors_created_outside_the_factory_become_fake_and_tied_weights_stay_tied(self, write):
        source = (
            HEAD
            + """
            TABLE = torch.arange(4.0)
            MADE_EARLY = nn.Linear(4, 4)
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first = MADE_EARLY
                    self.second = nn.Linear(4, 4)
                    self.second.weight = MADE_EARLY.weight
                    MADE_EARLY.bias.requires_grad_(False)
                    self.register_buffer("table", TABLE)
                    self.register_buffer("doubled", TABLE * 2)
                    self.plain = TABLE
                    self.strided = nn.Parameter(torch.from_numpy(__import__("numpy").ones((4, 6), "float32")).t())
            def build():
                return Net(), (TABLE, [TABLE, {"a": TABLE}], "text", None)
        """
        )
        file = write(source.replace("\n            ", "\n    "))
        spec = resolve_model(f"{file}:build")
        tensors = [*spec.module.parameters(), *spec.module.buffers(), spec.module.plain]
        nested = spec.calls[0].args
        assert all(is_fake(tensor) for tensor in [*tensors, nested[0], nested[1][0], nested[1][1]["a"]])
        assert nested[2:] == ("text", None)
        assert spec.module.first.weight is spec.module.second.weight
        assert spec.module.plain is spec.module.table
        assert isinstance(spec.module.first.weight, torch.nn.Parameter)
        assert [spec.module.first.weight.requires_grad, spec.module.first.bias.requires_grad] == [True, False]
        assert spec.module.strided.shape == (6, 4)
        assert spec.module.strided.stride() == (1, 6)

    def test_an_rnn_refers_to_its_fake_weights(self):
        with torch.device("meta"):
            module = nn.LSTM(4, 4)
        make_fake(module, new_fake_mode(), torch.device("cpu"))
        assert not module._weights_have_changed()  # otherwise its first call would flatten them again, a side effect

    def test_a_buffer_object_stays_one(self):
        with torch.device("meta"):
            module = nn.Module()
            module.kept, module.dropped = nn.Buffer(torch.ones(4)), nn.Buffer(torch.ones(4), persistent=False)
        make_fake(module, new_fake_mode(), torch.device("cpu"))
        assert all(is_fake(tensor) and isinstance(tensor, nn.Buffer) for tensor in module.buffers())
        assert list(module.state_dict()) == ["kept"]

    def test_output_of_the_users_code_goes_to_stderr(self, write, capsys):
        file = write("print('imported')\n" + dedent(GOOD) + "\ndef loud():\n    print('called')\n    return build()\n")
        resolve_model(f"{file}:loud")
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.split() == ["imported", "called"]

    @pytest.mark.parametrize(
        "conversion",
        ["to(torch.bfloat16)", "half()", "double().to('cpu')", "to(memory_format=torch.channels_last)"],
    )
    def test_a_factory_can_convert_the_module_it_built(self, write, conversion):
        file = write(
            HEAD
            + f"""
    def build():
        module = nn.Sequential(
            nn.Linear(4, 4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Embedding(4, 4), nn.LSTM(4, 4), nn.LayerNorm(4)
        )
        module.tied = module[0].weight
        module.{conversion}
        return module, (torch.zeros(2, 4),)
    """
        )

        def built(weights):
            module = resolve_model(f"{file}:build", weights=weights).module
            assert module.tied is module[0].weight
            return {
                name: (isinstance(tensor, nn.Parameter), tensor.requires_grad, (tensor + 1).dtype, tensor.stride())
                for name, tensor in module.state_dict(keep_vars=True).items()
            }

        assert built("fake") == built("real")
        assert torch.utils.swap_tensors.__module__ == "torch.utils"


class TestNames:
    def test_a_file_is_imported_under_its_stem_and_finds_its_neighbours(self, write):
        neighbour = write("WIDTH = 6\n")
        file = write(
            GOOD + f"\n    def wide():\n        from {neighbour.stem} import WIDTH\n        return build(WIDTH)\n"
        )
        spec = resolve_model(f"{file}:wide")
        assert type(spec.module).__module__ == file.stem
        assert spec.module.linear.weight.shape == (6, 6)

    def test_a_file_of_a_package_is_imported_by_its_dotted_name(self, write):
        package = f"package_of_user_{next(_numbers)}"
        write("", f"{package}/__init__.py")
        write("", f"{package}/inner/__init__.py")
        write("WIDTH = 6\n", f"{package}/sizes.py")
        file = write(
            GOOD + "\n    from ..sizes import WIDTH\n    def wide():\n        return build(WIDTH)\n",
            f"{package}/inner/net.py",
        )
        spec = resolve_model(f"{file}:wide")
        assert type(spec.module).__module__ == f"{package}.inner.net"
        assert spec.module.linear.weight.shape == (6, 6)

    def test_a_module_is_found_on_the_pythonpath(self, write):
        file = write(GOOD)
        spec = resolve_model(f"{file.stem}:build", pythonpath=[file.parent])
        assert type(spec.module).__module__ == file.stem
        assert str(file.parent) in sys.path

    def test_a_relative_path_is_relative_to_the_working_directory(self, write, monkeypatch):
        file = write(GOOD)
        monkeypatch.chdir(file.parent)
        assert type(resolve_model(f"{file.name}:build").module).__module__ == file.stem
        assert type(resolve_model(f"./{file.name}:build").module).__module__ == file.stem

    def test_a_factory_may_be_a_method_of_a_class(self, write):
        file = write(
            GOOD + "\n    class Zoo:\n        @staticmethod\n        def small():\n            return build(3)\n"
        )
        assert resolve_model(f"{file}:Zoo.small").module.linear.weight.shape == (3, 3)

    def test_a_file_that_shadows_another_module_is_refused(self, write):
        file = write(GOOD, "threading.py")
        with pytest.raises(ModelError, match="would be imported as threading") as caught:
            resolve_model(f"{file}:build")
        assert caught.value.actual == threading.__file__

    def test_a_file_name_that_is_not_an_identifier_is_refused(self, write):
        with pytest.raises(UsageError, match="Rename"):
            resolve_model(f"{write(GOOD, 'model.v2.py')}:build")


class TestWrongText:
    @pytest.mark.parametrize(
        "text", ["", "model", "model.py", "a.b.c", ":build", "package.module:", "with space:build"]
    )
    def test_a_malformed_model_lists_the_valid_forms(self, text):
        with pytest.raises(UsageError, match=r"path/to/file\.py:factory, package\.module:factory, or hf:PATH"):
            resolve_model(text)

    def test_a_file_without_a_factory_shows_how_to_name_it(self):
        with pytest.raises(UsageError, match=r"for example nets/a\.py:build"):
            resolve_model("nets/a.py")

    def test_a_missing_file_suggests_the_nearest(self, write):
        file = write(GOOD)
        wrong = file.with_name(file.name.replace("model", "modle"))
        with pytest.raises(ModelError, match=rf"{wrong} does not exist\. Did you mean {file.name}\?") as caught:
            resolve_model(f"{wrong}:build")
        assert caught.value.path == wrong

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{tmp}/nowhere/net.py:build", "does not exist"),
            ("{tmp}/:build", "is a folder"),
            ("no_such_module_of_cgtool.inner:build", r"There is no module no_such_module_of_cgtool.*--pythonpath"),
        ],
        ids=["no such folder", "a folder", "no such module"],
    )
    def test_missing_files_and_modules(self, tmp_path, text, message):
        with pytest.raises(ModelError, match=message):
            resolve_model(text.format(tmp=tmp_path))

    def test_a_missing_factory_suggests_the_nearest_or_lists_all(self, write):
        file = write(GOOD)
        with pytest.raises(ModelError, match=r"has no factory biuld\. Did you mean build\?"):
            resolve_model(f"{file}:biuld")
        with pytest.raises(ModelError, match=r"has no factory zzz\. It defines build, pair"):
            resolve_model(f"{file}:zzz")

    def test_a_factory_that_cannot_be_called(self, write):
        with pytest.raises(ModelError, match=r"number in .* is a int and cannot be called"):
            resolve_model(f"{write('number = 3')}:number")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"widht": 3}, "Did you mean width?"),
            ({"width": 3, "depth": 1}, "It takes width"),
        ],
    )
    def test_an_argument_that_the_factory_does_not_take(self, write, arguments, message):
        with pytest.raises(UsageError, match=message):
            resolve_model(f"{write(GOOD)}:build", factory_args=arguments)

    def test_an_argument_that_is_missing(self, write):
        file = write("def build(width):\n    raise AssertionError('called')\n")
        with pytest.raises(UsageError, match=r"missing a required argument: 'width'.*--arg name=value"):
            resolve_model(f"{file}:build")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"weights": "none"}, "fake or real"),
            ({"dtype": "float33"}, "not a floating-point dtype"),
            ({"dtype": "int8"}, "not a floating-point dtype"),
            ({"dtype": "nn"}, "not a floating-point dtype"),
            ({"device": "gpu0"}, "is not a device"),
        ],
    )
    def test_an_invalid_option_is_refused_before_any_code_runs(self, write, options, message):
        file = write("raise AssertionError('imported')")
        with pytest.raises(UsageError, match=message):
            resolve_model(f"{file}:build", **options)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    def test_a_missing_device(self, write):
        with pytest.raises(UsageError, match="has no CUDA device"):
            resolve_model(f"{write(GOOD)}:build", device="cuda")


class TestWrongCode:
    def test_a_factory_that_raises_shows_its_own_innermost_line(self, write):
        file = write(
            HEAD
            + """
            def inner(width):
                return torch.ones(width).view(7, 7)  # the line
            def build():
                return inner(3)
            """.replace("\n            ", "\n    ")
        )
        with pytest.raises(ModelError) as caught:
            resolve_model(f"{file}:build", weights="real")
        message = str(caught.value)
        assert f"{file}:build raised: RuntimeError: shape '[7, 7]'" in message
        assert f"{line_of(file, '# the line')}: return torch.ones(width).view(7, 7)" in message
        assert message.endswith("Fix the factory, or pass it other arguments with --arg name=value.")
        assert caught.value.path == line_of(file, "# the line")
        assert caught.value.actual == "RuntimeError"
        assert isinstance(caught.value.__cause__, RuntimeError)

    def test_a_plain_mistake_under_fake_weights_is_not_blamed_on_them(self, write):
        file = write("def build():\n    return {}['missing']\n")
        with pytest.raises(ModelError, match="raised: KeyError") as caught:
            resolve_model(f"{file}:build")
        assert "--weights" not in str(caught.value)

    @pytest.mark.parametrize(
        "line",
        [
            pytest.param("torch.linspace(0, 1, 4)[1].item()", id="item"),
            pytest.param("float(torch.ones(1).exp())", id="float"),
            pytest.param("torch.ones(3).numpy()", id="numpy"),
            pytest.param("torch.ones(3).exp().tolist()", id="tolist"),
            pytest.param("bool((torch.ones(3) > 0).all())", id="bool"),
            pytest.param("torch.ones(3).nonzero()", id="shape-by-value"),
            pytest.param("torch.equal(torch.ones(3), torch.zeros(3))", id="equal"),
        ],
    )
    def test_a_factory_that_reads_values_needs_real_weights(self, write, line):
        file = write(f"import torch\ndef build():\n    {line}  # the line\n    raise KeyError('built for real')\n")
        with pytest.raises(ModelError, match="cannot be built with fake weights") as caught:
            resolve_model(f"{file}:build")
        assert "--weights real" in str(caught.value)
        assert line_of(file, "# the line") in str(caught.value)
        with pytest.raises(ModelError, match="raised: KeyError: 'built for real'"):
            resolve_model(f"{file}:build", weights="real")

    @pytest.mark.parametrize(
        ("source", "message", "shown"),
        [
            ("WIDTH = 3\nHEIGHT = WIDTH / 0\n", "could not be imported: ZeroDivisionError", ":2: HEIGHT = WIDTH / 0"),
            ("def build(:\n    pass\n", "SyntaxError: invalid syntax", ":1: def build(:"),
            ("import no_such_module_of_ours\n", "No module named .*\n.*\n.*--pythonpath", ":1: import no_such_module"),
            ("import sys\nsys.exit(3)\n", 'if __name__ == "__main__"', ":2"),
        ],
        ids=["raises", "syntax", "not installed", "ends the process"],
    )
    def test_a_file_that_cannot_be_imported(self, write, source, message, shown):
        file = write(source)
        with pytest.raises(ModelError, match=message) as caught:
            resolve_model(f"{file}:build")
        assert f"{file}{shown}" in str(caught.value)

    def test_an_interrupt_stays_an_interrupt(self, write):
        file = write("def build():\n    raise KeyboardInterrupt\n")
        with pytest.raises(KeyboardInterrupt):
            resolve_model(f"{file}:build")

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            ("None", "returned NoneType. Let it return a cgtool.ModelSpec"),
            ("nn.Linear(2, 2)", "returned Linear"),
            ("(nn.Linear(2, 2),)", "returned a tuple of 1"),
            ("(nn.Linear(2, 2), torch.ones(2))", "with args a tuple"),
            ("(1, ())", "returned a int as its module. Let it return a torch.nn.Module"),
            ("ModelSpec(module=nn.Linear(2, 2), calls=[])", "without calls. Give it at least one"),
            (
                "ModelSpec(module=nn.Linear(2, 2), calls=[(torch.ones(2),)])",
                "calls.* must be a cgtool.ExampleCall, not tuple",
            ),
            (
                "ModelSpec(module=nn.Linear(2, 2), calls=ExampleCall())",
                "calls must be a list of cgtool.ExampleCall, not ExampleCall",
            ),
            ("ExampleCall(args=torch.ones(2))", "ExampleCall.args must be a tuple, .*, not .*Tensor"),
            ("ExampleCall(kwargs=[1])", "ExampleCall.kwargs must be a dict, .*, not list"),
            (
                "ModelSpec(module=None, calls=[], splitting_ops='aten::mm')",
                "splitting_ops must be a list of strings, not str",
            ),
            (
                "ModelSpec(module=None, calls=[], require={'n': 5})",
                "require.'n'. must be a pair of the smallest and the largest size, .*, not int",
            ),
            ("ModelSpec(module=nn.Linear(2, 2), calls=[ExampleCall()], method='decode')", "no method decode"),
        ],
    )
    def test_a_factory_that_returns_something_else(self, write, returned, message):
        file = write(HEAD + f"\n    def build():\n        return {returned}\n")
        with pytest.raises(ModelError, match=message):
            resolve_model(f"{file}:build")
