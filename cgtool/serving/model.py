"""A model whose batches run from CUDA graphs: one FULL wrapper around it, and one PIECEWISE wrapper around each piece.

Serving needs little of what `cgtool.load` returns: that it is callable, has the live `module`, and lets the functions
of its compiled pieces be replaced (`wrap_pieces`). Models that keep to this by hand are served as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from cgtool.config_values import CUDAGraphMode
from cgtool.errors import UsageError
from cgtool.plan.records import source_words
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.program import Piece, WrapPiece
from cgtool.serving.forward_context import BatchDescriptor, get_forward_context
from cgtool.serving.graphs import GraphBackend
from cgtool.serving.tensors import HeldTensors, ModelTensors, ReadTensors, copied
from cgtool.serving.wrapper import CUDAGraphWrapper, Pools


@runtime_checkable
class PiecewiseModel(Protocol):
    """A callable that runs compiled pieces and lets each be wrapped."""

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return what calls read of the module, as it is now, by source."""

    def open_all(self) -> None:
        """Open whatever calls would open otherwise."""

    def wrap_pieces(self, wrap: WrapPiece) -> None:
        """Call what `wrap` returns in place of each compiled piece, from now on."""


class GraphedModel:
    """A model that replays CUDA graphs as the forward context tells it, and is called as the model is.

    Args:
        model: A `PiecewiseModel`; or any callable, such as a module, of which only FULL graphs are captured.
        backend: The device.
        piecewise: Whether pieces are captured.
        lend_outputs: Return tensors that the next replay of the same graph writes over; each graph has a memory pool of
            its own then. Otherwise outputs are copied, and all graphs share one pool.
        copy_inputs: Copy inputs that need not lie where they lay at capture: arguments of the call, and what splitting
            ops return.
        debug: Check shapes, strides and dtypes of inputs at each replay.

    Raises:
        UsageError: `piecewise`, and a piece cannot be captured; the message names it.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        backend: GraphBackend,
        piecewise: bool = True,
        lend_outputs: bool = False,
        copy_inputs: bool = False,
        debug: bool = False,
    ) -> None:
        self.model = model
        self.pools = Pools(backend, shared=not lend_outputs)
        self.backend = backend
        self._lend = lend_outputs
        self._copy_inputs = copy_inputs
        self._debug = debug
        self._pieces: list[CUDAGraphWrapper] = []
        self.full = CUDAGraphWrapper(
            model,
            CUDAGraphMode.FULL,
            backend=backend,
            pools=self.pools,
            weights=_tensors_of(model),
            copied_inputs=None if copy_inputs else (),
            lend_outputs=lend_outputs,
            debug=debug,
        )
        if piecewise and isinstance(model, PiecewiseModel):
            model.wrap_pieces(self._wrap)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            GraphError: As the wrappers raise it.
            UsageError: Calls leave something in attributes of the model, which a replay would not do, or write over.
        """
        mode = get_forward_context().cudagraph_runtime_mode
        if mode is not CUDAGraphMode.NONE and (kept := getattr(self.model, "keeps", ())):
            name = source_words(kept[0])
            msg = (
                f"Each call leaves another tensor in {name} of the model, and a CUDA graph does not: keep it in a "
                "buffer that is written in place, return it, or serve without graphs (cudagraph_mode NONE)."
            )
            raise UsageError(msg, path=name, actual=kept)
        output = self.full(*args, **kwargs)
        leaves_graphs = mode is CUDAGraphMode.PIECEWISE
        return copied(output) if leaves_graphs and not self._lend else output

    def open_all(self) -> None:
        """Open every artifact of the model, so that no call does."""
        if isinstance(self.model, PiecewiseModel):
            self.model.open_all()

    @property
    def wrappers(self) -> tuple[CUDAGraphWrapper, ...]:
        """The wrapper of the model and those of its pieces, as far as calls have come to them."""
        return (self.full, *self._pieces)

    def drop(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Forget what was captured for one key."""
        for wrapper in self.wrappers:
            if wrapper.mode is mode:
                wrapper.drop(descriptor)

    def clear(self) -> None:
        """Forget all graphs and give their memory back, as before a sleep; what is captured next gets new pools."""
        for wrapper in self.wrappers:
            wrapper.clear()

    def _wrap(self, piece: Piece, function: Boxed) -> Boxed:
        _refuse(piece, copy_inputs=self._copy_inputs)
        wrapper = CUDAGraphWrapper(
            function,
            CUDAGraphMode.PIECEWISE,
            backend=self.backend,
            pools=self.pools,
            name=piece.name,
            copied_inputs=tuple(piece.returned_by_ops) if self._copy_inputs else (),
            lend_outputs=True,
            boxed=True,
            debug=self._debug,
        )
        self._pieces.append(wrapper)
        return wrapper


def _tensors_of(model: Callable[..., Any]) -> HeldTensors | None:
    """Return what a FULL graph of the model reads beside its arguments, as far as it can be told."""
    if isinstance(model, PiecewiseModel):
        return ReadTensors(model.live_tensors)
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    return None if module is None else ModelTensors(module)


def _refuse(piece: Piece, *, copy_inputs: bool) -> None:
    """Refuse a piece that graphs of counts of tokens cannot serve."""
    if len(piece.dynamic_dims) > 1:
        msg = (
            f"{piece.name} has {len(piece.dynamic_dims)} dynamic dimensions ({', '.join(piece.dynamic_dims)}), and a "
            "CUDA graph is chosen by the count of tokens alone: make the others static, or capture no pieces."
        )
        raise UsageError(msg, path=piece.name, actual=piece.dynamic_dims)
    if not piece.dynamic_dims and not piece.is_static:
        msg = f"No input of {piece.name} carries the count of tokens in its shape: give it one, or capture no pieces."
        raise UsageError(msg, path=piece.name)
    if piece.returned_by_ops and not copy_inputs:
        position, op = min(piece.returned_by_ops.items())
        msg = (
            f"Tensor {position} of {piece.name} is returned by {op} and lies elsewhere at every call: let the op write "
            "into an argument (mutates_args), or set cudagraph_copy_inputs."
        )
        raise UsageError(msg, path=piece.name, actual=op)
