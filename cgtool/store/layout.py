"""The layout of a cache: all path arithmetic, and the grammar of names. Must not import torch.

The tree under a cache root::

    CACHEDIR.TAG
    torch_compile_cache/
      <hash>/                                    64 hexadecimal digits
        key.json
        artifacts/<sha256>.<kind>                kind: [a-z][a-z0-9_]*(.[a-z0-9_]+)*, at most 40 characters
        signatures/<sha256>.json <sha256>.sig    of an entry imported with a signature, see cgtool.store.trust
        rank_<i>/<prefix>/                       i: no leading zeros; prefix: [A-Za-z0-9][A-Za-z0-9_.-]*
          manifest.json plan.json computation_graph.py transformed_code.py
          generated/<sha256[:16]>/<file>         compiler output for an artifact, for people; in no digest
      units/<key[:2]>/<key>/                     key: 64 hexadecimal digits
        lock unit.json <sha256>.<kind>
      artifacts/<sha256>.<kind>                  in container images, whose entries link to them
      lookup/<digest>/<hash>                     empty files
      lookup/indexed/<hash>-rank_<i>-<prefix>    empty files
      state/used/<hash>-rank_<i>-<prefix>        one byte per hit
      state/locks/<hash>-rank_<i>-<prefix>       empty files
      state/leases/...                           entries in use, see cgtool.store.leases
      state/trash/... state/pruned/...           pruned entries, see cgtool.store.pruned

Names are validated against this grammar before they become paths, so that no record can point outside the root.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cgtool.errors import CacheError
from cgtool.host import environment

CACHE_FOLDER = "torch_compile_cache"
ARTIFACTS = "artifacts"
SIGNATURES = "signatures"
KEY_FILE = "key.json"
MANIFEST_FILE = "manifest.json"
PLAN_FILE = "plan.json"
GRAPH_FILE = "computation_graph.py"
CODE_FILE = "transformed_code.py"
#: The files of a rank folder beside its manifest.
RANK_FILES = (PLAN_FILE, GRAPH_FILE, CODE_FILE)
#: Folder of a rank and prefix: compiler output for people; in no digest.
GENERATED = "generated"
UNIT_FILE = "unit.json"

#: The compiled part of a model that is used if none is named.
DEFAULT_PREFIX = "backbone"
#: Number of digits of a hash shown to people.
SHORT_DIGITS = 10

# Patterns are strings, so that each is compiled on first use: a load needs only some of them.
_HASH = r"[0-9a-f]{64}"
_PREFIX = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_KIND = r"(?=.{1,40}\Z)[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*"
_RANK_FOLDER = r"rank_(0|[1-9][0-9]{0,6})"
_MAX_RANK = 9_999_999


def is_hash(text: str) -> bool:
    """Return whether `text` is 64 lower-case hexadecimal digits."""
    return re.fullmatch(_HASH, text) is not None


def is_prefix(text: str) -> bool:
    """Return whether `text` is a valid name for a compiled part of a model."""
    return re.fullmatch(_PREFIX, text) is not None


def check_hash(text: str) -> str:
    """Return `text` if it is a valid hash, else raise CacheError."""
    return _checked(text, _HASH, "64 lower-case hexadecimal digits", "hash")


def check_kind(text: str) -> str:
    """Return `text` if it is a valid artifact kind, else raise CacheError."""
    return _checked(text, _KIND, "lower-case words joined by dots", "artifact kind")


def check_prefix(text: str) -> str:
    """Return `text` if it is a valid prefix, else raise CacheError."""
    return _checked(text, _PREFIX, "letters, digits, '_', '-' and '.', at most 64", "prefix")


def parse_rank_folder(name: str) -> int | None:
    """Return the rank in a folder name such as "rank_0", or None for any other name."""
    match = re.fullmatch(_RANK_FOLDER, name)
    return None if match is None else int(match[1])


def short(digest: str) -> str:
    """Return a hash or digest abbreviated for display."""
    return digest[:SHORT_DIGITS]


def resolve_root(cache_dir: Path | str | None = None) -> Path:
    """Return the absolute path of the cache root.

    Args:
        cache_dir: The user's choice, from an argument or `--cache-dir`. A path that ends with `torch_compile_cache`
            means its parent.

    Returns:
        The argument, else `CGTOOL_CACHE_DIR`, else the user's cache folder for cgtool.
    """
    chosen = cache_dir if cache_dir is not None else environment().cache_dir
    if chosen is None:
        import platformdirs  # imported lazily: takes milliseconds, and only the default location needs it

        chosen = platformdirs.user_cache_dir("cgtool", appauthor=False)
    root = Path(chosen).expanduser().absolute()
    return root.parent if root.name == CACHE_FOLDER else root


class RankName(msgspec.Struct, frozen=True, kw_only=True):
    """The name of one manifest in a cache: an entry's hash, a rank and a prefix.

    Raises:
        CacheError: One of them does not match the layout's grammar.
    """

    hash: str
    rank: int
    prefix: str

    def __post_init__(self) -> None:
        check_hash(self.hash)
        check_prefix(self.prefix)
        if type(self.rank) is not int or not 0 <= self.rank <= _MAX_RANK:
            expected = f"a number from 0 to {_MAX_RANK}"
            raise CacheError(f"'{self.rank}' is not a valid rank: use {expected}.", expected=expected, actual=self.rank)

    @property
    def flat(self) -> str:
        """The name as one file name: `<hash>-rank_<i>-<prefix>`."""
        return f"{self.hash}-rank_{self.rank}-{self.prefix}"


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The paths under one cache root. Only `hashes()` and `rank_names()` access the file system; they list folders."""

    root: Path

    @classmethod
    def at(cls, cache_dir: Path | str | None = None) -> CacheLayout:
        """Return the paths under the cache root that `resolve_root` gives."""
        return cls(root=resolve_root(cache_dir))

    @property
    def base(self) -> Path:
        """The folder `torch_compile_cache`."""
        return self.root / CACHE_FOLDER

    @property
    def tag(self) -> Path:
        """The file that tells backup tools to skip the root."""
        return self.root / "CACHEDIR.TAG"

    @property
    def units_dir(self) -> Path:
        """The folder of the units."""
        return self.base / "units"

    @property
    def lookup_dir(self) -> Path:
        """The folder of the direct-mode lookup."""
        return self.base / "lookup"

    @property
    def state_dir(self) -> Path:
        """The folder of usage stamps and locks, which are in no digest and are never shipped."""
        return self.base / "state"

    def entry_dir(self, hash_: str) -> Path:
        """The folder of one entry, the smallest thing that can be shipped."""
        return self.base / check_hash(hash_)

    def key_file(self, hash_: str) -> Path:
        """The `key.json` of one entry."""
        return self.entry_dir(hash_) / KEY_FILE

    def rank_dir(self, name: RankName) -> Path:
        """The folder of one rank and prefix."""
        return self.entry_dir(name.hash) / f"rank_{name.rank}" / name.prefix

    def manifest_file(self, name: RankName) -> Path:
        """The manifest of one rank and prefix."""
        return self.rank_dir(name) / MANIFEST_FILE

    def unit_dir(self, key: str) -> Path:
        """The folder of one unit."""
        return self.units_dir / check_hash(key)[:2] / key

    def entry_lock(self, name: RankName) -> Path:
        """The lock of one rank and prefix, held while its manifest is replaced."""
        return self.state_dir / "locks" / name.flat

    def used_file(self, name: RankName) -> Path:
        """The hit counter of one rank and prefix."""
        return self.state_dir / "used" / name.flat

    def hashes(self) -> list[str]:
        """Return the hashes of all entries, sorted; empty if there is no cache."""
        return sorted(name for name in _listed(self.base) if is_hash(name))

    def rank_names(self, hash_: str) -> Iterator[RankName]:
        """Yield every rank and prefix folder of an entry, by rank and prefix; a folder may not have its manifest yet.

        Symlinks are skipped: their targets do not belong to the entry and must not be removed with it.
        """
        entry = self.entry_dir(hash_)
        ranks = sorted(rank for name in _listed(entry, links=False) if (rank := parse_rank_folder(name)) is not None)
        for rank in ranks:
            for prefix in sorted(name for name in _listed(entry / f"rank_{rank}", links=False) if is_prefix(name)):
                yield RankName(hash=hash_, rank=rank, prefix=prefix)


def _listed(folder: Path, *, links: bool = True) -> list[str]:
    """List the names in a folder, with or without symlinks; [] if the folder does not exist."""
    try:
        with os.scandir(folder) as found:
            return [entry.name for entry in found if links or not entry.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CacheError(
            f"The folder {folder} could not be listed: {error.strerror}. Check its permissions.", path=folder
        ) from error


def _checked(text: str, grammar: str, expected: str, noun: str) -> str:
    if re.fullmatch(grammar, text) is None:
        raise CacheError(f"{text!r} is not a valid {noun}: use {expected}.", expected=expected, actual=text)
    return text
