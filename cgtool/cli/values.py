"""Option values of the form name=value and JSON, as click callbacks.

Must not import torch. The values of configuration fields are spelled as `cgtool.config` says. Grammar::

    pair = name "=" (JSON | any other text, taken as a string)

An option that is repeated adds to what came before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click


def arguments(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, Any]:
    """Read `--arg`: keyword arguments, each given once.

    Raises:
        click.BadParameter: A text is no name=value, the name is no Python identifier, or comes twice.
    """
    result: dict[str, Any] = {}
    for text in texts:
        name, value = _pair(text, ctx, param)
        if not name.isidentifier():
            message = f"{name!r} cannot name an argument. Give one such as num_layers=4."
            raise click.BadParameter(message, ctx=ctx, param=param)
        if name in result:
            raise click.BadParameter(f"{name!r} is given twice. Give it once.", ctx=ctx, param=param)
        result[name] = value
    return result


def settings(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, Any] | None:
    """Read `--inductor-config`: JSON objects and name=value, what comes later wins; None where it was not given.

    Raises:
        click.BadParameter: A text is neither.
    """
    if not texts:
        return None
    result: dict[str, Any] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            result.update(_mapping(text, ctx, param))
        else:
            name, value = _pair(text, ctx, param)
            result[name] = value
    return result


def listed(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:  # noqa: ARG001  click's signature
    """Let a bare JSON object stand for a list: {"batch": 4} is [{"batch": 4}]."""
    return f"[{text}]" if text is not None and text.lstrip().startswith("{") else text


def _mapping(text: str, ctx: click.Context, param: click.Parameter) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        hint = "Quote it for the shell: '{\"max_autotune\": true}'."
        raise click.BadParameter(f"{text!r} is no JSON ({error}). {hint}", ctx=ctx, param=param) from error
    return dict(document)


def _pair(text: str, ctx: click.Context, param: click.Parameter) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        message = f"{text!r} is no name=value. Put an equals sign between the name and the value: name=4."
        raise click.BadParameter(message, ctx=ctx, param=param)
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value
