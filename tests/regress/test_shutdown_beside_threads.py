# SPDX-License-Identifier: Apache-2.0
"""``shutdown()`` while another thread takes addresses: one of the two gives way, and says so."""

from __future__ import annotations

import threading
from typing import Any

import patrickstar
import pytest
import torch
from helpers import managed

NUM_TENSORS = 64
NUM_ELEMENTS = 4096


def test_shutdown_and_arrays_of_another_thread() -> None:
    for _ in range(10):
        _run_once()


def _run_once() -> None:
    refusals: list[str] = []  # not the errors, whose frames keep arrays
    arrays: list[tuple[int, Any]] = []
    failures: list[str] = []
    with managed("256KiB", chunk_size=NUM_ELEMENTS * 4):
        tensors = [torch.full((NUM_ELEMENTS,), float(value)) for value in range(NUM_TENSORS)]
        for tensor in tensors:
            patrickstar.manage(tensor)
        is_over = threading.Event()

        def take_arrays() -> None:
            index = 0
            while not is_over.is_set():
                index = (index + 1) % NUM_TENSORS
                try:
                    array = tensors[index].numpy()
                    if int(array.sum()) != index * NUM_ELEMENTS:
                        failures.append(f"tensor {index} has other values")
                    if index % 16 == 0:
                        arrays[:] = [(index, array)]
                except patrickstar.Error as error:
                    refusals.append(str(error))
                except BaseException as error:
                    failures.append(repr(error))

        thread = threading.Thread(target=take_arrays)
        thread.start()
        is_off = False
        for _ in range(20):
            try:
                patrickstar.shutdown()
                is_off = True
                break
            except patrickstar.Error as error:
                assert "cannot shut down" in str(error)
                assert tensors[3].sum() == 3 * NUM_ELEMENTS  # everything works on
        is_over.set()
        thread.join()
        assert not failures, failures[0]
        assert all("shutdown()" in refusal for refusal in refusals)
        lost = [index for index, array in arrays if int(array.sum()) != index * NUM_ELEMENTS]
        assert not lost, "an array lost its memory"
        for index, tensor in enumerate(tensors):
            assert tensor.eq(float(index)).all()
            assert patrickstar.is_managed(tensor) is not is_off
        arrays.clear()


def test_a_hold_that_nobody_counted_before_stops_the_stop() -> None:
    """The engine itself refuses, whatever its caller has looked at before."""
    with managed("256KiB"):
        tensor = torch.arange(1024.0)
        patrickstar.manage(tensor)
        array = tensor.numpy()
        with pytest.raises(patrickstar.Error, match="cannot shut down: 1 holder"):
            patrickstar._C.stop()
        assert array.sum() == tensor.sum()
        del array
        patrickstar.shutdown()
        assert not patrickstar.is_managed(tensor)
        assert tensor.tolist() == list(range(1024))
