# SPDX-License-Identifier: Apache-2.0
"""The harness of the twins: what the sample covers, and that differences and crashes show."""

from __future__ import annotations

import copy
import itertools

import matrix
import models
import optimizers
import pytest
import torch
import twins
import workloads


def every_pair(axes):
    return {
        tuple(sorted(((first, a), (second, b))))
        for first, second in itertools.combinations(axes, 2)
        for a in axes[first]
        for b in axes[second]
    }


def covered(cases):
    return set().union(*map(matrix.pairs, cases))


def test_every_two_choices_meet_in_the_cover():
    cover = matrix.pairwise_cover()
    assert covered(cover) == every_pair(matrix.AXES)
    largest, second = sorted(map(len, matrix.AXES.values()))[-2:]
    assert largest * second <= len(cover) <= 1.2 * largest * second


def test_cover_of_axes_of_one_choice():
    assert matrix.pairwise_cover({"a": ["x"], "b": ["y", "z"]}) == [
        {"a": "x", "b": "y"},
        {"a": "x", "b": "z"},
    ]


def test_the_product_has_every_combination_and_every_chunk_size():
    product = matrix.full_product()
    others = [axis for axis in matrix.AXES if axis != "chunks"]
    names = {matrix.case_id(case, others) for case in product}
    size = 1
    for axis in others:
        size *= len(matrix.AXES[axis])
    assert len(product) == len(names) == size
    assert {case["chunks"] for case in product} == set(matrix.AXES["chunks"])


def test_the_axes_name_every_workload():
    assert set(matrix.AXES["model"]) == set(models.MODELS)
    assert set(matrix.AXES["optimizer"]) == set(optimizers.OPTIMIZERS)
    assert set(matrix.AXES["precision"]) == set(workloads.PRECISIONS)


def test_models_have_the_sizes_they_promise():
    for make in models.MODELS.values():
        num_parameters = sum(p.numel() for p in make("off").parameters())
        assert 190_000 < num_parameters < 2_000_000


ANSWER = {
    "losses": ["a", "b"],
    "norms": ["c"],
    "gradients": {"w": "d", "unused": None},
    "weights": {"w": "e"},
    "state": {"w step": "f"},
    "model_data_bytes": 12,
}


def test_equal_answers_have_no_difference():
    assert twins.first_difference(ANSWER, copy.deepcopy(ANSWER)) is None


@pytest.mark.parametrize(
    ("part", "value", "difference"),
    [
        ("losses", ["a", "x"], "losses 1: plain b, managed x"),
        ("losses", ["a"], "losses 1: plain b, managed nothing"),
        ("gradients", {"w": "d", "unused": "0"}, "gradients unused: plain nothing, managed 0"),
        ("gradients", {"w": "d"}, "gradients unused: plain nothing, managed nothing"),
        ("state", {"w step": "f", "w more": "g"}, "state w more: plain nothing, managed g"),
        ("model_data_bytes", 13, "model_data_bytes: plain 12, managed 13"),
    ],
)
def test_the_first_difference_is_named(part, value, difference):
    assert twins.first_difference(ANSWER, {**ANSWER, part: value}) == difference


@pytest.mark.parametrize(
    ("tensor", "other"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, 2), torch.zeros(2, 2).T),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.ones(2, dtype=torch.bfloat16), torch.tensor([1, 1.01], dtype=torch.bfloat16)),
    ],
)
def test_digests_tell_bytes_layouts_and_types_apart(tensor, other):
    numbers = workloads.Numbers()
    assert numbers.digest("a", tensor) == numbers.digest("b", tensor.clone())
    assert numbers.digest("a", tensor) != numbers.digest("b", other)


def test_a_case_that_kills_its_process_answers_for_it_and_the_rest_go_on(tmp_path, monkeypatch):
    runner = tmp_path / "runner.py"
    runner.write_text(
        """
import json, os, sys
options = dict(word.lstrip("-").split("=") for word in sys.argv[1:])
with open(options["out"], "a") as out:
    for case in json.load(open(options["cases"])):
        if case["id"] == "bad":
            print("what it said", flush=True)
            os.abort()
        print(json.dumps({"id": case["id"]}), file=out, flush=True)
"""
    )
    monkeypatch.setattr(twins, "RUN", runner)
    names = ["0", "1", "bad", "3", "4", "5", "6"]
    answers = twins._run([{"id": name} for name in names], tmp_path / "runs", [])
    assert answers.keys() == set(names)
    assert "status -6" in answers["bad"]["error"]
    assert "what it said" in answers["bad"]["error"]
    assert all("error" not in answers[name] for name in names if name != "bad")
