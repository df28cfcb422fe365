# SPDX-License-Identifier: Apache-2.0
"""LossScale: keeps gradients inside the range of float16 while backward runs.

Backward starts from a seed multiplied by the scale. Before a gradient is added to a leaf's ``grad``
it is divided by it again, so ``grad`` is always what the loop would see without a scale; on the way
it is checked. A step over gradients that overflowed is skipped and the scale halved; after many
steps without one it is doubled. The rules and numbers are those of ``torch.amp.GradScaler``.

Note [Cycle]: A cycle is all backward passes up to a step, and all steps up to the next backward:
one update of the scale, however many optimizers there are.

Note [Nested leaves]: A backward that goes on with the one around it (a checkpoint's, that
recomputes its part of the graph) adds to the grad of parameters, and to that of its detached
inputs. From there the one around goes on, so that has to stay scaled. Detached inputs are neither
parameters nor managed, and no graph had them before.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from patrickstar import _C
from patrickstar.errors import Error, InvalidArgument

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_INITIAL_SCALE = 2.0**16
_GROWTH_FACTOR = 2.0
_BACKOFF_FACTOR = 0.5
_GROWTH_INTERVAL = 2000  # steps without an overflow until the scale grows

# From the initial scale down to 2**-16, and no gradient that came out of it: the scale is not at
# fault any more.
_MOST_SKIPPED_IN_A_ROW = 32

# autograd's nodes that add to a leaf's grad.
_AccumulateGrad = type(
    torch.autograd.graph.get_gradient_edge(torch.zeros(1, requires_grad=True)).node
)


class _Running(threading.local):
    """1 / scale of the backward that runs in this thread; None where nothing is to be unscaled."""

    inverse: torch.Tensor | None = None


class LossScale:
    """The scale of losses under ``mixed_precision="fp16"``.

    Attributes:
        scale: What the next backward multiplies its seed by.

    It has ``state_dict()`` and ``load_state_dict()``, so it can be saved with the model:

    Example:
        >>> import patrickstar
        >>> session = patrickstar.init(host_memory="64MiB", mixed_precision="fp16")
        >>> session.loss_scale.scale
        65536.0
        >>> patrickstar.shutdown()
    """

    def __init__(self) -> None:
        self.scale = _INITIAL_SCALE
        self._num_good_steps = 0
        self._num_skipped = 0  # in a row
        self._before_cycle = (self.scale, 0, 0)  # the three above
        self._has_stepped = False  # in this cycle
        self._has_skipped = False
        self._running = _Running()
        self._hooks: dict[int, tuple[weakref.ref[torch.Tensor], RemovableHandle]] = {}
        self._overflowed: dict[int, weakref.ref[torch.Tensor]] = {}  # leaves, by id
        self._left_scaled: weakref.WeakValueDictionary[int, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )  # detached inputs, by id

    def close(self) -> None:
        """Takes the hooks off all leaves."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._overflowed.clear()

    def state_dict(self) -> dict[str, Any]:
        """What training needs to go on: the scale and the steps since it changed."""
        return {
            "scale": self.scale,
            "num_good_steps": self._num_good_steps,
            "num_skipped": self._num_skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what ``state_dict()`` returned.

        Raises:
            InvalidArgument: It is not that.
        """
        if state.keys() != self.state_dict().keys():
            raise InvalidArgument(
                f"cannot load the loss scale: expected {', '.join(self.state_dict())}; got "
                f"{', '.join(map(str, state))}; pass what its state_dict() returned"
            )
        self.scale = float(state["scale"])
        self._num_good_steps = int(state["num_good_steps"])
        self._num_skipped = int(state["num_skipped"])
        self._has_stepped = True

    @contextlib.contextmanager
    def backward(self, outputs: Sequence[Any], *, is_continued: bool) -> Iterator[float]:
        """While a backward runs: unscales what it adds to the leaves of its graph.

        Args:
            outputs: Where it starts: tensors or edges of the graph.
            is_continued: Its seeds come from the backward around it, whose scale they carry.

        Yields:
            The factor for the seeds.
        """
        outer = self._running.inverse
        if not is_continued:
            self._begin_cycle()
            self._running.inverse = torch.tensor(self.scale).double().reciprocal().float()
        try:
            if self._running.inverse is not None:
                self._hook_leaves(outputs, is_continued=is_continued)
            yield self.scale
        finally:
            self._running.inverse = outer

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """While gradients are computed to be returned, not to be added to leaves."""
        outer, self._running.inverse = self._running.inverse, None
        try:
            yield
        finally:
            self._running.inverse = outer

    def take_step(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether an optimizer may step; updates the scale.

        Raises:
            Error: Too many steps in a row could not be taken, or a gradient is still scaled.
        """
        parameters = list(parameters)
        self._refuse_scaled(parameters)
        overflowed = [p for p in parameters if p.grad is not None and self._has_overflowed(p)]
        if not self._has_stepped:
            self._before_cycle = (self.scale, self._num_good_steps, self._num_skipped)
        self._has_stepped = True
        self._has_skipped = self._has_skipped or bool(overflowed)
        self._update()
        if overflowed and self._num_skipped >= _MOST_SKIPPED_IN_A_ROW:
            self._num_skipped = 0
            raise Error(
                f"cannot train in float16: {_MOST_SKIPPED_IN_A_ROW} steps in a row had gradients "
                f"that are inf or nan, the last at a loss scale of {self._before_cycle[0]:g}, "
                f"the first of them that of {_name_of(overflowed[0])}; expected finite ones at a "
                "low scale: look for an inf or nan in the data and the loss, lower the learning "
                'rate, or use mixed_precision="bf16"'
            )
        return not overflowed

    def _refuse_scaled(self, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters if self._left_scaled else []:
            if self._left_scaled.get(id(parameter)) is parameter and parameter.grad is not None:
                raise Error(
                    f"cannot step with the gradient of {_name_of(parameter)}: it is still scaled, "
                    "since only a reentrant checkpoint saw that tensor, and it is no parameter; "
                    "make it a torch.nn.Parameter, call patrickstar.manage() on it, or pass "
                    "use_reentrant=False"
                )

    def _has_overflowed(self, leaf: torch.Tensor) -> bool:
        reference = self._overflowed.get(id(leaf))
        return reference is not None and reference() is leaf

    def _update(self) -> None:
        """As torch's ``_amp_update_scale_``, from what was before this cycle."""
        scale, num_good, num_skipped = self._before_cycle
        if self._has_skipped:
            self.scale, self._num_good_steps = scale * _BACKOFF_FACTOR, 0
            self._num_skipped = num_skipped + 1
            return
        self.scale, self._num_good_steps, self._num_skipped = scale, num_good + 1, 0
        if self._num_good_steps == _GROWTH_INTERVAL:
            self._num_good_steps = 0
            grown = scale * _GROWTH_FACTOR
            if grown <= torch.finfo(torch.float32).max:
                self.scale = grown

    def _begin_cycle(self) -> None:
        if not self._has_stepped:
            return
        self._has_stepped = self._has_skipped = False
        for key, reference in list(self._overflowed.items()):
            leaf = reference()
            if leaf is None or leaf.grad is None or _is_finite(leaf.grad):
                del self._overflowed[key]

    def _hook_leaves(self, outputs: Sequence[Any], *, is_continued: bool) -> None:
        for leaf in _leaves_of(outputs):
            known = self._hooks.get(id(leaf))
            if not leaf.requires_grad or (known is not None and known[0]() is leaf):
                continue
            if is_continued and not (isinstance(leaf, nn.Parameter) or _C.is_managed(leaf)):
                self._left_scaled[id(leaf)] = leaf
            else:
                self._hook(leaf)

    def _hook(self, leaf: torch.Tensor) -> None:
        key = id(leaf)
        hooks = self._hooks

        def forget(dead: weakref.ref[torch.Tensor]) -> None:
            if key in hooks and hooks[key][0] is dead:  # else its id was used again
                del hooks[key]

        reference = weakref.ref(leaf, forget)

        @unserializable_hook  # type: ignore[untyped-decorator]
        def unscale(gradient: torch.Tensor | None) -> torch.Tensor | None:
            inverse, hooked = self._running.inverse, reference()
            if inverse is None or gradient is None or hooked is None:
                return None
            return self._unscaled(hooked, gradient, inverse)

        handle = leaf.register_hook(unscale)  # type: ignore[no-untyped-call]
        # The user's own hooks see what they would see without a scale. Autograd goes by the order
        # of insertion, which move_to_end() does not change.
        registered = leaf._backward_hooks
        assert registered is not None
        others = {key: hook for key, hook in registered.items() if key != handle.id}
        registered.clear()
        registered.update({handle.id: unscale, **others})
        hooks[key] = (reference, handle)

    def _unscaled(
        self, leaf: torch.Tensor, gradient: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        if gradient.dtype == torch.float16:
            raise InvalidArgument(
                f"cannot unscale the gradient of {_name_of(leaf)}: it is float16, where what a "
                'loss scale protects is lost; with mixed_precision="fp16" keep parameters in '
                "float32, for example by model.float()"
            )
        if leaf.grad is None:
            self._overflowed.pop(id(leaf), None)
        if gradient.requires_grad:  # it is part of a graph
            is_finite = _is_finite(gradient)
            unscaled = gradient * inverse
        else:
            unscaled = gradient.clone()
            found = torch.zeros(())
            values = unscaled._values() if unscaled.is_sparse else unscaled
            torch._amp_foreach_non_finite_check_and_unscale_([values], found, inverse)
            is_finite = not found.item()
        if not is_finite:
            self._overflowed[id(leaf)] = weakref.ref(leaf)
        return unscaled


def _leaves_of(outputs: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The leaves that a graph leads to."""
    nodes: list[Any] = []
    for output in outputs:
        is_edge = isinstance(output, torch.autograd.graph.GradientEdge)
        if is_edge or output.requires_grad:
            edge = output if is_edge else torch.autograd.graph.get_gradient_edge(output)
            nodes.append(edge.node)
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if type(node) is _AccumulateGrad:
            yield node.variable  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def _is_finite(tensor: torch.Tensor) -> bool:
    values = tensor.detach()
    return bool(torch.isfinite(values._values() if values.is_sparse else values).all())


def _name_of(tensor: torch.Tensor) -> str:
    if _C.is_managed(tensor):
        return repr(_C.name_of(tensor))
    return f"a tensor of shape {tuple(tensor.shape)}"
