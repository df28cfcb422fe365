# SPDX-License-Identifier: Apache-2.0
"""What was there before a file's tests need not be searched for garbage after each of its runs.

Every twin run collects garbage several times, and what torch imports takes most of that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
