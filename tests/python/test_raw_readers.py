# SPDX-License-Identifier: Apache-2.0
"""Readers that never meet the dispatcher: a right answer, never a signal."""

from __future__ import annotations

import functools
import json
import tempfile

import helpers
import pytest

# A tensor of these values, and what a reader of it may do. Each reader is an expression over
# `tensor` (managed), `wanted` (a plain copy) and the modules; it is right when it is true.
READERS = {
    "numpy": "(tensor.numpy() == wanted.numpy()).all()",
    "numpy of a view": "(tensor[2:].numpy() == wanted[2:].numpy()).all()",
    "numpy by force": "(tensor.numpy(force=True) == wanted.numpy()).all()",
    "__array__": "(numpy.asarray(tensor) == wanted.numpy()).all()",
    "tolist": "tensor.tolist() == wanted.tolist()",
    "item": "tensor[3].item() == wanted[3].item()",
    "print": "repr(tensor) == repr(wanted)",
    "iteration": "[float(x) for x in tensor] == wanted.tolist()",
    "dlpack": "torch.equal(torch.from_dlpack(tensor), wanted)",
    "data_ptr": "tensor.data_ptr() != 0",
    "const pointer": "tensor.const_data_ptr() != 0 if hasattr(tensor, 'const_data_ptr') else True",
    "untyped_storage element": "tensor.untyped_storage()[0] == wanted.untyped_storage()[0]",
    "untyped_storage bytes": "bytes(tensor.untyped_storage()) == bytes(wanted.untyped_storage())",
    "untyped_storage tolist": "storage.tolist() == wanted.untyped_storage().tolist()",
    "untyped_storage data_ptr": "tensor.untyped_storage().data_ptr() != 0",
    "untyped_storage slice": "len(storage[0:4]) == 4",
    "untyped_storage clone": "list(storage.clone()) == list(wanted.untyped_storage())",
    "untyped_storage cast": "list(storage.float())[1] == float(wanted.untyped_storage()[1])",
    "untyped_storage fill_": "list(storage.fill_(1))[:2] == [1, 1]",
    "untyped_storage write": "storage.__setitem__(0, 3) or storage[0] == 3",
    "untyped_storage copy_": "list(storage.copy_(wanted.untyped_storage()))[5] == 0",
    "untyped_storage from": "list(wanted.untyped_storage().copy_(storage))[5] == 0",
    "untyped_storage pin": "storage.is_pinned() is False",
    "untyped_storage share": "storage.share_memory_() is not None",
    "untyped_storage by file": "storage._share_fd_cpu_() is not None",
    "untyped_storage resize_": "storage.resize_(8192) is not None",
    "untyped_storage byteswap": "storage.byteswap(torch.float32) is None",
    "untyped_storage nbytes": "tensor.untyped_storage().nbytes() == 4096",
    "typed storage": "tensor.storage()[1] == wanted.storage()[1]",
    "is_shared": "tensor.is_shared() is False",
    "is_shared of the storage": "tensor.untyped_storage().is_shared() is False",
    "share_memory_": "torch.equal(tensor.share_memory_(), wanted)",
    "is_pinned": "tensor.is_pinned() is False",
    "_is_alias_of": "torch._C._is_alias_of(tensor, tensor)",
    "pickle": "torch.equal(pickle.loads(pickle.dumps(tensor)), wanted)",
    "torch.save": "torch.equal(saved(tensor), wanted)",
    "torch.save of a module": "torch.equal(saved(module)['weight'], module_wanted)",
    "copy": "torch.equal(copy.copy(tensor), wanted)",
    "deepcopy": "torch.equal(copy.deepcopy(tensor), wanted)",
    "set_ of a plain tensor": "torch.equal(torch.empty(0).set_(tensor), wanted)",
    "set_ to a plain storage": "torch.equal(tensor.set_(wanted.clone()), wanted)",
    "set_ of a storage": "torch.equal(torch.empty(0).set_(tensor.untyped_storage()), wanted)",
    "new_tensor": "torch.equal(tensor.new_tensor(tensor), wanted)",
    "torch.tensor": "torch.equal(torch.tensor(tensor), wanted)",
    "as_tensor": "torch.equal(torch.as_tensor(tensor), wanted)",
    "type": "torch.equal(tensor.type(torch.DoubleTensor), wanted.double())",
    "resize_": "tensor.resize_(2048).numel() == 2048",
    "out= of another shape": "torch.add(wanted[:5], 1, out=tensor).numel() == 5",
    "frombuffer": "torch.frombuffer(tensor.numpy(), dtype=torch.float32)[1] == wanted[1]",
    "hash and id": "hash(tensor) == id(tensor)",
    "numpy function": "numpy.allclose(numpy.add(tensor, 0), wanted)",
    "data_ptr of data": "tensor.data.data_ptr() != 0",
    "multiprocessing": "len(ForkingPickler.dumps(tensor)) > 0",
}

PROGRAM = """
    import copy, io, json, os, pickle, sys, warnings
    import numpy, torch, helpers, patrickstar
    from torch import nn
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # teaches the pickler about tensors

    warnings.simplefilter("ignore")
    readers, state = json.loads(sys.argv[1]), sys.argv[2]

    def saved(value):
        buffer = io.BytesIO()
        torch.save(value.state_dict() if isinstance(value, nn.Module) else value, buffer)
        buffer.seek(0)
        return torch.load(buffer)

    def answer(expression):
        wanted = torch.arange(1024, dtype=torch.float32)
        tensor = wanted.clone()
        module = nn.Linear(8, 8)
        patrickstar.manage([tensor, module])
        module_wanted = module.weight.detach().clone()
        names = dict(globals(), tensor=tensor, wanted=wanted, module=module)
        names.update(storage=tensor.untyped_storage(), module_wanted=module_wanted)
        if state == "evicted":
            helpers.evict_everything()
        elif state == "used":
            tensor.add_(0)
            module.weight.detach().add_(0)
        try:
            if state == "held":
                with patrickstar.resident(tensor, module):
                    is_right = bool(eval(expression, names))
            else:
                is_right = bool(eval(expression, names))
            result = "right" if is_right else "wrong"
        except patrickstar.Error:
            result = "our error"
        except RuntimeError as error:
            text = str(error)
            is_clean = "managed tensor" in text or "not resizable" in text
            result = "our error" if is_clean else f"RuntimeError: {text}"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        # Whatever the reader did, the tensor is alive and well or was replaced as a whole.
        helpers.evict_everything()
        tensor.detach().clone()
        return result

    with helpers.managed():
        for name, expression in readers.items():
            print("begins " + json.dumps(name), flush=True)
            print("ends " + json.dumps(answer(expression)), flush=True)
"""


@functools.cache
def answers(state: str) -> dict[str, str]:
    """What each reader gave, in processes that may die: the one that did is named."""
    given: dict[str, str] = {}
    left = dict(READERS)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            done = helpers.run_script(
                PROGRAM, json.dumps(left), state, environment={"HOME": folder}
            )
        name = None
        for line in done.stdout.splitlines():
            kind, _, text = line.partition(" ")
            if kind == "begins":
                name = json.loads(text)
            elif kind == "ends" and name is not None:
                given[name] = json.loads(text)
                del left[name]
                name = None
        if name is not None:
            given[name] = f"died with status {done.returncode}: {done.stderr[-2000:]}"
            del left[name]
        elif left:
            raise AssertionError(f"status {done.returncode}: {done.stderr}")
    return given


# A chunk gives each of its tensors so many bytes.
REFUSED = (
    "out= of another shape",
    "resize_",
    "untyped_storage resize_",
    "untyped_storage slice",
)


@pytest.mark.parametrize("name", [name for name in READERS if name not in REFUSED])
@pytest.mark.parametrize("state", ["evicted", "used"])
def test_a_raw_reader_is_right(name, state):
    assert answers(state)[name] == "right"


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_size_is_right_or_gets_our_error(name):
    assert answers("evicted")[name] in ("right", "our error")


# These would change whose memory it is or how much: a hold does not allow that.
NEVER = (
    "multiprocessing",
    "share_memory_",
    "untyped_storage by file",
    "untyped_storage resize_",
    "untyped_storage share",
    "untyped_storage slice",
)


@pytest.mark.parametrize("name", [name for name in READERS if name not in NEVER])
def test_inside_resident_raw_readers_are_right(name):
    assert answers("held")[name] == "right"


@pytest.mark.parametrize("name", NEVER)
def test_inside_resident_what_would_leave_its_memory_is_refused(name):
    assert answers("held")[name] == "our error"
