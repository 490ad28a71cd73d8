"""Features of torch's own state: settings, modes, hooks, and the call of a module."""

from __future__ import annotations

from soundness_projects import Feature

MODEL = ("model",)


def state(condition: str, live: str, names: str, **fields) -> Feature:
    """Return a feature of torch's state: what `forward` gives when a condition holds."""
    return Feature(probe=f"3.0 if {condition} else 2.0", live=live, names=names, places=MODEL, **fields)


def hooked(live: str, names: str, **fields) -> Feature:
    """Return a feature of how modules are called."""
    return Feature(
        init="self.part = nn.Identity()",
        probe="it.part",
        result="value(x)",
        live=live,
        names=names,
        places=("model", "submodule"),
        **fields,
    )


MATRIX = "x.expand(4, 4) @ x.expand(4, 4)"

STATE = {
    "default_dtype": Feature(
        probe="2.0",
        result="torch.ones(4)",
        live="torch.set_default_dtype(torch.float64)",
        names="dtype",
        places=MODEL,
    ),
    "default_device": Feature(
        probe="2.0", result="torch.ones(4)", live="torch.set_default_device('meta')", names="device", places=MODEL
    ),
    "autocast": Feature(
        probe="2.0", result=MATRIX, live="torch.autocast('cpu').__enter__()", names="autocast", places=MODEL
    ),
    "dtype_of_autocast_asked": state(
        "torch.get_autocast_dtype('cpu') is torch.float16", "torch.set_autocast_dtype('cpu', torch.float16)", "autocast"
    ),
    "tf32_of_cudnn": state(
        "not torch.backends.cudnn.allow_tf32", "torch.backends.cudnn.allow_tf32 = False", "tf32|precision"
    ),
    "benchmark_of_cudnn": state(
        "torch.backends.cudnn.benchmark", "torch.backends.cudnn.benchmark = True", "cudnn|benchmark"
    ),
    "cudnn_enabled": state("not torch.backends.cudnn.enabled", "torch.backends.cudnn.enabled = False", "cudnn"),
    "deterministic": state(
        "torch.are_deterministic_algorithms_enabled()", "torch.use_deterministic_algorithms(True)", "determinis"
    ),
    "anomaly_mode": state(
        "torch.is_anomaly_enabled()", "torch.autograd.set_detect_anomaly(True)", "anomaly", refused=True
    ),
    "warn_always": state("torch.is_warn_always_enabled()", "torch.set_warn_always(True)", "warn", refused=True),
    "grad_mode": state("torch.is_grad_enabled()", "", "grad", context="torch.enable_grad()"),
    "grad_mode_by_alias": Feature(
        head="from torch import is_grad_enabled as asks",
        probe="3.0 if asks() else 2.0",
        context="torch.enable_grad()",
        names="grad",
        places=MODEL,
    ),
    "grad_mode_of_the_bindings": state("torch._C.is_grad_enabled()", "", "grad", context="torch.enable_grad()"),
    "grad_mode_by_an_attribute": Feature(
        init="self.asks = torch.is_grad_enabled",
        probe="3.0 if it.asks() else 2.0",
        context="torch.enable_grad()",
        names="grad",
        places=("model", "config"),
    ),
    "function_mode": Feature(
        head=(
            "from torch.overrides import TorchFunctionMode\n\nclass Tripled(TorchFunctionMode):\n"
            "    def __torch_function__(self, function, types, args=(), kwargs=None):\n"
            "        made = function(*args, **kwargs or {})\n"
            "        return made * 3 if function is torch.sigmoid else made\n"
        ),
        probe="2.0",
        result="torch.sigmoid(x)",
        live="home.Tripled().__enter__()",
        names="mode|function",
        places=MODEL,
    ),
    "dispatch_mode": Feature(
        head=(
            "from torch.utils._python_dispatch import TorchDispatchMode\n\nclass Tripled(TorchDispatchMode):\n"
            "    def __torch_dispatch__(self, function, types, args=(), kwargs=None):\n"
            "        made = function(*args, **kwargs or {})\n"
            "        return made * 3 if function is torch.ops.aten.sigmoid.default else made\n"
        ),
        probe="2.0",
        result="torch.sigmoid(x)",
        live="home.Tripled().__enter__()",
        names="mode|dispatch",
        places=MODEL,
    ),
    "global_forward_hook": hooked(
        "torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 3)", "hook"
    ),
    "global_forward_pre_hook": hooked(
        "torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: (args[0] * 3,))", "hook"
    ),
    "call_of_a_module": hooked(
        "torch.nn.Module.__call__ = lambda self, *args: self.forward(*args) * 3", "__call__|Module"
    ),
    "call_impl_of_a_module": hooked(
        "torch.nn.Module._call_impl = lambda self, *args: self.forward(*args) * 3", "_call_impl|Module"
    ),
    "getattr_of_a_module": Feature(
        init="self.gain = 2.0",
        probe="getattr(it, 'extra', 2.0)",
        live="torch.nn.Module.__getattr__ = lambda self, name: 3.0",
        names="__getattr__|Module|extra",
        places=("model",),  # the submodule itself would be found by it
    ),
    "forward_of_torchs_class": hooked("torch.nn.Identity.forward = lambda self, x: x * 3", "Identity|forward"),
}
