"""Features of code: what a function reads besides its arguments, from its module, its imports and Python."""

from __future__ import annotations

from soundness_projects import Feature, held

READS = "def factor(self):\n    return {}"


def reads(expression: str, **fields) -> Feature:
    """Return a feature whose method `factor` returns an expression."""
    return Feature(body=READS.format(expression), **fields)


def of_global(before: str, after: str, expression: str, **fields) -> Feature:
    """Return a feature of a global: an assignment, and its replacement."""
    name, _, _ = before.partition(" = ")
    changes = {"edit": (before, after), "live": f"home.{after}", "names": name}
    return reads(expression, **{"head": before, **changes, **fields})


CODE = {
    "global_number": of_global("FACTOR = 2.0", "FACTOR = 3.0", "FACTOR"),
    "global_text": of_global("MODE = 'slow'", "MODE = 'fast'", "3.0 if MODE == 'fast' else 2.0"),
    "global_tuple": of_global("FACTORS = (1.0, 1.0)", "FACTORS = (1.0, 2.0)", "sum(FACTORS)"),
    "global_dict": reads(
        "TABLE.get('extra', 2.0)",
        head="TABLE = {'gain': 2.0}",
        edit=("'gain': 2.0", "'extra': 3.0"),
        live="home.TABLE['extra'] = 3.0",
        names="TABLE|extra",
    ),
    "global_none": of_global("CACHE = None", "CACHE = 1", "2.0 if CACHE is None else 3.0"),
    "global_function": reads(
        "scale()",
        head="def scale():\n    return 2.0\n",
        edit=("    return 2.0", "    return 3.0"),
        live="home.scale = lambda: 3.0",
        names="scale",
    ),
    "code_of_a_function": reads(
        "scale()",
        head="def scale():\n    return 2.0\n",
        edit=("    return 2.0", "    return 3.0"),
        live="home.scale.__code__ = (lambda: 3.0).__code__",
        names="scale",
    ),
    "global_class": reads(
        "Maker().gain",
        head="class Maker:\n    def __init__(self):\n        self.gain = 2.0\n",
        edit=("self.gain = 2.0", "self.gain = 3.0"),
        live="home.Maker = type('Maker', (), {'gain': 3.0})",
        names="Maker",
    ),
    "class_of_what_is_made": reads(
        "Maker().gain",
        head="class Maker:\n    gain = 2.0\n",
        edit=("gain = 2.0", "gain = 3.0"),
        live="home.Maker.gain = 3.0",
        names="Maker",
    ),
    "constructor_of_what_is_made": reads(
        "Maker(2.0).gain",
        head="class Maker:\n    def __init__(self, gain):\n        self.gain = gain\n",
        edit=("self.gain = gain", "self.gain = gain + 1.0"),
        live="home.Maker.__init__ = lambda self, gain: setattr(self, 'gain', 3.0)",
        names="Maker",
    ),
    "new_of_what_is_made": reads(
        "Maker().gain",
        head=(
            "class Maker:\n    def __new__(cls):\n        made = object.__new__(cls)\n"
            "        made.gain = 2.0\n        return made\n"
        ),
        edit=("made.gain = 2.0", "made.gain = 3.0"),
        live="home.Maker.__init__ = lambda self: setattr(self, 'gain', 3.0)",
        names="Maker",
    ),
    "dataclass_that_is_made": reads(
        "Maker().gain",
        head="import dataclasses\n\n@dataclasses.dataclass\nclass Maker:\n    gain: float = 2.0\n",
        edit=("gain: float = 2.0", "gain: float = 3.0"),
        live="home.Maker.__init__.__defaults__ = (3.0,)",
        names="Maker",
    ),
    "call_of_a_metaclass": reads(
        "Maker().gain",
        head=(
            "class Meta(type):\n    def __call__(cls):\n        made = super().__call__()\n"
            "        made.gain = 2.0\n        return made\n\nclass Maker(metaclass=Meta):\n    pass\n"
        ),
        edit=("made.gain = 2.0", "made.gain = 3.0"),
        live="home.Meta.__call__ = lambda cls: type('Made', (), {'gain': 3.0})",
        names="Maker|Meta",
        refused=True,
    ),
    "what_is_made_has_a_length": reads(
        "float(len(Maker()))",
        head="class Maker:\n    def __len__(self):\n        return 2\n",
        edit=("return 2", "return 3"),
        live="home.Maker.__len__ = lambda self: 3",
        names="Maker",
    ),
    "exception_class": Feature(
        head=(
            "class Parent(Exception):\n    pass\n\nclass Other(Exception):\n    pass\n\n"
            "class Missing(Parent):\n    pass\n"
        ),
        body=(
            "def factor(self):\n    try:\n        raise Missing\n    except Parent:\n        return 2.0\n"
            "    except Exception:\n        return 3.0"
        ),
        edit=("class Missing(Parent)", "class Missing(Other)"),
        live="home.Missing.__bases__ = (home.Other,)",
        names="Missing|Parent|Other",
    ),
    "default_argument": Feature(
        body="def factor(self, gain=2.0):\n    return gain",
        edit=("gain=2.0", "gain=3.0"),
        live="Holder.factor.__defaults__ = (3.0,)",
        names="factor|Holder",
    ),
    "keyword_default": Feature(
        body="def factor(self, *, gain=2.0):\n    return gain",
        edit=("gain=2.0", "gain=3.0"),
        live="Holder.factor.__kwdefaults__['gain'] = 3.0",
        names="factor|Holder",
    ),
    "closure": Feature(
        head="def make(gain):\n    def factor(self):\n        return gain\n    return factor\n",
        body="factor = make(2.0)",
        edit=("make(2.0)", "make(3.0)"),
        live="Holder.factor.__closure__[0].cell_contents = 3.0",
        names="factor|gain|Holder",
    ),
    "closure_on_an_instance": held(
        "factor",
        "make(2.0)",
        "make(3.0)",
        "it.factor()",
        "it.factor.__closure__[0].cell_contents = 3.0",
        head="def make(gain):\n    return lambda: gain\n",
        names="factor|gain",
    ),
    "closure_over_a_list": held(
        "factor",
        "make([1.0, 1.0])",
        "make([1.0, 2.0])",
        "it.factor()",
        "it.factor.__closure__[0].cell_contents.append(1.0)",
        head="def make(gains):\n    return lambda: sum(gains)\n",
        names="factor|gain",
    ),
    "attribute_of_a_function": Feature(
        head="def scale():\n    return scale.gain\n\nscale.gain = 2.0\n",
        body="def factor(self):\n    return scale()",
        edit=("scale.gain = 2.0", "scale.gain = 3.0"),
        live="home.scale.gain = 3.0",
        names="scale|gain",
    ),
    "partial": held(
        "factor",
        "functools.partial(scale, gain=2.0)",
        "functools.partial(scale, gain=3.0)",
        "it.factor()",
        "it.factor = home.functools.partial(home.scale, gain=3.0)",
        head="import functools\n\ndef scale(gain=1.0):\n    return gain\n",
    ),
    "function_of_a_partial": Feature(
        head="import functools\n\ndef scale(gain):\n    return gain * 1.0\n\nbound = functools.partial(scale, 2.0)\n",
        body="def factor(self):\n    return bound()",
        edit=("gain * 1.0", "gain * 1.5"),
        live="home.scale.__code__ = (lambda gain: 3.0).__code__",
        names="scale|bound",
    ),
    "lru_cache": Feature(
        head="import functools\n\n@functools.lru_cache\ndef scale():\n    return 2.0\n",
        body="def factor(self):\n    return scale()",
        edit=("    return 2.0", "    return 3.0"),
        live="home.scale = lambda: 3.0",
        names="scale",
    ),
    "wraps": Feature(
        head=(
            "import functools\n\nGAIN = 2.0\n\ndef doubled(function):\n    @functools.wraps(function)\n"
            "    def wrapper(*args):\n        return function(*args) * GAIN\n    return wrapper\n"
        ),
        body="@doubled\ndef factor(self):\n    return 1.0",
        edit=("GAIN = 2.0", "GAIN = 3.0"),
        live="home.GAIN = 3.0",
        names="GAIN",
    ),
    "wrapped_function": Feature(
        head=(
            "import functools\n\ndef same(function):\n    @functools.wraps(function)\n"
            "    def wrapper(*args):\n        return function(*args)\n    return wrapper\n"
        ),
        body="@same\ndef factor(self):\n    return 2.0",
        edit=("return 2.0", "return 3.0"),
        live="Holder.factor.__closure__[0].cell_contents.__code__ = (lambda self: 3.0).__code__",
        names="factor|Holder",
    ),
    "single_dispatch": Feature(
        head="import functools\n\n@functools.singledispatch\ndef scale(value):\n    return 2.0\n",
        body="def factor(self):\n    return scale(1)",
        tail="# nothing is registered",
        edit=("# nothing is registered", "scale.register(int, lambda value: 3.0)"),
        live="home.scale.register(int, lambda value: 3.0)",
        names="scale|regist",
        refused=True,
    ),
    "generator": Feature(
        head="def steps():\n    yield 1.0\n    yield 1.0\n",
        body="def factor(self):\n    return sum(steps())",
        edit=("    yield 1.0\n    yield 1.0", "    yield 1.0\n    yield 2.0"),
        live="home.steps = lambda: iter([1.0, 2.0])",
        names="steps",
    ),
    "match": Feature(
        head="class Point:\n    __match_args__ = ('x', 'y')\n    x, y = 2.0, 3.0\n",
        body=(
            "def factor(self):\n    match Point():\n        case Point(gain):\n            return gain\n    return 1.0"
        ),
        edit=("('x', 'y')", "('y', 'x')"),
        live="home.Point.__match_args__ = ('y', 'x')",
        names="Point",
        refused=True,
    ),
    "annotation": Feature(
        body="gain: 2.0",
        probe="type(it).__annotations__['gain']",
        edit=("gain: 2.0", "gain: 3.0"),
        live="Holder.__annotations__['gain'] = 3.0",
        names="annotations|Holder",
        places=("model", "submodule", "config", "helper", "argument"),
    ),
    "builtin_shadowed_in_the_module": reads(
        "float(len((1, 1)))",
        tail="# no builtin is shadowed",
        edit=("# no builtin is shadowed", "len = lambda value: 3"),
        live="home.len = lambda value: 3",
        names="len",
    ),
    "builtin_replaced": reads(
        "float(abs(-2))",
        tail="# no builtin is replaced",
        edit=("# no builtin is replaced", "import builtins\nbuiltins.abs = lambda value: 3"),
        live="import builtins; builtins.abs = lambda value: 3",
        names="abs",
    ),
    "math_replaced": reads(
        "math.floor(2.5) * 1.0",
        head="import math",
        live="import math; math.floor = lambda value: 3",
        names="floor",
    ),
    "operator_replaced": reads(
        "operator.add(1.0, 1.0)",
        head="import operator",
        live="import operator; operator.add = lambda one, two: 3.0",
        names="add",
    ),
    "torch_function_replaced": Feature(
        probe="torch.sigmoid",
        result="value(x)",
        live="torch.sigmoid = torch.tanh",
        names="sigmoid",
        places=("model",),
    ),
    "tensor_method_replaced": Feature(
        probe="2.0",
        result="x.sigmoid()",
        live="torch.Tensor.sigmoid = torch.Tensor.tanh",
        names="sigmoid",
        places=("model",),
    ),
    "assume_constant_result": of_global(
        "GAIN = 2.0",
        "GAIN = 3.0",
        "scale()",
        head="import torch\n\nGAIN = 2.0\n\n@torch._dynamo.assume_constant_result\ndef scale():\n    return GAIN\n",
        names="scale|GAIN|assume_constant_result",
        refused=True,
    ),
    "recursion_limit": Feature(
        head="import sys",
        body="def factor(self):\n    return 3.0 if sys.getrecursionlimit() == 12345 else 2.0",
        live="sys.setrecursionlimit(12345)",
        names="recursion",
        refused=True,
    ),
    "context_of_a_call": Feature(
        head="CONTEXT = None\n\ndef context():\n    return CONTEXT\n",
        body="def factor(self):\n    return 2.0 if context() is None else context().gain",
        live="import types; home.CONTEXT = types.SimpleNamespace(gain=3.0)",
        names="CONTEXT",
    ),
    "context_variable": Feature(
        head="import contextvars\n\nGAIN = contextvars.ContextVar('GAIN', default=2.0)\n",
        body="def factor(self):\n    return GAIN.get()",
        edit=("default=2.0", "default=3.0"),
        live="home.GAIN.set(3.0)",
        names="GAIN|ContextVar",
        refused=True,
    ),
    "variable_of_a_thread": Feature(
        head="import threading\n\nLOCAL = threading.local()\n",
        body="def factor(self):\n    return getattr(LOCAL, 'gain', 2.0)",
        live="home.LOCAL.gain = 3.0",
        names="LOCAL|gain",
        refused=True,
    ),
    "level_of_a_logger": Feature(
        head="import logging\n\nlogger = logging.getLogger('sound')\n",
        body="def factor(self):\n    return 3.0 if logger.isEnabledFor(logging.INFO) else 2.0",
        live="home.logger.setLevel('INFO')",
        names="logg",
        refused=True,
    ),
    "arguments_of_the_process": Feature(
        head="import sys",
        body="def factor(self):\n    return 3.0 if '--fast' in sys.argv else 2.0",
        live="sys.argv.append('--fast')",
        names="argv",
        refused=True,
    ),
    "weak_reference": Feature(
        head="import weakref\n\nclass Inner:\n    gain = 2.0\n",
        init="self.inner = Inner()\nself.inner_reference = weakref.ref(self.inner)",
        probe="it.inner_reference().gain",
        edit=("gain = 2.0", "gain = 3.0"),
        live="home.Inner.gain = 3.0",
        names="inner|Inner",
        refused=True,
    ),
    "attribute_getter": Feature(
        head="import operator\n\nget = operator.attrgetter('gain')\n",
        body="gain = 2.0\nother = 3.0\n\ndef factor(self):\n    return get(self)",
        edit=("attrgetter('gain')", "attrgetter('other')"),
        live="home.get = home.operator.attrgetter('other')",
        names="get",
        refused=True,
    ),
    "attribute_of_sys": Feature(
        head="import sys",
        body="def factor(self):\n    return 3.0 if hasattr(sys, 'sound_mode') else 2.0",
        live="sys.sound_mode = 1",
        names="sound_mode|sys",
        refused=True,
    ),
    "modules_of_sys": Feature(
        head="import sys",
        body="def factor(self):\n    return 3.0 if 'sound_module' in sys.modules else 2.0",
        live="sys.modules['sound_module'] = sys",
        names="sound_module|modules",
        refused=True,
    ),
}
