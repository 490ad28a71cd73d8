"""The canonical form of a call: plain methods, wrappers, defaults, and calls that do not match."""

from __future__ import annotations

import functools

import pytest

from cgtool.errors import ModelError
from cgtool.guards.signature import CallSignature


def passing(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return wrapper


def passing_all(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Plain:
    def forward(self, a, b=2, /, c=3, *rest, d, e=5, **extra):
        return (a, b, c, rest, d, e, extra)


class Simple:
    def forward(self, input_ids, mask=None, *, scale=1.0):
        return (input_ids, mask, scale)


class Wrapped:
    @passing
    def forward(self, input_ids=None, mask=None, position_ids=None, **kwargs):
        return (input_ids, mask, position_ids, kwargs)


class WrappedTwice:
    @passing_all
    @passing
    def forward(self, first, /, input_ids, mask=None, *rest, flag=False):
        return (first, input_ids, mask, rest, flag)


def test_plain_parameters_get_their_values_and_defaults():
    signature = CallSignature.of(Simple().forward)
    assert signature.names == ("input_ids", "mask", "scale")
    assert signature.bind((1,), {}) == {"input_ids": 1, "mask": None, "scale": 1.0}
    assert signature.bind((), {"mask": 3, "input_ids": 1}) == {"input_ids": 1, "mask": 3, "scale": 1.0}
    assert not signature.is_wrapper


def test_every_kind_of_parameter_survives_bind_and_call():
    model = Plain()
    signature = CallSignature.of(model.forward)
    for args, kwargs in (
        ((1,), {"d": 4}),
        ((1, 2, 3, 7, 8), {"d": 4, "z": 9}),
        ((1,), {"d": 4, "c": 0, "a": 6, "e": None}),
    ):
        locals_ = signature.bind(args, kwargs)
        assert signature.call(model.forward, locals_) == model.forward(*args, **kwargs)
        assert signature.bind(*signature.arguments(locals_)) == locals_


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2, 3), {}), ((1,), {"nope": 1}), ((1,), {"input_ids": 1})],
    ids=["missing", "too many", "unknown", "twice"],
)
def test_a_call_that_does_not_match_raises_as_the_model_does(args, kwargs):
    model = Simple()
    with pytest.raises(TypeError) as theirs:
        model.forward(*args, **kwargs)
    with pytest.raises(TypeError) as ours:
        CallSignature.of(model.forward).bind(args, kwargs)
    assert str(ours.value) == str(theirs.value).replace("Simple.", "").replace("4 were", "3 were").replace(
        "from 2 to 3", "from 1 to 2"
    )


def test_a_wrapper_gets_every_named_argument_in_the_order_of_the_signature():
    signature = CallSignature.of(Wrapped().forward)
    assert signature.is_wrapper
    assert signature.names == ("args", "kwargs")
    by_name = signature.bind((), {"position_ids": 3, "input_ids": 1, "zeta": 0, "alpha": 9})
    by_place = signature.bind((1,), {"position_ids": 3, "zeta": 0, "alpha": 9})
    assert by_name == by_place == {"args": (), "kwargs": {"input_ids": 1, "position_ids": 3, "zeta": 0, "alpha": 9}}
    assert list(by_name["kwargs"]) == list(by_place["kwargs"]) == ["input_ids", "position_ids", "zeta", "alpha"]


def test_an_absent_argument_and_its_default_are_the_same_call_of_a_wrapper():
    signature = CallSignature.of(Wrapped().forward)
    forms = [((1,), {}), ((1, None), {}), ((1,), {"mask": None}), ((), {"position_ids": None, "input_ids": 1})]
    assert [signature.bind(*form) for form in forms] == [{"args": (), "kwargs": {"input_ids": 1}}] * 4
    assert signature.bind((None, 2), {}) == {"args": (), "kwargs": {"mask": 2}}
    assert signature.bind((1,), {"extra": None}) == {"args": (), "kwargs": {"input_ids": 1, "extra": None}}


@pytest.mark.parametrize(
    ("default", "value", "same"),
    [(1.5, 1.5, True), (0.0, -0.0, False), (1, True, False), (1, 1.0, False), ("a", "ab"[:1], True), ((), [], False)],
)
def test_only_arguments_identical_to_the_default_are_left_out(default, value, same):
    class Model:
        @passing
        def forward(self, x=default):
            return x

    expected = {} if same else {"x": value}
    assert CallSignature.of(Model().forward).bind((), {"x": value}) == {"args": (), "kwargs": expected}


def test_a_wrapper_without_self_gets_the_module_first():
    model = WrappedTwice()
    signature = CallSignature.of(model.forward)
    for args, kwargs, expected in (
        ((0, 1), {}, {"args": (model, 0), "kwargs": {"input_ids": 1}}),
        ((0, 1, 2, 3), {"flag": True}, {"args": (model, 0, 1, 2, 3), "kwargs": {"flag": True}}),
        ((0,), {"flag": True, "input_ids": 1}, {"args": (model, 0), "kwargs": {"input_ids": 1, "flag": True}}),
    ):
        locals_ = signature.bind(args, kwargs)
        assert locals_ == expected
        assert signature.call(model.forward, locals_) == model.forward(*args, **kwargs)


def test_arguments_that_only_the_wrapper_accepts_are_passed_on_unchanged():
    class Lenient:
        def _inner(self, x):
            return x

        def forward(self, *args, **kwargs):
            kwargs.pop("return_dict", None)
            return self._inner(*args, **kwargs)

        forward.__wrapped__ = _inner

    signature = CallSignature.of(Lenient().forward)
    assert signature.bind((1,), {"return_dict": False}) == {"args": (1,), "kwargs": {"return_dict": False}}
    assert signature.bind_error((1,), {"return_dict": False}) == "got an unexpected keyword argument 'return_dict'"
    assert signature.bind_error((1,), {}) is None


def test_sources_and_display_names():
    plain, wrapped, twice = (CallSignature.of(c().forward) for c in (Simple, Wrapped, WrappedTwice))
    assert plain.source("input_ids") == "arg:input_ids"
    assert wrapped.source("mask") == 'arg:kwargs["mask"]'
    assert wrapped.source("other") == 'arg:kwargs["other"]'
    assert twice.source("first") == "arg:args[1]"
    assert twice.source("mask") == 'arg:kwargs["mask"]'
    assert wrapped.display_name('arg:kwargs["mask"][0]') == "mask[0]"
    assert plain.display_name('arg:batch["x"][0]') == 'batch["x"][0]'
    with pytest.raises(ModelError, match=r"no parameter 'nope'; its parameters are: input_ids, mask, scale"):
        plain.source("nope")


def test_generated_names_never_shadow_a_parameter():
    class Odd:
        @passing
        def forward(self, _absent, _named=1, _default_1=2, _named_default_1=3, **_leading):
            return (_absent, _named, _default_1, _named_default_1, _leading)

    model = Odd()
    signature = CallSignature.of(model.forward)
    assert signature.bind((7,), {"_default_1": 3, "x": 1}) == {
        "args": (),
        "kwargs": {"_absent": 7, "_default_1": 3, "x": 1},
    }


def test_a_function_set_on_the_instance_is_used_as_it_is():
    def forward(x, y=2):
        return x + y

    signature = CallSignature.of(forward)
    assert signature.bind((1,), {}) == {"x": 1, "y": 2}
    assert signature.call(forward, {"x": 1, "y": 2}) == 3
    with pytest.raises(ModelError, match="has no signature"):
        CallSignature.of(type)
