"""Profiles of other formats: what their files say, and what they have to be asked for."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

from autopipe.core.errors import FileError, UsageError
from autopipe.core.files import read
from autopipe.core.profile import Profile
from autopipe.importers import Facts, format_of, import_profile
from autopipe.importers.facts import shape_of

PROFILES = Path(__file__).parents[1] / "profiles"


def node(name: str, what: str, forward: str, backward: str, activation: str, parameters: str = "0.000") -> str:
    times = f"forward_compute_time={forward}, backward_compute_time={backward}"
    return f"{name} -- {what} -- {times}, activation_size={activation}, parameter_size={parameters}"


GRAPH = "\n".join(
    [
        node("node1", "Input", "500.000", "0.000", "96.000"),
        node("node4", "Add", "1.000", "2.000", "[40.0; 24.0]"),
        node("node2", "Linear(in_features=3, out_features=4)", "2.500", "5.000", "64.000", "48.000"),
        node("node3", "ReLU(inplace)", "0.500", "0.250", "64.000") + " -- stage_id=1",
        node("node5", "__getitem__(1)", "0.000", "0.000", "8.000"),
        *("\tnode1 -- node2", "\tnode2 -- node3", "\tnode3 -- node4", "\tnode2 -- node4", "\tnode4 -- node5", ""),
    ]
)
TABLE = "layer,forward_ms,backward (ms),output [kB],parameters\nembed,2,4,8,100\nblock,10,20,8,200\nhead,1,2,4,50\n"


def imported(tmp_path: Path, text: str, name: str, **facts: object) -> Profile:
    path = tmp_path / "some"
    path.write_text(text)
    return import_profile(str(path), name, Facts(str(path), **({"micro_batch": 8, "device": "v100"} | facts)))


def test_a_pipedream_graph_in_execution_order_without_inputs_and_loose_ends(tmp_path):
    made = imported(tmp_path, GRAPH, "pipedream")
    assert [layer.name for layer in made.layers] == ["node2.Linear", "node3.ReLU", "node4.Add"]
    assert [(c.forward_s, c.backward_s, c.output_bytes) for c in made.at(8)] == [
        (2.5e-3, 5e-3, 64),
        (0.5e-3, 0.25e-3, 64),
        (1e-3, 2e-3, 64),
    ]
    assert [(e.name, e.producer, e.consumers, e.bytes(8)) for e in made.edges] == [
        ("node2.Linear", 0, (1, 2), 64),
        ("node3.ReLU", 1, (2,), 64),
    ]
    assert (made.layers[0].parameter_bytes, made.layers[0].parameters) == (48, 12)
    assert made.device == "NVIDIA V100 SXM2"
    assert made.origin == "imported"
    assert not any(layer.can_split_backward for layer in made.layers)


@pytest.mark.parametrize("name", ["pipedream", "table"])
@pytest.mark.parametrize(
    ("facts", "asked"),
    [({"micro_batch": None}, "add --micro-batch N"), ({"device": None}, "add --device NAME")],
)
def test_what_the_file_does_not_say_is_asked_for_by_name(tmp_path, name, facts, asked):
    with pytest.raises(UsageError, match=asked):
        imported(tmp_path, GRAPH if name == "pipedream" else TABLE, name, **facts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no nodes"),
        ("node1 -- Linear\n", "line 1 is neither a node nor an edge"),
        (GRAPH + GRAPH.splitlines()[1], "node4 is there twice"),
        (GRAPH + "\tnode4 -- node9\n", "an edge names node9"),
        (GRAPH + "\tnode4 -- node2\n", "go round in a circle"),
        (GRAPH.replace("=2.500", "=-2.5"), "line 3: node2 has a figure that is negative or no number"),
        (GRAPH.replace("[40.0; 24.0]", "[40.0; x]"), "node4 has a figure that is negative or no number"),
    ],
)
def test_a_broken_graph_is_told_by_line(tmp_path, text, said):
    with pytest.raises(FileError, match=said):
        imported(tmp_path, text, "pipedream")


def test_a_table_with_units_in_its_header(tmp_path):
    made = imported(tmp_path, TABLE, "table")
    assert [layer.name for layer in made.layers] == ["embed", "block", "head"]
    assert [c.forward_s for c in made.at(8)] == [0.002, 0.01, 0.001]
    assert [c.output_bytes for c in made.at(8)] == [8000, 8000, 4000]
    assert [layer.parameter_bytes for layer in made.layers] == [400, 800, 200]
    assert [edge.shape for edge in made.edges] == [("250*b",), ("250*b",)]


@pytest.mark.parametrize("sign", [";", "\t"])
def test_a_table_with_other_signs_between_its_columns(tmp_path, sign):
    assert imported(tmp_path, TABLE.replace(",", sign), "table") == imported(tmp_path, TABLE, "table")


def test_a_table_of_several_micro_batches_says_its_own(tmp_path):
    text = "name,micro_batch,fwd_us,bwd_us,activation_B,params_MB,held_B\n" + "".join(
        f"l{i},{b},{10 * b},{20 * b},{100 * b},1,{300 * b}\n" for b in (1, 2) for i in range(3)
    )
    made = imported(tmp_path, text, "table", micro_batch=None)
    assert made.micro_batches == (1, 2)
    assert [c.held_after_forward_bytes for c in made.at(2)] == [600] * 3
    assert made.at(2)[0].forward_s == pytest.approx(20e-6)
    assert made.edges[0].bytes(2) == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layer,forward_ms\n", "has no layers"),
        ("layer,forward_ms\na,1\n", "has no column backward, output, parameters"),
        (TABLE.replace("forward_ms", "forward"), "column 'forward' has no unit: call it forward_ms"),
        (TABLE.replace("10,20", "ten,20"), "line 3: 'ten' in column 'forward_ms' is no figure"),
        (TABLE + "head,1,2,4,50\n", "line 5: layer head is there twice"),
        (TABLE + ",1,2,4,50\n", "line 5 has no name"),
    ],
)
def test_a_broken_table_is_told_by_line_and_column(tmp_path, text, said):
    with pytest.raises(FileError, match=said):
        imported(tmp_path, text, "table")


def test_the_format_is_known_by_the_ending_or_by_name():
    assert (format_of("a/vgg16.txt"), format_of("x.csv"), format_of("model.py")) == ("pipedream", "table", None)
    assert format_of("whatever", "table") == "table"
    with pytest.raises(UsageError, match="--from 'alpa' is not known: use one of pipedream, table"):
        format_of("x", "alpa")


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({8: 64}, (("2*b",), "float32")),
        ({8: 40}, ((10,), "float32")),
        ({8: 7}, ((7,), "uint8")),
        ({1: 4, 2: 8}, (("1*b",), "float32")),
        ({1: 4, 2: 4}, ((1,), "float32")),
        ({1: 4, 2: 12}, None),
    ],
)
def test_sizes_become_shapes(sizes, shape):
    assert shape_of(sizes, "float32") == shape


def pipedreams_bottleneck_s(profile: Profile, machines: int, bytes_per_s: float, *, replicas: bool = True) -> float:
    """The optimum of PipeDream's objective on a chain (Narayanan et al., SOSP 2019), transfers counted."""
    ((size, costs),) = [(table.micro_batch, table.layers) for table in profile.costs]
    times = [0.0, *accumulate(cost.forward_s + cost.backward_s for cost in costs)]
    weights = [0, *accumulate(layer.parameter_bytes for layer in profile.layers)]
    sent = [0, *(sum(edge.bytes(size) for edge in profile.crossing(cut)) for cut in range(1, len(costs))), 0]

    def stage(start: int, stop: int, m: int) -> float:
        shared = 4 * (m - 1) * (weights[stop] - weights[start]) / (bytes_per_s * m)
        transfers = 2 * max(sent[start], sent[stop]) / (bytes_per_s * m)
        return max((times[stop] - times[start] + shared) / m, transfers)

    @cache
    def best(stop: int, left: int) -> float:
        return min(
            max(best(start, left - m) if start else 0.0, stage(start, stop, m))
            for m in (range(1, left + 1) if replicas else [1])
            for start in range(stop)
            if (start == 0) or left > m
        )

    return min(best(len(costs), count) for count in range(1, machines + 1))


@pytest.mark.parametrize(
    ("name", "layers", "machines", "bytes_per_s", "replicas", "seconds"),
    [
        ("alexnet", 22, 4, 1e9, True, 0.0342171),
        ("alexnet", 22, 4, 10e9, True, 0.022186),
        ("alexnet", 22, 4, 1e9, False, 0.0664535),
        ("vgg16", 40, 4, 1e9, True, 0.205521),
        ("vgg16", 40, 4, 10e9, True, 0.170179),
        ("vgg16", 40, 4, 1e9, False, 0.411042),
    ],
)
def test_the_published_chains_have_the_bottlenecks_of_pipedreams_own_optimizer(
    name, layers, machines, bytes_per_s, replicas, seconds
):
    profile = read(PROFILES / f"{name}.v100.profile.json", Profile)
    assert len(profile.layers) == layers
    assert "MIT licence" in " ".join(profile.sources)
    found = pipedreams_bottleneck_s(profile, machines, bytes_per_s, replicas=replicas)
    assert found == pytest.approx(seconds, rel=1e-5)
