# SPDX-License-Identifier: Apache-2.0
"""Feeding data to a training loop."""

from patrickstar.data.loader import DataLoader

__all__ = ["DataLoader"]
