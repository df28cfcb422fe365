# SPDX-License-Identifier: Apache-2.0
"""The check that comes before the compiled part is loaded."""

from __future__ import annotations

import torch


def check_torch_version() -> None:
    """Refuses a torch whose C++ interface is another than the one we were built for.

    Raises:
        ImportError: The installed torch has another minor version, or there is no build.
    """
    try:
        from patrickstar._build_info import TORCH_VERSION
    except ImportError as error:
        raise ImportError(
            "patrickstar is not built: run `make setup` in its repository, or "
            "`pip install --no-build-isolation .`"
        ) from error
    if _minor(torch.__version__) != _minor(TORCH_VERSION):
        raise ImportError(
            f"patrickstar was built for torch {TORCH_VERSION} and torch {torch.__version__} is "
            "installed: the compiled part would not match; install torch=="
            f"{TORCH_VERSION.split('+')[0]}, or rebuild patrickstar with "
            "`pip install --no-build-isolation --force-reinstall --no-deps .`"
        )


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])
