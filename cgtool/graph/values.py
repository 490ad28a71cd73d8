"""Encoding and decoding of nodes' arguments, constants and tensor metadata as JSON.

`cgtool.plan.pieces` defines the grammar. Symbolic sizes become text through `cgtool.graph.sympy_text`, which is
imported lazily because it needs sympy; a process with a symbolic size has imported that already. A value that the
grammar does not have is an error when it is encoded. Must not import torch._dynamo, torch._inductor or sympy.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import fx

from cgtool.errors import ArtifactError, SplitError
from cgtool.plan.pieces import Body, Dim, Json, PieceGraph, TensorMeta

_REF = r"%(0|[1-9][0-9]*)"
#: Layouts and memory formats by their names in JSON, also in the literals of guards and outputs.
LAYOUTS = {str(v).removeprefix("torch."): v for v in (torch.strided, torch.sparse_coo, torch.sparse_csr)}
FORMATS = {
    str(v).removeprefix("torch."): v
    for v in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
#: Encoders of containers; the second argument encodes an item. The types are exact: a named tuple is not a plain tuple.
_CONTAINERS: dict[type, Callable[[Any, Callable[[Any], Json]], Json]] = {
    list: lambda value, item: [item(v) for v in value],
    fx.immutable_collections.immutable_list: lambda value, item: [item(v) for v in value],
    tuple: lambda value, item: {"t": [item(v) for v in value]},
    torch.Size: lambda value, item: {"t": [item(v) for v in value]},
    dict: lambda value, item: {"d": [[item(k), item(v)] for k, v in value.items()]},
    fx.immutable_collections.immutable_dict: lambda value, item: {"d": [[item(k), item(v)] for k, v in value.items()]},
    slice: lambda value, item: {"slice": [item(v) for v in (value.start, value.stop, value.step)]},
}
#: Encoders of other values; they return None for a value that the grammar does not have.
_ATOMS: dict[type, Callable[[Any], Json]] = {
    float: lambda value: {"f": repr(value)},
    str: lambda value: {"s": value},
    complex: lambda value: {"c": [repr(value.real), repr(value.imag)]},
    type(...): lambda _value: {"ellipsis": 0},
    torch.dtype: lambda value: {"dtype": dtype_text(value)},
    torch.device: lambda value: {"device": device_text(value)},
    torch.layout: lambda value: _named("layout", value, LAYOUTS),
    torch.memory_format: lambda value: _named("format", value, FORMATS),
}
_SYMBOLIC = (fx.Node, torch.SymInt, torch.SymFloat, torch.SymBool)


def encode_value(value: Any, ref: Callable[[Any], Json]) -> Json:
    """Encode an argument of an FX node in the grammar of `cgtool.plan.pieces`.

    `ref` encodes each `fx.Node` and each symbolic number, usually as a reference such as "%3".

    Raises:
        SplitError: `value` contains an object that the grammar does not have.
    """
    if isinstance(value, _SYMBOLIC):
        return ref(value)
    if value is None or type(value) in (bool, int):
        return value
    container = _CONTAINERS.get(type(value))
    if container is not None:
        return container(value, lambda item: encode_value(item, ref))
    if isinstance(value, torch.Tensor):
        return {"const": _encode_constant(value)}
    atom = _ATOMS.get(type(value))
    encoded = atom(value) if atom is not None else None
    if encoded is not None:
        return encoded
    text = str(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise SplitError(
        f"an op of the graph takes {text[:80]} of type {kind}, which a plan cannot store; pass it as a number, "
        f"string, list or tensor",
        actual=kind,
    )


def _named(tag: str, value: Any, known: dict[str, Any]) -> Json:
    text = str(value).removeprefix("torch.")
    return {tag: text} if text in known else None


def _encode_constant(tensor: torch.Tensor) -> Json:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        raise SplitError(
            f"the graph contains a constant tensor of type {type(tensor).__name__} whose values are unknown; build the "
            f"model with real weights (--weights real), or register the tensor as a buffer",
            actual=type(tensor).__name__,
        )
    plain = tensor.detach().to("cpu").contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    encoded: dict[str, Json] = {
        "dtype": dtype_text(tensor.dtype),
        "shape": list(tensor.shape),
        "data": base64.b64encode(data).decode("ascii"),
    }
    if tensor.device.type != "cpu":
        encoded["device"] = device_text(tensor.device)
    return encoded


def decode_value(data: Json, lookup: Callable[[str], Any]) -> Any:
    """Decode a value that `encode_value` returned; `lookup` resolves each reference, such as "%3".

    Raises:
        ArtifactError: `data` is outside the grammar.
    """
    if data is None or type(data) in (bool, int):
        return data
    if type(data) is str:
        if not re.fullmatch(_REF, data):
            raise _malformed(data)
        return lookup(data)
    if type(data) is list:
        return [decode_value(item, lookup) for item in data]
    if type(data) is not dict or len(data) != 1:
        raise _malformed(data)
    [(tag, body)] = data.items()
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise _malformed(data)
    try:
        return decoder(body, lookup)
    except (TypeError, ValueError, KeyError, RuntimeError, binascii.Error) as error:
        raise _malformed(data) from error


def refs_of(data: Json) -> list[str]:
    """Return the references in `data` in order, with duplicates.

    Raises:
        ArtifactError: `data` is outside the grammar.
    """
    refs: list[str] = []
    decode_value(data, refs.append)
    return refs


def constants_of(graph: PieceGraph) -> list[torch.Tensor]:
    """Return the constant tensors of a piece, in the order in which its nodes use them.

    A compiled piece takes them as inputs after its own, because torch does not restore constants inside a module from
    a saved artifact.

    Raises:
        ArtifactError: The graph contains a value outside the grammar.
    """
    return [decode_value({tag: body}, str) for node in graph.nodes for tag, body in node.atoms() if tag == "const"]


def _float(text: Any) -> float:
    if type(text) is not str:
        raise TypeError(text)
    value = float(text)
    if repr(value) != text and not math.isnan(value):
        raise ValueError(text)
    return value


def _text(body: Any, _lookup: Any) -> str:
    if type(body) is not str:
        raise TypeError(body)
    return body


def _items(body: Any, lookup: Any) -> list[Any]:
    if type(body) is not list:
        raise TypeError(body)
    return [decode_value(item, lookup) for item in body]


def _pairs(body: Any, lookup: Any) -> dict[Any, Any]:
    return {decode_value(k, lookup): decode_value(v, lookup) for k, v in body}


def _slice(body: Any, lookup: Any) -> slice:
    start, stop, step = _items(body, lookup)
    return slice(start, stop, step)


def _complex(body: Any, _lookup: Any) -> complex:
    real, imag = body
    return complex(_float(real), _float(imag))


def _constant(body: Any, _lookup: Any) -> torch.Tensor:
    dtype, shape = dtype_of(body["dtype"]), [int(size) for size in body["shape"]]
    data = bytearray(base64.b64decode(body["data"], validate=True))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).to(device_of(body.get("device", "cpu")))


_DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "f": lambda body, _: _float(body),
    "s": _text,
    "c": _complex,
    "t": lambda body, lookup: tuple(_items(body, lookup)),
    "d": _pairs,
    "slice": _slice,
    "ellipsis": lambda _body, _lookup: ...,
    "dtype": lambda body, _: dtype_of(body),
    "device": lambda body, _: device_of(body),
    "layout": lambda body, _: LAYOUTS[body],
    "format": lambda body, _: FORMATS[body],
    "const": _constant,
    "graph": lambda body, _: msgspec.convert(body, Body),
}


def _malformed(data: Json) -> ArtifactError:
    return ArtifactError(
        f"{str(data)[:120]!r} is not a valid value. The plan was changed or truncated; warm the model again.",
        actual=data,
    )


def dtype_text(dtype: torch.dtype) -> str:
    """Return "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(text: str) -> torch.dtype:
    """Return the dtype with the name that `dtype_text` returned.

    Raises:
        ArtifactError: This torch has no such dtype.
    """
    dtype = getattr(torch, text, None) if isinstance(text, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ArtifactError(f"This torch has no dtype {text!r}. Warm the model again.", actual=text)
    return dtype


def device_text(device: torch.device | str) -> str:
    """Return the type of a device; its index differs between processes, each of which uses one device per type."""
    return torch.device(device).type


def device_of(text: str, index: int | None = None) -> torch.device:
    """Return the device of a type, with this index unless it is the CPU.

    Raises:
        ArtifactError: `text` is not a type of device.
    """
    if isinstance(text, str) and text.isalpha():
        with contextlib.suppress(RuntimeError):
            return torch.device(text) if index is None or text == "cpu" else torch.device(text, index)
    raise ArtifactError(f"{text!r} is not a device that this torch knows. Warm the model again.", actual=text)


def placed(value: Any, index: int | None) -> Any:
    """Move a constant tensor to the device with this index, or give a device this index; return others unchanged."""
    if isinstance(value, torch.device):
        return device_of(value.type, index)
    if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
        return value.to(device_of(value.device.type, index))
    return value


def tensor_meta(tensor: torch.Tensor, names: Mapping[str, str] | None = None) -> TensorMeta:
    """Return the metadata of a real or fake tensor, with the symbols of its ShapeEnv renamed by `names`.

    Raises:
        SplitError: The grammar of expressions does not have a size.
    """
    renamed = names or {}
    return TensorMeta(
        dtype=dtype_text(tensor.dtype),
        shape=tuple(dim_of(size, renamed) for size in tensor.shape),
        stride=tuple(dim_of(step, renamed) for step in tensor.stride()),
        device=device_text(tensor.device),
    )


def dim_of(size: Any, names: Mapping[str, str]) -> Dim:
    """Return a size as an int, or as an expression with its symbols renamed by `names`.

    Raises:
        SplitError: The grammar of expressions does not have it.
    """
    if type(size) is int:
        return size
    if not isinstance(size, torch.SymInt):
        return int(size)
    # imported lazily: only symbolic sizes need sympy, and a load has none
    from cgtool.graph.sympy_text import expression_text

    text = expression_text(size.node.expr, names)
    return int(text) if text.lstrip("-").isdigit() else text
