"""The plan: the stitched programs of one rank and prefix as data. Must not import torch.

`load` generates Python from `plan.json`, so every string of it is checked against the grammar first. The file holds
values that variants share once, in tables, and refers to them by number (`PlanRows`). The grammar, as far as the types
do not express it::

    source   = root accessor*            see cgtool.guards.sources; in a table, the number of a text
    template = ["v", value id] | ["const", literal] | ["expr", expr] | ["list"|"tuple", [template...]]
             | ["dict", [[key literal, template]...]] | ["call", "module:Qual", [template...], [[name, template]...]]
             | ["source", source]        an object that was passed in, or an attribute of the model, itself
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
#: A class, as `module:Qual.Name`, with `<locals>` for a class defined in a function.
ClassName = Annotated[str, Meta(pattern=rf"\A{_DOTTED}:{_WORD}(\.({_WORD}|<locals>))*\Z", max_length=500)]
#: The number of a value: an input, or an output of a step.
ValueId = Annotated[int, Meta(ge=0, lt=2**24)]
#: The number of a piece; -1 for a step that only changes the layout of an output, and runs like a splitting piece.
PieceIndex = Annotated[int, Meta(ge=-1, lt=2**24)]


#: The limit of a plan's texts in total: prefixes are shared, so a few bytes could expand to gigabytes.
_MAX_CHARACTERS = 2**28


class TextRows(Record):
    """A table of texts in JSON. Text n is the text of its parent, an earlier one (or -1), followed by an end.

    The table is two flat arrays, which are faster to read than an array of pairs.
    """

    parents: tuple[int, ...]
    ends: tuple[str, ...]


class Texts:
    """A table of texts.

    Args:
        rows: The result of `cgtool.plan.writing.TextTable.rows`.

    Raises:
        ValueError: The parent of a text does not precede it, or the texts are too long in total.
    """

    def __init__(self, rows: TextRows) -> None:
        self.parents = rows.parents
        self.ends = rows.ends
        self.whole: list[str] = []
        characters = 0
        for number, (parent, end) in enumerate(zip(self.parents, self.ends, strict=True)):
            if not -1 <= parent < number:
                msg = f"text {number} has text {parent} as its parent, which does not precede it"
                raise ValueError(msg)
            text = self.whole[parent] + end if parent >= 0 else end
            characters += len(text)
            if characters > _MAX_CHARACTERS:
                msg = f"its texts have more than {_MAX_CHARACTERS} characters in total"
                raise ValueError(msg)
            self.whole.append(text)


class Guard(Row):
    """A condition that held when the model was traced: `describe(kind, resolve(source)) == expected`."""

    source: str
    kind: str
    expected: Json


class Input(Row):
    """A tensor that the stitched program takes.

    Args:
        source: A parameter or buffer of the model, an argument, or a global.
        meta: Its metadata, over the variant's symbols.
    """

    source: str
    meta: TensorMeta


class Step(Row):
    """The call of a piece in a stitched program.

    Args:
        piece: The `piece_index`; -1 for a step that only changes the layout of an output.
        splitting: Whether it contains a splitting op or only changes the layout: it runs op by op and is not compiled.
        graph: The identity of its `PieceGraph` in the plan.
        symbols: The piece's symbols as expressions over the variant's.
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
    """A plain attribute of the model that each call sets to the same value.

    Args:
        source: The submodule that has the attribute.
        name: The attribute.
        before: Its value during the trace, an encoded literal.
        after: Its value from the first call on.
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
    """A value that each call stores in an attribute of the model, or in an item of a dict there.

    Args:
        place: The source of the attribute or item.
        value: The template of the value.
    """

    place: str
    value: Json


class VariantHead(Record, kw_only=True):
    """The fields of a variant that are the same in the file and in memory.

    Args:
        name: The name of the example call.
        fixed: The sizes of dimensions that the variant fixes, by name: {"num_tokens": 1}.
        dims: The dynamic dimensions by name, with the symbols that represent each.
        symbols: The variant's symbols and their ranges.
        relations: Expressions over the symbols that must be true.
        call_guards: Guards on the arguments of a call and on global state.
        output: The template of the model's return value.
        settled: Attributes of the model that every call sets to the same value.
        kept: Values that each call stores in the model, in the order in which they are set.
        calls_before: How many calls of the example lead to the state of the model in which it was traced.
        sizes_before: The dynamic dimensions of these calls; null means those of the traced call.
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
        """The dimension that each symbol represents; symbols without one are left out."""
        return {symbol: dim for dim, symbols in self.dims.items() for symbol in symbols}

    @property
    def given(self) -> Json:
        """The template of the program's result: the output, in a tuple with the kept values if there are any."""
        return ["tuple", [self.output, *(kept.value for kept in self.kept)]] if self.kept else self.output


class Variant(VariantHead):
    """A stitched program and its guards.

    Args:
        inputs: The tensors that it takes, which have the first value ids.
        steps: The calls of its pieces in order; their outputs have the following value ids.
        model_guards: Guards on the model and on globals.
    """

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    model_guards: Sequence[Guard]


class GuardGroup(Row):
    """Guards of one kind and expected value on several objects.

    Args:
        kind: The kind of the guards, see `cgtool.guards.kinds`.
        expected: The expected value.
        sources: The numbers of the texts of their sources.
    """

    kind: str
    expected: Json
    sources: tuple[Count, ...]


class GuardTable(Sequence[Guard]):
    """Guards in groups; each `Guard` is created on access."""

    def __init__(self, texts: Texts, groups: Iterable[GuardGroup]) -> None:
        self.texts = texts
        self.groups = tuple(groups)

    def __len__(self) -> int:
        """Return the number of guards."""
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
    """The variants of one rank and prefix, and the graphs of their pieces by identity."""

    method: str
    qualname: str
    variants: tuple[Variant, ...]
    graphs: Mapping[str, PieceGraph]


class StepRow(Row):
    """A `Step` in the file; `graph` and `symbols` are indices into `PlanRows.graphs.members` and `PlanRows.symbols`."""

    piece: PieceIndex
    splitting: bool
    graph: Count
    symbols: Count
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]


class GroupRow(Row):
    """A `GuardGroup` in the file; `kind` is an index into `PlanRows.kinds`, because a kind with many names is long."""

    kind: Count
    expected: Json
    sources: tuple[Count, ...]


class VariantRows(VariantHead):
    """A `Variant` in the file; inputs and guards are indices into `PlanRows.inputs` and `PlanRows.guards`."""

    inputs: tuple[Count, ...]
    steps: tuple[StepRow, ...]
    model_guards: tuple[Count, ...]


class PlanRows(Record):
    """`plan.json`.

    Args:
        schema: The version of this grammar.
        method: The method that was traced.
        qualname: The class of the model.
        texts: The sources of inputs and guards, and their prefixes.
        metas: The distinct metadata of inputs.
        inputs: The index of the source and of the metadata of each input.
        symbols: Mappings of a piece's symbols to expressions over a variant's.
        kinds: The kinds of guards.
        guards: Guards on the model; all guards of a group belong to the same variants.
        graphs: The graphs of all steps.
        variants: The variants in the order in which their guards are checked.
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
    """Return the fields of a variant's `VariantHead` by name."""
    return {name: getattr(variant, name) for name in VariantHead.__struct_fields__}


def source_words(text: str) -> str:
    """Format a source for a message: "layers.0.eps", "input_ids", "tiny_llama.SCALE"."""
    if text == "self":
        return "the model"
    text = re.sub(r"^(self\.|arg:|free:|module:|state:)", "", text)
    text = re.sub(r"^global:([^:]+):", r"\1.", text)
    return text.replace("|type", "'s type")


def parse_plan(data: bytes, *, path: Path) -> Plan:
    """Parse the bytes of `plan.json`, which match their digest in the manifest.

    Args:
        data: The bytes.
        path: The path of the file, for errors.

    Raises:
        CacheSchemaError: Another version of cgtool wrote it.
        CacheCorruptError: It is not a valid plan.
    """
    try:
        return _plan(decode(data, PlanRows))
    except (ValueError, IndexError) as error:
        schema = _schema_of(data)
        if schema not in (None, SCHEMA):
            message = f"{path} has schema {schema}; this cgtool reads schema {SCHEMA}. Warm the model again with it."
            raise CacheSchemaError(message, path=path, expected=SCHEMA, actual=schema) from error
        why = "an index in it is out of range" if isinstance(error, IndexError) else error
        message = f"{path} is not a valid plan ({why}). Warm the model again."
        raise CacheCorruptError(message, path=path) from error


def _plan(rows: PlanRows) -> Plan:
    """Resolve the indices of a plan.

    Raises:
        ValueError: The table of texts or graphs is invalid.
        IndexError: An index is out of range.
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
    """Return the `schema` field of a JSON object, or None."""

    class Versioned(msgspec.Struct):
        schema: int

    try:
        return msgspec.json.decode(data, type=Versioned).schema
    except (ValueError, RecursionError):
        return None
