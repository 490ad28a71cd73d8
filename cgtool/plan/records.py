"""The plan: the stitched programs of one rank and prefix as data. Must not import torch.

`plan.json` is what `load` generates Python from: whatever reaches generated code is of the grammar, or refused. In the
file, what variants share stands once, in tables, and is spoken of by its number (`PlanRows`). Grammar of what a type
here does not say::

    source   = root accessor*            see cgtool.guards.sources; in a table, the number of a text
    template = ["v", value id] | ["const", literal] | ["expr", expr] | ["list"|"tuple", [template...]]
             | ["dict", [[key literal, template]...]] | ["call", "module:Qual", [template...], [[name, template]...]]
             | ["source", source]        the very object that was passed in, or an attribute of the model
    literal  = a value as data           see cgtool.guards.kinds
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import msgspec
from msgspec import Meta

from cgtool.errors import CacheCorruptError, CacheSchemaError
from cgtool.plan.grammar import Count, DimName, Record, decode
from cgtool.plan.pieces import (
    Expression,
    GraphRows,
    Graphs,
    Json,
    Keyword,
    PieceGraph,
    Row,
    SymbolName,
    SymbolRange,
    TensorMeta,
)

SCHEMA: Literal[3] = 3

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_DOTTED = rf"{_WORD}(\.{_WORD})*"
#: A method of the model.
MethodName = Annotated[str, Meta(pattern=rf"\A{_WORD}\Z", max_length=200)]
#: A class, as `module:Qual.Name`; a class that a function made has that function in its name.
ClassName = Annotated[str, Meta(pattern=rf"\A{_DOTTED}:{_WORD}(\.({_WORD}|<locals>))*\Z", max_length=500)]
#: The value of an input, or of an output of a step.
ValueId = Annotated[int, Meta(ge=0, lt=2**24)]
#: A piece's number; -1 where a step only lays out an output anew, op by op as a splitting piece runs.
PieceIndex = Annotated[int, Meta(ge=-1, lt=2**24)]


#: What a plan's texts may come to: beginnings are shared, so a few bytes may promise gigabytes.
_MAX_CHARACTERS = 2**28


class TextRows(Record):
    """Texts in JSON: text n is that of its parent, an earlier one (-1: none), and an end, as in 0 and ".eps".

    Two flat arrays, because an array for each text would cost its reader more than the text.
    """

    parents: tuple[int, ...]
    ends: tuple[str, ...]


class Texts:
    """Texts by number, as they were read.

    Args:
        rows: As `TextTable.rows` returned them.

    Raises:
        ValueError: A text begins with a later one, or they are too long in all.
    """

    def __init__(self, rows: TextRows) -> None:
        self.parents = rows.parents
        self.ends = rows.ends
        self.whole: list[str] = []
        characters = 0
        for number, (parent, end) in enumerate(zip(self.parents, self.ends, strict=True)):
            if not -1 <= parent < number:
                msg = f"text {number} begins with text {parent}, which does not come before it"
                raise ValueError(msg)
            text = self.whole[parent] + end if parent >= 0 else end
            characters += len(text)
            if characters > _MAX_CHARACTERS:
                msg = f"its texts come to more than {_MAX_CHARACTERS} characters"
                raise ValueError(msg)
            self.whole.append(text)


class Guard(Row):
    """A fact that held when the model was traced: `describe(kind, resolve(source)) == expected`."""

    source: str
    kind: str
    expected: Json


class Input(Row):
    """A tensor that the stitched program takes.

    Args:
        source: Where it comes from: a parameter or buffer of the model, an argument, a global.
        meta: Its dtype, shape, stride and device, over the variant's symbols.
    """

    source: str
    meta: TensorMeta


class Step(Row):
    """One piece of a stitched program.

    Args:
        piece: Its `piece_index`; a step that only lays out an output anew has -1.
        splitting: Whether it holds a splitting op, or only lays out: it runs as it stands and is never compiled.
        graph: The identity of its `PieceGraph` in the plan.
        symbols: The piece's symbols over the variant's.
        inputs: Value ids, one for each input of the graph.
        outputs: Value ids, one for each output of the graph.
    """

    piece: int
    splitting: bool
    graph: str
    symbols: Mapping[str, str]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Settled(Row):
    """A plain attribute that each call sets.

    Args:
        source: The module of the model that has it.
        name: The attribute.
        before: What it was when it was traced, an encoded literal.
        after: What it is from the first call on.
    """

    source: str
    name: Keyword
    before: Json
    after: Json

    @property
    def place(self) -> str:
        """The source of the attribute."""
        return f"{self.source}.{self.name}"


class Kept(Row):
    """What each call leaves in an attribute, or in an item of a dict, of the model.

    Args:
        place: The source of the attribute or item.
        value: The template of what it is left.
    """

    place: str
    value: Json


class VariantHead(Record, kw_only=True):
    """What a variant says in the file as in memory.

    Args:
        name: The example call's name.
        fixed: Dimensions that this variant fixes, by name: {"num_tokens": 1}.
        dims: Dynamic dimensions by name, and the symbols that carry each.
        symbols: The variant's symbols and their ranges.
        relations: Expressions over the symbols that must be true.
        call_guards: What must hold of a call.
        output: What the model returns, as a template.
        settled: The attributes of the model that a call sets for good.
        kept: What each call leaves in places of the model, in the order in which it is set.
        calls_before: How many calls of its example lead to the state of the model that it was traced in.
        sizes_before: The dynamic dimensions of these calls; null: they are of the sizes of the call that comes next.
    """

    name: str
    fixed: dict[DimName, Count]
    dims: dict[DimName, tuple[SymbolName, ...]]
    symbols: tuple[SymbolRange, ...]
    relations: tuple[Expression, ...]
    call_guards: tuple[Guard, ...]
    output: Json
    settled: tuple[Settled, ...] = ()
    kept: tuple[Kept, ...] = ()
    calls_before: Count = 0
    sizes_before: dict[DimName, Count] | None = None

    @property
    def dim_of(self) -> dict[str, str]:
        """The dimension that each symbol carries, of those that carry one."""
        return {symbol: dim for dim, symbols in self.dims.items() for symbol in symbols}

    @property
    def given(self) -> Json:
        """What the program gives, as a template: the output, and with it what is kept where something is."""
        return ["tuple", [self.output, *(one.value for one in self.kept)]] if self.kept else self.output


class Variant(VariantHead):
    """One stitched program and what must hold for a call that it serves.

    Args:
        inputs: The tensors that it takes: the first value ids.
        steps: Its pieces in order; their outputs are the value ids that follow.
        model_guards: What must hold of the model and of globals.
    """

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    model_guards: Sequence[Guard]


class GuardGroup(Row):
    """One fact about several objects.

    Args:
        kind: What is looked at, see `cgtool.guards.kinds`.
        expected: What was seen.
        sources: Which objects, as numbers of texts.
    """

    kind: str
    expected: Json
    sources: tuple[Count, ...]


class GuardTable(Sequence[Guard]):
    """Guards in groups that speak of the same texts; each is made when it is asked for."""

    def __init__(self, texts: Texts, groups: Iterable[GuardGroup]) -> None:
        self.texts = texts
        self.groups = tuple(groups)

    def __len__(self) -> int:
        """Return how many guards there are."""
        return sum(len(group.sources) for group in self.groups)

    def __iter__(self) -> Iterator[Guard]:
        """Iterate over the guards, group by group."""
        whole = self.texts.whole
        for group in self.groups:
            for source in group.sources:
                yield Guard(source=whole[source], kind=group.kind, expected=group.expected)

    @overload
    def __getitem__(self, index: int) -> Guard: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Guard]: ...
    def __getitem__(self, index: Any) -> Any:
        """Return a guard, or several."""
        return tuple(self)[index]


class Plan(Record):
    """All variants of one rank and prefix, and the graphs of their pieces by identity."""

    method: str
    qualname: str
    variants: tuple[Variant, ...]
    graphs: Mapping[str, PieceGraph]


class StepRow(Row):
    """A `Step` in the file; `graph` is the number of a member, `symbols` of the plan's mappings of symbols."""

    piece: PieceIndex
    splitting: bool
    graph: Count
    symbols: Count
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]


class GroupRow(Row):
    """A `GuardGroup` in the file; `kind` is the number of a kind, because one that holds many names is long."""

    kind: Count
    expected: Json
    sources: tuple[Count, ...]


class VariantRows(VariantHead):
    """A `Variant` in the file; inputs and guards are numbers of the plan's inputs and groups of guards."""

    inputs: tuple[Count, ...]
    steps: tuple[StepRow, ...]
    model_guards: tuple[Count, ...]


class PlanRows(Record):
    """`plan.json`.

    Args:
        schema: The version of this grammar.
        method: The model's method that was traced.
        qualname: The model's class.
        texts: The sources that inputs and guards speak of, and their beginnings.
        metas: The kinds of tensors that inputs are of.
        inputs: Of each input of any variant the number of its source and of its meta.
        symbols: How pieces' symbols read over a variant's.
        kinds: Kinds of guards.
        guards: Facts about the model; a group belongs to the same variants as a whole.
        graphs: The graphs of all steps.
        variants: In the order in which a call asks them.
    """

    schema: Literal[3]
    method: MethodName
    qualname: ClassName
    texts: TextRows
    metas: tuple[TensorMeta, ...]
    inputs: tuple[tuple[Count, Count], ...]
    symbols: tuple[dict[SymbolName, Expression], ...]
    kinds: tuple[str, ...]
    guards: tuple[GroupRow, ...]
    graphs: GraphRows
    variants: Annotated[tuple[VariantRows, ...], Meta(min_length=1)]


def head_of(variant: VariantHead) -> dict[str, Any]:
    """Return what a variant says in the file as in memory, by field."""
    return {name: getattr(variant, name) for name in VariantHead.__struct_fields__}


def source_words(text: str) -> str:
    """Return a source as a person would write it: "layers.0.eps", "input_ids", "tiny_llama.SCALE"."""
    if text == "self":
        return "the model"
    text = re.sub(r"^(self\.|arg:|free:|module:|state:)", "", text)
    text = re.sub(r"^global:([^:]+):", r"\1.", text)
    return text.replace("|type", "'s type")


def parse_plan(data: bytes, *, path: Path) -> Plan:
    """Return the plan in the bytes of a file, whose digest the manifest has vouched for.

    Args:
        data: The bytes.
        path: Where they were read, for errors.

    Raises:
        CacheSchemaError: Another version of cgtool wrote it.
        CacheCorruptError: It is no plan.
    """
    try:
        return _plan(decode(data, PlanRows))
    except (ValueError, IndexError) as error:
        schema = _schema_of(data)
        if schema not in (None, SCHEMA):
            message = f"{path} has schema {schema}; this cgtool reads schema {SCHEMA}. Warm the model again with it."
            raise CacheSchemaError(message, path=path, expected=SCHEMA, actual=schema) from error
        why = "a number in it counts past its table" if isinstance(error, IndexError) else error
        message = f"{path} is no plan ({why}). Warm the model again."
        raise CacheCorruptError(message, path=path) from error


def _plan(rows: PlanRows) -> Plan:
    """Return a plan with its numbers looked up.

    Raises:
        ValueError, IndexError: A number counts past its table.
    """
    texts = Texts(rows.texts)
    graphs = Graphs(rows.graphs)
    identities = list(graphs)
    inputs = [Input(source=texts.whole[source], meta=rows.metas[meta]) for source, meta in rows.inputs]
    if any(max(group.sources, default=0) >= len(texts.whole) for group in rows.guards):
        raise IndexError
    groups = [
        GuardGroup(kind=rows.kinds[group.kind], expected=group.expected, sources=group.sources) for group in rows.guards
    ]
    variants = [
        Variant(
            **head_of(variant),
            inputs=tuple([inputs[number] for number in variant.inputs]),
            steps=tuple(
                [
                    Step(
                        piece=step.piece,
                        splitting=step.splitting,
                        graph=identities[step.graph],
                        symbols=rows.symbols[step.symbols],
                        inputs=step.inputs,
                        outputs=step.outputs,
                    )
                    for step in variant.steps
                ]
            ),
            model_guards=GuardTable(texts, [groups[number] for number in variant.model_guards]),
        )
        for variant in rows.variants
    ]
    return Plan(method=rows.method, qualname=rows.qualname, variants=tuple(variants), graphs=graphs)


def _schema_of(data: bytes) -> int | None:
    """Return the schema that JSON says it has, or None."""

    class Said(msgspec.Struct):
        schema: int

    try:
        return msgspec.json.decode(data, type=Said).schema
    except (ValueError, RecursionError):
        return None
