# SPDX-License-Identifier: Apache-2.0
"""init: the one added line."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from patrickstar import _C, errors
from patrickstar.config import DEFAULTS, Config, resolve
from patrickstar.errors import Error
from patrickstar.session import Session, current, set_current

_logger = logging.getLogger("patrickstar")

_C.set_error_classes(errors)
atexit.register(_C.stop_at_exit)


def init(
    *,
    device: str | torch.device | None = None,
    device_memory: int | float | str | None = None,
    host_memory: int | float | str | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    disk_space: int | float | str | None = None,
    mixed_precision: str | None = None,
    gradient_accumulation_steps: int = DEFAULTS["gradient_accumulation_steps"],
    gradient_clipping: float | None = None,
    chunk_size: int | float | str | None = None,
    optimizer: str = DEFAULTS["optimizer"],
    log: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Session:
    """Puts the models of this process under management; call it before they are built.

    From here on their bytes live in chunks that move between memory and disk, within the budgets,
    and the numbers stay those of plain PyTorch. A second call may only repeat the settings.

    Sizes are bytes, text such as ``"6GiB"``, or a fraction of what is there. Every argument can
    also be set by the environment variable ``PATRICKSTAR_<NAME>``; an argument wins (one equal
    to its default counts as left out).

    Args:
        device: Where the model computes; ``"cpu"``, which is also the default.
        device_memory: Bytes of chunks on an accelerator; an error without one.
        host_memory: Bytes of chunks in host memory. A hard bound. By default measured: half of the
            available memory at first, revised after each step.
        spill_dir: The folder of the spill file, created when missing; by default in your cache.
        disk_space: The most bytes of the spill file; by default 0.9 of what is free there.
        mixed_precision: ``"bf16"`` or ``"fp16"``: the type that ``torch.autocast`` runs the
            model's calls in; with fp16 losses are scaled. By default the script's own precision.
        gradient_accumulation_steps: Of so many calls of an optimizer's ``step()``, the last one
            steps, and gradients are those of the mean loss.
        gradient_clipping: The norm to which an optimizer's gradients are clipped before it steps.
        chunk_size: Bytes of a parameter chunk in fp32; by default a 32nd of ``host_memory``,
            between 64 KiB and 16 MiB.
        optimizer: ``"auto"`` or ``"native"``; both run the optimizer's own code for now.
        log: A file that gets one JSON record a step.
        config: A mapping of these settings, or a JSON or TOML file of them.

    Returns:
        The session.

    Raises:
        InvalidArgument: A setting cannot be used; the message names it.
        Unsupported: A setting that is not built yet.
        IoError: The spill folder cannot be written.
        Error: Management is on with other settings.

    Example:
        >>> import patrickstar
        >>> session = patrickstar.init(host_memory="64MiB")
        >>> patrickstar.shutdown()
    """
    settings = resolve(**locals())
    session = current()
    if session is None:
        return _start(settings)
    _check_same(session.config, settings)
    return session


def _start(settings: Config) -> Session:
    _load_in_order()
    session = Session(settings)
    try:
        session.open()
    except BaseException:
        if _C.is_running():
            session.close()  # what had been opened
        raise
    set_current(session)
    return session


def _check_same(running: Config, asked: Config) -> None:
    """A second init() may only ask for what is there.

    What was asked in the same words is the same, even where the figure behind it has drifted.
    """
    for name in (*DEFAULTS, "stress"):
        was, now = getattr(running, name), getattr(asked, name)
        is_same_wish = name in DEFAULTS and running.asked[name] == asked.asked[name]
        if was != now and not is_same_wish:
            raise Error(
                f"management is already on with {name}={was!s}, and init() was called again "
                f"with {name}={now!s}; call patrickstar.shutdown() first"
            )


def _load_in_order() -> None:
    """Has transformers load weights one after another: its threads would read ahead of us."""
    if "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ:
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
        _logger.info("set HF_DEACTIVATE_ASYNC_LOAD=1, so that models load in bounded memory")
