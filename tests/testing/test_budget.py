"""Budgets: what is counted, which ports are named, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from records import gather, reduce, snapshot_of

from fxboundary.testing import BudgetError, PortRecord, SnapshotError, StepRecord

SNAPSHOT = snapshot_of(*(p for i in range(8) for p in (gather(f"l.{i}:x"), reduce(f"l.{i}:out"))))


def test_a_budget_that_is_kept():
    SNAPSHOT.assert_collectives()
    SNAPSHOT.assert_collectives({"all_reduce": 8, "all_to_all": 0}, bytes_at_most=6144)
    SNAPSHOT.assert_collectives({"all_gather": 0}, bytes_at_most="1.5 KiB", direction="backward")
    snapshot_of().assert_collectives({"all_reduce": 0}, bytes_at_most=0)


def test_the_ports_that_exceed_a_budget_are_named():
    with pytest.raises(BudgetError) as failure:
        SNAPSHOT.assert_collectives({"all_reduce": 1, "all_gather": 8}, bytes_at_most="4 KiB")
    assert isinstance(failure.value, AssertionError)
    assert_expected_inline(
        str(failure.value),
        """\
8 all_reduce, at most 1 allowed:
  8 all_reduce of 384 B at l.{0..7}:out (forward)
6 KiB, at most 4 KiB allowed:
  8 all_reduce of 384 B at l.{0..7}:out (forward)
  8 all_gather of 192 B at l.{0..7}:x (forward)
  8 reduce_scatter of 192 B at l.{0..7}:x (backward)""",
    )


def test_directions_are_counted_apart():
    with pytest.raises(BudgetError, match="8 reduce_scatter backward, at most 0 allowed"):
        SNAPSHOT.assert_collectives({"reduce_scatter": 0}, direction="backward")
    SNAPSHOT.assert_collectives({"reduce_scatter": 0}, direction="forward")


def test_unequal_all_to_alls_are_all_to_alls():
    step = StepRecord("all_to_all_v(S(0)->S(1), tp=4)", 1)
    snapshot = snapshot_of(replace(gather("a:x"), forward=(step,)))
    with pytest.raises(BudgetError, match="1 all_to_all, at most 0"):
        snapshot.assert_collectives({"all_to_all": 0})


def test_what_cannot_be_counted_is_no_pass():
    unknown = PortRecord("l.1:out", "[?]", "S(-1)->R", "R", None, None)
    with pytest.raises(BudgetError, match=r"of l\.1:out the shapes, .* are not known"):
        snapshot_of(unknown).assert_collectives({"all_reduce": 0})
    symbolic = replace(gather("l.2:x"), forward=(StepRecord("all_gather(dim=1, tp=4)"),))
    with pytest.raises(BudgetError, match=r"sizes of l\.2:x are not known"):
        snapshot_of(symbolic).assert_collectives(bytes_at_most=1)


@pytest.mark.parametrize(
    ("at_most", "options", "message"),
    [
        ({"all_gahter": 0}, {}, r"no collective 'all_gahter' \(did you mean 'all_gather'"),
        ({"all_reduce": -1}, {}, r"at_most\['all_reduce'\] = -1: write a number, 0 or more"),
        ({"all_reduce": True}, {}, "write a number"),
        ({}, {"bytes_at_most": "64 MB"}, r"no unit 'MB' \(did you mean 'MiB'"),
        ({}, {"bytes_at_most": "much"}, "write a number of bytes, or as in '64 MiB'"),
        ({}, {"bytes_at_most": "0.3 KiB"}, "not a whole number of bytes"),
        ({}, {"bytes_at_most": -1}, "write a number of bytes"),
        ({}, {"direction": "forwards"}, r"direction='forwards' \(did you mean 'forward'"),
    ],
)
def test_a_malformed_budget_is_refused(at_most, options, message):
    with pytest.raises(SnapshotError, match=message):
        SNAPSHOT.assert_collectives(at_most, **options)
