# SPDX-License-Identifier: Apache-2.0
"""Files of managed tensors: plain PyTorch's size and content, whoever writes and whoever reads."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import patrickstar
import pytest
import safetensors.torch
import torch
from helpers import evict_everything, managed
from torch import nn

StateDict = Mapping[str, torch.Tensor]


class Tied(nn.Module):
    """An embedding tied to a head, beside weights of odd shapes and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.body = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
        self.norm = nn.BatchNorm1d(16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.brief = nn.Parameter(torch.randn(16, 16).bfloat16())
        self.codes = nn.Parameter(torch.arange(64, dtype=torch.uint8), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(8, 4).t())
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.embedding(x))) * self.scale)


def _model(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def _equal(left: StateDict, right: StateDict) -> bool:
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype
        and torch.equal(left[name].detach().clone(), right[name].detach().clone())
        for name in left
    )


@pytest.fixture(autouse=True)
def _management() -> Iterator[None]:
    with managed("24KiB", stress="evict,poison"):
        yield


@pytest.fixture
def pair() -> tuple[Tied, StateDict]:
    """A managed model, evicted, and copies of its state."""
    model = _model()
    wanted = {name: value.clone() for name, value in _model().state_dict().items()}
    patrickstar.manage(model)
    evict_everything()
    return model, wanted


def _torch_bytes(value: object, **options: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("is_zip", [True, False])
def test_torch_save_writes_what_plain_pytorch_writes(
    pair: tuple[Tied, StateDict], is_zip: bool
) -> None:
    model, wanted = pair
    options = {"_use_new_zipfile_serialization": is_zip}
    written = _torch_bytes(model.state_dict(), **options)
    plain = _torch_bytes(_model().state_dict(), **options)
    assert len(written) <= len(plain) * 1.05
    loaded = torch.load(io.BytesIO(written), weights_only=True)
    assert _equal(loaded, wanted)
    storages = [v.untyped_storage().data_ptr() for k, v in loaded.items() if v.numel()]
    assert len(storages) - len(set(storages)) == 1  # the tied pair


def test_a_single_weight_is_saved_alone(pair: tuple[Tied, StateDict]) -> None:
    model, _ = pair
    weight = _model().body[0].weight
    assert len(_torch_bytes(model.body[0].weight)) <= len(_torch_bytes(weight)) * 1.05


def test_the_state_of_an_optimizer_is_saved_in_its_own_size() -> None:
    def trained() -> torch.optim.Optimizer:
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(8)).sum().backward()
        optimizer.step()
        return optimizer

    written = _torch_bytes(trained().state_dict())
    patrickstar.shutdown()
    plain = trained().state_dict()
    assert len(written) <= len(_torch_bytes(plain)) * 1.05
    loaded = torch.load(io.BytesIO(written), weights_only=True)
    for index, state in plain["state"].items():
        assert _equal(loaded["state"][index], state)


def test_a_mapped_file_loads_into_a_managed_model(
    pair: tuple[Tied, StateDict], tmp_path: Path
) -> None:
    model, _ = pair
    other = _model(seed=1).state_dict()
    torch.save(other, tmp_path / "other.pt")
    mapped = torch.load(tmp_path / "other.pt", mmap=True, map_location="cpu", weights_only=True)
    model.load_state_dict(mapped)
    evict_everything()
    assert _equal(model.state_dict(), other)


@pytest.mark.parametrize("is_assigned", [False, True])
def test_state_of_all_kinds_is_loaded(pair: tuple[Tied, StateDict], is_assigned: bool) -> None:
    model, wanted = pair
    other = _model(seed=1)
    model.load_state_dict(copy.deepcopy(other.state_dict()), strict=True, assign=is_assigned)
    x = torch.arange(8)
    assert torch.equal(model(x), other(x))
    evict_everything()
    assert torch.equal(model.eval()(x), other.eval()(x))
    model.load_state_dict(wanted, assign=is_assigned)
    evict_everything()
    assert _equal(model.state_dict(), wanted)


def test_a_meta_model_takes_managed_state_by_assignment(pair: tuple[Tied, StateDict]) -> None:
    model, wanted = pair
    with torch.device("meta"):
        shell = Tied()
    shell.load_state_dict(model.state_dict(), assign=True)
    assert _equal(shell.state_dict(), wanted)


_COPIES: dict[str, Callable[[Tied], Tied]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save of the module": lambda model: torch.load(
        io.BytesIO(_torch_bytes(model)), weights_only=False
    ),
    "averaged": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


@pytest.mark.parametrize("name", _COPIES)
def test_a_copy_has_the_same_state_and_ties(pair: tuple[Tied, StateDict], name: str) -> None:
    model, wanted = pair
    made = _COPIES[name](model)
    assert _equal(made.state_dict(), wanted)
    assert made.head.weight is made.embedding.weight
    with torch.no_grad():
        made.scale.fill_(7.0)
        made.head.weight.zero_()
    evict_everything()
    assert _equal(model.state_dict(), wanted)


def test_safetensors_writes_the_bytes_that_it_writes_for_plain_tensors(
    pair: tuple[Tied, StateDict], tmp_path: Path
) -> None:
    model, wanted = pair

    def storable(state: StateDict) -> dict[str, torch.Tensor]:
        return {k: v for k, v in state.items() if k not in ("transposed", "head.weight")}

    files = [tmp_path / "managed.safetensors", tmp_path / "plain.safetensors"]
    safetensors.torch.save_file(storable(model.state_dict()), files[0], {"format": "pt"})
    safetensors.torch.save_file(storable(wanted), files[1], {"format": "pt"})
    assert files[0].read_bytes() == files[1].read_bytes()
    assert safetensors.torch.save(storable(model.state_dict())) == safetensors.torch.save(
        storable(wanted)
    )


def test_safetensors_refuses_what_it_refuses_of_plain_tensors(
    pair: tuple[Tied, StateDict], tmp_path: Path
) -> None:
    model, _ = pair
    file = tmp_path / "model.safetensors"
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file(model.state_dict(), file)
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors.torch.save_file({"transposed": model.transposed.detach()}, file)


def test_safetensors_saves_and_loads_a_model(pair: tuple[Tied, StateDict], tmp_path: Path) -> None:
    model, wanted = pair
    model.transposed = nn.Parameter(wanted["transposed"].contiguous())
    file = str(tmp_path / "model.safetensors")
    safetensors.torch.save_model(model, file)
    other = _model(seed=1)
    other.transposed = nn.Parameter(other.transposed.contiguous())
    patrickstar.manage(other)
    assert safetensors.torch.load_model(other, file) == (set(), [])
    evict_everything()
    assert _equal(other.state_dict(), wanted)
    patrickstar.shutdown()
    plain = _model(seed=2)
    plain.transposed = nn.Parameter(plain.transposed.contiguous())
    safetensors.torch.load_model(plain, file)
    assert _equal(plain.state_dict(), wanted)


_MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to cpu": lambda model: model.to("cpu"),
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "channels": lambda model: model.to(memory_format=torch.preserve_format),
}


@pytest.mark.parametrize("name", _MOVES)
def test_moves_and_casts_of_a_managed_model(pair: tuple[Tied, StateDict], name: str) -> None:
    model, _ = pair
    expected = _MOVES[name](_model()).state_dict()
    moved = _MOVES[name](model)
    assert moved is model
    assert model.head.weight is model.embedding.weight
    evict_everything()
    assert _equal(model.state_dict(), expected)


def test_to_empty_and_loading_again(pair: tuple[Tied, StateDict]) -> None:
    model, wanted = pair
    model.to_empty(device="cpu")
    model.load_state_dict(wanted)
    evict_everything()
    assert _equal(model.state_dict(), wanted)


def test_shared_memory_makes_a_tensor_ordinary(pair: tuple[Tied, StateDict]) -> None:
    model, wanted = pair
    model.share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters() if parameter.numel())
    evict_everything()
    assert _equal(model.state_dict(), wanted)


def test_an_array_keeps_its_bytes_in_memory_as_long_as_it_lives(
    pair: tuple[Tied, StateDict],
) -> None:
    model, wanted = pair
    weight = model.body[0].weight
    window = weight.detach().numpy()[2:4]
    evict_everything()
    assert (window == wanted["body.0.weight"][2:4].numpy()).all()
    window[0, 0] = 5.0
    del window
    evict_everything()
    assert weight[2, 0].item() == 5.0
    assert patrickstar.stats().num_leases == 0


def test_addresses_beyond_half_of_the_budget_are_refused(pair: tuple[Tied, StateDict]) -> None:
    model, _ = pair
    layers = [nn.Linear(32, 32) for _ in range(9)]
    patrickstar.manage(layers)
    with pytest.raises(patrickstar.OutOfMemory, match=r"data_ptr\(\) of .* half of the "):
        [layer.weight.data_ptr() for layer in layers]
    model(torch.arange(8)).sum().backward()


def test_a_whole_model_can_be_asked_for_the_addresses_of_its_storages() -> None:
    layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(9)])
    patrickstar.manage(layers)
    state = layers.state_dict()
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    assert sorted(names.values()) == sorted([name] for name in state)
    for value in state.values():
        storage = value.untyped_storage()
        raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        assert bytes(raw) == value.clone().numpy().tobytes()


def test_a_deep_copy_of_a_state_dict_keeps_its_aliases(pair: tuple[Tied, StateDict]) -> None:
    model, wanted = pair
    copied = copy.deepcopy(model.state_dict())
    assert _equal(copied, wanted)
    copied["embedding.weight"].fill_(3.0)
    evict_everything()
    assert copied["head.weight"].eq(3.0).all()
    assert _equal(model.state_dict(), wanted)
    rows = copy.deepcopy([model.transposed.detach()[1:], model.transposed.detach()])
    rows[1].zero_()
    assert rows[0].eq(0.0).all()


def test_torch_script_saves_a_module_that_fits() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).eval()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    patrickstar.manage(model)
    traced = torch.jit.trace(model, torch.randn(2, 16))
    evict_everything()
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    assert _equal(torch.jit.load(file).state_dict(), wanted)
    large = nn.Sequential(*[nn.Linear(32, 32) for _ in range(9)])
    patrickstar.manage(large)
    traced = torch.jit.trace(large, torch.randn(2, 32))
    with pytest.raises(patrickstar.OutOfMemory, match=r"torch\.jit\.save"):
        torch.jit.save(traced, io.BytesIO())
