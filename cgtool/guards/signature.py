"""The canonical form of a call: how its arguments become the locals of the method's first frame.

Shared by the tracer and the runtime. Must not import torch. The *root locals* are the parameters of the method's own
function (`method.__func__`, not the function that a decorator wrapped); the source `arg:<name>` refers to them.

- The arguments of a plain function are bound to its parameters, with defaults applied.
- A wrapper `(self, *args, **kwargs)` made with `functools.wraps` has the locals `args` and `kwargs`. Every argument
  that the wrapped signature names is moved into `kwargs`, in the order of that signature, and left out if it is the
  default, so that `mask=None` and no mask are the same call. Arguments without a name keep their position and order.
- A call that the wrapped signature does not accept is passed on unchanged: a wrapper may take more than it shows.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from cgtool.errors import ModelError
from cgtool.plan.records import source_words

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_ABSENT: Any = object()


class CallSignature:
    """The live signature of a bound method; create one with `CallSignature.of(method)`.

    Attributes:
        names: The root locals in order.
        outer: The signature that users see, without `self`.
        own: The parameters of the method's own function, without `self`.
        is_wrapper: Whether `own` receives the parameters of `outer` through `*args` and `**kwargs`.
    """

    def __init__(
        self, method: Callable[..., Any], outer: inspect.Signature, own: inspect.Signature, owner: Any
    ) -> None:
        self.method = method
        self.outer = outer
        self.own = own
        self.names: tuple[str, ...] = tuple(own.parameters)
        #: The module itself if it is the first of `*args`, because the function has no parameter `self`.
        self._leading: tuple[Any, ...] = () if owner is None else (owner,)
        #: The root local that collects keyword arguments without a parameter.
        self.var_keyword = _name_of_kind(own, _VAR_KEYWORD)
        self.outer_var_keyword = _name_of_kind(outer, _VAR_KEYWORD)
        self._var_positional = _name_of_kind(own, _VAR_POSITIONAL)
        self.is_wrapper = self.var_keyword is not None and list(outer.parameters) != list(own.parameters)
        bound = self._wrapper_binder() if self.is_wrapper else _plain_binder(own, self._leading)
        #: Takes the model's arguments and returns the values of `names` as a tuple; raises TypeError as the model does.
        self.binder: Callable[..., tuple[Any, ...]] = bound

    @classmethod
    def of(cls, method: Callable[..., Any]) -> CallSignature:
        """Return the signature of `method`, a bound method or any callable with a signature.

        Raises:
            ModelError: `inspect` finds no signature for the callable.
        """
        function = getattr(method, "__func__", method)
        try:
            own = inspect.signature(function, follow_wrapped=False)
            outer = inspect.signature(method)
        except (TypeError, ValueError) as error:
            msg = f"{method!r} has no signature ({error}); give the model's method named parameters."
            raise ModelError(msg, path=getattr(method, "__qualname__", None)) from error
        owner = None
        if function is not method:
            first = next(iter(own.parameters.values()), None)
            if first is not None and first.kind in _POSITIONAL:
                own = own.replace(parameters=list(own.parameters.values())[1:])
            else:
                owner = getattr(method, "__self__", None)
        return cls(method, outer, own, owner)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the root locals of the call `method(*args, **kwargs)`.

        Raises:
            TypeError: The call does not match the signature, with Python's message.
        """
        return dict(zip(self.names, self.binder(*args, **kwargs), strict=True))

    def arguments(self, locals_: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of a call with these root locals."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in self.own.parameters.items():
            if parameter.kind in _POSITIONAL:
                args.append(locals_[name])
            elif parameter.kind is _VAR_POSITIONAL:
                args.extend(locals_[name][len(self._leading) :])
            elif parameter.kind is _KEYWORD_ONLY:
                kwargs[name] = locals_[name]
            else:
                kwargs.update(locals_[name])
        return tuple(args), kwargs

    def call(self, method: Callable[..., Any], locals_: Mapping[str, Any]) -> Any:
        """Call `method`, which has this signature, with these root locals."""
        args, kwargs = self.arguments(locals_)
        return method(*args, **kwargs)

    def source(self, name: str) -> str:
        """Return the source of the argument that users call `name`: `arg:x`, or `arg:kwargs["x"]` in a wrapper.

        Raises:
            ModelError: The method has no such parameter.
        """
        parameter = self.own.parameters.get(name)
        if parameter is not None and parameter.kind not in {_VAR_POSITIONAL, _VAR_KEYWORD}:
            return f"arg:{name}"
        shown = self.outer.parameters.get(name)
        if shown is not None and shown.kind is inspect.Parameter.POSITIONAL_ONLY and self._var_positional is not None:
            return f"arg:{self._var_positional}[{len(self._leading) + list(self.outer.parameters).index(name)}]"
        if self.var_keyword is not None and (shown is not None or self.outer_var_keyword is not None):
            return f"arg:{self.var_keyword}[{json.dumps(name)}]"
        if shown is not None:
            msg = (
                f"*{name} collects arguments without names, so cgtool cannot refer to one of them. "
                "Give the method named parameters."
            )
            raise ModelError(msg, path=name)
        known = ", ".join(self.outer.parameters) or "none"
        msg = f"The model's method has no parameter {name!r}; its parameters are: {known}."
        raise ModelError(msg, path=name, expected=list(self.outer.parameters), actual=name)

    def display_name(self, source: str) -> str:
        """Return a source as users write it: the argument `arg:kwargs["mask"]` is `mask`."""
        if not source.startswith("arg:"):
            return source_words(source)
        if self.var_keyword is not None:
            source = re.sub(rf'^arg:{re.escape(self.var_keyword)}\["([A-Za-z_]\w*)"\]', r"arg:\1", source)
        return source.removeprefix("arg:")

    def bind_error(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Return why the call does not match the signature that users see, or None if it does."""
        try:
            self.outer.bind(*args, **kwargs)
        except TypeError as error:
            return str(error)
        return None

    def _wrapper_binder(self) -> Callable[..., tuple[Any, ...]]:
        canonical = _canonicaliser(self.outer)
        own = _plain_binder(self.own, self._leading)

        def bind(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            try:
                args, kwargs = canonical(*args, **kwargs)
            except TypeError:
                # A wrapper may accept more than the function it wraps, so its own parameters decide.
                return own(*args, **kwargs)
            return own(*args, **kwargs)

        return bind


def _name_of_kind(signature: inspect.Signature, kind: Any) -> str | None:
    return next((name for name, parameter in signature.parameters.items() if parameter.kind is kind), None)


def _header(signature: inspect.Signature, defaults: dict[str, Any], absent: bool) -> str:
    """Return the parameter list of a function with this signature; adds the default values to `defaults`."""
    parts: list[str] = []
    parameters = list(signature.parameters.values())
    for index, parameter in enumerate(parameters):
        kind, before = parameter.kind, parameters[index - 1].kind if index else None
        if before is inspect.Parameter.POSITIONAL_ONLY and kind is not before:
            parts.append("/")
        if kind is _KEYWORD_ONLY and before not in {_KEYWORD_ONLY, _VAR_POSITIONAL}:
            parts.append("*")
        star = "*" if kind is _VAR_POSITIONAL else "**" if kind is _VAR_KEYWORD else ""
        text = star + parameter.name
        if not star and parameter.default is not inspect.Parameter.empty:
            defaults[f"_default_{index}"] = _ABSENT if absent else parameter.default
            text += f"=_default_{index}"
        parts.append(text)
    if parameters and parameters[-1].kind is inspect.Parameter.POSITIONAL_ONLY:
        parts.append("/")
    return ", ".join(parts)


def _define(name: str, header: str, body: list[str], names: dict[str, Any]) -> Callable[..., Any]:
    """Compile a function from the live model's own parameter names (nothing from a plan reaches this)."""
    text = "\n".join([f"def {name}({header}):", *(f"    {line}" for line in body)])
    exec(compile(text, "<cgtool call>", "exec"), names)  # noqa: S102  # a real call binds faster than Signature.bind
    function: Callable[..., Any] = names[name]
    return function


def _plain_binder(own: inspect.Signature, leading: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
    names: dict[str, Any] = {}
    header = _header(own, names, absent=False)
    fresh = _unused("_leading", own)
    names[fresh] = leading
    values = [
        f"{fresh} + {name}" if leading and parameter.kind is _VAR_POSITIONAL else name
        for name, parameter in own.parameters.items()
    ]
    return _define("forward", header, [f"return ({''.join(f'{value}, ' for value in values)})"], names)


def _canonicaliser(outer: inspect.Signature) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return a function with the outer signature that returns a call's canonical args and kwargs."""
    names: dict[str, Any] = {}
    header = _header(outer, names, absent=True)
    # Longer than any parameter, so that no name derived from it collides with a parameter.
    absent, result = _unused("_absent", outer), "_named" + "_" * max(map(len, outer.parameters), default=0)
    names[absent] = _ABSENT
    by_place, by_name, rest, extra = [], [], None, None
    for index, (name, parameter) in enumerate(outer.parameters.items()):
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            by_place.append(name)
        elif parameter.kind is _VAR_POSITIONAL:
            rest = name
        elif parameter.kind is _VAR_KEYWORD:
            extra = name
        else:
            by_name.append((name, _keep(name, parameter, index, (absent, result), names), parameter.kind))
    body: list[str] = []
    placed = f"({''.join(f'{name}, ' for name in by_place)})"
    if any(outer.parameters[name].default is not inspect.Parameter.empty for name in by_place):
        placed = f"tuple(v for v in {placed} if v is not {absent})"
    if rest is not None:
        # With arguments in *rest, those before it can only be passed by position.
        held = "".join(f"{name}, " for name, _, kind in by_name if kind is not _KEYWORD_ONLY)
        body += [f"if {rest}:", f"    {result} = {{}}"]
        body += [f"    {keep}" for _, keep, kind in by_name if kind is _KEYWORD_ONLY]
        body += [f"    {result}.update({extra})"] if extra else []
        body += [f"    return {placed} + ({held}) + {rest}, {result}"]
    body += [f"{result} = {{}}", *(keep for _, keep, _ in by_name)]
    body += [f"{result}.update({extra})"] if extra else []
    body += [f"return {placed}, {result}"]
    return _define("forward", header, body, names)


def _keep(name: str, parameter: inspect.Parameter, index: int, fixed: tuple[str, str], names: dict[str, Any]) -> str:
    """Return the line that adds an argument to the result, unless it is absent or the default."""
    absent, result = fixed
    if parameter.default is inspect.Parameter.empty:
        return f"{result}[{name!r}] = {name}"
    default = f"{result}_default_{index}"
    names[default] = functools.partial(_differs, parameter.default)
    return f"if {name} is not {absent} and {default}({name}): {result}[{name!r}] = {name}"


def _differs(default: Any, value: Any) -> bool:
    # Compared as text, because 0.0 == -0.0.
    plain = type(default) in {int, float, str} and type(value) is type(default)
    return value is not default and not (plain and repr(value) == repr(default))


def _unused(name: str, signature: inspect.Signature) -> str:
    while name in signature.parameters:
        name += "_"
    return name
