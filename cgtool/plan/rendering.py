"""Render parts of a plan as text for people: encoded values, guards, changed definitions, and the plan as Python.

That Python (`transformed_code.py`) never runs. `cgtool.guards.sources` and `cgtool.guards.kinds` define the grammar of
sources and literals. Must not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from cgtool.plan.grammar import digest_of
from cgtool.plan.pieces import Json, Node, PieceGraph, TensorMeta
from cgtool.plan.records import Plan, Step, source_words

#: Kinds of guards with a boolean value: the text for true and for false.
_BOOLEAN_KINDS = {
    "hasattr": ("had an attribute {}", "did not have an attribute {}"),
    "contains": ("had the key {}", "did not have the key {}"),
    "absent": ("was not set on the object itself", "was set on the object itself"),
    "empty": ("was empty", "was not empty"),
    "settles": ("was one of {}", "was none of {}"),
    "same": ("were one object", "were two objects"),
    "apart": ("had separate memory", "shared memory"),
    "requires_grad": ("required grad", "did not require grad"),
    "is_leaf": ("was a leaf", "was not a leaf"),
    "has_grad": ("had a grad", "had no grad"),
    "is_view": ("was a view", "was not a view"),
    "is_inference": ("was an inference tensor", "was not an inference tensor"),
    "is_buffer": ("was an nn.Buffer", "was not an nn.Buffer"),
}
_MAX_CHARACTERS = 200


def spell(literal: Json) -> str:
    """Return an encoded literal as a person would write it; return malformed ones unchanged."""
    try:
        return _spell(literal)
    except (LookupError, TypeError, ValueError, RecursionError):
        return str(literal)[:80]


def _spell(literal: Json) -> str:
    if literal is None or isinstance(literal, (bool, int)):
        return str(literal)
    if isinstance(literal, str):
        return repr(literal)
    tag, *rest = literal
    if tag in {"t", "l", "size", "set", "frozenset"}:
        inner = ", ".join(map(_spell, rest))
        return {"t": f"({inner})", "l": f"[{inner}]", "size": f"Size({inner})"}.get(tag, f"{{{inner}}}")
    if tag == "d":
        return "{" + ", ".join(f"{_spell(key)}: {_spell(item)}" for key, item in rest) + "}"
    if tag == "function":
        return f"{rest[0]} (code {rest[1][:8]})" if rest[1] else str(rest[0])
    if tag == "enum":
        return f"{rest[0]}.{rest[1]}"
    if tag == "slice":
        return ":".join("" if part is None else _spell(part) for part in rest)
    if tag == "range":
        return f"range({rest[0]}, {rest[1]}, {rest[2]})"
    if tag == "group":
        return f"process group {rest[0]} (rank {rest[1]} of {rest[2]})"
    if tag == "mesh":
        return f"{rest[0]} mesh {'_'.join(rest[2])} of the ranks {rest[1]} in {', '.join(map(_spell, rest[3]))}"
    if tag == "sharding":
        return f"{rest[2]} placed as {', '.join(rest[1])} on the {_spell(rest[0])}"
    if tag == "typing":
        head = rest[1] if isinstance(rest[1], str) else _spell(rest[1]).rpartition(" ")[2]
        return f"{head}[{', '.join(map(_spell, rest[2:]))}]" if rest[2:] else head
    return " ".join(map(str, rest)) or "..."


def definition_words(then: Json, now: Json) -> str:
    """Describe how a class, written as [name, {member: digest}], has changed."""
    name = str(then[0]).replace(":", ".")
    if now[0] != then[0]:
        return f"class {name} was replaced by {str(now[0]).replace(':', '.')}"
    old, new = then[1], now[1]
    changes = [f"member {member} has changed" for member in old if member in new and new[member] != old[member]]
    changes += [f"member {member} was removed" for member in old if member not in new]
    changes += [f"member {member} was added" for member in new if member not in old]
    return f"class {name}: {'; '.join(changes)}"


def names_words(owner: str, kind: str, then: Json, now: Json) -> str:
    """Describe the attributes (kind "named" or "attributes") or keys ("named_keys") that an object gained or lost.

    For an ABC (kind "registered"), describe the classes that were registered with it or are no longer.
    """
    gone = [name for name in then if name not in now]
    new = [name for name in now if name not in then]
    if kind == "named_keys":
        changes = [f"{owner} had the key {name!r} when this was compiled and no longer has it" for name in gone]
        changes += [f"{owner} did not have the key {name!r} when this was compiled and has it now" for name in new]
    elif kind == "registered":
        changes = [f"{name} was registered with {owner} when this was compiled and no longer is" for name in gone]
        changes += [f"{name} was not registered with {owner} when this was compiled and is now" for name in new]
    else:
        changes = [f"{owner}.{name} was set when this was compiled and no longer is" for name in gone]
        changes += [f"{owner}.{name} was not set when this was compiled and is now" for name in new]
    return "; ".join(changes) or f"the attributes of {owner} had a different order when this was compiled"


#: Digits of a graph's identity.
_SHORT = 10

_HEADER = '''"""The stitched programs of this entry, for reading only.

Generated from plan.json, which `load` reads instead. v<n> are values; piece_<i> is a compiled piece.
"""
'''


def plan_text(plan: Plan) -> str:
    """Return all variants of `plan` as Python."""
    parts = [_HEADER, *(line for index in range(len(plan.variants)) for line in _variant(plan, index))]
    return "\n".join(parts) + "\n"


def _variant(plan: Plan, index: int) -> Iterator[str]:
    variant = plan.variants[index]
    fixed = "".join(f", {name} = {size}" for name, size in variant.fixed.items())
    yield f"\n\ndef variant_{index}(self, call):  # {variant.name}{fixed}"
    for symbol in variant.symbols:
        carried = [name for name, symbols in variant.dims.items() if symbol.name in symbols]
        bounds = f"{symbol.min} to {symbol.max}" if symbol.max is not None else f"at least {symbol.min}"
        yield f"    # {symbol.name}: {', '.join(carried) or 'a size'}, {bounds}"
    for relation in variant.relations:
        yield f"    # holds: {relation}"
    for number, tensor in enumerate(variant.inputs):
        name = source_words(tensor.source)
        owner = "self." if tensor.source.startswith("self.") else "call."
        yield f"    v{number} = {owner}{name}  # {tensor_text(tensor.meta)}"
    for step in variant.steps:
        yield from _step(plan.graphs[step.graph], step)
    for kept in variant.kept:
        yield f"    {kept.place} = {kept.value!r}"
    yield f"    return {variant.output!r}"


def _step(graph: PieceGraph, step: Step) -> Iterator[str]:
    results = ", ".join(f"v{number}" for number in step.outputs)
    arguments = ", ".join(f"v{number}" for number in step.inputs)
    if not step.splitting:
        assign = f"{results} = " if results else ""
        yield f"    {assign}piece_{step.piece}({arguments})  # {step.graph[:_SHORT]}, {len(graph.nodes)} ops"
        return
    yield f"    # piece {step.piece}, splitting: runs op by op"
    names = {f"%{place}": f"v{number}" for place, number in enumerate(step.inputs)}
    names.update(zip(graph.outputs, (f"v{number}" for number in step.outputs), strict=False))
    for offset, node in enumerate(graph.nodes):
        reference = f"%{len(graph.inputs) + offset}"
        target = names.get(reference, f"t{offset}")
        names.setdefault(reference, target)
        yield f"    {target} = {node_text(node, names)}"


def node_text(node: Node, names: Mapping[str, str]) -> str:
    """Return a node as a call: "torch.add(%0, 1, alpha=2)"; `names` replaces references such as %0."""
    arguments = [value_text(arg, names) for arg in node.args]
    arguments += [f"{name}={value_text(value, names)}" for name, value in sorted(node.kwargs.items())]
    if node.kind in ("size", "method") and arguments:
        return f"{arguments[0]}.{node.target or 'size'}({', '.join(arguments[1:])})"
    return f"{node.target}({', '.join(arguments)})"


def value_text(value: Json, names: Mapping[str, str]) -> str:
    """Return a node's argument as a person would write it."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list):
        return f"[{', '.join(value_text(item, names) for item in value)}]"
    if not isinstance(value, dict) or len(value) != 1:
        return str(value)
    ((tag, body),) = value.items()
    if tag == "t" and isinstance(body, list):
        return f"({', '.join(value_text(item, names) for item in body)})"
    if tag == "slice" and isinstance(body, list):
        return ":".join("" if item is None else value_text(item, names) for item in body)
    if tag == "const":
        return f"a constant, {digest_of(body)[:_SHORT]}"
    if tag == "graph":
        return f"a graph of {len(body[1])} ops, {digest_of(body)[:_SHORT]}"
    return {"s": repr(body), "ellipsis": "..."}.get(tag, str(body))


def tensor_text(meta: TensorMeta) -> str:
    """Return the metadata of a tensor as text: "float32[s0, 64] strides [64, 1] cpu"."""
    shape, stride = (", ".join(map(str, dims)) for dims in (meta.shape, meta.stride))
    return f"{meta.dtype}[{shape}] strides [{stride}] {meta.device}"


def expected_words(kind: str, value: Json) -> str:
    """Describe the expected value of a guard: "1e-06", "of type toy:Mode"; malformed values are shown as JSON."""
    try:
        text = _expected(kind.partition(":")[0], value)
    except (LookupError, TypeError, ValueError):
        text = json.dumps(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def _expected(word: str, value: Json) -> str:
    if word in _BOOLEAN_KINDS:
        return "true" if value else "false"
    if word in {"value", "group", "computed"}:
        return spell(value)
    if word == "type":
        return f"of type {value}"
    if word == "length":
        return f"of type {value[0]} with {value[1]} elements"
    if word == "steps_of_one":
        return (
            f"a tensor whose dimensions of size one have the strides {['natural' if s is None else s for s in value]}"
        )
    if word == "keys":
        return "a dict with the keys " + ", ".join(map(spell, value)) if value else "an empty dict"
    if word == "tensor":
        return f"a {value[1]} tensor of shape {tuple(value[2])} and strides {tuple(value[3])} on {value[4]}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def changed_words(source: str, kind: str, was: Json, now: Json, *, when: str = "") -> str:
    """Describe how the value of a guard has changed: "layers.0.eps was 1e-06 and is 1e-05 now".

    Args:
        source: The source of the guard.
        kind: The kind of the guard, with its argument.
        was: The old value.
        now: The current value.
        when: The time of the old value, such as " when this was compiled".
    """
    name, (word, _, argument) = source_words(source), kind.partition(":")
    if word == "group":
        name = f"the group that torch names {argument!r}"
    if word == "code" or _is_one_function(was, now):
        return f"the code of {name} has changed"
    if word == "class":
        return definition_words(was, now)
    if word in {"named", "named_keys", "attributes", "registered"}:
        return names_words(name, word, was, now)
    if word == "digest":
        return f"{name} was different{when or ' before'}"
    if word == "hooks":
        return f"{name} had {was or 'no'} hooks{when} and has {now or 'none'} now"
    if word == "computed":
        name = f"{name}.{argument}"
    if word not in _BOOLEAN_KINDS:
        return f"{name} was {expected_words(word, was)}{when} and is {expected_words(word, now)} now"
    subject = f"{name}.{argument}" if word == "absent" else name
    if word in {"same", "apart"}:
        subject = f"{name} and {source_words(argument)}"
    return f"{subject} {_BOOLEAN_KINDS[word][not was].format(argument)}{when or ' before'}; that has changed"


def _is_one_function(was: Json, now: Json) -> bool:
    """Return whether two values are functions of the same name."""
    both = [value for value in (was, now) if isinstance(value, list) and len(value) == 3 and value[0] == "function"]  # noqa: PLR2004 - tag, name, digest
    return len(both) == 2 and was[1] == now[1]  # noqa: PLR2004
