"""What a plan says once and speaks of by number: texts that share beginnings, and graphs that differ in constants.

A model of many layers repeats itself. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cgtool.plan.grammar import Count, Digest, Record
from cgtool.plan.pieces import Json, PieceGraph, Row, identity_of, put_together, taken_apart

_WITH_INDEX = ("|keys", "|values", "|list")
#: What a plan's texts may come to: beginnings are shared, so a few bytes may promise gigabytes.
_MAX_CHARACTERS = 2**28


class TextRows(Record):
    """Texts in JSON: text n is that of its parent, an earlier one (-1: none), and an end, as in 0 and ".eps".

    Two flat arrays, because an array for each text would cost its reader more than the text.
    """

    parents: tuple[int, ...]
    ends: tuple[str, ...]


class TextTable:
    """Texts by number while a plan is written; a text shares its beginning with an earlier one."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._parents: list[int] = []
        self._ends: list[str] = []

    def rows(self) -> TextRows:
        """Return the texts as they are written."""
        return TextRows(parents=tuple(self._parents), ends=tuple(self._ends))

    def number(self, text: str) -> int:
        """Return the number of `text`, which is added where it is new."""
        if text not in self._numbers:
            cut = max(text.rfind("."), text.rfind("["), text.rfind("|"))
            if text[:cut].endswith(_WITH_INDEX):  # `|keys[0]` is one step
                cut = text.rfind("|")
            parent = self.number(text[:cut]) if cut > 0 else -1
            self._parents.append(parent)
            self._ends.append(text[max(cut, 0) :])
            self._numbers[text] = len(self._ends) - 1
        return self._numbers[text]


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


class Member(Row):
    """A graph as its frame, by number, and its constants."""

    identity: Digest
    frame: Count
    constants: tuple[Json, ...]


class GraphRows(Record):
    """Graphs in JSON: those that differ in constants alone share one frame (`cgtool.plan.pieces.taken_apart`)."""

    frames: tuple[PieceGraph, ...]
    members: tuple[Member, ...]


class Graphs(Mapping[str, PieceGraph]):
    """The graphs of a plan by identity, as they were read.

    Args:
        rows: As `graph_rows` returned them.

    Raises:
        ValueError: A member speaks of a frame that is not there, or is another graph than its identity says.
    """

    def __init__(self, rows: GraphRows) -> None:
        self._frames = rows.frames
        self._members = {member.identity: member for member in rows.members}
        self._whole: dict[str, PieceGraph] = {}
        canonical = [frame.canonical() for frame in rows.frames]
        num_constants: dict[int, int] = {}
        for member in rows.members:
            if member.frame >= len(canonical):
                msg = f"the graph {member.identity[:16]} has no frame"
                raise ValueError(msg)
            count = num_constants.setdefault(member.frame, len(member.constants))
            if count != len(member.constants) or (
                identity_of(canonical[member.frame], member.constants) != member.identity
            ):
                msg = f"the graph {member.identity[:16]} was changed"
                raise ValueError(msg)
        if len(self._members) < len(rows.members):
            msg = "a graph is there twice"
            raise ValueError(msg)

    def parts_of(self, identity: str) -> tuple[int, PieceGraph, tuple[Json, ...]]:
        """Return the number of a graph's frame, the frame, and the constants that stand in its holes."""
        member = self._members[identity]
        return member.frame, self._frames[member.frame], member.constants

    def __getitem__(self, identity: str) -> PieceGraph:
        """Return the graph of that identity.

        Raises:
            ArtifactError: A hole of its frame has no constant.
        """
        if identity not in self._whole:
            _, frame, constants = self.parts_of(identity)
            self._whole[identity] = put_together(frame, constants)
        return self._whole[identity]

    def __contains__(self, identity: object) -> bool:
        """Return whether there is a graph of that identity."""
        return identity in self._members

    def __iter__(self) -> Iterator[str]:
        """Iterate over the identities."""
        return iter(self._members)

    def __len__(self) -> int:
        """Return how many graphs there are."""
        return len(self._members)


def graph_rows(graphs: Mapping[str, PieceGraph]) -> GraphRows:
    """Return graphs as they are written, each frame once."""
    numbers: dict[bytes, int] = {}
    frames: list[PieceGraph] = []
    members: list[Member] = []
    for identity, graph in graphs.items():
        frame, constants = taken_apart(graph)
        number = numbers.setdefault(frame.canonical(), len(frames))
        if number == len(frames):
            frames.append(frame)
        members.append(Member(identity=identity, frame=number, constants=constants))
    return GraphRows(frames=tuple(frames), members=tuple(members))
