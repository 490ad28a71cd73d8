"""Twins of a model's tensors and of a call's arguments: copies of real tensors, seeded numbers for fake ones.

The model runs with the twins in place of its own tensors, and each run starts from the original state of its modules.
Tensors that share memory in the model have twins that share memory.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn

from cgtool.compiler._torch import storage_id
from cgtool.compiler.proof._torch import is_fake
from cgtool.compiler.proof.inputs import Style, draw_storage, rounded
from cgtool.graph.values import tensor_meta
from cgtool.guards.sources import PARTS
from cgtool.trace.local_tensors import LOCAL

#: Parameters are copied for each run if they are smaller than this in total; a forward that writes to one is rare.
_SMALL_BYTES = 64 << 20
#: The depth to which values are traversed.
_MAX_DEPTH = 8


class Twins:
    """Tensors to run a model with, one for each of its own.

    Args:
        module: The model.
        style: How numbers for fake tensors are drawn.
        bound: The exclusive upper bound of drawn integers.
    """

    def __init__(self, module: nn.Module, *, style: Style, bound: int) -> None:
        self._module = module
        self._style = style
        self._bound = bound
        self._places = list(_places(module))
        #: Each container of the modules with its original content, since a call may store results in it.
        self._held = [(holder, copy.copy(holder)) for _, holder in _holders(module)]
        self._own = [holder[key] for _, holder, key in self._places]
        number_of = {id(tensor): number for number, tensor in enumerate(self._own)}
        #: Weak references to the tensors, as LSTMs have them: container, key, and the tensor's number.
        self._weak = [
            (holder, key, number_of[id(value())])
            for holder, then in self._held
            for key, value in (enumerate(then) if isinstance(then, list) else then.items())
            if isinstance(value, weakref.ref) and id(value()) in number_of
        ]
        self._modules = {id(child): child for child in module.modules()}
        drawn: dict[int, torch.Tensor] = {}
        self._base = self._twins_of(self._own, lambda tensor: self._real(tensor, drawn))
        both = list(zip(self._places, self._base, strict=True))
        parameters = [tensor for place, tensor in both if _is_parameter(place)]
        small = sum(tensor.untyped_storage().nbytes() for tensor in parameters) <= _SMALL_BYTES
        self._written = {storage_id(tensor) for place, tensor in both if small or not _is_parameter(place)}

    def __enter__(self) -> Self:
        self._put(self._base)
        return self

    def __exit__(self, *_: object) -> None:
        self._put(self._own)

    def renew(self) -> None:
        """Restore the model's original state with fresh twins of all tensors that a run may write to."""
        copies: dict[int, torch.Tensor] = {}
        self._put(self._twins_of(self._base, lambda tensor: self._copy(tensor, copies)))

    def written(self) -> dict[str, Any]:
        """Return the tensors of the model that a run may have written to or stored there, by name."""
        as_they_were = {id(tensor) for tensor in self._base if storage_id(tensor) not in self._written}
        held = ((name, holder[key]) for name, holder, key in _places(self._module))
        return {name: tensor for name, tensor in held if id(tensor) not in as_they_were}

    def perturb(self, dtype: torch.dtype, most_bytes: int) -> None:
        """Change each float of the model by one rounding of `dtype`, up or down, for up to `most_bytes` of tensors."""
        spent = 0

        def perturbed(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal spent
            size = tensor.untyped_storage().nbytes()
            if not tensor.is_floating_point() or spent + size > most_bytes:
                return tensor
            spent += size
            return like(tensor, rounded(tensor.detach(), dtype))

        self._put(self._twins_of([holder[key] for _, holder, key in self._places], perturbed))

    def arguments(self, given: Any) -> Any:
        """Return a copy of a call's arguments, with drawn tensors for fake ones; the model's modules are not copied."""
        memo: dict[int, Any] = dict(self._modules)
        drawn: dict[int, torch.Tensor] = {}
        kept = [tensor for _, tensor in tensors_of(given, "")]  # keeps the tensors alive, so that ids stay valid
        for tensor in kept:
            if is_fake(tensor):
                memo[id(tensor)] = self._real(tensor, drawn)
            elif tensor.grad_fn is not None:
                memo[id(tensor)] = tensor.detach().clone()
        return copy.deepcopy(given, memo)

    def _put(self, tensors: list[torch.Tensor]) -> None:
        for holder, then in self._held:
            holder.clear()
            holder.extend(then) if isinstance(holder, list) else holder.update(then)
        for (_, holder, key), tensor in zip(self._places, tensors, strict=True):
            holder[key] = tensor
        for holder, key, number in self._weak:
            holder[key] = weakref.ref(tensors[number])

    def _twins_of(
        self, tensors: list[torch.Tensor], twin: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return a twin of each tensor; the same tensor gets the same twin."""
        memo: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            if id(tensor) not in memo:
                memo[id(tensor)] = twin(tensor)
        return [memo[id(tensor)] for tensor in tensors]

    def _real(self, tensor: torch.Tensor, drawn: dict[int, torch.Tensor]) -> torch.Tensor:
        if not is_fake(tensor):
            return tensor
        number = storage_id(tensor)
        if number not in drawn:
            meta = tensor_meta(tensor)
            seed = [len(drawn), meta.dtype, str(meta.shape)]
            num_bytes = int(tensor.untyped_storage().nbytes())
            drawn[number] = draw_storage(
                meta, num_bytes, tensor.device, seed=seed, style=self._style, bound=self._bound
            )
        return _view(tensor, drawn[number])

    def _copy(self, tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
        number = storage_id(tensor)
        if number not in self._written:
            return tensor
        if number not in copies:
            storage: Any = tensor.untyped_storage()
            copies[number] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage.clone())
        return _view(tensor, copies[number])


def over_same_memory(module: nn.Module) -> dict[int, torch.Tensor]:
    """Return a memo for `copy.deepcopy` with which a copy of a model shares its memory.

    It maps the id of each tensor to the tensor itself, and of each DTensor to a new one over the same local tensor.
    """
    found = {}
    for _, holder, key in _places(module):
        own = holder.owner if isinstance(holder, _Shard) else holder[key]
        found[id(own)] = like(own, own.detach()) if isinstance(holder, _Shard) else own
    return found


def num_fake_bytes(module: nn.Module) -> int:
    """Return how much memory a model's fake tensors would take."""
    tensors = [holder[key] for _, holder, key in _places(module)]
    return sum({storage_id(t): int(t.untyped_storage().nbytes()) for t in tensors if is_fake(t)}.values())


def like(own: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return `data`, as a parameter if `own` is one."""
    return nn.Parameter(data, requires_grad=own.requires_grad) if isinstance(own, nn.Parameter) else data


def tensors_of(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value with their names; modules are not traversed."""
    for place, leaf in leaves_of(value, name):
        if isinstance(leaf, torch.Tensor):
            yield place, leaf


def leaves_of(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value with names such as `output["logits"]`."""
    parts = _parts_of(value, name) if depth < _MAX_DEPTH else None
    if parts is None:
        yield name, value
        return
    for place, part in parts:
        yield from leaves_of(part, place, depth + 1)


def _parts_of(value: Any, name: str) -> list[tuple[str, Any]] | None:
    if isinstance(value, torch.Tensor | nn.Module | type) or callable(value):
        return None
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f"{name}.{key}", part) for key, part in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"{name}[{n}]", part) for n, part in enumerate(value)]
    if dataclasses.is_dataclass(value):
        return [(f"{name}.{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    held = getattr(value, "__dict__", None)
    return [(f"{name}.{key}", part) for key, part in held.items()] if held else None


class _Shard:
    """A DTensor's local tensor behind the interface of a dict."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> torch.Tensor:
        held: torch.Tensor = getattr(self.owner, name)
        return held

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        setattr(self.owner, name, tensor)


def _is_parameter(place: tuple[str, Any, Any]) -> bool:
    _, holder, key = place
    return isinstance(holder.owner if isinstance(holder, _Shard) else holder[key], nn.Parameter)


def _places(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield each plain tensor in a model's modules: its name, its container (dict, list or shard), and its key."""
    for path, holder in _holders(module):
        for key, value in enumerate(holder) if isinstance(holder, list) else holder.items():
            if _is_plain(value):
                name = f"{path}[{key}]" if isinstance(holder, list) else f"{path}.{key}".lstrip(".")
                yield (f"{name}.{LOCAL}", _Shard(value), LOCAL) if hasattr(value, LOCAL) else (name, holder, key)


def _holders(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the dicts and lists in a model's modules, with their names."""
    for path, child in module.named_modules():
        for held in (child._parameters, child._buffers, vars(child)):  # noqa: SLF001 - bypasses overridden attributes
            yield path, held
        for key, value in vars(child).items():
            yield from _containers(f"{path}.{key}".lstrip("."), key, value)


def _containers(name: str, key: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the nested lists and dicts in an attribute of a module, except torch's own."""
    if type(value) not in {list, dict} or key in PARTS:
        return
    yield name, value
    if depth < 3:  # noqa: PLR2004 - as deep as people nest their caches
        for place, part in value.items() if type(value) is dict else enumerate(value):
            yield from _containers(f"{name}[{place!r}]", "", part, depth + 1)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"


def _view(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Return a view of `flat` with the same layout as `tensor` in its storage."""
    storage = flat.untyped_storage()
    shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    data = torch.empty(0, dtype=tensor.dtype, device=flat.device)
    data.set_(storage, int(tensor.storage_offset()), shape, stride)
    return like(tensor, data)
