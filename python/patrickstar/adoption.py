# SPDX-License-Identifier: Apache-2.0
"""Adopter: finds parameters and puts them under management, in place.

Note [Doors]: A parameter comes in by one of these, whichever is first: its registration in a
module (which also covers construction and from_pretrained); the first call of its module; the
first step of its optimizer; ``manage()``. While a model is built, a registered parameter waits
until the next ones no longer fit beside it, because its values are usually not there yet; its
bytes are reserved in the budget meanwhile.

Note [Aliases]: A tensor detached from a parameter before adoption would silently stop following
it. So a storage is adopted only when all its users are known parameters; else the parameter is
tried again at each step boundary, and its owner is told once.
"""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)

from patrickstar import _C
from patrickstar.errors import OutOfMemory
from patrickstar.patches import Function, Patches

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_logger = logging.getLogger("patrickstar")


@dataclass
class _Tracked:
    """A parameter that is, or shall be, under management."""

    parameter: weakref.ref[torch.Tensor]
    name: str
    gradient_hook: RemovableHandle | None = None
    reservation: _C.Reservation | None = None  # of a pending one
    reserved_bytes: int = 0
    num_postponed: int = 0  # step boundaries at which it could not be adopted

    def reserve(self, num_bytes: int) -> None:
        self.reservation = _C.reserve(num_bytes)
        self.reserved_bytes = num_bytes

    def release(self) -> int:
        """Gives the reservation back; returns its bytes."""
        num_bytes, self.reserved_bytes = self.reserved_bytes, 0
        if self.reservation is not None:
            self.reservation.release()
            self.reservation = None
        return num_bytes


class Adopter:
    """Keeps the parameters of all models of this process under management.

    Args:
        pending_bytes: Registered parameters beyond these bytes are adopted at once.
    """

    def __init__(self, pending_bytes: int) -> None:
        self._most_pending_bytes = pending_bytes
        self._pending_bytes = 0
        self._pending: dict[int, _Tracked] = {}  # by id of the parameter, as below
        self._tracked: dict[int, _Tracked] = {}
        self._left_out: dict[int, weakref.ref[torch.Tensor]] = {}
        self._seen_modules: dict[int, weakref.ref[nn.Module]] = {}
        self._is_building = True
        self._handles: list[RemovableHandle] = []
        self._call_hook: RemovableHandle | None = None
        self._patches = Patches()

    def open_doors(self) -> None:
        """Registers the hooks."""
        self._handles = [register_module_parameter_registration_hook(self._on_registration)]
        self._watch_calls(True)
        replace = self._patches.replace
        replace(torch.utils, "swap_tensors", self._swapping(torch.utils.swap_tensors))
        replace(torch.export, "export", self._exporting(torch.export.export))

    def release_reservations(self) -> None:
        """Gives back what is kept free for pending parameters."""
        for tracked in self._pending.values():
            self._pending_bytes -= tracked.release()

    def close_doors(self) -> None:
        """Removes every hook, also those of single parameters."""
        for handle in self._handles:
            handle.remove()
        self._watch_calls(False)
        self._patches.close()
        for tracked in [*self._tracked.values(), *self._pending.values()]:
            tracked.release()
            if tracked.gradient_hook is not None:
                tracked.gradient_hook.remove()
        self._handles = []
        self._tracked.clear()
        self._pending.clear()

    def adopt_module(self, module: nn.Module) -> None:
        """Adopts the parameters of a module and of everything in it, under their dotted names."""
        for name, parameter in module.named_parameters():
            if _C.is_managed(parameter):
                _C.rename(parameter, name)
            self._expect(parameter, name)
        waiting = {id(part) for part in module.modules() if not _has_all_values(part)}
        for part in module.modules():
            if not waiting or waiting.isdisjoint(map(id, part.modules())):
                self._mark_seen(part)
        self.flush()

    def adopt_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Adopts tensors that belong to no module."""
        for tensor in tensors:
            if not _C.is_managed(tensor):
                self._expect(tensor, f"tensor of shape {tuple(tensor.shape)}", is_known_by=False)
        self.flush()

    def adopt_copy(self, original: torch.Tensor, copy: torch.Tensor) -> None:
        """Adopts a fresh copy of a managed tensor, so that copies of large models fit too."""
        name = f"a copy of {_C.name_of(original)}"
        if isinstance(copy, nn.Parameter):
            self._expect(copy, name)
            self.flush()
        else:
            _C.adopt([copy], [name])

    def adopt_now(self, tensor: torch.Tensor, name: str) -> _C.Adoption:
        """Adopts one tensor at its owner's wish, also one that was left out before."""
        key = id(tensor)
        self._left_out.pop(key, None)
        waiting = self._pending.get(key)
        self._expect(tensor, name, is_known_by=False)
        taken = self._take_pending([key])
        if not taken:
            return _C.Adoption.ALREADY if _C.is_managed(tensor) else _C.Adoption.LEFT_ALONE
        answer = self._adopt(taken)[0]
        if waiting is not None and answer == _C.Adoption.ALIASED:
            self._pending[key] = waiting  # its next step boundary may find it free
        return answer

    def readmit(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forgets that tensors were left out."""
        for tensor in tensors:
            self._left_out.pop(id(tensor), None)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Makes a tensor ordinary and never adopts it by itself again."""
        key = id(tensor)
        _C.unmanage(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            _C.unmanage(tensor.grad)
        self._take_pending([key])
        tracked = self._tracked.pop(key, None)
        if tracked is not None and tracked.gradient_hook is not None:
            tracked.gradient_hook.remove()
        self._mark_left_out(tensor)

    def sweep(self) -> None:
        """At a step boundary: adopts what was re-pointed or postponed, follows requires_grad."""
        for key, tracked in list(self._tracked.items()):
            parameter = tracked.parameter()
            if parameter is None:
                del self._tracked[key]
            elif not _C.is_managed(parameter):
                self._expect(parameter, tracked.name)
            elif tracked.gradient_hook is None:
                self._hook_gradient(parameter, tracked)
        self.flush(is_boundary=True)

    def flush(self, but: torch.Tensor | None = None, *, is_boundary: bool = False) -> None:
        """Adopts every pending parameter except `but`."""
        keys = [key for key in self._pending if but is None or key != id(but)]
        if not keys:
            return
        postponed = []
        taken = self._take_pending(keys)
        try:
            answers = self._adopt(taken)
        except BaseException:
            self._pending.update({id(parameter): tracked for tracked, parameter in taken})
            raise
        for (tracked, parameter), answer in zip(taken, answers, strict=True):
            if answer == _C.Adoption.ALIASED:
                self._pending[id(parameter)] = tracked
                postponed.append(tracked)
        if is_boundary:
            _warn_of_aliases(postponed)

    def _on_registration(self, module: nn.Module, name: str, parameter: object) -> None:
        if not isinstance(parameter, torch.Tensor):
            return
        if not self._expect(parameter, f"{type(module).__name__}.{name}"):
            return
        tracked = self._pending[id(parameter)]
        num_bytes = parameter.nbytes
        if self._pending_bytes + num_bytes > self._most_pending_bytes:
            self.flush(but=parameter)
        try:
            tracked.reserve(num_bytes)
        except OutOfMemory:
            self.flush(but=parameter)
            tracked.reserve(num_bytes)
        self._pending_bytes += num_bytes

    def _on_call(self, module: nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return
        if id(module) in self._seen_modules:
            return
        _C.install_guard()  # for ops that came with the module's own libraries
        self.adopt_module(module)
        self.end_building()

    def end_building(self) -> None:
        """From the first call or step on, memory is for training."""
        if self._is_building:
            self._is_building = False
            _C.tune_malloc(False)

    def _watch_calls(self, is_on: bool) -> None:
        if self._call_hook is not None:
            self._call_hook.remove()
        self._call_hook = register_module_forward_pre_hook(self._on_call) if is_on else None

    def _exporting(self, original: Function) -> Function:
        """A strict export takes no module while there is a hook on all of them."""

        @functools.wraps(original)
        def export(mod: nn.Module, *args: object, **kwargs: object) -> object:
            if isinstance(mod, nn.Module):
                self.adopt_module(mod)
            self._watch_calls(False)
            try:
                return original(mod, *args, **kwargs)
            finally:
                self._watch_calls(bool(self._handles))

        return export

    def _swapping(self, original: Function) -> Function:
        """torch refuses to swap tensors that somebody refers to weakly, as we do."""

        @functools.wraps(original)
        def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
            left_out = [tensor for tensor in (t1, t2) if self._is_left_out(tensor)]
            names = [(tensor, self._forget(tensor)) for tensor in (t1, t2)]
            try:
                original(t1, t2)
            finally:
                for tensor in left_out:
                    self._mark_left_out(tensor)
                for tensor, name in names:
                    if name is not None:
                        self._know_again(tensor, name)

        return swap_tensors

    def _forget(self, tensor: torch.Tensor) -> str | None:
        """Drops all that refers to a tensor; returns the name that it was known by."""
        key = id(tensor)
        self._left_out.pop(key, None)
        waiting = self._pending.get(key)
        self._take_pending([key])
        known = self._tracked.pop(key, None) or waiting
        if known is None or known.parameter() is not tensor:
            return None
        if known.gradient_hook is not None:
            known.gradient_hook.remove()
        return known.name

    def _know_again(self, tensor: torch.Tensor, name: str) -> None:
        hooks = tensor._post_accumulate_grad_hooks
        if hooks is not None and not hooks:
            tensor._post_accumulate_grad_hooks = hooks  # for autograd
        if not _C.is_managed(tensor):
            self._expect(tensor, name)
            return
        known = _Tracked(weakref.ref(tensor), name)
        self._tracked[id(tensor)] = known
        self._hook_gradient(tensor, known)

    def _expect(self, parameter: torch.Tensor, name: str, *, is_known_by: bool = True) -> bool:
        """Notes a parameter to be adopted; False when there is nothing to do.

        A name that it is not known by serves only until a better one is there.
        """
        key = id(parameter)
        waiting = self._pending.get(key)
        if waiting is not None and waiting.parameter() is parameter:
            if is_known_by:
                waiting.name = name
            return False
        self._take_pending([key])  # of one that is dead, whose id was used again
        known = self._tracked.get(key)
        if known is not None and known.parameter() is not parameter:
            known = None  # its id was used before by one that is dead
        if known is not None and is_known_by:
            known.name = name
        if self._is_left_out(parameter) or not _is_adoptable(parameter):
            return False
        self._tracked.pop(key, None)
        self._pending[key] = known or _Tracked(weakref.ref(parameter), name)
        return True

    def _take_pending(self, keys: Iterable[int]) -> list[tuple[_Tracked, torch.Tensor]]:
        """Takes parameters off the pending list, with their reservations; those that live."""
        taken = []
        for key in keys:
            tracked = self._pending.pop(key, None)
            if tracked is None:
                continue
            self._pending_bytes -= tracked.release()
            parameter = tracked.parameter()
            if parameter is not None:
                taken.append((tracked, parameter))
        return taken

    def _adopt(self, taken: list[tuple[_Tracked, torch.Tensor]]) -> list[_C.Adoption]:
        answers = _C.adopt([p for _, p in taken], [tracked.name for tracked, _ in taken])
        for (entry, parameter), answer in zip(taken, answers, strict=True):
            if answer in (_C.Adoption.DONE, _C.Adoption.ALREADY):
                self._tracked[id(parameter)] = entry
                self._hook_gradient(parameter, entry)
            elif answer == _C.Adoption.OVERLAPPING:
                self._mark_left_out(parameter)
                warnings.warn(
                    f"parameter {entry.name!r} is left out of management: several of its elements "
                    "share memory (it was expanded, or made by as_strided); make it contiguous "
                    "to have it managed",
                    stacklevel=2,
                )
        return answers

    def _hook_gradient(self, parameter: torch.Tensor, tracked: _Tracked) -> None:
        if parameter.requires_grad and parameter.is_leaf and tracked.gradient_hook is None:
            register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
            tracked.gradient_hook = register(_C.take_gradient)

    def _mark_left_out(self, tensor: torch.Tensor) -> None:
        key = id(tensor)
        self._left_out[key] = weakref.ref(tensor, lambda dead: self._forget_left_out(key, dead))

    def _forget_left_out(self, key: int, dead: weakref.ref[torch.Tensor]) -> None:
        if self._left_out.get(key) is dead:  # else its id was used again
            del self._left_out[key]

    def _is_left_out(self, tensor: torch.Tensor) -> bool:
        left_out = self._left_out.get(id(tensor))
        if left_out is None:
            return False
        return left_out() is tensor

    def _mark_seen(self, module: nn.Module) -> None:
        key = id(module)
        self._seen_modules[key] = weakref.ref(module, lambda _: self._seen_modules.pop(key, None))


def _warn_of_aliases(postponed: list[_Tracked]) -> None:
    """Tells once of parameters that an alias keeps out of management.

    Not at the first boundary: a graph that is still alive may hold views of them.
    """
    names = []
    for tracked in postponed:
        tracked.num_postponed += 1
        if tracked.num_postponed == 2:
            names.append(tracked.name)
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"parameters {shown} are not managed yet: other tensors share their memory (made by "
            "detach(), .data or a view, or kept by a graph); drop those, or build the model after "
            "patrickstar.init()",
            stacklevel=2,
        )


def _has_all_values(module: nn.Module) -> bool:
    """Whether no parameter of the module itself, without its parts, still waits for its bytes."""
    return not any(
        parameter.is_meta or nn.parameter.is_lazy(parameter)
        for parameter in module.parameters(recurse=False)
    )


def _is_adoptable(parameter: torch.Tensor) -> bool:
    return (
        parameter.device.type == "cpu"
        and parameter.layout is torch.strided
        and not nn.parameter.is_lazy(parameter)
        and not _C.is_managed(parameter)
        and parameter.numel() > 0
    )
