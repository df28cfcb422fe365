# SPDX-License-Identifier: Apache-2.0
"""The exception tree: what catches it, what it prints, and that it survives a trip to a worker."""

from __future__ import annotations

import errno
import pickle

import pytest
import torch
from patrickstar import errors

PARENTS = {
    errors.InvalidArgument: (ValueError,),
    errors.OutOfMemory: (torch.OutOfMemoryError, MemoryError),
    errors.IoError: (OSError,),
    errors.CorruptData: (),
    errors.Unsupported: (),
    errors.Timeout: (TimeoutError,),
}
MESSAGE = "cannot fetch chunk 12: 96.0 MiB free"


@pytest.mark.parametrize("kind", PARENTS)
def test_every_kind_is_caught_as_error_and_as_what_a_plain_script_expects(kind):
    for parent in (errors.Error, RuntimeError, *PARENTS[kind]):
        with pytest.raises(parent):
            raise kind(MESSAGE)


@pytest.mark.parametrize("kind", [errors.Error, *PARENTS])
def test_text_is_the_plain_message_before_and_after_pickling(kind):
    error = kind(MESSAGE)
    copy = pickle.loads(pickle.dumps(error))
    assert str(error) == str(copy) == MESSAGE
    assert type(copy) is kind


def test_io_error_keeps_its_errno_out_of_the_text():
    error = errors.IoError(MESSAGE, errno.ENOSPC)
    copy = pickle.loads(pickle.dumps(error))
    assert str(error) == str(copy) == MESSAGE
    assert error.errno == copy.errno == errno.ENOSPC
    assert errors.IoError(MESSAGE).errno is None


def test_unsupported_is_not_taken_for_a_missing_implementation():
    assert not issubclass(errors.Unsupported, NotImplementedError)
