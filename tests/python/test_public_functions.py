# SPDX-License-Identifier: Apache-2.0
"""manage, unmanage, is_managed, resident, stats, shutdown, and the log."""

from __future__ import annotations

import json

import helpers
import patrickstar
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def test_without_management_everything_says_so():
    tensor = torch.zeros(4)
    assert not patrickstar.is_managed(tensor)
    patrickstar.shutdown()
    for call in (patrickstar.stats, lambda: patrickstar.manage(tensor)):
        with pytest.raises(patrickstar.Error, match=r"management is off; call patrickstar\.init"):
            call()
    with pytest.raises(patrickstar.Error, match="management is off"), patrickstar.resident(tensor):
        pass


def test_manage_takes_modules_tensors_and_collections():
    with helpers.managed():
        model, alone = nn.Linear(4, 4), torch.arange(10)
        listed, named = torch.randn(3, 3), torch.randn(2).bool()
        patrickstar.manage([model, alone, [listed], {"name": named}])
        everything = [model.weight, model.bias, alone, listed, named]
        assert all(map(patrickstar.is_managed, everything))
        patrickstar.manage([model, alone])  # again: nothing changes
        assert torch.equal(alone, torch.arange(10))
        for wrong in (3, "text", None):
            with pytest.raises(patrickstar.InvalidArgument, match="expected a module, a tensor"):
                patrickstar.manage(wrong)  # type: ignore[arg-type]
        with pytest.raises(patrickstar.InvalidArgument, match=r"layout torch\.sparse_coo"):
            patrickstar.manage(torch.eye(3).to_sparse())


def test_manage_keeps_identity_and_unmanage_gives_it_back():
    with helpers.managed():
        model = nn.Linear(32, 32)
        model(torch.randn(2, 32)).sum().backward()
        weight, address = model.weight, id(model.weight)
        view, wanted = weight.detach()[2], weight.detach().clone()
        patrickstar.unmanage(model)
        assert id(model.weight) == address
        assert model.weight is weight
        assert not any(map(patrickstar.is_managed, [weight, weight.grad, model.bias, view]))
        assert torch.equal(weight, wanted)
        weight.detach().numpy()[2] = 7.0  # ordinary memory, which the old view follows
        assert torch.equal(weight.detach()[2], torch.full((32,), 7.0))
        for _ in range(2):  # it is not adopted by itself again
            helpers.train(helpers.Recorder(), model, num_steps=1)
        assert not patrickstar.is_managed(weight)
        del view
        patrickstar.manage(model)
        assert patrickstar.is_managed(weight)
        helpers.train(helpers.Recorder(), model, num_steps=1)


def test_unmanaged_in_the_middle_of_training():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(4)
        optimizer = helpers.adamw(model)
        for step in range(4):
            if step == 2 and patrickstar._C.is_running():
                patrickstar.unmanage(model.layers[1])
            loss = model(torch.randn(4, 32)).pow(2).mean()
            recorder.train_step(f"step {step}", loss, model, optimizer)
        recorder.note("end", model)

    helpers.twin(loop)


def test_resident_gives_addresses_that_stay_and_writes_that_count():
    with helpers.managed("24KiB", stress="evict,poison"):
        model = helpers.Stack(3)
        patrickstar.manage(model)
        first = model.layers[0].weight
        with patrickstar.resident(first):
            assert patrickstar.stats().num_leases == 1
            array = first.detach().numpy()
            address = first.data_ptr()
            for _ in range(3):
                model(torch.randn(2, 32))  # everything else comes and goes
            assert first.data_ptr() == address
            array[0] = 5.0
            assert torch.equal(first.detach()[0], torch.full((32,), 5.0))
        del array
        assert patrickstar.stats().num_leases == 1  # of data_ptr(), until the next step
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        helpers.evict_everything()
        assert patrickstar.stats().num_leases == 0
        assert torch.equal(first.detach()[0], torch.full((32,), 5.0))
        with (
            pytest.raises(patrickstar.OutOfMemory, match=r"patrickstar\.resident"),
            patrickstar.resident(helpers.Stack(8), model),
        ):
            pass
        assert patrickstar.stats().num_leases == 0


def test_resident_lets_go_after_an_exception_and_may_be_nested():
    with helpers.managed():
        tensor = torch.randn(8)
        patrickstar.manage(tensor)
        with pytest.raises(KeyError), patrickstar.resident(tensor), patrickstar.resident([tensor]):
            raise KeyError
        assert patrickstar.stats().num_leases == 0
        with patrickstar.resident(tensor):
            assert len(tensor.numpy()) == 8
            assert patrickstar.stats().num_leases == 1
        assert patrickstar.stats().num_leases == 0


def test_an_op_beside_a_resident_tensor_counts_it():
    with helpers.managed("16KiB"):
        tensors = [torch.ones(32, 32) for _ in range(6)]
        patrickstar.manage(tensors)
        with patrickstar.resident(tensors[:3]):
            assert tensors[4].sum() == 1024
            with pytest.raises(patrickstar.OutOfMemory, match="3 other chunks are leased"):
                torch.add(tensors[4], tensors[5])
        assert torch.equal(torch.add(tensors[4], tensors[5]), torch.full((32, 32), 2.0))


def test_stats_count_what_happened():
    with helpers.managed("16KiB", chunk_size=4096):
        tensors = [torch.ones(32, 32) for _ in range(8)]  # a page each, four fit
        patrickstar.manage(tensors)
        before = patrickstar.stats()
        assert before.num_chunks == 8
        assert before.managed_bytes == 8 * 4096
        assert before.host_resident_bytes <= before.host_budget_bytes == 16 << 10
        for tensor in tensors:
            tensor.add_(1)
        after = patrickstar.stats()
        assert after.num_fetches - before.num_fetches == 8
        assert after.fetched_bytes - before.fetched_bytes == 8 * 4096
        assert after.num_op_leases - before.num_op_leases == 8
        assert after.read_bytes - before.read_bytes == 8 * 4096
        assert after.num_evictions > before.num_evictions
        assert after.steps == after.skipped_steps == 0
        assert "16.0 KiB budget" in str(after)


def test_shutdown_gives_ordinary_tensors_with_the_same_bytes():
    def loop(recorder: helpers.Recorder) -> None:
        model = helpers.Stack(4)
        optimizer = helpers.adamw(model)
        held = []
        for step in range(4):
            loss = model(torch.randn(4, 32)).pow(2).mean()
            if step == 2:
                patrickstar.shutdown()  # between forward and backward; nothing in plain PyTorch
            loss.backward()
            optimizer.step()
            recorder.step(f"step {step}", loss, model, optimizer)
            held.append(model.layers[0].weight.detach().clone())
            optimizer.zero_grad()
        recorder.note("end", model)
        assert len(model.layers[0].weight.detach().numpy()) == 32
        assert not any(map(patrickstar.is_managed, [*model.parameters(), *held]))

    expected = helpers.plain(loop)
    for host_memory in ("48KiB", helpers.EVERYTHING):
        with helpers.managed(host_memory):
            got = helpers.plain(loop)
        helpers.assert_same(got.records, expected.records, host_memory)


def test_shutdown_takes_every_patch_and_hook_back():
    names = ("numpy", "__array__", "tolist", "data_ptr", "is_shared", "__deepcopy__")
    before = [getattr(torch.Tensor, name) for name in names]
    model = nn.Linear(4, 4)
    with helpers.managed():
        patrickstar.manage(model)
        assert getattr(torch.Tensor, "numpy") is not before[0]  # noqa: B009
    assert [getattr(torch.Tensor, name) for name in names] == before
    for registry in (
        torch.nn.modules.module._global_forward_pre_hooks,
        torch.nn.modules.module._global_parameter_registration_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    ):
        assert not registry
    assert not model.weight._post_accumulate_grad_hooks


def test_the_log_has_one_record_a_step(tmp_path):
    path = tmp_path / "run.jsonl"
    with helpers.managed("48KiB", log=path):
        helpers.plain(lambda recorder: helpers.train_stack(recorder, num_steps=5))
        stats = patrickstar.stats()
        records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    times = [record["time_s"] for record in records]
    assert times == sorted(times)
    assert all(record["loss"] is None and record["skipped"] is False for record in records)
    for record in records:
        host = record["memory"]["host"]
        assert 0 <= host["resident"] <= host["peak"] <= host["budget"] == 48 << 10
        assert record["memory"]["disk"]["used"] > 0
        assert record["stall_s"] >= 0
    for name in ("fetched_bytes", "evicted_bytes", "spilled_bytes", "read_bytes"):
        traffic = [record["traffic"][name] for record in records]
        assert all(number > 0 for number in traffic[1:]), name
        assert sum(traffic) <= getattr(stats, name)  # what came after the last step is not in
