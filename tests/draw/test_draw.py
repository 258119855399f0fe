"""Drawings: what is in the files, parsed; folding, escaping, and graphs of every origin."""

from __future__ import annotations

import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.nn as nn
from models import Stack, mlp_contracts
from torch.utils.checkpoint import checkpoint

import fxboundary as fb
import fxboundary.ops  # the operator
from fxboundary.cli import main
from fxboundary.draw import draw, picture_of
from fxboundary.draw.page import page_text
from fxboundary.draw.picture import Group, Picture, Repeat, cards, folded
from fxboundary.draw.svg import svg_text
from fxboundary.static import capture, fake_mesh

SVG = "{http://www.w3.org/2000/svg}"
INPUT = torch.zeros(2, 8, 8)


def picture(model: nn.Module, contracts, inputs=INPUT, sizes=None) -> Picture:
    plan = fb.Plan(sizes or {"tp": 2}, contracts)
    return picture_of(capture(model.to("meta"), plan, inputs), "test")


def boxes(picture: Picture, part: int = 0) -> list[str]:
    """Titles of the cards that are drawn, with the labels of their ports."""
    return [
        f"{card.title or card.kind}({', '.join(mark.label for mark in card.marks)})"
        for card in cards(picture.parts[part].items)
    ]


def flow(picture: Picture, part: int = 0) -> list[str]:
    items, edges = picture.parts[part].items, picture.parts[part].edges
    names = {card.id: card.title or card.kind for card in cards(items)}
    return [f"{names[e.source[0]]} → {names[e.target[0]]}" for e in folded(items, edges)]


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


class Parsed(HTMLParser):
    """Tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.text.append(data)

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [a for _, a in self.tags if name in (a.get("class") or "").split()]


@pytest.fixture(scope="module")
def stack() -> Picture:
    return picture(Stack(layers=3), mlp_contracts(sequence_parallel=True))


def test_equal_layers_are_drawn_once_with_their_number(stack: Picture) -> None:
    (repeat,) = (item for item in stack.parts[0].items if isinstance(item, Repeat))
    assert (repeat.title, repeat.count) == ("layers.{0..2}", 3)
    assert isinstance(repeat.first, Group)
    assert boxes(stack) == [
        "x()",
        "norm(param.weight)",
        "mlp(in.x, down:param.bias, out)",
        "add()",
        "values()",
    ]
    assert repeat.stride == 3


def test_data_flows_between_boxes_residuals_too_and_not_from_a_copy_to_itself(stack) -> None:
    assert flow(stack) == ["x → norm", "norm → mlp", "x → add", "mlp → add", "add → values"]
    assert all(edge.gradient for edge in stack.parts[0].edges)


def test_totals_count_all_layers_and_their_bytes(stack: Picture) -> None:
    counts = {kind: (f.count, f.sent, b.count, b.sent) for kind, f, b in stack.totals}
    assert counts == {
        "all_gather": (3, 3 * 512, 3, 3 * 512),
        "reduce_scatter": (3, 3 * 512, 3, 3 * 512),
        "all_reduce": (0, 0, 3, 3 * 32),
    }


def test_the_svg_has_both_directions_with_labels_and_tooltips(stack: Picture) -> None:
    svg = svg_text(stack)
    words = texts(svg)
    assert "↓ forward" in words
    assert "in.xall_gather" in words  # forward
    assert "in.xreduce_scatter" in words  # backward
    assert "tp: S(1)→R  all_gather(dim=1, tp=2)" in words
    assert "512 B" in words
    assert any(word.startswith("layers.{0..2} ×3") for word in words)
    tips = [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert any("layers.0.mlp:in.x\n" in tip and "512 bytes" in tip for tip in tips)


def test_nothing_in_the_svg_leaves_its_area(stack: Picture) -> None:
    root = ElementTree.fromstring(svg_text(stack))
    width = float(root.attrib["width"])
    half = [g for g in root.iter(f"{SVG}g") if g.attrib.get("id", "").startswith("backward")]
    left = float(half[0].attrib["transform"].partition("(")[2].partition(" ")[0])
    for rect in half[0].iter(f"{SVG}rect"):
        assert left + float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width


def test_the_page_is_self_contained_well_formed_and_has_totals(stack: Picture) -> None:
    page = page_text(stack)
    parsed = Parsed(page)
    assert not parsed._open
    links = [a for _, a in parsed.tags if {"src", "href"} & a.keys()]
    assert links == []
    assert "http" not in page
    ports = parsed.of_class("port")
    assert len(ports) == 2 * 4
    assert all(port["tabindex"] == "0" for port in ports)
    assert "9, 3.1 KiB" in parsed.text  # backward, all kinds
    assert [repeat["data-count"] for repeat in parsed.of_class("repeat")] == ["3", "3"]


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_the_same_model_gives_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    written = []
    for run in range(2):
        plan = fb.Plan({"tp": 2}, mlp_contracts(sequence_parallel=True))
        path = tmp_path / f"{run}.{suffix}"
        draw(capture(Stack().to("meta"), plan, INPUT), path)
        written.append(path.read_bytes())
    assert written[0] == written[1]


def test_a_layer_that_differs_is_not_folded() -> None:
    contracts = mlp_contracts(sequence_parallel=True)
    contracts["layers.0"] = {"in_src": {"x": {"tp": "R"}}, "in_dst": {"x": {"tp": "S(1)"}}}
    drawn = picture(Stack(layers=3), contracts)
    titles = [item.title for item in drawn.parts[0].items]
    assert titles == ["x", "layers.0", "layers.{1..2}", ""]
    assert "port(in.x)" in boxes(drawn)  # the container's own port stands alone


class Hostile(nn.Module):
    NAME = '<img src=x onerror="alert(1)">&\'"\x00'

    def __init__(self) -> None:
        super().__init__()
        self.add_module(self.NAME, nn.Linear(8, 8))

    def forward(self, x):
        return self._modules[self.NAME](x)


def hostile_graph() -> torch.fx.GraphModule:
    gm = torch.fx.symbolic_trace(nn.Identity())
    (x,) = (node for node in gm.graph.nodes if node.op == "placeholder")
    port = _port(gm.graph, x, f"{Hostile.NAME}:in.x")
    port.meta["nn_module_stack"] = {"0": (f"a.{Hostile.NAME}", Hostile.NAME)}
    gm.graph.output_node().args = (port,)
    return gm


def _port(graph: torch.fx.Graph, x: torch.fx.Node, label: str) -> torch.fx.Node:
    with graph.inserting_after(x):
        return graph.call_function(
            torch.ops.fxboundary.redistribute.default,
            (x, "tp=2", "S(0)", "R", "R", label, [], ""),
        )


def test_names_are_text_and_never_markup(monkeypatch) -> None:
    import fxboundary.graph.find as find
    from fxboundary.mesh import mesh_spec

    monkeypatch.setattr(find, "named_spec", lambda name: mesh_spec({"tp": 2}))
    drawn = picture_of([hostile_graph()], Hostile.NAME)
    page = page_text(drawn)
    parsed = Parsed(page)
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert "onerror" not in {key for _, a in parsed.tags for key in a}
    assert any("<img src=x onerror=" in text for text in parsed.text)
    svg = svg_text(drawn)  # parses, so the zero byte is gone
    assert {node.tag for node in ElementTree.fromstring(svg).iter(f"{SVG}img")} == set()
    assert any("<img" in text for text in texts(svg))


def test_a_graph_without_ports_shows_its_modules_and_says_so() -> None:
    drawn = picture_of([torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))], "t")
    assert drawn.ports == 0
    assert boxes(drawn)[1:] == ["0()", "1()", "values()"]
    assert "no ports" in texts(svg_text(drawn))
    assert "No ports." in Parsed(page_text(drawn)).text


def test_no_graph_at_all_is_a_drawing_too(tmp_path: Path) -> None:
    for suffix in ("svg", "html"):
        draw([], tmp_path / f"empty.{suffix}")
        assert "no ports" in (tmp_path / f"empty.{suffix}").read_text().lower()


def test_a_port_of_the_model_itself_stands_outside_of_every_module() -> None:
    contract = {"": {"in_src": {"x": {"tp": "S(1)"}}, "in_dst": {"x": {"tp": "R"}}}}
    drawn = picture(Stack(), contract)
    assert boxes(drawn)[:2] == ["args_0()", "port(in.x)"]
    assert flow(drawn)[0] == "args_0 → port"


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Stack(layers=1).layers[0].mlp

    def forward(self, x):
        return self.mlp(self.mlp(x))


MLP = {"mlp": mlp_contracts(sequence_parallel=True)["layers.*.mlp"]}


def test_a_module_that_is_called_twice_is_two_boxes() -> None:
    drawn = picture(Shared(), MLP)
    ports = "in.x, down:param.bias, out"
    assert boxes(drawn)[1:3] == [f"mlp({ports})", f"mlp#2({ports})"]
    assert flow(drawn) == ["x → mlp", "mlp → mlp#2", "mlp#2 → values"]


class Broken(Shared):
    def forward(self, x):
        y = self.mlp(x)
        torch._dynamo.graph_break()
        return self.mlp(y)


def test_graphs_after_a_graph_break_are_drawn_below_each_other() -> None:
    drawn = picture(Broken(), MLP)
    assert len(drawn.parts) == 2
    words = texts(svg_text(drawn))
    assert [word for word in words if word.startswith("graph ")] == ["graph 1 of 2", "graph 2 of 2"]
    assert "Graph 2 of 2" in Parsed(page_text(drawn)).text


class Checkpointed(Shared):
    def forward(self, x):
        return checkpoint(self.mlp, x, use_reentrant=False) + x


def test_ports_within_a_checkpointed_block_are_drawn_where_it_is_called() -> None:
    drawn = picture(Checkpointed(), MLP, torch.zeros(2, 8, 8, requires_grad=True))
    assert boxes(drawn)[1] == "mlp(in.x, down:param.bias, out)"
    assert flow(drawn) == ["x → mlp", "mlp → add", "x → add", "add → values"]


def test_ports_without_a_gradient_say_so_and_launch_nothing_backward() -> None:
    contract = {"mlp": {"out_src": {"tp": "P(max)"}, "out_dst": {"tp": "R"}}}
    drawn = picture(Shared().requires_grad_(False), contract)
    marks = [mark for card in cards(drawn.parts[0].items) for mark in card.outs]
    assert [mark.backward for mark in marks] == [None, None]
    assert "outno gradient" in texts(svg_text(drawn))
    assert [(f.count, b.count) for _, f, b in drawn.totals] == [(2, 0)]


def test_ports_of_parameters_open_a_module_that_has_no_others() -> None:
    sharded = {"params": {"up.weight": {"tp": "S(0) -> R"}, "down.weight": {"tp": "S(0) -> R"}}}
    assert boxes(picture(Stack(), {"layers.*.mlp": sharded}))[2:5] == [
        "up(param.weight, param.bias)",
        "silu()",
        "down(param.weight, param.bias)",
    ]


def test_exported_graphs_are_drawn_too() -> None:
    with fake_mesh(fb.Plan({"tp": 2}, {}).spec) as mesh:
        model = Stack(layers=2)
        fb.apply(model, fb.Plan(mesh, mlp_contracts(sequence_parallel=True)))
        exported = torch.export.export(model, (INPUT,), strict=True).module()
        drawn = picture_of([exported], "exported")
    assert "mlp(in.x, down:param.bias, out)" in boxes(drawn)
    assert any(isinstance(item, Repeat) for item in drawn.parts[0].items)


def huge_graph(layers: int, ports: int) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    value.meta["val"] = torch.zeros(4, 4, device="meta")
    for layer in range(layers):
        for port in range(ports):
            path = f"layers.{layer}.part{port}"
            for target in (torch.relu, None):
                if target is None:
                    value = _port(graph, value, f"part{port}:in.x")
                else:
                    with graph.inserting_after(value):
                        value = graph.call_function(target, (value,))
                value.meta["val"] = torch.zeros(4, 4, device="meta")
                value.meta["nn_module_stack"] = {
                    "l": (f"layers.{layer}", nn.Module),
                    "p": (path, nn.Linear),
                }
    graph.output(value)
    return torch.fx.GraphModule(nn.Module(), graph)


def test_a_huge_model_is_drawn_in_under_two_seconds(monkeypatch) -> None:
    import fxboundary.graph.find as find
    from fxboundary.mesh import mesh_spec

    spec = mesh_spec({"tp": 2})
    monkeypatch.setattr(find, "named_spec", lambda name: spec)
    gm = huge_graph(200, 8)
    start = time.process_time()
    drawn = picture_of([gm], "huge")
    svg, page = svg_text(drawn), page_text(drawn)
    assert time.process_time() - start < 2
    assert drawn.ports == 1600
    assert "layers.{0..199} ×200Module" in texts(svg)
    assert len(page) < 200_000


def model_and_input():
    return Stack(), torch.zeros(2, 8, 8)


def model_alone():
    return Stack()


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.chdir(Path(__file__).parent)
    path = tmp_path / "plan.yaml"
    path.write_text(fb.Plan({"tp": 2}, mlp_contracts(sequence_parallel=True)).to_yaml())
    return str(path)


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_the_command_writes_the_file_and_says_what(plan_file, tmp_path, capsys, suffix) -> None:
    output = str(tmp_path / f"b.{suffix}")
    where = "test_draw:model_and_input"
    assert main(["draw", plan_file, "--mesh", "tp=4", "--model", where, "-o", output]) == 0
    assert capsys.readouterr().out == f"{output}: 8 ports in 1 graph\n"
    assert "plan.yaml on tp=4" in Path(output).read_text()


@pytest.mark.parametrize(
    ("model", "output", "message"),
    [
        ("model_and_input", "b.png", "cannot draw .png; write .svg or .html"),
        ("model_and_input", "b", "cannot draw a file without a suffix"),
        ("model_and_input", "absent/b.svg", "No such file or directory"),
        ("model_alone", "b.svg", "returned no example inputs; return (module, example_inputs)"),
        ("absent", "b.svg", "has no attribute 'absent'"),
    ],
)
def test_errors_are_one_line_and_status_2(
    plan_file, tmp_path, capsys, model, output, message
) -> None:
    arguments = ["--model", f"test_draw:{model}", "-o", str(tmp_path / output)]
    assert main(["draw", plan_file, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_absent_plan_is_an_error(tmp_path, capsys) -> None:
    output = str(tmp_path / "b.svg")
    assert main(["draw", "absent.yaml", "--model", "a:b", "-o", output]) == 2
    assert capsys.readouterr().err == "error: absent.yaml: No such file or directory\n"
