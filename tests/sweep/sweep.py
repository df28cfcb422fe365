# SPDX-License-Identifier: Apache-2.0
"""Calls every method and property of a tensor or storage class on an evicted managed one.

Each call is made in a forked process of its own, next to the same call on a plain twin. Prints a
JSON line a call: the outcome is "right" (same answer, same bytes afterwards, or the same kind of
error), "our error", or what went wrong.

Usage: sweep.py KIND [NAME ... | --list]
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import pickle
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import patrickstar
import torch
from patrickstar import _C
from torch import nn

TIME_LIMIT_S = 60  # of one call; a signal ends it

# These end or replace the process, wait for somebody, or touch no tensor of ours.
LEFT_OUT = {
    "__class__", "__del__", "__init_subclass__", "__new__", "__subclasshook__", "__init__",
    "__weakref__", "__dict__", "__doc__", "__module__", "__getattribute__", "__setattr__",
    "__delattr__", "__reduce__", "__sizeof__", "__dir__", "__hash__", "__subclasscheck__",
    "_make_subclass", "_make_wrapper_subclass", "_make_dtensor", "__torch_dispatch__",
    "__torch_function__", "_use_count", "_weak_ref", "_free_weak_ref", "_release_ipc_counter_cuda",
    "_expired", "_new_with_weak_ptr", "_new_shared_cuda", "_new_shared_fd_cpu",
    "_new_shared_filename_cpu", "from_file", "from_buffer", "_from_buffer", "_new_with_file",
    "_new_wrapped_storage", "__cuda_array_interface__", "_share_cuda_", "_cdata",
    "_fix_weakref", "_dynamo_dynamic_indices", "__orig_bases__",
}  # fmt: skip

# Of a plain storage these end the process as well, when they are given nonsense.
LEFT_OUT |= {"__delitem__", "_set_cdata", "_set_from_file", "_write_file"}

# How the engine hears of gradients.
LEFT_OUT |= {"_post_accumulate_grad_hooks"}

# What an answer says about addresses and identities differs between twins.
ADDRESSES = {
    "data_ptr", "const_data_ptr", "_data_ptr", "_version", "__reduce_ex__", "_share_fd_cpu_",
    "_share_filename_cpu_",
}  # fmt: skip


def _values() -> torch.Tensor:
    return torch.linspace(-2, 2, 64).reshape(8, 8)


class Module(nn.Module):
    """One weight with a gradient and momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(_values())


def make(kind: str) -> Any:
    """A target of a kind, over the same values wherever it is made."""
    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.9)
    if patrickstar_is_on():
        patrickstar.manage(module)
    (module.weight * torch.arange(8.0)).sum().backward()
    optimizer.step()
    weight = module.weight
    targets: dict[str, Callable[[], Any]] = {
        "parameter": lambda: weight,
        "detached": lambda: weight.detach(),
        "data": lambda: weight.data,
        "slice": lambda: weight.detach()[2:5, 1:],
        "gradient": lambda: weight.grad,
        "state": lambda: optimizer.state[weight]["momentum_buffer"],
        "untyped storage": lambda: weight.untyped_storage(),
        "typed storage": lambda: weight._typed_storage(),
    }
    target = targets[kind]()
    keep_alive.append((module, optimizer))
    return target


keep_alive: list[Any] = []


def patrickstar_is_on() -> bool:
    return _C.is_running()


def arguments(target: Any) -> list[tuple[Any, ...]]:
    """Guesses at what a method takes, the plain ones first."""
    is_tensor = isinstance(target, torch.Tensor)
    other = torch.full(target.shape, 0.5) if is_tensor else target.clone()
    square = torch.eye(8)
    index = torch.zeros(target.shape, dtype=torch.int64) if is_tensor else 0
    mask = torch.zeros(target.shape, dtype=torch.bool) if is_tensor else 0
    return [
        (), (0,), (other,), (0, 1), (0.5,), (torch.float64,), ([0],), ((4, 16),), ("cpu",),
        (square,),
        (lambda x: x,), (0, index), (0, index, other), (0, index, 1.0), (mask, 1.0), (mask,),
        (other, lambda x, y: y), (other, other), (other, other, other), (0, 0, 1), ("weight",),
        ({},),
        (0, torch.tensor([0]), 1.0), (0, torch.tensor([0]), other), (torch.tensor([0]),), (0, 7),
        (2, 0, 1), (torch.eye(8), 2.0), (io.BytesIO(), False, True, 4), (torch.float32,),
    ]  # fmt: skip


def bytes_of(target: Any) -> bytes:
    if isinstance(target, torch.Tensor):
        return pickle.dumps(target.detach().clone().cpu().contiguous().view(-1).tolist())
    storage = target._untyped_storage if hasattr(target, "_untyped_storage") else target
    return bytes(storage.clone().tolist())


def normal(answer: Any, depth: int = 0) -> Any:
    """An answer in a form that two processes agree on."""
    if isinstance(answer, torch.Tensor):
        if answer.layout != torch.strided or answer.device.type != "cpu":
            return str(answer.layout), tuple(answer.shape)
        values = answer.detach().clone().reshape(-1).tolist()
        return str(answer.dtype), tuple(answer.shape), [_plain_number(v) for v in values]
    if isinstance(answer, (torch.UntypedStorage, torch.storage.TypedStorage)):
        return type(answer).__name__, bytes_of(answer)
    if isinstance(answer, (bool, int, float, complex, str, bytes, type(None))):
        return _plain_number(answer)
    if isinstance(answer, (list, tuple)) and depth < 4:
        return type(answer).__name__, [normal(item, depth + 1) for item in answer]
    if hasattr(answer, "__array__"):
        return "array", answer.tolist()
    return type(answer).__name__


def _plain_number(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value


def call(kind: str, name: str, args_index: int | None) -> tuple[str, Any]:
    """Reads an attribute and calls it with the guess of that number; None only reads it."""
    target = make(kind)
    if patrickstar_is_on():
        _C.evict_all()
    torch.manual_seed(1)
    try:
        attribute = getattr(target, name)
        if args_index is None:
            answer = attribute
        else:
            answer = attribute(*copy.copy(arguments(target)[args_index]))
        shown = type(answer).__name__ if name in ADDRESSES else normal(answer)
        if patrickstar_is_on():
            _C.evict_all()
        return "answer", (shown, bytes_of(target))
    except patrickstar.Error as error:
        return "our error", str(error)
    except BaseException as error:
        return type(error).__name__, str(error).splitlines()[0] if str(error) else ""


def outcome(kind: str, name: str) -> str:
    """Compares the first guess that works on a plain target, else all errors."""
    owner = type(make(kind))
    is_called = callable(getattr(owner, name, None))
    guesses = range(len(arguments(make(kind)))) if is_called else [None]
    for guess in guesses:
        status, expected = call(kind, name, guess)
        if status == "answer" or guess is None:
            return _compare(kind, name, guess, (status, expected))
    return _compare(kind, name, 0, call(kind, name, 0))


def _compare(kind: str, name: str, guess: int | None, expected: tuple[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        patrickstar.init(host_memory="48KiB", chunk_size=4096, spill_dir=folder)
        status, found = call(kind, name, guess)
        if status == "our error":
            return status
        if (status, found) == expected:
            return "right"
        if expected[0] not in ("answer", "our error") and status == expected[0]:
            return "right"  # the same kind of error
        return f"guess {guess}: expected {str(expected)[:300]}, got {str((status, found))[:300]}"


def in_a_process_of_its_own(kind: str, name: str) -> str:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        signal.alarm(TIME_LIMIT_S)
        try:
            text = outcome(kind, name)
        except BaseException as error:
            text = f"the sweep itself failed: {error!r}"
        os.write(write_end, text.encode()[:4000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)}"
    return text or f"exit status {status}"


def names(kind: str) -> list[str]:
    """Every attribute of the class that is swept."""
    return sorted(name for name in dir(type(make(kind))) if name not in LEFT_OUT)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a forked process has no thread pool
    kind, *wanted = sys.argv[1:]
    if wanted == ["--list"]:
        print(json.dumps(names(kind)))
        return
    for name in wanted or names(kind):
        print(json.dumps([name, in_a_process_of_its_own(kind, name)]), flush=True)


if __name__ == "__main__":
    main()
