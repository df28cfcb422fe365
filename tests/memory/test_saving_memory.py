# SPDX-License-Identifier: Apache-2.0
"""Saving and loading what is larger than memory raises resident memory by a constant."""

from __future__ import annotations

import json

import helpers
import pytest

# A piece of 16 MiB and the files' buffers.
ALLOWED_BYTES = 32 << 20

PROGRAM = """
    import json, os, sys, tempfile
    import patrickstar, safetensors.torch, torch
    from torch import nn

    def resident(key):
        for line in open("/proc/self/status"):
            if line.startswith(key):
                return int(line.split()[1]) * 1024

    def rise(work):
        patrickstar._C.evict_all()  # so that what comes in counts
        before = resident("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew
        work()
        return resident("VmHWM") - before

    torch.manual_seed(0)
    folder = tempfile.mkdtemp(dir=sys.argv[1])
    budget = 48 << 20
    patrickstar.init(host_memory=budget, spill_dir=folder + "/spill")
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(40)])  # 160 MiB
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    wanted = [p.detach().double().sum().item() for p in model.parameters()]

    rises = {
        "torch.save": rise(lambda: torch.save(state, folder + "/all.pt")),
        "safetensors": rise(
            lambda: safetensors.torch.save_file(state["model"], folder + "/model.safetensors")
        ),
        "save_checkpoint": rise(
            lambda: patrickstar.save_checkpoint(folder + "/checkpoint", model, optimizer)
        ),
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    del state
    rises["load_checkpoint"] = rise(
        lambda: patrickstar.load_checkpoint(folder + "/checkpoint", model, optimizer)
    )
    found = [p.detach().double().sum().item() for p in model.parameters()]
    print(json.dumps({"budget": budget, "rises": rises, "is_equal": found == wanted}))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    done = helpers.run_script(PROGRAM, str(tmp_path_factory.mktemp("saving")))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", ["torch.save", "safetensors", "save_checkpoint", "load_checkpoint"])
def test_memory_rises_by_a_constant(measured: dict[str, object], how: str) -> None:
    # Payloads fill the budget, whatever brings them there.
    assert measured["rises"][how] <= measured["budget"] + ALLOWED_BYTES


def test_what_was_loaded_is_what_was_saved(measured: dict[str, object]) -> None:
    assert measured["is_equal"]
