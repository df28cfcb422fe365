# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: all of training in a folder, written and read a piece in memory at a time."""

from patrickstar.checkpoint.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
