"""A dry run's execution traces, read back with Google's protobuf and executed as a simulator would, without time."""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import decoder
from google.protobuf.unknown_fields import UnknownFieldSet

from mmm.errors import ConfigError
from mmm.plan import chakra
from mmm.plan.dry_run import dry_run
from mmm.plan.execution_trace import as_rank, seconds_of
from mmm.plan.machine import known_machines, load
from mmm.plan.step_graph import Node, flops_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
LM = [sys.executable, "-m", "mmm.trainer.lm", "--device", "cpu", "--preset", "debug", "--dataset", "random"]
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
# Message → its fields: name, number, type; as MLCommons publishes them.
SCHEMA = {
    "AttributeProto": [
        *[("name", 1, "STRING"), ("double_val", 3, "DOUBLE"), ("int32_val", 7, "INT32"), ("int64_val", 9, "INT64")],
        *[("uint64_val", 13, "UINT64"), ("bool_val", 27, "BOOL"), ("string_val", 29, "STRING")],
    ],
    "GlobalMetadata": [("version", 1, "STRING"), ("attr", 2, "AttributeProto")],
    "Node": [
        *[("id", 1, "UINT64"), ("name", 2, "STRING"), ("type", 3, "INT32"), ("ctrl_deps", 4, "UINT64")],
        *[("data_deps", 5, "UINT64"), ("start_time_micros", 6, "UINT64"), ("duration_micros", 7, "UINT64")],
        ("attr", 10, "AttributeProto"),
    ],
}
REPEATED = {"attr", "ctrl_deps", "data_deps"}


@pytest.fixture(scope="module")
def messages():
    """The classes of the schema."""
    field, file = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FileDescriptorProto(name="et", syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        value = [number for _, number, _ in fields if number > 1] if name == "AttributeProto" else []
        if value:
            message.oneof_decl.add(name="value")
        for called, number, kind in fields:
            label = field.LABEL_REPEATED if called in REPEATED else field.LABEL_OPTIONAL
            own = {"type_name": f".{kind}"} if kind in SCHEMA else {}
            own |= {"oneof_index": 0} if number in value else {}
            kind = "MESSAGE" if kind in SCHEMA else kind
            message.field.add(name=called, number=number, label=label, type=getattr(field, f"TYPE_{kind}"), **own)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in SCHEMA}


def attributes(message):
    return {each.name: getattr(each, each.WhichOneof("value")) for each in message.attr}


def read(path, messages):
    """The attributes of a file, and its nodes."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        size, at = decoder._DecodeVarint32(data, at)
        found.append(messages["Node" if found else "GlobalMetadata"].FromString(data[at : at + size]))
        assert all(not len(UnknownFieldSet(part)) for part in (found[-1], *found[-1].attr))
        at += size
    assert at == len(data)
    assert found[0].version == chakra.VERSION
    return attributes(found[0]), found[1:]


def check_graph(nodes):
    """All that a node waits for exists, and comes before it."""
    numbers = [node.id for node in nodes]
    assert numbers == sorted(set(numbers))
    for node in nodes:
        waits_for = [*node.data_deps, *node.ctrl_deps]
        assert set(waits_for) <= set(numbers)
        assert all(before < node.id for before in waits_for)
        assert len(waits_for) == len(set(waits_for))


def check_totals(nodes, rank):
    """Calls and bytes by axis and operation: those of the dry run's table."""
    found = defaultdict(lambda: [0, 0, 0])
    for node in nodes:
        if node.type != COMPUTE:
            about = attributes(node)
            entry = found[about["axis"], about["operation"]]
            for at, more in enumerate((1, about["payload_bytes"], about["sent_bytes"])):
                entry[at] += more
    table = {(row["axis"], row["operation"]): row for row in rank["collectives"]}
    assert set(found) == set(table)
    for key, (calls, payload, sent) in found.items():
        assert (calls, payload) == (table[key]["calls"], table[key]["payload_bytes"])
        assert abs(sent - table[key]["sent_bytes"]) <= calls  # each rounded


def execute(ranks, groups):
    """Run every rank's nodes as soon as they may; raise where one never may.

    A collective ends when the whole group is at its next one, which has to be the same; a receive when it was sent.
    """
    about = {(rank, node.id): attributes(node) for rank, nodes in ranks.items() for node in nodes}
    waits = {
        (rank, node.id): len(node.data_deps) + len(node.ctrl_deps) for rank, nodes in ranks.items() for node in nodes
    }
    after = defaultdict(list)
    for rank, nodes in ranks.items():
        for node in nodes:
            for number in (*node.data_deps, *node.ctrl_deps):
                after[rank, number].append((rank, node.id))
    ready = [node for node, count in waits.items() if not count]
    sent, received, at_group, left = defaultdict(list), defaultdict(list), defaultdict(dict), len(waits)

    while ready:
        rank, number = node = ready.pop()
        given, ended = about[node], [node]
        if "comm_type" in given:
            members = at_group[given["pg_name"]]
            assert rank not in members, "two at once in a group"
            members[rank] = node
            ended = []
            if set(members) == groups[given["pg_name"]]:
                calls = {(about[each]["comm_type"], about[each]["payload_bytes"]) for each in members.values()}
                assert len(calls) == 1, f"group {given['pg_name']}: {calls}"
                ended = [*members.values()]
                members.clear()
        elif "comm_src" in given:
            way = given["comm_src"], given["comm_dst"], given["comm_tag"]
            mine = sent if given["operation"] == "send" else received
            assert rank == (given["comm_src"] if mine is sent else given["comm_dst"])
            mine[way].append(node)
            ended = [node] if mine is sent else []
            if sent[way] and received[way]:
                pair = sent[way].pop(0), received[way].pop(0)
                assert about[pair[0]]["comm_size"] == about[pair[1]]["comm_size"]
                ended = [*{*ended, pair[1]}]
        left -= len(ended)
        for each in ended:
            for later in after[each]:
                waits[later] -= 1
                if not waits[later]:
                    ready.append(later)
    assert left == 0, "the rest can never begin"
    assert not any(sent.values())


def trace(tmp_path, *words):
    report = tmp_path / "report.json"
    words = [*LM, *words, "--dry_run_json", str(report), "--trace", str(tmp_path / "step")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


def test_a_step_of_fsdp(tmp_path, messages):
    """Its file, its picture, and what its nodes say, by hand: --preset debug."""
    found = trace(tmp_path, "--dry_run", "512", "--batch_size", "4", "--dry_run_machine", "dgx-h100")
    about, nodes = read(tmp_path / "step.0.et", messages)
    assert about == {"rank": 0, "layout": "dp512", "precision": "fp32", "machine": "DGX-H100"}
    check_graph(nodes)
    check_totals(nodes, found["ranks"][0])
    kinds = Counter(node.type for node in nodes)
    assert kinds[COLLECTIVE] == len(found["ranks"][0]["calls"])
    assert kinds[COMPUTE] > 100
    groups = json.loads((tmp_path / "step.json").read_text())
    assert groups == {"1": list(range(512))}
    by_number = {node.id: node for node in nodes}
    for node in nodes:
        given = attributes(node)
        if node.name == "aten::mm":
            assert given["num_ops"] > 0
            assert given["tensor_size"] > 0
            assert node.data_deps
        if given.get("operation") == "all_gather":
            assert given["comm_size"] * 512 == given["payload_bytes"]
            assert [by_number[at].name for at in node.data_deps] == ["fsdp::all_gather_copy_in"]
            readers = [other.name for other in nodes if node.id in other.data_deps]
            assert readers == ["fsdp::split_with_sizes_copy"]
    picture = json.loads((tmp_path / "step.0.perfetto.json").read_text())
    events = [event for event in picture["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(nodes)
    ends = {event["args"]["node"]: event["ts"] + event["dur"] for event in events}
    for event in events:
        assert event["ts"] + 1e-6 >= max((ends[at] for at in event["args"]["waits_for"]), default=0.0)
    for thread in {event["tid"] for event in events}:
        line = sorted((event["ts"], event["dur"]) for event in events if event["tid"] == thread)
        assert all(begin + length <= after + 1e-6 for (begin, length), (after, _) in pairwise(line))
    assert {p.name for p in tmp_path.iterdir()} == {"report.json", "step.json", "step.0.et", "step.0.perfetto.json"}


LAYOUTS = {
    "pp·dp·tp": (8, "--n_layers 4 --microbatches 4 --batch_size 4 --pp 2 --tp 2"),
    "interleaved": (2, "--n_layers 4 --microbatches 4 --batch_size 4 --pp 2 --schedule Interleaved1F1B"),
    "cp ring": (4, "--batch_size 4 --cp 2 --tp 2"),
    "experts": (8, "--batch_size 4 --n_experts 4 --top_k 4 --ep 2 --tp 2"),
    "hsdp": (8, "--batch_size 4 --parallel hsdp --cp 2"),
    "zero1": (4, "--batch_size 4 --parallel zero1"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_of_a_world_runs_to_its_end(tmp_path, messages, name):
    ranks, words = LAYOUTS[name]
    found = trace(tmp_path, "--dry_run", str(ranks), *words.split(), "--dry_run_trace_all")
    groups = {name: set(members) for name, members in json.loads((tmp_path / "step.json").read_text()).items()}
    world = {}
    for rank in range(ranks):
        about, world[rank] = read(tmp_path / f"step.{rank}.et", messages)
        assert about["rank"] == rank
        check_graph(world[rank])
    for rank in found["ranks"]:
        check_totals(world[rank["rank"]], rank)
    execute(world, groups)


@pytest.mark.long
@pytest.mark.parametrize(("case", "rank"), [("llama fsdp·tp", 3), ("llama cp·tp", 1), ("experts ep", 2)])
def test_a_rank_of_the_same_stage_does_the_same_in_its_own_groups(case, rank):
    from plan_accuracy import CASES, train

    ranks, line = CASES[case]
    first = dry_run(partial(train, line), ranks, 0, traced=True).ranks[0]
    own = dry_run(partial(train, line), ranks, rank, traced=True).ranks[0]
    assert first.nodes != own.nodes
    assert as_rank(first, rank).nodes == own.nodes


def test_flops_of_a_product_and_of_attention():
    aten = torch.ops.aten
    a, b = torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta")
    assert flops_of(aten.mm.default, {"self": a, "mat2": b}, a @ b) == 2 * 3 * 4 * 5
    query = torch.empty(2, 3, 7, 8, device="meta")  # batch, heads, seq, head_dim
    given = {"query": query, "key": query, "value": query}
    forward = flops_of(aten._scaled_dot_product_flash_attention_for_cpu.default, given, None)
    assert forward == 2 * 2 * 2 * 3 * 7 * 7 * 8
    given["grad_out"] = query
    backward = flops_of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, given, None)
    assert backward == 5 * forward // 2
    assert flops_of(aten.add.Tensor, {"self": a, "other": a}, a) == 0


def test_a_kernel_takes_the_longer_of_its_products_and_its_memory():
    machine = load(str(known_machines()["dgx-h100"]), "--machine")
    products = Node("mm", "compute", "forward", 10**15, 1, 1, 1, (), ())
    rate = machine.peak("bf16") * machine.matmul_efficiency
    assert seconds_of(products, machine, "bf16") == pytest.approx(1e15 / rate)
    copies = Node("add", "compute", "forward", 0, 1, 10**12, 10**12, (), ())
    rate = machine.memory_bandwidth * machine.memory_efficiency
    assert seconds_of(copies, machine, "bf16") == pytest.approx(2e12 / rate)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**31, 2**63 - 1, -1])
def test_a_number_on_the_wire(number, messages):
    read = messages["AttributeProto"].FromString(chakra.attribute("payload_bytes", number))
    assert (read.name, read.int64_val) == ("payload_bytes", number)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "x"], "--dry_run_trace without --dry_run"),
        (["--dry_run", "8", "--dry_run_trace_all"], "--dry_run_trace_all without --dry_run_trace"),
        (["--dry_run", "8", "--trace", "no/such/x"], "--dry_run_trace no/such/x: there is no folder no/such"),
        (
            ["--dry_run", "8", "--trace", "x", "--dry_run_machine", "abacus"],
            "--dry_run_machine abacus: there is no such",
        ),
        (["--dry_run", "8", "--trace", "x", "--dry_run_trace_all", "--dry_run_rank", "1"], "with --dry_run_rank"),
    ],
)
def test_flags_that_do_not_go_together(words, said, monkeypatch):
    from mmm.trainer import lm
    from mmm.trainer.options import parse

    monkeypatch.setattr(sys, "argv", ["lm", "--device", "cpu", *words])
    with pytest.raises(ConfigError, match=said):
        parse(lm.Config)
