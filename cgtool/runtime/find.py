"""From a model to its callable: find the entry that serves it, without a trace, or say why none does; then open it.

The way of ccache's direct mode: cheap facts lead to candidates; a candidate's factors are compared with those of
this process, its traced files with the files as they are now, its guards with the live model. What differs becomes a
sentence.

The compiler is a factor because it decides what `warm` compiles, and what Inductor's own artifacts are built with as
they are opened. So a compiler of another version is a miss, whatever the adaptor: whoever changed it, to be rid of a
fault of the old one say, must not be served what the old one made. A machine that has none says nothing about it: it
can make nothing else of the model, and what was compiled elsewhere is what it is there to run.

The bytes of all artifacts are read and matched to their digests at load, and what was matched is what is opened: when
a call first chooses it, so that a start pays for what it uses. Those of the first variant are opened at load where they
serve all of its sizes, so that a machine which cannot open any says so as it starts.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from cgtool import host
from cgtool.errors import ArtifactError, CacheError, CacheMissError, CacheSchemaError, RefusedError
from cgtool.graph.expressions import rename, symbols_of
from cgtool.guards._torch import process_group_is_initialized, register_groups
from cgtool.guards.sources import Roots, SourceError, leads_to
from cgtool.guards.table import failures_of
from cgtool.plan.pieces import AOT_INDUCTOR, EAGER, Json, PieceGraph
from cgtool.plan.records import GuardTable, Plan, Step, Variant, parse_plan
from cgtool.plan.shapes import dispatch_order
from cgtool.runtime.aoti_package import Packages
from cgtool.runtime.call import LoadedModel, first_index
from cgtool.runtime.dispatch import Bounds, Boxed, Choice, PiecewiseBackend, Unopened, graph_at, symbol_bounds
from cgtool.runtime.factors import Live, differences_now
from cgtool.runtime.op_by_op import promised_function
from cgtool.runtime.weights import is_weight, tensor_differences
from cgtool.store.artifacts import code_of
from cgtool.store.entry import Entry
from cgtool.store.layout import PLAN_FILE, CacheLayout, RankName, short
from cgtool.store.leases import keep
from cgtool.store.lookup import LookupStore
from cgtool.store.records import Key, parse_key
from cgtool.store.trust import REASONS, Records, TrustPolicy, resolved

#: Adaptors whose code names the device that it was compiled on.
_OF_THE_FIRST_DEVICE = frozenset({"inductor", "inductor_standalone"})
#: How many reasons a miss tells, and how many other entries it looks at to find the nearest.
_MAX_REASONS = 12
_MAX_LOOKED_AT = 256


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that serves the model: its files, its plan, and what it was keyed on."""

    entry: Entry
    key: Key
    plan: Plan


def rank_here() -> int:
    """Return this process's rank, as its launcher says; without one, as the default process group says, else 0."""
    if process_group_is_initialized() and not any(host.variables_now(("RANK", "LOCAL_RANK")).values()):
        return torch.distributed.get_rank()
    return host.environment().rank


class Finder:
    """Looks for the entry of one model in one cache.

    Args:
        layout: Where the cache lies.
        module: The live model.
        live: What a key says of it and of this process.
        rank: Which process of a model-parallel group.
        prefix: Which compiled part of the model.
        trust: What an entry must be before anything of it is interpreted.
        only_asks: Whether nothing will be used of what is found: then nothing is held, and no miss is counted.
    """

    def __init__(
        self,
        layout: CacheLayout,
        module: Any,
        live: Live,
        *,
        rank: int,
        prefix: str,
        trust: TrustPolicy,
        only_asks: bool = False,
    ) -> None:
        self._trust = trust
        self._only_asks = only_asks
        self._untrusted: list[RefusedError] = []
        self._other_schema: CacheSchemaError | None = None
        # Resolved once: whoever may turn a link could show one folder to the policy and another to the reader.
        self._layout = CacheLayout(root=resolved(layout.root))
        self._module = module
        self._live = live
        self._rank = rank
        self._prefix = prefix

    def find(self, accept: Callable[[Found], tuple[str, ...]] = lambda _: ()) -> Found:
        """Return the entry that serves the model; of several, the one that was published or completed last.

        Args:
            accept: Asked of each entry that fits; sentences that it returns turn it away.

        Raises:
            CacheMissError: There is none; its reasons say why, those of the nearest entry.
            RefusedError: There is one that may not be trusted, and none that may.
            CacheSchemaError: What is there was written by another version of cgtool.
            CacheError: The cache cannot be read.
        """
        refused: list[tuple[str, tuple[str, ...]]] = []
        try:
            for hash_ in LookupStore(self._layout).candidates(self._live.lookup):
                found, reasons = self._look(hash_)
                if found is not None:
                    reasons = accept(found)
                    # From here on prune leaves it alone, unless it was quicker.
                    if not reasons and (self._only_asks or keep(self._layout, found.entry.name)):
                        return found
                if reasons:
                    refused.append((hash_, reasons))
        finally:
            host.compiler_version()  # it was asked, and is waited for
        raise self._failure(refused)

    @property
    def lookup(self) -> str:
        """The digest of the model's cheap facts."""
        return self._live.lookup

    def fits(self, key: Key) -> bool:
        """Return whether an entry of this key may serve the model."""
        return not differences_now(key, self._live)

    def at(self, hash_: str) -> Found:
        """Return one entry, which serves the model.

        Raises:
            CacheMissError: It does not, or it is gone; and as `find`.
        """
        found, reasons = self._look(hash_)
        if found is not None and keep(self._layout, found.entry.name):
            return found
        raise self._failure([(hash_, reasons or ("it was removed meanwhile",))])

    def _look(self, hash_: str) -> tuple[Found | None, tuple[str, ...]]:
        """Return the entry, or why it does not serve; (None, ()) when it has nothing for this rank and prefix."""
        name = RankName(hash=hash_, rank=self._rank, prefix=self._prefix)
        try:
            records = self._trust.read(self._layout, name)
            if records is None:
                return None, ()
            key = self._key(hash_, records)
            if differences_now(key, self._live, when="first"):
                return None, differences_now(key, self._live)
            entry = self._trust.entry(self._layout, name, records)
            if entry is None:
                return None, ()
            plan = parse_plan(entry.files[PLAN_FILE], path=self._layout.rank_dir(name) / PLAN_FILE)
        except RefusedError as error:
            self._untrusted.append(error)
            return None, (str(error),)
        except CacheSchemaError as error:
            self._other_schema = error  # told only when no entry of this version serves
            return None, (str(error),)
        except CacheError as error:
            return None, (str(error),)
        # By now the compiler has had time to answer.
        reasons = self._guards(plan) or differences_now(key, self._live, when="last")
        return (None, reasons) if reasons else (Found(entry=entry, key=key, plan=plan), ())

    def _key(self, hash_: str, records: Records) -> Key:
        return parse_key(records.key, path=self._layout.key_file(hash_), hash_=hash_)

    def _guards(self, plan: Plan) -> tuple[str, ...]:
        method = getattr(self._module, plan.method, None)
        if method is None:
            return (f"The model has no method {plan.method} now.",)
        tables = [variant.model_guards for variant in plan.variants]
        roots = Roots(self._module, method)
        if isinstance(tables[0], GuardTable) and "transformers.utils.output_capturing" in sys.modules:
            from cgtool.guards.transformers import install_hooks, models_with_hooks  # other models need none

            with contextlib.suppress(SourceError):
                for source in models_with_hooks(tables[0].texts.whole):  # the plan's
                    install_hooks(roots.resolve(source))
        failures = failures_of(tables, roots)
        if failures:
            return tuple(failure.sentence for failure in failures)
        # Parameters and buffers are among the facts; what is left is tensors that lie about as plain attributes.
        known = self._live.known["state"]["tensors"]
        inputs = {item.source: item for variant in plan.variants for item in variant.inputs}
        kept = {one.place for variant in plan.variants for one in variant.kept}
        others = [
            item
            for source, item in inputs.items()
            if not leads_to(source, kept) and (source[5:] not in known or source[:5] != "self.")
        ]
        return tuple(tensor_differences(roots, filter(is_weight, others)))

    def _failure(self, refused: list[tuple[str, tuple[str, ...]]]) -> Exception:
        """Return why nothing serves: an entry that may not be trusted tells more than one of another version."""
        if self._untrusted:
            return max(
                self._untrusted, key=lambda error: REASONS.index(error.reason) if error.reason in REASONS else -1
            )
        if self._other_schema is not None:
            return self._other_schema
        return self._miss(refused)

    def _miss(self, refused: list[tuple[str, tuple[str, ...]]]) -> CacheMissError:
        # Kept off the way of a hit.
        from cgtool.store import pruned as record

        pruned = (record.pruned if self._only_asks else record.count_miss)(self._layout, self._live.lookup)
        if not refused:
            refused = self._others()
        if not refused:
            elsewhere = self._elsewhere()
            msg = f"There is nothing for this model in {self._layout.root} (rank {self._rank}, prefix {self._prefix!r})"
            advice = "Warm it first: `cgtool warm MODEL`, or call cgtool.compile."
            msg = f"{msg}: {elsewhere}" if elsewhere else f"{msg}. {advice}"
            reason = "nothing has been warmed for this model" if pruned is None else pruned.sentence
            return CacheMissError(msg, reasons=(elsewhere or reason,), path=self._layout.root)
        hash_, reasons = min(refused, key=lambda pair: len(pair[1]))
        shown = "\n  ".join(reasons[:_MAX_REASONS])
        msg = (
            f"No entry of {self._layout.root} fits this model. The nearest, {short(hash_)}, does not because:\n"
            f"  {shown}\n{self._advice(reasons)}"
        )
        return CacheMissError(msg, reasons=reasons[:_MAX_REASONS], path=self._layout.root, nearest=hash_)

    def _elsewhere(self) -> str:
        """Say for which other ranks the model was warmed; "" where for none."""
        hashes = LookupStore(self._layout).candidates(self._live.lookup)
        names = (name for hash_ in hashes for name in self._layout.rank_names(hash_) if name.prefix == self._prefix)
        ranks = sorted({name.rank for name in names if self._layout.manifest_file(name).exists()} - {self._rank})
        if not ranks:
            return ""
        listed = ", ".join(map(str, ranks))
        return (
            f"it was warmed for rank {listed}, and not for rank {self._rank}. Where each holds a part of a model, warm "
            "all (`torchrun ... -m cgtool warm MODEL`, or `--world-size N`); where each holds all of it, load with "
            "rank=0."
        )

    def _advice(self, reasons: tuple[str, ...]) -> str:
        tensors = self._live.known["state"]["tensors"]
        if any(" meta" in spelled for spelled in tensors.values()):
            return (
                "Tensors on the meta device have no memory: give them some (module.to_empty(device=...), then "
                "load_state_dict) before the model is loaded."
            )
        if any(reason.startswith("model.class was ") for reason in reasons):
            return (
                "A class is known by the module that it is imported from: import it as it was when the model was "
                "warmed, or warm it by the name that it has here (`cgtool warm MODULE:FACTORY`)."
            )
        return "Warm the model again as it is now, or undo the change."

    def _others(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return entries that the facts did not lead to and that are of a model of the same class.

        One of that name in another module is the same where its tensors are: a file is imported by several names.
        """
        known = self._live.known
        found: list[tuple[str, tuple[str, ...]]] = []
        for hash_ in self._layout.hashes()[:_MAX_LOOKED_AT]:
            name = RankName(hash=hash_, rank=self._rank, prefix=self._prefix)
            try:
                records = self._trust.read(self._layout, name)
                key = None if records is None else self._key(hash_, records)
            except (CacheError, RefusedError):
                continue
            if key is None:
                continue
            is_of_its_name = _class_name(key.value("model")) == _class_name(known["model"])
            if key.value("model") == known["model"] or (is_of_its_name and key.value("state") == known["state"]):
                found.append((hash_, differences_now(key, self._live)))
        return [(hash_, reasons) for hash_, reasons in found if reasons]


def _class_name(model: Json) -> str | None:
    """Return the name that a class has in its module; None for what another cgtool may have written there."""
    named = model.get("class") if isinstance(model, dict) else None
    return named.partition(":")[2] if isinstance(named, str) else None


#: Makes a function from an artifact: (adaptor, bytes, the piece's graph at the artifact's shape).
Opener = Callable[[str, bytes, PieceGraph], Boxed]


def open_entry(found: Found, module: Any, opener: Opener, *, recheck_calls: bool = False) -> LoadedModel:
    """Return the callable that serves `module` from an entry that was found for it.

    Args:
        found: The entry.
        module: The live model.
        opener: Opens one artifact of an adaptor that needs more than torch; those of `aot_inductor` and `eager` are
            opened here.
        recheck_calls: Whether each call looks at all live objects, as `recheck` does.

    Raises:
        CacheCorruptError: An artifact's bytes differ from their digest.
        ArtifactError: An artifact cannot be opened here, or not for the model's device, or a piece has none. A call
            raises it too, where it is the first to choose an artifact.
        GuardError: A tensor of the model is of another make than when it was compiled.
    """
    register_groups()
    index = first_index(module, found.plan)
    if index and (named := sorted({row.adaptor for row in found.entry.manifest.rows} & _OF_THE_FIRST_DEVICE)):
        msg = (
            f"What {named[0]} compiled runs on the first device alone, and this model is on device {index}. Let this "
            f"process see that one alone (CUDA_VISIBLE_DEVICES={index}), or warm with aot_inductor."
        )
        raise ArtifactError(msg, path=found.entry.name.hash, expected=0, actual=index)
    plan = found.plan
    with Packages(device_index=index) as packages:

        def open_now(adaptor: str, code: bytes, step: Step, bounds: Bounds) -> Boxed:
            graph = graph_at(plan.graphs[step.graph], step, bounds)
            if adaptor == EAGER:
                return promised_function(graph, device_index=index)
            return packages.open(code, graph) if adaptor == AOT_INDUCTOR else opener(adaptor, code, graph)

        pieces = _pieces(found, open_now)
        return LoadedModel(
            module,
            _with_added_guards(plan, pieces),
            {place: _backend(choices) for place, choices in pieces.items()},
            device_index=index,
            variables=found.key.value("variables"),
            recheck_calls=recheck_calls,
        )


def _pieces(found: Found, open_now: Callable[[str, bytes, Step, Bounds], Boxed]) -> dict[tuple[int, int], list[Choice]]:
    """Return what serves each piece of each variant, by (variant, piece), what is to be preferred first."""
    opened: dict[tuple[str, str, str, str], tuple[Unopened, tuple[str, ...]]] = {}
    pieces: dict[tuple[int, int], list[Choice]] = {}
    plan, manifest = found.plan, found.entry.manifest
    read = found.entry.artifacts(row.artifact for row in manifest.rows)
    steps = [{step.piece: step for step in variant.steps} for variant in plan.variants]
    for row in sorted(manifest.rows, key=lambda row: (dispatch_order(row.shape), not row.tuned)):
        step = steps[row.variant].get(row.piece_index) if row.variant < len(steps) else None
        if step is None:
            msg = (
                f"The manifest names piece {row.piece_index} of variant {row.variant}, which its plan has not. "
                "Warm the model again."
            )
            raise ArtifactError(msg, path=found.entry.name.hash)
        bounds = symbol_bounds(plan.variants[row.variant], row.shape)
        digest = row.artifact.digest
        # What the graph at this shape is made from: its own identity would have to be computed for each row.
        key = digest, step.graph, repr(row.shape), repr(step.symbols)
        if key not in opened:
            code = code_of(read[digest], row, step.graph)
            guards = tuple(rename(text, step.symbols) for text in row.artifact.guards)
            opened[key] = Unopened(functools.partial(open_now, row.adaptor, code, step, bounds)), guards
        function, guards = opened[key]
        choice = Choice(shape=row.shape, bounds=bounds, guards=guards, function=function)
        pieces.setdefault((row.variant, row.piece_index), []).append(choice)
    return pieces


def _backend(choices: list[Choice]) -> PiecewiseBackend:
    return PiecewiseBackend(
        general=next((one.function for one in choices if not one.bounds), None),
        choices=[one for one in choices if one.bounds],
    )


def _is_from_data(guard: str, variant: Variant) -> bool:
    """Return whether a guard speaks of a size that is known only while the program runs."""
    return not set(symbols_of(guard)) <= {symbol.name for symbol in variant.symbols}


def _with_added_guards(plan: Plan, pieces: Mapping[tuple[int, int], list[Choice]]) -> Plan:
    """Return the plan with what the compiler relied on for the general shape among its variants' relations."""
    if not any(one.guards for choices in pieces.values() for one in choices):
        return plan
    variants = []
    for index, variant in enumerate(plan.variants):
        added: dict[str, None] = dict.fromkeys(variant.relations)
        for step in variant.steps:
            for one in pieces.get((index, step.piece), ()):
                added.update((guard, None) for guard in one.guards if not one.bounds or _is_from_data(guard, variant))
        variants.append(replace(variant, relations=tuple(added)))
    return replace(plan, variants=tuple(variants))
