# SPDX-License-Identifier: Apache-2.0
"""What one rank of ``test_collectives.py`` runs: every case as a twin, in step with the other rank.

``python collective_cases.py <rank> <rendezvous> <report> <case>...`` writes to the report, in JSON,
the name of each case and the traceback of its failure, or an empty text.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import helpers
import patrickstar
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_single, all_reduce
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE = 2
TIMEOUT_S = 20
TIGHT = "24KiB"  # of 32 KiB of parameters
WHOLE_MODEL = "48KiB"  # what DDP broadcasts when it wraps; with gradients and state it is tight

CASES: dict[str, Callable[[], None]] = {}


def twin(run: Callable[[helpers.Recorder], None]) -> None:
    """A case that gives the same in plain PyTorch and under management."""
    tight = WHOLE_MODEL if run.__name__.startswith("ddp") else TIGHT
    CASES[run.__name__] = lambda: helpers.twin(run, tight=tight, must_evict=False)


def managed_only(run: Callable[[], None]) -> None:
    """A case about management itself."""
    CASES[run.__name__] = run


def rank() -> int:
    return dist.get_rank()


def make_model(num_layers: int = 4) -> nn.Module:
    """The same names and shapes on every rank, other values on each; adopted and evicted."""
    torch.manual_seed(rank())
    model = helpers.Stack(num_layers)
    with torch.no_grad():
        model(torch.zeros(1, 32))
    helpers.evict_everything()
    return model


def batch(step: int) -> torch.Tensor:
    """Other data on every rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank())
    return torch.randn(4, 32, generator=generator)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [layer.weight.detach() for layer in model.layers]


@twin
def all_reduce_in_place(recorder):
    model = make_model()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
    helpers.evict_everything()
    recorder.note("model", model)


@twin
def all_reduce_of_parameters_that_require_grad(recorder):
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter, op=dist.ReduceOp.MAX)
    recorder.note("model", model)


@twin
def all_reduce_of_gradients(recorder):
    model = make_model()
    optimizer = helpers.adamw(model)
    for step in range(2):
        loss = model(batch(step)).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD_SIZE
        recorder.step(f"step {step}", loss, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    recorder.note("end", model)


@twin
def many_at_once(recorder):
    """Waited for in another order, with operations that evict while they are under way."""
    model = make_model(3)
    other = make_model(4)
    works = [dist.all_reduce(weight, async_op=True) for weight in weights(model)]
    other(batch(0))
    for work in reversed(works):
        work.wait()
    helpers.evict_everything()
    recorder.note("model", model)
    recorder.note("other", other)


@twin
def never_waited_for(recorder):
    model = make_model(2)
    for weight in weights(model):
        dist.all_reduce(weight, async_op=True)  # the work is dropped at once
    helpers.evict_everything()
    dist.barrier()
    for weight in weights(model):
        dist.all_reduce(weight)  # in order: whatever was under way is done when this is
    recorder.note("model", model)


@twin
def through_a_future(recorder):
    model = make_model(2)
    futures = [
        dist.all_reduce(weight, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
        for weight in weights(model)
    ]
    recorder.note("doubled", [future.wait() for future in futures])
    recorder.note("model", model)


@managed_only
def leases_end_with_the_work():
    with helpers.managed():
        model = make_model(2)
        work = dist.all_reduce(weights(model)[0], async_op=True)
        work.wait()
        assert patrickstar.stats().num_leases == 0
        helpers.evict_everything()
        assert patrickstar.stats().host_resident_bytes == 0


@managed_only
def a_receive_holds_until_it_is_waited_for():
    with helpers.managed():
        tensor = torch.zeros(1024)
        patrickstar.manage(tensor)
        work = dist.irecv(tensor, 1 - rank(), tag=7)
        assert patrickstar.stats().num_leases == 1
        helpers.evict_everything()
        assert patrickstar.stats().host_resident_bytes == tensor.nbytes
        with pytest.raises(patrickstar.Error, match="cannot shut down"):
            patrickstar.shutdown()
        dist.send(torch.ones(1024), 1 - rank(), tag=7)
        work.wait()
        assert patrickstar.stats().num_leases == 0
        helpers.evict_everything()
        assert torch.equal(tensor, torch.ones(1024))


@managed_only
def a_receive_that_is_dropped_ends_its_lease():
    with helpers.managed():
        tensor = torch.zeros(1024)
        patrickstar.manage(tensor)
        work = dist.irecv(tensor, 1 - rank(), tag=8)  # nobody sends
        assert patrickstar.stats().num_leases == 1
        del work
        assert patrickstar.stats().num_leases == 0


@managed_only
def what_does_not_fit_is_an_error_that_names_it():
    with helpers.managed("12KiB"):
        model = make_model(4)
        tensors = weights(model)
        with pytest.raises(
            patrickstar.OutOfMemory,
            match=r"for c10d::allgather_ \(layers\.0\.weight.* at least 16384 bytes",
        ):
            dist.group.WORLD.allgather([tensors], [torch.zeros(32, 32)])
        assert patrickstar.stats().num_leases == 0


@twin
def broadcasts(recorder):
    model = make_model()
    works = []
    for index, weight in enumerate(weights(model)[:2]):
        works.append(dist.broadcast(weight, src=index % WORLD_SIZE, async_op=True))
    for work in works:
        work.wait()
    for layer in model.layers:
        dist.broadcast(layer.bias.data, src=1)
    helpers.evict_everything()
    recorder.note("model", model)


@twin
def all_gathers(recorder):
    model = make_model(2)
    weight = model.layers[0].weight.detach()
    plain = [torch.empty(32, 32) for _ in range(WORLD_SIZE)]
    dist.all_gather(plain, weight)
    recorder.note("plain outputs", plain)
    managed = [layer.weight.detach() for layer in model.layers]
    dist.all_gather(managed, plain[rank()] * 3, async_op=True).wait()
    helpers.evict_everything()
    recorder.note("managed outputs", model)


@twin
def gathers_into_one_tensor(recorder):
    model = make_model(2)
    whole = torch.empty(64, 32)
    dist.all_gather_single(whole, model.layers[0].weight.detach())
    recorder.note("whole", whole)
    target = model.layers[1].weight.detach()
    dist.all_gather_single(target, whole[:16].contiguous())
    recorder.note("model", model)


@twin
def reduce_and_scatter(recorder):
    model = make_model(4)
    first, second, third, fourth = weights(model)
    dist.reduce(first, dst=1)
    dist.reduce_scatter(third, [second, fourth])
    dist.reduce_scatter_single(model.layers[0].bias.data, batch(0)[:2].reshape(-1))
    dist.scatter(fourth, [second, third] if rank() == 0 else None, src=0)
    helpers.evict_everything()
    recorder.note("model", model)


@twin
def gather_and_all_to_all(recorder):
    model = make_model(4)
    first, second, third, fourth = weights(model)
    dist.gather(first, [second, third] if rank() == 1 else None, dst=1)
    dist.all_to_all_single(fourth, first)
    helpers.evict_everything()
    recorder.note("model", model)


@twin
def lists_of_managed_tensors_beside_plain_ones(recorder):
    """The dispatcher does not see that a tensor in a list of lists is managed."""
    model = make_model(4)
    first, second, third, fourth = weights(model)
    plain = torch.full((32, 32), float(rank()))
    work = dist.reduce_scatter(plain, [first, second], async_op=True)
    make_model(2)(batch(0))  # evicts what is not held
    work.wait()
    recorder.note("reduced", plain)
    helpers.evict_everything()
    dist.scatter(plain, [first, third] if rank() == 0 else None)
    recorder.note("scattered", plain)
    dist.gather(plain, [second, fourth] if rank() == 1 else None, dst=1)
    helpers.evict_everything()
    recorder.note("model", model)


@twin
def lists_in_inference_mode(recorder):
    """With tensors made there as well a call has no key of views, which all others have."""
    model = make_model(4)
    first, second, third, fourth = weights(model)
    with torch.inference_mode():
        plain = torch.full((32, 32), float(rank()))
        work = dist.all_gather([first, second], plain, async_op=True)
        make_model(2)(batch(0))  # evicts what is not held
        work.wait()
        helpers.evict_everything()
        dist.reduce_scatter(plain, [second, third])
        dist.scatter(plain, [first, third] if rank() == 0 else None)
        dist.gather(plain, [second, fourth] if rank() == 1 else None, dst=1)
    helpers.evict_everything()
    recorder.note("scattered", plain.clone())
    recorder.note("model", model)


@twin
def inference_tensors(recorder):
    """Made in inference mode, plain or views of managed ones, and used after it."""
    model = make_model(4)
    with torch.inference_mode():
        first, second = (layer.weight.detach() for layer in model.layers[:2])
        part = model.layers[2].weight[:16].view(-1)
        plain = torch.full((32, 32), float(rank()))
    helpers.evict_everything()
    dist.all_gather([first, second], plain)
    helpers.evict_everything()
    dist.all_reduce(plain)
    dist.all_reduce(part)
    dist.scatter(plain, [first, second] if rank() == 0 else None)
    with torch.inference_mode():
        works = [dist.all_reduce(first, async_op=True), dist.broadcast(second, 1, async_op=True)]
        make_model(2)(batch(0))
        for work in works:
            work.wait()
    helpers.evict_everything()
    recorder.note("plain", plain.clone())
    recorder.note("model", model)


@twin
def lists_of_lists(recorder):
    """Coalesced, as c10d takes them: every list of the outer list is managed, plain or both."""
    model = make_model(4)
    first, second, third, fourth = weights(model)
    plain = torch.full((32, 32), float(rank()))
    group = dist.group.WORLD
    works = [group.allgather([[first, plain.clone()]], [plain])]
    options = dist.ReduceScatterOptions()
    works.append(group.reduce_scatter([plain.clone()], [[second, third]], options))
    helpers.evict_everything()
    for work in works:
        work.wait()
    dist.all_gather_coalesced([[second, third], [fourth, plain]], [plain * 2, plain * 3])
    helpers.evict_everything()
    recorder.note("plain", plain)
    recorder.note("model", model)


@twin
def send_and_receive(recorder):
    model = make_model(3)
    first, second, third = weights(model)
    if rank() == 0:
        dist.send(first, dst=1)
        dist.recv(second, src=1)
    else:
        dist.recv(second, src=0)
        dist.send(first, dst=0)
    peer = 1 - rank()
    works = [dist.isend(second, peer), dist.irecv(third, peer)]
    model(batch(0))  # evicts what is not held
    for work in works:
        work.wait()
    helpers.evict_everything()
    recorder.note("model", model)


@twin
def batched_send_and_receive(recorder):
    model = make_model(3)
    first, second, third = weights(model)
    peer = 1 - rank()
    operations = [
        dist.P2POp(dist.isend, first, peer),
        dist.P2POp(dist.irecv, second, peer),
        dist.P2POp(dist.isend, third, peer),
    ]
    buffer = torch.empty(32, 32)
    operations.append(dist.P2POp(dist.irecv, buffer, peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    helpers.evict_everything()
    recorder.note("buffer", buffer)
    recorder.note("model", model)


@twin
def objects_and_barriers(recorder):
    """What sends no managed memory goes on as it is."""
    make_model(2)
    dist.barrier()
    dist.monitored_barrier()
    answers = [None] * WORLD_SIZE
    dist.all_gather_object(answers, {"rank": rank()})
    recorder.note("answers", str(answers))


@twin
def functional_collectives(recorder):
    model = make_model(3)
    for weight in weights(model):
        recorder.note("sum", all_reduce(weight, "sum", dist.group.WORLD) + 0)
    recorder.note("all", all_gather_single(weights(model)[0], 0, dist.group.WORLD) + 0)
    recorder.note("model", model)


def train_wrapped(recorder, model, wrapped, num_steps=3):
    optimizer = helpers.adamw(model)
    for step in range(num_steps):
        loss = wrapped(batch(step)).pow(2).mean()
        recorder.train_step(f"step {step}", loss, model, optimizer)
    recorder.note("end", model)


@twin
def ddp(recorder):
    model = make_model()
    train_wrapped(recorder, model, DistributedDataParallel(model))


@twin
def ddp_before_adoption(recorder):
    """The wrapper is there before the parameters are managed: its reducer keeps working."""
    torch.manual_seed(rank())
    model = helpers.Stack(4)
    train_wrapped(recorder, model, DistributedDataParallel(model))


@twin
def ddp_with_small_buckets_and_views(recorder):
    model = make_model()
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=0.008, gradient_as_bucket_view=True, static_graph=True
    )
    train_wrapped(recorder, model, wrapped)


@twin
def ddp_with_accumulation(recorder):
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = helpers.sgd(model)
    for step in range(2):
        with wrapped.no_sync():
            wrapped(batch(2 * step)).pow(2).mean().backward()
        loss = wrapped(batch(2 * step + 1)).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        recorder.step(f"step {step}", loss, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    recorder.note("end", model)


@twin
def ddp_with_a_communication_hook(recorder):
    def halve_and_sum(_, bucket):
        work = dist.all_reduce(bucket.buffer().div_(WORLD_SIZE), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model = make_model()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, halve_and_sum)
    train_wrapped(recorder, model, wrapped)


@twin
def ddp_with_uneven_inputs(recorder):
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = helpers.sgd(model)
    with wrapped.join():
        for step in range(2 + rank()):
            wrapped(batch(step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    recorder.note("end", model)


def run_all(names: list[str], report: Path) -> None:
    results = {}
    for name in names:
        try:
            CASES[name]()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        report.write_text(json.dumps(results))


def main(own_rank: int, rendezvous: str, report: Path, names: list[str]) -> None:
    gc.freeze()  # what was imported need not be searched after each run
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=own_rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    run_all(names, report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
