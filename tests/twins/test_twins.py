# SPDX-License-Identifier: Apache-2.0
"""Twins: the same seeded training in plain PyTorch and under a budget gives the same bytes.

The sample holds every two choices of the axes; the whole product is marked ``full``. Each case
runs in three steps: the plain side, the managed side (its budget from the plain side's model data),
the comparison of every loss, norm, gradient, weight and optimizer state as bytes.
"""

from __future__ import annotations

import matrix
import pytest
import twins

COVER = matrix.pairwise_cover()
COVERED = {matrix.case_id(case) for case in COVER}
REST = [case for case in matrix.full_product() if matrix.case_id(case) not in COVERED]

CASES_AT_ONCE = 41  # so that a long run shows how far it is, and no test looks like a hang


class Sides:
    """Both sides of the selected cases, run when the first of a batch is asked for."""

    def __init__(self, cases, folder):
        self.cases = cases
        self.folder = folder
        self.answers = {}

    def of(self, case):
        first = self.cases.index(case) // CASES_AT_ONCE * CASES_AT_ONCE
        if first not in self.answers:
            cases = self.cases[first : first + CASES_AT_ONCE]
            folder = self.folder / str(first)
            plain = twins.run_plain(cases, folder)
            self.answers[first] = plain, twins.run_managed(cases, plain, folder)
        plain, managed = self.answers[first]
        return plain[matrix.case_id(case, matrix.PLAIN_AXES)], managed.get(matrix.case_id(case))


@pytest.fixture(scope="module")
def sides(request, tmp_path_factory):
    selected = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return Sides(selected, tmp_path_factory.mktemp("twins"))


def check(case, plain, managed):
    assert "error" not in plain, plain["error"]
    assert "error" not in managed, managed["error"]
    check_refusals(case, plain, managed)
    difference = twins.first_difference(plain, managed)
    assert difference is None, difference
    check_budget(managed)


def check_refusals(case, plain, managed):
    """A budget is refused when some op's own set does not fit, with the number that would do."""
    refused = [refusal["budget_bytes"] for refusal in managed["refusals"]]
    assert "out_of_memory" not in managed, (
        f"after budgets {refused} the message leads nowhere: {managed.get('out_of_memory')}"
    )
    assert refused == sorted(set(refused))
    if refused:
        assert managed["one_byte_less"] is not None, "less than the named budget works too"
    budget = twins.budget_bytes(case, plain)
    largest = plain["largest_parameter_bytes"]
    if budget < largest:
        assert refused, f"ran in {budget} bytes, and one op takes {largest}"
    if case["budget"] == "100":
        assert not refused, f"refused {refused} bytes, which hold all model data"


def check_budget(managed):
    budget, stats = managed["budget_bytes"], managed["stats"]
    assert stats["host_budget_bytes"] == budget
    assert stats["num_evictions"] > 0
    assert 0 < stats["host_peak_bytes"] <= budget
    assert 0 < managed["mapped_peak_bytes"] <= budget


@pytest.mark.parametrize("case", COVER, ids=matrix.case_id)
def test_twin(case, sides):
    check(case, *sides.of(case))


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=matrix.case_id)
def test_twin_of_the_whole_product(case, sides):
    check(case, *sides.of(case))


def test_a_skipped_lease_goes_red_under_stress(tmp_path):
    case = {
        "model": "tied",
        "precision": "fp32",
        "checkpointing": "off",
        "optimizer": "sgd",
        "budget": "50",
        "stress": "full",
        "chunks": "16KiB",
    }
    plain = twins.run_plain([case], tmp_path / "plain")
    for skip_leases in (False, True):
        folder = tmp_path / f"skip {skip_leases}"
        managed = twins.run_managed([case], plain, folder, skip_leases=skip_leases)
        (twin,), (answer,) = plain.values(), managed.values()
        is_red = "error" in answer or twins.first_difference(twin, answer) is not None
        assert is_red == skip_leases, answer
