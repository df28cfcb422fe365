# SPDX-License-Identifier: Apache-2.0
"""The data loader of a script that may later run in many processes."""

from __future__ import annotations

from typing import TypeVar

import torch.utils.data

_T_co = TypeVar("_T_co", covariant=True)


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """Loads batches exactly as ``torch.utils.data.DataLoader`` does, with its signature.

    Use this name in a script instead of torch's: in one process the two give the same batches for
    the same seed.

    Args:
        *args, **kwargs: Those of ``torch.utils.data.DataLoader``.

    Example:
        >>> from patrickstar.data import DataLoader
        >>> [batch.tolist() for batch in DataLoader(range(4), batch_size=2)]
        [[0, 1], [2, 3]]
    """
