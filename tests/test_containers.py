"""Reading and replacing one entry of a container, which itself stays as it was."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxboundary.containers import entry_at, item, replace_at, split_path, with_index, with_item

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Record:
    left: Any
    right: Any = None


class Entries(list):
    pass


def test_a_name_splits_into_an_argument_and_the_way_inside():
    assert split_path("x") == ("x", ())
    assert split_path("batch.ids.0") == ("batch", ("ids", "0"))


@pytest.mark.parametrize(
    ("container", "path"),
    [
        ([1, 2], "0"),
        ((1, 2), "0"),
        (Pair(1, 2), "left"),
        (Pair(1, 2), "0"),
        (Entries([1, 2]), "0"),
        ({"left": 1, "right": 2}, "left"),
        (OrderedDict(left=1, right=2), "left"),
        (defaultdict(int, left=1, right=2), "left"),
        (UserDict(left=1, right=2), "left"),
        (Record(1, 2), "left"),
        (SimpleNamespace(left=1, right=2), "left"),
        ({"a": [Record((0, 1), 2)]}, "a.0.left.1"),
    ],
)
def test_an_entry_is_replaced_in_a_container_of_the_same_type(container, path):
    before, steps = copy.deepcopy(container), tuple(path.split("."))
    changed = replace_at(container, steps, lambda value: value + 10)
    assert container == before
    assert type(changed) is type(container)
    entry = changed
    for step in steps:
        entry = item(entry, step)
    assert entry == 11
    assert replace_at(changed, steps, lambda value: value - 10) == before


def test_structures_of_torch_keep_their_type():
    found = torch.max(torch.tensor([[1.0, 3.0]]), 1)
    changed = with_index(found, 0, found.values + 1)
    assert type(changed) is type(found)
    assert changed.values.item() == 4
    assert changed.indices is found.indices


def test_the_order_of_a_mapping_is_kept():
    assert list(with_item({"b": 1, "a": 2}, "b", 3)) == ["b", "a"]


@pytest.mark.parametrize(
    ("container", "path"), [(None, ("a",)), ({"a": None}, ("a", "b")), ([None], ("0",))]
)
def test_none_on_the_way_is_left_alone(container, path):
    assert replace_at(container, path, lambda value: value and 1 / 0) == container


@pytest.mark.parametrize("container", [{"a": 1}, [1], (1,), Pair(1, 2), Record(1)])
@pytest.mark.parametrize("key", ["absent", "values", "count"])
def test_an_entry_that_is_not_there_is_an_error(container, key):
    with pytest.raises(KeyError):
        item(container, key)


def test_an_entry_is_found_by_its_path():
    assert entry_at({"a": [None, (3,)]}, ("a", "1", "0")) == 3
    assert entry_at({"a": None}, ("a", "1", "0")) is None
    with pytest.raises(KeyError):
        entry_at({"a": []}, ("b",))
