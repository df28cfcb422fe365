# SPDX-License-Identifier: Apache-2.0
"""The random generators that are used when none is named: torch's, Python's, NumPy's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """The states of all of them."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    with contextlib.suppress(ImportError):
        import numpy as np

        state["numpy"] = np.random.get_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets what ``random_state`` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.asarray(keys), *rest))
