"""The eager boundary: operations, plans of inputs and outputs, structures, and bindings."""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import mesh_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fxboundary as fb
from fxboundary.boundary import bind_inputs, collective_type
from fxboundary.ops import PortOp

R, P = Replicate(), Partial()


@pytest.fixture
def mesh(fake_world):
    """Of two fake ranks: a reduction leaves values as they are, a gather repeats them."""
    fake_world(2)
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def op_on(mesh, src, dst, execution_op=None):
    label = collective_type((src,), (dst,))
    return fb.RedistOp("x", 0, mesh, (src,), (dst,), label, execution_op)


def add_ten(tensor):
    assert type(tensor) is torch.Tensor
    return tensor + 10


def ten_lowerer(src, dst):
    return add_ten


def boundary(mesh, lowerer=ten_lowerer, label="", signature=None, **fields):
    return fb.PrecompiledBoundary(
        fb.Contract(**fields), mesh, ("tp",), op_lowerer=lowerer, label=label, signature=signature
    )


class TestCollectiveType:
    @pytest.mark.parametrize(
        ("src", "dst", "label"),
        [
            ("R", "R", "identity"),
            ("S(0)", "S(0)", "identity"),
            ("P", "P", "identity"),
            ("P,S(0)", "P,S(0)", "identity"),
            ("P", "S(0)", "reduce_scatter"),
            ("P(avg)", "S(1)", "reduce_scatter"),
            ("P,P", "S(0),R", "reduce_scatter"),
            ("P,S(0)", "R,S(1)", "reduce_scatter"),
            ("P", "R", "all_reduce"),
            ("P(avg),P", "R,R", "all_reduce"),
            ("P,S(0)", "R,R", "all_reduce"),
            ("S(0)", "R", "all_gather"),
            ("S(0),S(0)", "R,R", "all_gather"),
            ("S(0)", "S(1)", "redistribute"),
            ("R", "S(0)", "redistribute"),
            ("R", "P", "redistribute"),
            ("S(0)", "P", "redistribute"),
            ("S(0),S(0)", "R,S(1)", "redistribute"),
            ("P", "P(avg)", "redistribute"),
            # only the mesh dimensions that differ count
            ("S(0),P", "S(0),R", "all_reduce"),
            ("P,S(0)", "P,R", "all_gather"),
            ("P,R", "P,S(0)", "redistribute"),
        ],
    )
    def test_labels_a_change(self, src, dst, label):
        layouts = (tuple(map(fb.parse_placement, text.split(","))) for text in (src, dst))
        assert collective_type(*layouts) == label

    def test_does_not_select_the_path(self, mesh):
        op = fb.RedistOp("x", 0, mesh, (P,), (R,), "all_gather", add_ten)
        assert op.execute(torch.ones(2)).tolist() == [11, 11]


class TestRedistOp:
    def test_has_the_named_fields(self, mesh):
        op = fb.RedistOp(
            arg_name="x",
            arg_index=1,
            mesh=mesh,
            src_placements=(P,),
            dst_placements=(R,),
            collective_type="all_reduce",
        )
        assert op.execution_op is None
        assert (op.arg_name, op.arg_index, op.mesh) == ("x", 1, mesh)
        assert (op.src_placements, op.dst_placements) == ((P,), (R,))

    def test_identity_returns_the_same_object(self, mesh):
        x = torch.ones(2)
        assert op_on(mesh, Shard(0), Shard(0)).execute(x) is x

    def test_identity_unwraps_a_dtensor_in_production(self, mesh):
        x = torch.ones(2)
        found = op_on(mesh, R, R).execute(DTensor.from_local(x, mesh, [R]))
        assert type(found) is torch.Tensor
        assert found.data_ptr() == x.data_ptr()

    def test_identity_keeps_a_dtensor_in_validation(self, mesh):
        x = DTensor.from_local(torch.ones(2), mesh, [R])
        assert op_on(mesh, R, R).execute(x, as_dtensor=True) is x

    def test_identity_wraps_a_local_tensor_without_a_copy_in_validation(self, mesh):
        x = torch.ones(2)
        found = op_on(mesh, Shard(0), Shard(0)).execute(x, as_dtensor=True)
        assert found.placements == (Shard(0),)
        assert found.shape == (4,)
        assert found.to_local().data_ptr() == x.data_ptr()

    def test_execution_op_runs_on_the_local_tensor(self, mesh):
        assert op_on(mesh, P, R, add_ten).execute(torch.ones(2)).tolist() == [11, 11]

    def test_execution_op_runs_on_the_local_tensor_of_a_dtensor(self, mesh):
        x = DTensor.from_local(torch.ones(2), mesh, [P])
        found = op_on(mesh, P, R, add_ten).execute(x)
        assert type(found) is torch.Tensor
        assert found.tolist() == [11, 11]

    def test_a_dtensor_in_another_layout_than_declared_is_refused(self, mesh):
        x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        for op in (op_on(mesh, P, R, add_ten), op_on(mesh, R, R)):
            with pytest.raises(fb.PlacementMismatchError, match=r"x: declared ., but a DTensor "):
                op.execute(x)
        negative = op_on(mesh, Shard(-1), Shard(-1))
        assert negative.execute(x).tolist() == [1, 1]

    def test_execution_op_is_not_for_validation(self, mesh):
        found = op_on(mesh, P, R, add_ten).execute(torch.ones(2), as_dtensor=True)
        assert isinstance(found, DTensor)
        assert found.placements == (R,)
        assert found.to_local().tolist() == [1, 1]

    def test_without_execution_op_goes_through_dtensor(self, mesh):
        op = op_on(mesh, Shard(0), R)
        assert type(op.execute(torch.ones(2))) is torch.Tensor
        assert op.execute(torch.ones(2)).shape == (4,)
        wrapped = op.execute(torch.ones(2), as_dtensor=True)
        assert isinstance(wrapped, DTensor)
        assert (wrapped.placements, wrapped.to_local().shape) == ((R,), (4,))
        given = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        assert op.execute(given).shape == (4,)


def values_and_gradients():
    """Every path of a port on real ranks: plain, DTensor in, and the DTensor fallback."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    port = fb.PrecompiledBoundary(
        fb.Contract(in_src={"x": {"tp": "P"}}, in_dst={"x": {"tp": "S(0)"}}), mesh, ("tp",)
    )
    (planned,) = port.in_plan
    fallback = fb.RedistOp(
        "x", 0, mesh, planned.src_placements, planned.dst_placements, planned.collective_type
    )
    rank, found = dist.get_rank(), []
    for op, wrap in itertools.product((planned, fallback), (False, True)):
        x = (torch.arange(4.0) + rank).requires_grad_()
        given = DTensor.from_local(x, mesh, [P], run_check=False) if wrap else x
        y = op.execute(given)
        y.backward(torch.tensor([1.0, 2.0]) + 10 * rank)
        found.append((y.tolist(), x.grad.tolist()))
    return found


def test_all_paths_give_equal_values_and_gradients(ranks2):
    gradient = [1.0, 2.0, 11.0, 12.0]
    expected = [[([1.0, 3.0], gradient)] * 4, [([5.0, 7.0], gradient)] * 4]
    assert ranks2.run(values_and_gradients) == expected


class TestPlans:
    def test_inputs_of_both_sides_sorted_with_identities(self, mesh):
        b = boundary(
            mesh,
            in_src={"z": {"tp": "P"}, "b": {"tp": "S(0)"}},
            in_dst={"a": {"tp": "S(1)"}, "b": {"tp": "S(0)"}},
        )
        labels = [(op.arg_name, op.collective_type) for op in b.in_plan]
        assert labels == [("a", "redistribute"), ("b", "identity"), ("z", "all_reduce")]
        assert [(op.src_placements, op.dst_placements) for op in b.in_plan] == [
            ((R,), (Shard(1),)),
            ((Shard(0),), (Shard(0),)),
            ((P,), (R,)),
        ]
        assert all(op.mesh is mesh for op in b.in_plan)

    @pytest.mark.parametrize("fields", [{}, {"out_src": {"tp": "P"}}, {"out_dst": {"tp": "S(0)"}}])
    def test_outputs_need_both_sides(self, mesh, fields):
        assert boundary(mesh, **fields).out_plan == []

    def test_identities_among_outputs_are_skipped_and_keep_their_position(self, mesh):
        b = boundary(
            mesh,
            out_src={"z": {"tp": "P"}, "same": {"tp": "S(0)"}, "a": {"tp": "P"}},
            out_dst={"a": {"tp": "R"}, "same": {"tp": "S(0)"}, "z": {"tp": "S(0)"}},
        )
        assert [(op.arg_name, op.arg_index) for op in b.out_plan] == [("z", 0), ("a", 2)]

    def test_positions_of_outputs_come_from_out_names(self, mesh):
        sides = {"out_src": {"a": {"tp": "P"}, "b": {"tp": "P"}}, "out_dst": {"a": {}, "b": {}}}
        for out_names in (["b", "other", "a"], {"a": 2, "b": 0}):
            b = boundary(mesh, **sides, out_names=out_names)
            assert [(op.arg_name, op.arg_index) for op in b.out_plan] == [("a", 2), ("b", 0)]

    def test_entries_of_one_output_share_its_position(self, mesh):
        names = ("cache.k", "cache.v", "y")
        b = boundary(mesh, out_src={n: {"tp": "P"} for n in names}, out_dst={n: {} for n in names})
        assert [op.arg_index for op in b.out_plan] == [0, 0, 1]
        b = boundary(mesh, in_dst={n: {} for n in names})
        assert [op.arg_index for op in b.in_plan] == [0, 0, 1]

    def test_none_counts_as_empty(self, mesh):
        b = boundary(mesh, in_src=None, in_dst={"x": {"tp": "S(0)"}})
        assert b.in_plan[0].src_placements == (R,)
        b = boundary(mesh, in_src={"x": {"tp": "S(0)"}}, in_dst=None)
        assert b.in_plan[0].dst_placements == (R,)
        assert boundary(mesh).in_plan == []

    def test_the_short_form_is_the_output_called_output(self, mesh):
        (op,) = boundary(mesh, out_src={"tp": "P"}, out_dst={"tp": "R"}).out_plan
        assert (op.arg_name, op.arg_index, op.collective_type) == ("output", 0, "all_reduce")

    def test_names_of_mesh_dimensions_must_fit_the_mesh(self, mesh):
        with pytest.raises(fb.ContractError, match="1 mesh dimensions, but names "):
            fb.PrecompiledBoundary(fb.Contract(), mesh, ("dp", "tp"))
        with pytest.raises(fb.ContractError, match="no mesh dimension 'cp'; the mesh has tp"):
            boundary(mesh, in_dst={"x": {"cp": "R"}})


class TestLowerer:
    def test_accepts_or_declines_each_change(self, mesh):
        asked = []

        def lowerer(src, dst):
            asked.append((src, dst))
            return add_ten if src == (P,) else None

        b = boundary(
            mesh,
            lowerer,
            in_src={"a": {"tp": "P"}, "b": {"tp": "S(0)"}, "c": {"tp": "S(0)"}},
            in_dst={"a": {}, "b": {}, "c": {"tp": "S(0)"}},
            out_src={"tp": "P"},
            out_dst={"tp": "S(0)"},
        )
        assert asked == [((P,), (R,)), ((Shard(0),), (R,)), ((P,), (Shard(0),))]
        a, declined, identity = b.in_plan
        assert a.execution_op is add_ten
        assert isinstance(declined.execution_op, PortOp)
        assert identity.execution_op is None
        (x, y, z), _ = b.redistribute_inputs((torch.ones(2),) * 3, {})
        assert x.tolist() == [11, 11]
        assert y.shape == (4,)
        assert z.tolist() == [1, 1]
        assert b.redistribute_outputs(torch.ones(2)).tolist() == [11, 11]

    def test_is_not_needed(self, mesh):
        b = boundary(mesh, None, in_src={"x": {"tp": "S(1)"}})
        (x,), _ = b.redistribute_inputs((torch.ones(2, 3),), {})
        assert x.shape == (2, 6)


class TestInputs:
    def forward(self, x, y=None, *, flag=False):
        raise AssertionError("only its signature counts")

    def bound(self, mesh, **fields):
        signature = inspect.signature(self.forward)
        fields = fields or {"in_src": {"x": {"tp": "P"}, "y": {"tp": "P"}}}
        return boundary(mesh, signature=signature, **fields)

    def test_given_by_position_by_keyword_or_both(self, mesh):
        b, one = self.bound(mesh), torch.ones(1)
        for args, kwargs in (((one, one), {}), ((one,), {"y": one}), ((), {"x": one, "y": one})):
            new_args, new_kwargs = b.redistribute_inputs(args, kwargs)
            assert isinstance(new_args, tuple)
            assert [t.item() for t in (*new_args, *new_kwargs.values())] == [11, 11]
            assert list(new_kwargs) == list(kwargs)
        assert one.item() == 1

    def test_a_keyword_goes_before_a_position(self, mesh):
        b = self.bound(mesh, in_src={"x": {"tp": "P"}})
        args, kwargs = b.redistribute_inputs((torch.zeros(1),), {"x": torch.ones(1)})
        assert (args[0].item(), kwargs["x"].item()) == (0, 11)

    def test_absent_or_none_is_skipped_and_not_injected(self, mesh):
        b = self.bound(mesh)
        assert b.redistribute_inputs((), {}) == ((), {})
        assert b.redistribute_inputs((None,), {"y": None}) == ((None,), {"y": None})
        args, kwargs = b.redistribute_inputs((torch.ones(1),), {"flag": True})
        assert len(args) == 1
        assert kwargs == {"flag": True}

    def test_the_callers_arguments_stay_as_they_were(self, mesh):
        b, one = self.bound(mesh), torch.ones(1)
        args, kwargs = [one], {"y": one}
        b.redistribute_inputs(args, kwargs)
        assert args[0] is one
        assert kwargs["y"] is one

    def test_an_identity_is_the_same_object(self, mesh):
        same = {"x": {"tp": "S(0)"}}
        b, one = self.bound(mesh, in_src=same, in_dst=same), torch.ones(1)
        assert b.redistribute_inputs((one,), {})[0][0] is one

    def test_validation_gives_dtensors(self, mesh):
        b = self.bound(mesh)
        (x,), _ = b.redistribute_inputs((torch.ones(1),), {}, as_dtensor=True)
        assert isinstance(x, DTensor)
        assert x.placements == (R,)

    def test_a_way_inside_an_argument(self, mesh):
        b = self.bound(mesh, in_src={"x.ids.1": {"tp": "P"}, "x.mask": {"tp": "P"}})
        batch = {"ids": (torch.zeros(1), torch.ones(1)), "mask": None}
        (changed,), _ = b.redistribute_inputs((batch,), {})
        assert [t.item() for t in changed["ids"]] == [0, 11]
        assert changed["mask"] is None
        assert batch["ids"][1].item() == 1


class TestBinding:
    def of(self, forward, *names):
        found = bind_inputs(list(names), inspect.signature(forward))
        return {name: (b.index, b.keyword, b.path) for name, b in found.items()}

    def test_positions_come_from_the_signature(self):
        def forward(a, b, c=None): ...

        assert self.of(forward, "c", "b") == {"c": (2, "c", ()), "b": (1, "b", ())}

    def test_keyword_only_arguments_have_no_position(self):
        def forward(a, *, b): ...

        assert self.of(forward, "b", "a")["b"] == (None, "b", ())

    def test_an_entry_of_catch_all_parameters_is_not_taken_for_the_first(self):
        def forward(*xs): ...

        def keywords(x, /, **kw): ...

        assert self.of(forward, "args.1")["args.1"] == self.of(forward, "xs.1")["xs.1"]
        assert self.of(keywords, "kwargs.x") == {}

    def test_the_one_input_of_another_name_is_the_first_parameter(self):
        def forward(hidden, mask=None): ...

        assert self.of(forward, "x") == {"x": (0, "hidden", ())}
        assert self.of(forward, "x.ids") == {"x.ids": (0, "hidden", ("ids",))}
        assert self.of(forward, "x", "mask") == {"mask": (1, "mask", ())}

        def keyword(*, hidden): ...

        assert self.of(keyword, "x") == {"x": (None, "hidden", ())}

        def catch_all(**kwargs): ...

        assert self.of(catch_all, "x") == {}

    def test_variadic_arguments_are_named_by_position_and_keyword(self):
        def forward(a, *args, **kwargs): ...

        assert self.of(forward, "args.0", "args.2.k", "kwargs.x", "kwargs.x.y", "args") == {
            "args.0": (1, "*args", ()),
            "args.2.k": (3, "*args", ("k",)),
            "kwargs.x": (None, "x", ()),
            "kwargs.x.y": (None, "x", ("y",)),
        }

        def only(*args): ...

        assert self.of(only, "x") == {"x": (0, "*args", ())}

    def test_a_keyword_is_not_a_positional_only_parameter(self, mesh):
        def forward(x, /, **kwargs): ...

        b = boundary(mesh, signature=inspect.signature(forward), in_src={"x": {"tp": "P"}})
        args, kwargs = b.redistribute_inputs((torch.ones(1),), {"x": 5})
        assert (args[0].item(), kwargs) == (11, {"x": 5})

    def test_without_a_signature_names_are_positional_in_sorted_order(self):
        found = bind_inputs(["a", "b.ids"], None)
        assert [(b.index, b.keyword, b.path) for b in found.values()] == [
            (0, "a", ()),
            (1, "b", ("ids",)),
        ]


Named = namedtuple("Named", "aux y")


@dataclass
class Output:
    y: Any
    aux: Any = None


class TestOutputs:
    def named(self, mesh, label="block", **fields):
        sides = {"out_src": {"y": {"tp": "P"}}, "out_dst": {"y": {"tp": "R"}}}
        return boundary(mesh, label=label, **{**sides, **fields})

    @pytest.mark.parametrize(
        "outputs",
        [
            (torch.ones(1), "aux"),
            [torch.ones(1), None],
            {"aux": 1, "y": torch.ones(1)},
            Output(torch.ones(1), 3),
            Named(1, torch.ones(1)),
        ],
    )
    def test_structure_in_is_structure_out(self, mesh, outputs):
        before = copy.deepcopy(outputs)
        changed = self.named(mesh).redistribute_outputs(outputs)
        assert type(changed) is type(outputs)
        assert repr(outputs) == repr(before)  # not changed in place
        assert repr(changed) == repr(before).replace("[1.]", "[11.]")
        assert repr(changed) != repr(before)

    def test_a_tensor_is_a_tensor(self, mesh):
        assert self.named(mesh).redistribute_outputs(torch.ones(1)).item() == 11
        assert self.named(mesh).redistribute_outputs(None) is None

    def test_a_model_output_stays_one(self, mesh):
        outputs = pytest.importorskip("transformers.modeling_outputs")
        given = outputs.CausalLMOutputWithPast(logits=torch.ones(1), hidden_states=None)
        sides = {"out_src": {"logits": {"tp": "P"}}, "out_dst": {"logits": {}}}
        changed = boundary(mesh, **sides).redistribute_outputs(given)
        assert type(changed) is type(given)
        assert (changed.logits.item(), changed["logits"].item(), changed[0].item()) == (11,) * 3
        assert (given.logits.item(), given.loss, changed.loss) == (1, None, None)
        loss = {"out_src": {"loss": {"tp": "P"}}, "out_dst": {"loss": {}}}
        assert boundary(mesh, **loss).redistribute_outputs(given).loss is None

    @pytest.mark.parametrize("outputs", [(None, 1), [None], {"y": None}, Output(None)])
    def test_none_is_skipped(self, mesh, outputs):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert self.named(mesh).redistribute_outputs(outputs) == outputs

    @pytest.mark.parametrize(
        ("outputs", "count"),
        [((1, 2), "2 outputs"), ([1], "1 outputs"), (torch.ones(1), "1 output")],
    )
    def test_a_declared_output_past_the_end_warns_and_is_skipped(self, mesh, outputs, count):
        b = self.named(mesh, out_names={"y": 2})
        with pytest.warns(fb.FxBoundaryWarning) as caught:
            assert b.redistribute_outputs(outputs) is outputs
        assert [str(warning.message) for warning in caught] == [
            f"block: declared output 'y' is not there (index 2 of {count}); it is skipped"
        ]

    @pytest.mark.parametrize("outputs", [{"z": 1, "aux": 2}, Named(1, 2)._asdict() | {"y": 1}])
    def test_a_declared_key_that_is_not_there_warns(self, mesh, outputs):
        outputs.pop("y", None)
        with pytest.warns(fb.FxBoundaryWarning, match="declared output 'y' is not there") as caught:
            assert self.named(mesh).redistribute_outputs(outputs) is outputs
        assert f"(the outputs are {', '.join(outputs)})" in str(caught[0].message)

    @pytest.mark.parametrize("outputs", [{"y": torch.ones(1)}, (torch.ones(1), 2), [torch.ones(1)]])
    def test_the_short_form_is_the_first_output(self, mesh, outputs):
        b = boundary(mesh, out_src={"tp": "P"}, out_dst={"tp": "R"})
        assert "[11.]" in repr(b.redistribute_outputs(outputs))

    @pytest.mark.parametrize("outputs", [Output(torch.ones(1), 3), {"loss": 1, "y": 2}])
    def test_the_short_form_does_not_choose_among_names(self, mesh, outputs):
        b = boundary(mesh, out_src={"tp": "P"}, out_dst={"tp": "R"})
        with pytest.raises(fb.PlacementMismatchError, match="name the output: out_dst="):
            b.redistribute_outputs(outputs)

    def test_a_way_inside_an_output(self, mesh):
        sides = {"out_src": {"cache.k": {"tp": "P"}}, "out_dst": {"cache.k": {}}}
        b = boundary(mesh, **sides, out_names=["y", "cache"])
        given = (torch.ones(1), {"k": torch.ones(1), "v": torch.ones(1)})
        y, cache = b.redistribute_outputs(given)
        assert [t.item() for t in (y, cache["k"], cache["v"])] == [1, 11, 1]
        assert given[1]["k"].item() == 1

    def test_validation_gives_dtensors(self, mesh):
        for outputs in (torch.ones(1), (torch.ones(1),)):
            found = self.named(mesh).redistribute_outputs(outputs, as_dtensor_input=True)
            found = found[0] if isinstance(found, tuple) else found
            assert isinstance(found, DTensor)
            assert found.placements == (R,)


def test_placements_of_an_operation_may_be_text(fake_world):
    fake_world(4)
    op = fb.RedistOp("x", 0, mesh_of(tp=4), ["s(0)"], ["R"], "all_gather")
    assert op.src_placements == (Shard(0),)
    assert op.execute(torch.ones(2)).shape == (8,)


def test_a_contracted_input_that_is_no_tensor_is_an_error_that_names_the_port(fake_world):
    fake_world(4)
    contract = fb.Contract(in_src={"x": {}}, in_dst={"x": {"tp": "S(0)"}})
    boundary = fb.PrecompiledBoundary(contract, mesh_of(tp=4), ("tp",), label="mlp")
    with pytest.raises(fb.PlacementMismatchError, match=r"mlp:in\.x: expected a tensor, got 3"):
        boundary.redistribute_inputs((3,), {})
