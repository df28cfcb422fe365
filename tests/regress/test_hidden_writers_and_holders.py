# SPDX-License-Identifier: Apache-2.0
"""Writes that a schema hides, gradients in somebody's hands, tensors that change their identity."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import patrickstar
import pytest
import torch
from helpers import evict_everything, managed
from patrickstar.testing import mapped_bytes
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import dlpack


@pytest.fixture(autouse=True)
def _management() -> Iterator[None]:
    with managed("256KiB", stress="evict,poison"):
        yield


def _bytes_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.detach().clone(), right.detach().clone())


def test_running_statistics_that_batch_norm_writes_survive_eviction() -> None:
    plain, norm = nn.BatchNorm1d(64), nn.BatchNorm1d(64)
    patrickstar.manage(list(norm.buffers())[:2])
    x = torch.randn(8, 64) + 5
    plain(x), norm(x)
    evict_everything()
    assert _bytes_equal(norm.running_mean, plain.running_mean)
    assert _bytes_equal(norm.running_var, plain.running_var)


def test_a_first_forward_in_inference_mode_leaves_ordinary_parameters() -> None:
    layer = nn.Linear(8, 8)
    with torch.inference_mode():
        layer(torch.randn(1, 8))
    assert patrickstar.is_managed(layer.weight)
    assert not layer.weight.is_inference()
    layer(torch.randn(1, 8)).sum().backward()
    assert layer.weight.grad is not None


def test_a_gradient_buffer_of_the_user_stays_the_gradient() -> None:
    layer = nn.Linear(4, 1, bias=False)
    layer(torch.ones(1, 4))
    flat = torch.zeros(4)
    layer.weight.grad = flat.view(1, 4)
    layer(torch.ones(1, 4)).sum().backward()
    assert not patrickstar.is_managed(layer.weight.grad)
    flat.mul_(0.5)
    assert layer.weight.grad.tolist() == [[0.5] * 4]


def test_a_gradient_that_a_hook_has_kept_stays_the_gradient() -> None:
    layer = nn.Linear(4, 1, bias=False)
    kept: list[torch.Tensor] = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    layer(torch.ones(1, 4)).sum().backward()
    assert kept[0] is layer.weight.grad


@pytest.mark.parametrize(
    "parametrize", [parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_parametrizations_of_managed_weights(parametrize) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    patrickstar.manage(layer)
    parametrize(layer)
    layer(torch.randn(2, 64)).sum().backward()
    layer.weight = torch.eye(64)
    original = next(layer.parametrizations.weight.parameters())
    assert original.grad is not None


def test_set_takes_the_identity_of_a_managed_source() -> None:
    source, target = nn.Linear(8, 8), torch.zeros(2)
    patrickstar.manage(source)
    target.set_(source.weight.detach())
    assert patrickstar.is_managed(target)
    with torch.no_grad():
        source.weight.fill_(3.0)
    assert (target.clone() == 3.0).all()


def test_what_is_made_over_a_managed_storage_follows_it() -> None:
    layer = nn.Linear(8, 8)
    patrickstar.manage(layer)
    storage = layer.weight.untyped_storage()
    window = torch.tensor([]).set_(storage, 8, (2, 4), (8, 2))
    capsule = dlpack.to_dlpack(layer.weight.detach())
    evict_everything()
    assert patrickstar.is_managed(window)
    assert _bytes_equal(window, layer.weight[1:3, ::2])
    window.fill_(7.0)
    evict_everything()
    assert layer.weight[1, 0].item() == 7.0
    shared = torch.from_dlpack(capsule)
    shared[1, 0] = 8.0
    del shared, capsule
    evict_everything()
    assert window[0, 0].item() == 8.0
    storage.fill_(0)
    evict_everything()
    assert layer.weight.count_nonzero() == 0


def test_a_copy_made_inside_a_step_is_ordinary() -> None:
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 8)).sum()
        loss.backward()
        layer.weight.detach().clone().numpy()
        return loss

    optimizer.step(closure)


def test_a_deep_copy_keeps_gradient_and_attributes() -> None:
    tensor = torch.randn(8, 8, requires_grad=True)
    patrickstar.manage(tensor)
    tensor.note = "mine"
    tensor.sum().backward()
    twin = copy.deepcopy(tensor)
    assert twin.note == "mine"
    assert _bytes_equal(twin.grad, tensor.grad)


def test_memory_shared_with_other_processes_is_left_alone() -> None:
    with pytest.raises(patrickstar.InvalidArgument, match="not shared with other processes"):
        patrickstar.manage(torch.arange(1000.0).share_memory_())


def test_shutdown_and_unmanage_inside_resident_are_refused() -> None:
    layer = nn.Linear(8, 8)
    patrickstar.manage(layer)
    with patrickstar.resident(layer):
        with pytest.raises(patrickstar.Error, match=r"patrickstar\.resident"):
            patrickstar.shutdown()
        with pytest.raises(patrickstar.Unsupported, match="leave the `with` block"):
            patrickstar.unmanage(layer)
    patrickstar.unmanage(layer)


def test_counters_forget_a_dead_model() -> None:
    layer = nn.Linear(64, 64)
    patrickstar.manage(layer)
    assert patrickstar.stats().managed_bytes > 0
    del layer
    gc.collect()
    assert patrickstar.stats().managed_bytes == 0


def test_a_failed_build_does_not_keep_shutdown_from_working() -> None:
    patrickstar.shutdown()
    with managed(64 * 1024, chunk_size="64KiB"):
        whole = nn.Linear(128, 128, bias=False)
        patrickstar.manage(whole)
        pending = nn.Linear(128, 2, bias=False)
        patrickstar.shutdown()
        assert not patrickstar.is_managed(whole.weight)
        assert pending.weight.shape == (2, 128)


def test_what_was_mapped_is_unmapped_at_shutdown() -> None:
    layer = nn.Linear(100, 100)
    patrickstar.manage(layer)
    assert mapped_bytes() > 0
    patrickstar.shutdown()
    for _ in range(3):
        with managed("8MiB"):
            big = nn.Linear(1000, 1000)
            patrickstar.manage(big)
            del big
        before = _resident_bytes()
    assert _resident_bytes() - before < 4 << 20


def test_without_a_disk_the_named_budget_is_enough() -> None:
    patrickstar.shutdown()
    budget = 524288
    for _ in range(10):
        try:
            with managed(budget, chunk_size="64KiB", disk_space=0):
                nn.Sequential(*[nn.Linear(128, 128) for _ in range(10)])
            return
        except patrickstar.OutOfMemory as error:
            named = int(str(error).split("host_memory to at least ")[1].split()[0])
            assert named > budget
            budget = named
    pytest.fail("the named budgets never were enough")


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096
