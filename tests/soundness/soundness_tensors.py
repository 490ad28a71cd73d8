"""Features of tensors and of arguments, whose properties Dynamo folds while it traces."""

from __future__ import annotations

from soundness_projects import MODULES, Feature, held

MODEL = ("model",)


def argument(probe: str, live: str, names: str, **fields) -> Feature:
    """Return a feature of the tensor `x` passed to `forward`."""
    return Feature(probe="2.0", result=f"x * ({probe})", live=live, names=names, places=MODEL, **fields)


def second(factor: str, given: str, later: str, **fields) -> Feature:
    """Return a feature of a second argument, `other`, that decides what `x` is multiplied by."""
    changes = {"arguments": given, "live": f"args = (args[0], {later})"}
    plain = {"probe": "2.0", "result": f"x * ({factor})", "parameters": "other", "names": "other", "places": MODEL}
    return Feature(**{**plain, **changes, **fields})


TENSOR, TWO = "torch.linspace(1.0, 2.0, 4)", "[torch.ones(4), torch.ones(4)]"
PARAMETER = "nn.Parameter(torch.ones(4))"
ONES = "torch.ones(4)"

TENSORS = {
    "requires_grad": held(
        "weight",
        PARAMETER,
        "nn.Parameter(torch.ones(4), requires_grad=False)",
        "2.0 if it.weight.requires_grad else 3.0",
        "it.weight.requires_grad_(False)",
    ),
    "requires_grad_by_name": held(
        "weight",
        PARAMETER,
        "",
        "2.0 if getattr(it.weight, 'requires_grad') else 3.0",
        "it.weight.requires_grad_(False)",
    ),
    "requires_grad_of_all": held(
        "weight",
        PARAMETER,
        "",
        "2.0 if all(weight.requires_grad for weight in it.parameters()) else 3.0",
        "it.weight.requires_grad_(False)",
        places=MODULES,
    ),
    "requires_grad_of_a_buffer": held(
        "weight",
        ONES,
        "torch.ones(4).requires_grad_()",
        "3.0 if it.weight.requires_grad else 2.0",
        "it.weight.requires_grad_()",
    ),
    "is_leaf": held("weight", ONES, "torch.ones(4, requires_grad=True) * 1", "2.0 if it.weight.is_leaf else 3.0"),
    "grad_fn": held(
        "weight", ONES, "torch.ones(4, requires_grad=True) * 1", "2.0 if it.weight.grad_fn is None else 3.0"
    ),
    "grad": held("weight", PARAMETER, "", "2.0 if it.weight.grad is None else 3.0", "it.weight.grad = torch.ones(4)"),
    "is_parameter": held(
        "weight",
        PARAMETER,
        "torch.ones(4, requires_grad=True)",
        "2.0 if isinstance(it.weight, nn.Parameter) else 3.0",
        "del it.weight; it.weight = torch.ones(4, requires_grad=True)",
    ),
    "is_buffer": held(
        "weight",
        ONES,
        f"nn.Buffer({ONES})",
        "3.0 if isinstance(it.weight, nn.Buffer) else 2.0",
        f"del it.weight; it.weight = nn.Buffer({ONES})",
        places=("model", "submodule"),
    ),
    "hidden_by_an_attribute": Feature(
        init=f"self.register_buffer('weight', {ONES})",
        probe="it.weight",
        result="x * value",
        instance=f"vars(it)['weight'] = {ONES} * 3",
        names="weight",
        places=("model", "submodule"),
    ),
    "exact_type": Feature(
        head="class Marked(torch.Tensor):\n    pass\n",
        init=f"self.weight = {ONES}",
        probe="2.0 if type(it.weight) is torch.Tensor else 3.0",
        edit=(ONES, f"{ONES}.as_subclass(Marked)"),
        instance="it.weight = it.weight.as_subclass(home.Marked)",
        names="weight",
    ),
    "type_of_a_parameter": Feature(
        head="class Special(nn.Parameter):\n    pass\n",
        init=f"self.weight = {PARAMETER}",
        probe="from app import HOME\nreturn 3.0 if isinstance(it.weight, HOME.Special) else 2.0",
        edit=(PARAMETER, "Special(torch.ones(4))"),
        instance="it.weight = home.Special(torch.ones(4))",
        names="weight|Special",
    ),
    "attribute_of_a_tensor": held("weight", PARAMETER, "", "getattr(it.weight, 'scale', 2.0)", "it.weight.scale = 3.0"),
    "attribute_of_a_tensor_asked": held(
        "weight", PARAMETER, "", "3.0 if hasattr(it.weight, 'scale') else 2.0", "it.weight.scale = 3.0"
    ),
    "attribute_of_a_tensor_changed": Feature(
        init=f"self.weight = {PARAMETER}\nself.weight.scale = 2.0",
        probe="it.weight.scale",
        edit=("self.weight.scale = 2.0", "self.weight.scale = 3.0"),
        instance="it.weight.scale = 3.0",
        names="weight|scale",
    ),
    "stride": held(
        "weight", "torch.ones(2, 2)", "torch.ones(2, 2).t()", "float(it.weight.stride(0))", "it.weight = it.weight.t()"
    ),
    "stride_of_size_one": held("weight", "torch.ones(1, 4)", "torch.ones(2, 4)[::2]", "float(it.weight.stride(0))"),
    "strides_as_a_tuple": held(
        "weight", "torch.ones(1, 4)", "", "float(sum(it.weight.stride()))", "it.weight = torch.ones(2, 4)[::2]"
    ),
    "is_contiguous": held(
        "weight",
        "torch.ones(2, 3)",
        "",
        "2.0 if it.weight.is_contiguous() else 3.0",
        "it.weight = torch.ones(3, 2).t()",
    ),
    "storage_offset": held(
        "weight", "torch.ones(8)[:4]", "torch.ones(8)[4:]", "2.0 + it.weight.storage_offset()", refused=True
    ),
    "dtype": held(
        "weight", ONES, f"{ONES}.double()", "it.weight.dtype", "it.weight = it.weight.double()", result="x.to(value)"
    ),
    "is_floating_point": held(
        "weight",
        "torch.ones(4, dtype=torch.long)",
        "",
        "3.0 if it.weight.is_floating_point() else 2.0",
        "it.weight = torch.ones(4)",
    ),
    "shape": held("weight", ONES, "torch.ones(5)", "float(it.weight.shape[0])"),
    "number_of_dimensions": held("weight", ONES, "torch.ones(4, 1)", "float(it.weight.ndim)"),
    "device": held(
        "weight",
        ONES,
        "torch.ones(4, device='meta')",
        "2.0 if it.weight.device.type == 'cpu' else 3.0",
        "it.weight = it.weight.to('meta')",
    ),
    "is_inference": held(
        "weight",
        ONES,
        "",
        "3.0 if it.weight.is_inference() else 2.0",
        "with torch.inference_mode():\n    it.weight = torch.ones(4)",
        refused=True,
    ),
    "is_conj": held(
        "weight",
        "torch.ones(4, dtype=torch.complex64)",
        "torch.ones(4, dtype=torch.complex64).conj()",
        "3.0 if it.weight.is_conj() else 2.0",
        "it.weight = it.weight.conj()",
        refused=True,
    ),
    "is_shared": held(
        "weight", ONES, "", "3.0 if it.weight.is_shared() else 2.0", "it.weight.share_memory_()", refused=True
    ),
    "same_memory": Feature(
        init="self.one = torch.ones(4)\nself.two = torch.ones(4)",
        probe="3.0 if it.one.data_ptr() == it.two.data_ptr() else 2.0",
        instance="it.two = it.one[:]",
        names="one|two|data_ptr",
        refused=True,
    ),
    "number_in_a_tensor": held(
        "weight", "torch.tensor(2.0)", "", "float(it.weight)", "it.weight.fill_(3.0)", refused=True
    ),
    "constant_of_torchs_module": held(
        "part",
        "nn.LayerNorm(4)",
        "nn.LayerNorm(4, eps=1.0)",
        "it.part",
        "it.part.eps = 1.0",
        result="value(x)",
        places=MODULES,
    ),
    "function_of_torch": held("act", "torch.relu", "torch.sigmoid", "it.act", result="value(x)"),
    "class_of_torchs_module": held(
        "part",
        "nn.ReLU()",
        "nn.Sigmoid()",
        "it.part",
        "it.part = torch.nn.Sigmoid()",
        result="value(x)",
        places=MODULES,
    ),
    "parametrization": Feature(
        init="self.part = nn.Linear(4, 4, bias=False)\n# nothing is parametrized",
        probe="it.part",
        result="value(x)",
        edit=(
            "# nothing is parametrized",
            "torch.nn.utils.parametrize.register_parametrization(self.part, 'weight', nn.Sigmoid())",
        ),
        instance="torch.nn.utils.parametrize.register_parametrization(it.part, 'weight', torch.nn.Sigmoid())",
        names="part",
        places=MODULES,
    ),
    "argument_requires_grad": argument("2.0 if x.requires_grad else 3.0", "args[0].requires_grad_()", "grad"),
    "argument_is_leaf": argument("2.0 if x.is_leaf else 3.0", "args = (args[0].requires_grad_() * 1,)", "leaf|grad"),
    "argument_stride_of_size_one": argument("float(x[:1].stride(0))", "args = (torch.ones(8)[::2],)", "stride|x"),
    "argument_is_parameter": argument(
        "3.0 if isinstance(x, nn.Parameter) else 2.0",
        "args = (nn.Parameter(args[0], requires_grad=False),)",
        "x|Parameter",
    ),
    "argument_of_a_subclass": argument(
        "2.0 if type(x) is torch.Tensor else 3.0",
        "args = (args[0].as_subclass(home.Marked),)",
        "x|Marked",
        head="class Marked(torch.Tensor):\n    pass\n",
    ),
    "argument_dtype": argument("2.0", "args = (args[0].double(),)", "x|dtype|float64"),
    "argument_shape": argument("float(x.shape[0])", "args = (torch.ones(5),)", "x|shape|size"),
    "argument_with_an_attribute": argument("getattr(x, 'scale', 2.0)", "args[0].scale = 3.0", "x|scale"),
}

#: The same tensor or object given twice, or given and held.
ARGUMENTS = {
    "arguments_become_one": second("3.0 if x is other else 2.0", TENSOR, "args[0]", names="x|other|same"),
    "arguments_become_two": second(
        "3.0 if x is other else 2.0", "", "args[0]", parameters="other=None", names="x|other"
    ),
    "argument_is_a_buffer": argument(
        "3.0 if x is self.own else 2.0",
        "args = (model.own,)",
        "x|own",
        init="self.register_buffer('own', torch.linspace(1.0, 2.0, 4))",
    ),
    "arguments_share_memory_and_one_is_written": second(
        "other.fill_(3.0)", TENSOR, "args[0][:]", names="x|other|memory|storage"
    ),
    "elements_of_an_argument": second("3.0 if other[0] is other[1] else 2.0", TWO, "[args[0], args[0]]"),
    "length_of_an_argument": second("float(len(other))", TWO, "[args[0]]"),
    "key_of_an_argument": second(
        "other.get('extra', 2.0)", "{'gain': 1.0}", "{'gain': 1.0, 'extra': 3.0}", names="other|extra"
    ),
    "number_as_an_argument": second("other", "2.0", "3.0"),
    "true_as_an_argument": second("other", "1", "True", result="torch.full((4,), other)"),
    "default_of_forward": Feature(
        probe="2.0",
        result="x * other",
        parameters="other=2.0",
        edit=("other=2.0", "other=3.0"),
        live="net.Net.forward.__defaults__ = (3.0,)",
        names="other|forward",
        places=MODEL,
    ),
    "class_of_an_argument": second(
        "other.gain",
        "net.One()",
        "net.Two()",
        head="class One:\n    gain = 2.0\n\nclass Two:\n    gain = 3.0\n",
        names="other|One|Two",
    ),
    "length_of_a_class_of_an_argument": argument(
        "float(len(other))",
        "net.One.__len__ = lambda self: 3",
        "other|One",
        head="class One:\n    def __len__(self):\n        return 2\n",
        parameters="other",
        arguments="net.One()",
    ),
    "none_as_an_argument": second("2.0 if other is None else 3.0", "None", "1"),
}
