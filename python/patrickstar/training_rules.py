# SPDX-License-Identifier: Apache-2.0
"""TrainingRules: the settings of ``init()`` that change what a plain loop computes.

Each part exists only when its setting asks for it: without, nothing of torch is patched for it and
no call costs anything.
"""

from __future__ import annotations

from patrickstar.accumulation import Accumulation
from patrickstar.backward_patch import BackwardPatch
from patrickstar.config import Config
from patrickstar.loss_scale import LossScale
from patrickstar.mixed_precision import DTYPES, ForwardAutocast
from patrickstar.step_rules import StepRules


class TrainingRules:
    """Mixed precision, gradient accumulation and gradient clipping.

    Args:
        config: The settings.

    Attributes:
        loss_scale: None unless the precision needs one.
        step_rules: None when every ``step()`` is the optimizer's own.
    """

    def __init__(self, config: Config) -> None:
        precision, num_calls = config.mixed_precision, config.gradient_accumulation_steps
        self.loss_scale = LossScale() if precision == "fp16" else None
        accumulation = Accumulation(num_calls) if num_calls > 1 else None
        self._parts: list[ForwardAutocast | BackwardPatch | Accumulation] = []
        if precision is not None:
            self._parts.append(ForwardAutocast(DTYPES[precision]))
        if self.loss_scale is not None or accumulation is not None:
            self._parts.append(BackwardPatch(num_calls, self.loss_scale))
        if accumulation is not None:
            self._parts.append(accumulation)
        has_rules = accumulation or self.loss_scale or config.gradient_clipping
        self.step_rules = (
            StepRules(accumulation, config.gradient_clipping, self.loss_scale)
            if has_rules
            else None
        )

    def open(self) -> None:
        for part in self._parts:
            part.open()

    def close(self) -> None:
        for part in reversed(self._parts):
            part.close()
        if self.loss_scale is not None:
            self.loss_scale.close()
