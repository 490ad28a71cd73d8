"""Handle calls that no compiled variant accepts: raise, run the model eagerly, or compile another variant."""

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

#: "raise": raise a `GuardError`. "eager": run the model itself, with one warning per cause. "warm": compile for the
#: call and run the result. "background": compile in a thread, and run the model itself in the meantime.
Otherwise = Literal["raise", "eager", "warm", "background"]

#: The most times that one model is compiled, as `torch._dynamo.config.recompile_limit` is for torch.compile.
MOST_WARMS = 8

_NUMBER = re.compile(r"\d+")


class AnyCall(AsModule):
    """A model that runs from compiled code, and handles every other call according to `otherwise`.

    Several threads may call one object at once; if several need a compilation, the first compiles.

    Args:
        module: The live model.
        eager: Calls the model itself.
        name: The model's name in messages.
        otherwise: How to handle a call that no variant accepts.
        loaded: The compiled model; None makes the first call compile, whatever `otherwise` is.
        warm: Compiles the model for the arguments of a call and returns the loaded result; None if compiling is not
            possible.
    """

    _OWN = frozenset(
        {"module", "_eager", "_name", "_otherwise", "_warm", "_lock", "_loaded", "_waits", "_background", "_gave_up"}
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
        #: Replaced as a whole: a call that is running continues with the models it started with.
        self._loaded: tuple[LoadedModel, ...] = () if loaded is None else (loaded,)
        #: Whether calls wait for a compilation: a trace temporarily replaces the values that calls stored in the model.
        self._waits = otherwise == "warm" and loaded is not None and bool(loaded.assigned_places)
        self._background: threading.Thread | None = None
        self._gave_up: str | None = None
        self._causes: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            TypeError: The arguments do not match the signature of the model's method.
            GuardError: With "raise", as `LoadedModel`; with "warm", if no compiled code can handle the call.
            CgtoolError: With "warm", if the model cannot be compiled for this call.
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
        """Drop the compiled models if a copy, or an unpickled object, can load them from the cache again."""
        loaded = () if self._warm is not None else self._loaded
        return {**vars(self), "_loaded": loaded, "_background": None}

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
            return self._run_eagerly(self._reason(args, kwargs), args, kwargs)
        if self._otherwise == "warm":
            return self._warmed(args, kwargs)
        with self._lock:
            if self._gave_up is None and (self._background is None or not self._background.is_alive()):
                self._background = threading.Thread(
                    target=self._compile_in_background, args=(args, kwargs), name="cgtool-warm", daemon=True
                )
                self._background.start()
        return self._run_eagerly(self._gave_up, args, kwargs)

    def _warmed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:  # a second thread waits for the compilation of the first
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
            _log.info("Compiling %s again: %s", self._name, self._reason(args, kwargs))
        model = self._warm(args, kwargs)
        self._loaded = (*self._loaded, model)
        self._waits = self._waits or (self._otherwise == "warm" and bool(model.assigned_places))
        return model

    def _compile_in_background(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        beside_calls.set(True)  # affects only this thread, which ends after the compilation
        try:
            self._compiled(args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever the error, the model runs eagerly
            self._gave_up = f"The model cannot be compiled: {error}"

    def _reason(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return str(self._loaded[0].refusal(args, kwargs))

    def _run_eagerly(self, reason: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count("eager_calls")
        # Reasons that differ only in sizes count as one cause.
        if reason is not None and (cause := _NUMBER.sub("", reason)) not in self._causes:
            self._causes.add(cause)
            _log.warning("A call of %s runs eagerly: %s", self._name, reason)
        return self._eager(*args, **kwargs)

    def recheck(self) -> None:
        """Check all guards on the model again, as `LoadedModel.recheck`; does nothing before the first call."""
        for model in self._loaded:
            model.recheck()
