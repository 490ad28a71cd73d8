"""Random changes to a genuine bundle and its parts are refused or read; nothing else happens."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from pathlib import Path

import pytest
from bundle_maker import File, Forge, index_of, opened, packed
from cache_maker import lay_entry, tree
from cache_samples import sealed
from json_changes import mutated_json

from cgtool.errors import CacheError, RefusedError
from cgtool.plan.records import parse_plan
from cgtool.store.bundle.unpack import unpack
from cgtool.store.bundle_index import Limits, parse_index
from cgtool.store.layout import RankName
from cgtool.store.records import parse_manifest
from cgtool.store.signatures import parse_signatures

LIMITS = Limits(max_bytes=2**26, max_ratio=50, ratio_from_bytes=2**22)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory) -> Forge:
    root = tmp_path_factory.mktemp("genuine")
    return Forge.of(root, lay_entry(root))


def mutated_bytes(data: bytes, pick: random.Random) -> bytes:
    """Change some bytes; remove, duplicate or move a range."""
    out = bytearray(data)
    for _ in range(pick.choice((1, 1, 2, 8))):
        at, size = pick.randrange(len(out) + 1), pick.choice((1, 4, 64, 512))
        match pick.randrange(6):
            case 0:
                out[at : at + 1] = bytes([pick.randrange(256)])
            case 1:
                del out[at : at + size]
            case 2:
                out[at:at] = out[at : at + size]
            case 3:
                out[at:at] = pick.randbytes(size)
            case 4:
                del out[at:]
            case _:
                other = pick.randrange(len(out) + 1)
                out[at : at + size], out[other : other + size] = out[other : other + size], out[at : at + size]
    return bytes(out)


def mutated_bundle(forge: Forge, pick: random.Random) -> bytes:
    """Change one layer of a bundle, and rebuild the layers around it, so that the change is reached."""
    names = sorted(forge.files)
    name = pick.choice(names)
    match pick.randrange(8):
        case 0:
            return mutated_bytes(forge.bytes(), pick)
        case 1:
            return packed(mutated_bytes(opened(forge.bytes()), pick))
        case 2:
            return forge.bytes(index=mutated_bytes(index_of(forge.files), pick))
        case 3:
            return forge.bytes(index=_sealed(mutated_json(json.loads(index_of(forge.files)), pick)))
        case 4:
            return forge.with_file(name, mutated_bytes(forge.files[name], pick)).bytes()
        case 5:
            end = pick.choice(("/key.json", "/manifest.json"))
            record = mutated_json(json.loads(forge.files[forge.name(end)]), pick)
            return forge.with_file(forge.name(end), _sealed(record)).bytes()
        case 6:
            plan = mutated_json(json.loads(forge.files[forge.name("/plan.json")]), pick)
            return forge.with_plan(_text(plan)).bytes()
        case _:
            fields = {
                pick.choice(("type", "mode", "mtime", "uid", "linkname", "devmajor")): pick.choice((b"2", 0o777, "x"))
            }
            return forge.bytes(change=lambda ms: [_headed(m, fields) if m.name == name else m for m in ms])


def _headed(member: File, fields: dict[str, object]) -> File:
    kinds = {"type": bytes, "linkname": str}
    fitting = {n: v for n, v in fields.items() if isinstance(v, kinds.get(n, int))}
    return File(name=member.name, data=member.data, header=fitting)


def _sealed(record: object) -> bytes:
    try:
        return sealed(record) if isinstance(record, dict) else _text(record)
    except (TypeError, ValueError):
        return _text(record)


def _text(value: object) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def try_one(forge: Forge, seed: int, folder: Path) -> str:
    """Unpack a changed bundle; return the reason of the refusal, or "" if it was accepted."""
    bundle = mutated_bundle(forge, random.Random(seed))
    target = folder / "in"
    target.mkdir()
    try:
        unpack(io.BytesIO(bundle), target, limits=LIMITS)
    except RefusedError as error:
        return error.reason if len(str(error)) < 2000 else "too long a message"
    finally:
        outside = [name for name in tree(folder) if not name.startswith("in")]
        shutil.rmtree(target)
        assert outside == []
    return ""


@pytest.mark.parametrize("count", [250, pytest.param(2500, marks=pytest.mark.slow)])
def test_a_changed_bundle_is_refused_or_whole(genuine, tmp_path, count):
    reasons = {try_one(genuine, seed, tmp_path) for seed in range(count)}
    expected = "bad_index truncated bad_compression bad_header corrupt_manifest corrupt_plan"
    assert {"", *expected.split()} <= reasons


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
def test_a_changed_record_is_refused_or_read(genuine, seed):
    pick = random.Random(seed)
    manifest, plan = genuine.files[genuine.name("/manifest.json")], genuine.files[genuine.name("/plan.json")]
    name = RankName(hash=genuine.name("/key.json").split("/")[1], rank=0, prefix="backbone")
    for _ in range(400):
        for parse in (
            lambda: parse_manifest(_sealed(mutated_json(json.loads(manifest), pick)), path=Path("m"), name=name),
            lambda: parse_plan(_text(mutated_json(json.loads(plan), pick)), path=Path("p")),
            lambda: parse_index(_sealed(mutated_json(json.loads(index_of(genuine.files)), pick)), limits=LIMITS),
            lambda: parse_signatures(
                _text(mutated_json({"schema": 1, "signatures": [{"key": "", "signature": ""}]}, pick))
            ),
        ):
            with contextlib.suppress(CacheError, RefusedError):
                parse()
