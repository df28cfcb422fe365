# SPDX-License-Identifier: Apache-2.0
"""StepStub: what stands in for an optimizer inside its own ``step()``.

A stub has the optimizer's class and attributes, so the code of ``step()`` runs as it is - closures,
hooks, profiler marks - but iterating over its ``param_groups`` does something else first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.optim.optimizer import Optimizer

Group = dict[str, Any]  # of an optimizer's param_groups
State = dict[str, Any]  # of one parameter, as in optimizer.state


class _SteppedGroups(list[Group]):
    """The optimizer's groups; what a loop over them meets is made when the loop begins."""

    def __init__(self, groups: list[Group], to_step: Callable[[], Iterable[Group]]) -> None:
        super().__init__(groups)
        self._to_step = to_step

    def __iter__(self) -> Iterator[Group]:
        return iter(self._to_step())


def copy_of(optimizer: Optimizer, **attributes: Any) -> Any:
    """An optimizer of the same class and attributes, not copied, but for those given."""
    copy = type(optimizer).__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__, **attributes)
    return copy


def stub_of(optimizer: Optimizer, to_step: Callable[[], Iterable[Group]]) -> Optimizer:
    """An optimizer whose ``step()`` updates the groups that ``to_step`` gives, and no others.

    Args:
        optimizer: Its class, state and settings are the stub's, not copied.
        to_step: Called when ``step()`` begins with the groups: after hooks and closure. It may
            update parameters itself and give only the rest, or nothing.
    """
    groups = _SteppedGroups(optimizer.param_groups, to_step)
    stub: Optimizer = copy_of(optimizer, param_groups=groups)
    return stub
