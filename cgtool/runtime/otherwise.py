"""What a call gets that no compiled variant serves: an error, the model itself, or a further variant."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from cgtool.errors import GuardError
from cgtool.host import count
from cgtool.runtime.call import NOT_SERVED, AsModule, LoadedModel
from cgtool.threads import ForkedLock, beside_calls

_log = logging.getLogger(__name__)

#: "raise": a `GuardError`. "eager": the model itself, with one warning for each cause. "warm": what is compiled for the
#: call now. "background": the same in a thread, and the model itself meanwhile.
Otherwise = Literal["raise", "eager", "warm", "background"]

#: How many times one model is compiled: `torch._dynamo.config.recompile_limit` of torch.compile.
MOST_WARMS = 8

_NUMBER = re.compile(r"\d+")


class AnyCall(AsModule):
    """A model that runs from what was compiled for it, and does what was asked for with every other call.

    Several threads may call one object at once; of those that wait for a compilation the first compiles.

    Args:
        module: The live model.
        eager: Calls the model itself.
        name: What messages call it.
        otherwise: What a call gets that nothing serves.
        loaded: What was compiled for it; None: the first call compiles, whatever `otherwise` says.
        warm: Takes the arguments of a call and returns what was compiled for them; None where nothing can be compiled.
    """

    _OWN = frozenset(
        {"module", "_eager", "_name", "_otherwise", "_warm", "_lock", "_loaded", "_waits", "_behind", "_gave_up"}
        | {"_causes"}
    )

    def __init__(
        self,
        module: Any,
        eager: Callable[..., Any],
        name: str,
        otherwise: Otherwise,
        *,
        loaded: LoadedModel | None = None,
        warm: Callable[[tuple[Any, ...], Mapping[str, Any]], LoadedModel] | None = None,
    ) -> None:
        self.module = module
        self._eager = eager
        self._name = name
        self._otherwise = otherwise
        self._warm = warm
        self._lock = ForkedLock()
        #: Grows at its end; replaced as a whole, so that a call goes on with what it began with.
        self._loaded: tuple[LoadedModel, ...] = () if loaded is None else (loaded,)
        #: Whether a call waits for a warm: a trace has the model hold other things than what calls left in it.
        self._waits = otherwise == "warm" and loaded is not None and bool(loaded.keeps)
        self._behind: threading.Thread | None = None
        self._gave_up: str | None = None
        self._causes: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            TypeError: The call does not fit the model's method.
            GuardError: With "raise" as `LoadedModel` does; with "warm" where no compiled code can serve the call.
            CgtoolError: With "warm": what keeps the model from being compiled for this call.
        """
        if not self._loaded and self._otherwise != "background":
            return self._warmed(args, kwargs)
        try:
            answer = self._attempt(args, kwargs)
        except GuardError as error:
            if self._otherwise not in {"eager", "background"}:
                raise
            return self._run_eagerly(str(error), args, kwargs)
        return answer if answer is not NOT_SERVED else self._other(args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, and what comes out of a pickle, find in the cache again what was compiled."""
        found = () if self._warm is not None else self._loaded
        return {**vars(self), "_loaded": found, "_behind": None}

    def _attempt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._waits:
            with self._lock:
                return self._first_answer(args, kwargs)
        return self._first_answer(args, kwargs)

    def _first_answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for model in self._loaded:
            answer = model.attempt(*args, **kwargs)
            if answer is not NOT_SERVED:
                return answer
        return NOT_SERVED

    def _other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._otherwise == "raise":
            raise self._loaded[0].refusal(args, kwargs)
        if self._otherwise == "eager" or len(self._loaded) >= MOST_WARMS:
            return self._run_eagerly(self._why(args, kwargs), args, kwargs)
        if self._otherwise == "warm":
            return self._warmed(args, kwargs)
        with self._lock:
            if self._gave_up is None and (self._behind is None or not self._behind.is_alive()):
                self._behind = threading.Thread(
                    target=self._warm_behind, args=(args, kwargs), name="cgtool-warm", daemon=True
                )
                self._behind.start()
        return self._run_eagerly(self._gave_up, args, kwargs)

    def _warmed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:  # a second thread's call waits for what the first one's makes
            answer = self._attempt(args, kwargs)
            if answer is not NOT_SERVED:
                return answer
            model = self._compiled(args, kwargs)
            if self._waits:
                return model(*args, **kwargs)
        return model(*args, **kwargs)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoadedModel:
        if self._warm is None:
            raise self._loaded[0].refusal(args, kwargs)
        if self._loaded:
            _log.info("Compiling %s again: %s", self._name, self._why(args, kwargs))
        model = self._warm(args, kwargs)
        self._loaded = (*self._loaded, model)
        self._waits = self._waits or (self._otherwise == "warm" and bool(model.keeps))
        return model

    def _warm_behind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        beside_calls.set(True)  # in this thread, which ends with its work
        try:
            self._compiled(args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the model goes on without
            self._gave_up = f"It cannot be compiled: {error}"

    def _why(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return str(self._loaded[0].refusal(args, kwargs))

    def _run_eagerly(self, why: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count("eager_calls")
        if why is not None and (cause := _NUMBER.sub("", why)) not in self._causes:  # sizes are one cause
            self._causes.add(cause)
            _log.warning("A call of %s runs eagerly: %s", self._name, why)
        return self._eager(*args, **kwargs)

    def recheck(self) -> None:
        """Do what `LoadedModel.recheck` does; before the first call there is nothing to check."""
        for model in self._loaded:
            model.recheck()
