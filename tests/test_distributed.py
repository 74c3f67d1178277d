"""Peer tables as far as they need no GPU: groups of a mesh, what `moe` finds, what `initialize` refuses, and the
exchange between processes over a store. The arenas themselves: test_cuda_peers.py."""

import concurrent.futures
import dataclasses
import itertools
import pathlib
import re
import shutil
import subprocess
import threading
import time
import types

import cases
import jax
import numpy as np
import pytest
from cases import MESHES, mesh_of
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mok_jax import MoKConfig, distributed, ops
from mok_jax.placement import place

SIZES = dict(tokens=16, hidden=8, top_k=2)


@pytest.fixture(autouse=True)
def no_tables(monkeypatch):
    monkeypatch.setattr(distributed, "_tables", [])


@pytest.fixture
def module():
    try:
        return ops.cuda()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", MESHES)
def test_groups_are_numbered_as_the_devices_number_themselves(name):
    mesh = mesh_of(name)
    placement = place(mesh, [], "expert", None)
    index = jax.shard_map(
        lambda: placement.index()[None], mesh=mesh, in_specs=(), out_specs=P(mesh.axis_names), check_vma=False
    )
    places = {}
    for shard in jax.jit(index)().addressable_shards:
        places[shard.device.id] = tuple(int(v) for v in np.asarray(shard.data)[0])
    for number, group in enumerate(distributed.groups_of(mesh, "expert")):
        for rank, device in enumerate(group):
            assert places[device.id] == (rank, number)


def table_of(mesh, **changes):
    devices = tuple(device.id for device in mesh.devices.flat)
    return dataclasses.replace(
        distributed.Table(5, "key", "pointers", mesh.shape_tuple, "expert", devices, 1000), **changes
    )


def test_a_table_that_is_large_enough_is_found():
    mesh = mesh_of("d2_e4")
    distributed._tables.append(table_of(mesh, id=9))
    for where in (mesh, mesh.abstract_mesh):
        assert distributed.find(where, "expert", 1000).id == 9
        assert distributed.find(where, "expert", 1001) is None
        assert distributed.find(where, "data", 400) is None
        assert distributed.why_not(where, 4) is None
    # Of several, an abstract mesh does not say which.
    other = table_of(mesh, id=11, devices=(8, 9, 10, 11, 12, 13, 14, 15))
    distributed._tables.append(other)
    assert distributed.find(mesh, "expert", 400).id == 9
    text = r"mesh must be concrete .* devices \[0, 1, .*\] and \[8, 9, .*\]; got an abstract one"
    with pytest.raises(ValueError, match=text):
        distributed.find(mesh.abstract_mesh, "expert", 400)
    distributed._tables.remove(other)
    assert distributed.find(mesh_of("e2_d4"), "expert", 400) is None
    assert "no peer buffers" in distributed.why_not(mesh_of("e2_d4").abstract_mesh, 2)


def test_another_order_of_the_devices_is_refused():
    mesh = mesh_of("d2_e4")
    distributed._tables.append(table_of(mesh))
    turned = Mesh(mesh.devices[::-1], mesh.axis_names)
    with pytest.raises(ValueError, match=r"moe: the mesh must have its devices in the order \[0, 1, .* got \[4, 5"):
        distributed.find(turned, "expert", 1000)


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (TypeError, "mesh must be a concrete", dict(mesh=None)),
        (ValueError, "way must be one of .* got 'nccl2'", dict(way="nccl2")),
        (ValueError, "way must be one of .* got array", dict(way=np.array(["ipc", "nccl"]))),
        (ValueError, "hidden must be an integer >= 1 and below 2..31, got 0", dict(hidden=0)),
        (ValueError, "tokens must be an integer >= 1 and below 2..31, got 1.5", dict(tokens=1.5)),
        (
            ValueError,
            r"tokens \* top_k must be below 2..31, and times .* got 2147483647, 2 and 8",
            dict(tokens=2**31 - 1),
        ),
        (
            ValueError,
            "tokens .* and times hidden below 2..58, got 1073741824, 1 and 1073741824",
            dict(tokens=2**30, top_k=1, hidden=2**30),
        ),
        (TypeError, "dtype must be bfloat16 or float32, that of x, got 'mxfp8'", dict(dtype="mxfp8")),
        (TypeError, "dtype must be bfloat16 or float32, that of x, got .*float16", dict(dtype=np.float16)),
        (ValueError, "timeout must be seconds > 0 and below 1e6, got -1", dict(timeout=-1)),
        (
            ValueError,
            r"expert_axis must name an axis of the mesh \('data', 'expert'\), got 'exprt'",
            dict(expert_axis="exprt"),
        ),
        (ValueError, "mesh must have CUDA devices, these are cpu, which need no arenas; leave the call out", {}),
    ],
)
def test_what_initialize_refuses(error, text, options):
    mesh = options.pop("mesh", mesh_of("d2_e4"))
    with pytest.raises(error, match=f"distributed.initialize: {text}"):
        distributed.initialize(mesh, **SIZES | options)


# ---- several processes, as threads ----


class Store:
    """What jax.distributed's client does with keys; a key is set once."""

    def __init__(self):
        self.values, self.barriers, self.lock = {}, {}, threading.Lock()

    def key_value_set_bytes(self, key, value):
        assert key not in self.values, key
        self.values[key] = value

    def blocking_key_value_get_bytes(self, key, milliseconds):
        for _ in range(milliseconds):
            if key in self.values:
                return self.values[key]
            time.sleep(1e-3)
        raise RuntimeError("DEADLINE_EXCEEDED")

    def key_value_set(self, key, value):
        self.key_value_set_bytes(key, value)

    def blocking_key_value_get(self, key, milliseconds):
        return self.blocking_key_value_get_bytes(key, milliseconds)

    def key_value_delete(self, key):
        del self.values[key]

    def wait_at_barrier(self, key, milliseconds, processes):
        with self.lock:
            barrier = self.barriers.setdefault(key, threading.Barrier(len(processes)))
        try:
            barrier.wait(milliseconds / 1000)
        except threading.BrokenBarrierError as error:
            raise RuntimeError("DEADLINE_EXCEEDED\nmore lines") from error


class Memory:
    """The module's functions about arenas, of one process among several."""

    def __init__(self, process, shared):
        self.process, self.shared, self.tables, self.freed, self.closed = process, shared, {}, [], []
        self.addresses = itertools.count(1000 * (process + 1), 100)

    def reach(self, ordinal, peer):
        return self.shared.get("unreachable", "")

    def targets(self):
        return {}

    JAXLIB_VERSION = "0.10.2"

    def open_device(self, ordinal):
        pass

    def synchronize(self, ordinal):
        pass

    def arena_allocate(self, way, ordinal, size):
        if self.shared.get("full") == self.process:
            raise RuntimeError("allocating an arena: out of memory")
        return next(self.addresses)

    def arena_export(self, way, ordinal, address):
        if self.shared.get("odd") == self.process:
            raise IndexError("map::at")
        return f"{way} {address}".encode()

    def arena_import(self, way, ordinal, handle, size):
        if self.shared.get("sealed") == way and self.shared.get("sealed_to", self.process) == self.process:
            raise RuntimeError("importing an arena: not permitted")
        if self.shared.get("leaves") == self.process:
            raise KeyboardInterrupt
        self.shared.setdefault("mapped", []).append((self.process, int(handle.split()[1])))
        name, address = handle.decode().split()
        assert (name, size) == (way, 4096)
        return 10**6 + int(address)

    def arena_free(self, way, ordinal, address):
        assert not any(address == mapped for _, mapped in self.shared.get("mapped", ()))
        self.freed.append(address)

    def arena_close(self, way, ordinal, address):
        time.sleep(0.05 * self.process)  # others would be ahead of this one if they did not wait
        self.shared["mapped"].remove((self.process, address - 10**6))
        self.closed.append(address)

    def set_table(self, table, ordinal, group, rank, size, arenas):
        self.tables[table, ordinal] = (group, rank, size, arenas)

    def remove_table(self, table):
        if self.shared.get("leaves") == self.process:
            raise KeyboardInterrupt
        self.tables = {key: value for key, value in self.tables.items() if key[0] != table}


class Counts:
    """What each process counts: nothing built yet."""

    def __init__(self, me):
        self.me, self.counts = me, {}

    def __getitem__(self, key):
        return self.counts.get((self.me.process, key), 0)

    def __setitem__(self, key, number):
        self.counts[self.me.process, key] = number


def processes(monkeypatch, shape, axes, count, shared=None, first=0, way=None, timeout=5.0, missed=(0, 0), size=4096):
    """Runs `_build`, once and for each time that others miss, in `count` processes of equally many devices.
    size: of an arena, or a tuple of what each process asks for.

    Returns their results or errors, and memories.
    """
    each = int(np.prod(shape)) // count
    devices = [
        types.SimpleNamespace(id=i, process_index=first + i // each, local_hardware_id=i % each)
        for i in range(np.prod(shape))
    ]
    grid = np.array(devices, object).reshape(shape)
    mesh = types.SimpleNamespace(devices=grid, axis_names=axes, shape_tuple=tuple(zip(axes, shape, strict=True)))
    store, me = Store(), threading.local()
    monkeypatch.setattr(distributed, "_client", lambda: store)
    monkeypatch.setattr(jax, "process_index", lambda: me.process)
    monkeypatch.setattr(distributed, "_built", Counts(me))
    shared = {} if shared is None else shared
    memories = [Memory(process, shared) for process in range(count)]

    def build(process):
        me.process = first + process
        groups = distributed.groups_of(mesh, "expert")
        time.sleep(1.6 * timeout * missed[process])
        for _ in range(1 + max(missed) - missed[process]):
            try:
                wanted = size[process] if isinstance(size, tuple) else size
                result = distributed._build(memories[process], mesh, groups, "expert", wanted, way, timeout)
            except (RuntimeError, KeyboardInterrupt) as error:
                result = str(error)
        return result

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(build, range(count))), memories


def test_every_rank_gets_its_own_way_to_each_arena_of_its_group(monkeypatch):
    tables, memories = processes(monkeypatch, (2, 4), ("expert", "data"), 2)
    assert [table.way for table in tables] == ["ipc", "ipc"] and tables[0].id == tables[1].id
    # Rank 0 of each group is in process 0, rank 1 in process 1, on the device of the group's number.
    for process, memory in enumerate(memories):
        for ordinal in range(4):
            group, rank, size, arenas = memory.tables[tables[0].id, ordinal]
            assert (group, rank, size) == (ordinal, process, 4096)
            own, other = 1000 * (process + 1) + 100 * ordinal, 1000 * (2 - process) + 100 * ordinal
            assert arenas[rank] == own and arenas[1 - rank] == 10**6 + other


def test_larger_arenas_take_the_place_of_smaller_ones(monkeypatch):
    (small,), (memory,) = processes(monkeypatch, (4,), ("expert",), 1)
    distributed._tables.append(small)
    monkeypatch.setitem(globals(), "Memory", lambda process, shared: memory)
    for size in (4096, 4000):
        assert processes(monkeypatch, (4,), ("expert",), 1, size=size)[0] == [small] and not memory.freed
    (large,), _ = processes(monkeypatch, (4,), ("expert",), 1, size=8192)
    assert (large.id, large.way, large.bytes) == (small.id, "pointers", 8192)
    assert not distributed._tables and memory.freed == [1000, 1100, 1200, 1300]
    assert [value[2] for value in memory.tables.values()] == [8192] * 4


def test_processes_that_ask_for_arenas_of_different_sizes(monkeypatch):
    errors, memories = processes(monkeypatch, (4,), ("expert",), 2, size=(4096, 8192), way="ipc")
    text = "the processes ask for arenas of [4096, 8192] bytes; every process of the mesh must call it alike"
    assert errors == [f'distributed.initialize: ipc: {text}; use implementation="xla" over these devices'] * 2
    assert not any(memory.tables or memory.freed for memory in memories)


DID_NOT_COME = (
    "mok_jax.distributed: the processes [0, 1] did not all come to give arenas back; "
    "every one must call initialize, with the same sizes, and finalize alike: DEADLINE_EXCEEDED"
)


def test_larger_arenas_that_one_process_alone_asks_for(monkeypatch):
    small, memories = processes(monkeypatch, (4,), ("expert",), 2)
    distributed._tables.append(small[0])
    monkeypatch.setitem(globals(), "Memory", lambda process, shared: memories[process])
    results, _ = processes(monkeypatch, (4,), ("expert",), 2, size=(4096, 8192), timeout=0.3)
    assert results == [small[0], DID_NOT_COME]
    assert distributed._tables == [small[0]]
    assert all(memory.tables and not memory.freed for memory in memories)


def test_what_peers_may_still_have_mapped_is_not_freed(monkeypatch):
    (table, _), (memory, _) = processes(monkeypatch, (4,), ("expert",), 2)
    distributed._tables.append(table)
    monkeypatch.setattr(distributed.ops, "cuda", lambda: memory)

    class Leaves(Store):
        def wait_at_barrier(self, key, milliseconds, processes):
            if key.endswith("/closed"):
                raise RuntimeError("DEADLINE_EXCEEDED")

    monkeypatch.setattr(distributed, "_client", Leaves)
    with pytest.raises(RuntimeError, match=re.escape(DID_NOT_COME)):
        distributed.finalize()
    assert (distributed.tables(), memory.tables, len(memory.closed), memory.freed) == ((), {}, 4, [])
    distributed.finalize()  # has nothing left to do
    assert len(memory.closed) == 4


def test_processes_outside_the_mesh_are_not_waited_for(monkeypatch):
    tables, _ = processes(monkeypatch, (4,), ("expert",), 2, first=3)
    assert [table.processes for table in tables] == [(3, 4)] * 2


def test_one_process_uses_raw_pointers(monkeypatch):
    (table,), (memory,) = processes(monkeypatch, (4,), ("expert",), 1)
    assert table.way == "pointers" and not table.imported
    assert [value[3] for value in memory.tables.values()] == [[1000, 1100, 1200, 1300]] * 4


def test_compiled_calls_outlive_a_change_of_the_way(monkeypatch):
    ids = {processes(monkeypatch, (4,), ("expert",), 2, way=way)[0][0].id for way in ("ipc", "fabric", None)}
    assert len(ids) == 1
    # Which they could not while a table of another way is there.
    tables, _ = processes(monkeypatch, (4,), ("expert",), 1, way="fabric")
    distributed._tables += tables
    for way in ("fabric", None):
        assert processes(monkeypatch, (4,), ("expert",), 1, way=way)[0] == tables
    with pytest.raises(ValueError, match="way must be 'fabric' or None while these arenas are there, got 'ipc'; call"):
        processes(monkeypatch, (4,), ("expert",), 1, way="ipc")


@pytest.mark.parametrize(
    ("shared", "reason"),
    [
        ({"full": 1}, "process 1: allocating an arena: out of memory"),
        ({"unreachable": "device 0 cannot access device 1"}, "process 0: device 0 cannot access device 1"),
    ],
)
def test_a_failure_of_one_process_is_every_process_s_error(monkeypatch, shared, reason):
    errors, memories = processes(monkeypatch, (4,), ("expert",), 2, shared)
    last = reason
    if "full" in shared:
        last = "process 0: mok_jax was built with the headers of jaxlib 0.10.2, by which XLA lends no communicator"
    text = f"distributed.initialize: ipc: {reason}; fabric: {reason}; nccl: {last}; "
    assert errors == [f'{text}use implementation="xla" over these devices'] * 2
    for memory in memories:
        assert not memory.tables
        assert len(memory.freed) == len({*memory.freed})
    assert len(memories[0].freed) == (4 if "full" in shared else 0)


def test_the_next_way_is_tried_and_why_it_was(monkeypatch):
    tables, memories = processes(monkeypatch, (4,), ("expert",), 2, {"sealed": "ipc"})
    for table in tables:
        assert table.way == "fabric"
        assert table.refused == (("ipc", "process 0: importing an arena: not permitted"),)
    for memory, table in zip(memories, tables, strict=True):
        made = [address for _, address in table.arenas]
        assert len(made) == 2 and not {*made} & {*memory.freed} and len(memory.freed) == 2
        assert len(memory.tables) == 2


def test_what_others_have_mapped_is_freed_when_they_have_closed_it(monkeypatch):
    shared = {"sealed": "ipc", "sealed_to": 0}  # process 1 maps two arenas on two devices, then all give up
    tables, memories = processes(monkeypatch, (4,), ("expert",), 2, shared)
    assert [table.way for table in tables] == ["fabric"] * 2
    assert [len(memory.freed) for memory in memories] == [2, 2] and len(memories[1].closed) == 4


def test_an_error_of_any_kind_reaches_every_process(monkeypatch):
    errors, memories = processes(monkeypatch, (4,), ("expert",), 2, {"odd": 1}, way="ipc")
    text = "distributed.initialize: ipc: process 1: IndexError('map::at'); use implementation="
    assert all(error.startswith(text) for error in errors) and len(errors) == 2
    assert [len(memory.freed) for memory in memories] == [2, 1]


def test_what_a_process_that_leaves_may_have_mapped_stays(monkeypatch, capfd):
    errors, memories = processes(monkeypatch, (4,), ("expert",), 2, {"leaves": 1}, way="ipc", timeout=1.0)
    assert errors[0].startswith("distributed.initialize: process 1 did not come within 1 s")
    assert not memories[0].tables and len(memories[0].closed) == 4 and not memories[0].freed
    assert "mok_jax: arenas stay until the process ends" in capfd.readouterr().err


@pytest.mark.parametrize("late", [0, 1])
def test_a_process_that_missed_a_build_takes_part_in_the_next(monkeypatch, late):
    missed = (1, 0) if late == 0 else (0, 1)
    tables, _ = processes(monkeypatch, (4,), ("expert",), 2, timeout=1.5, missed=missed)
    assert [table.way for table in tables] == ["ipc"] * 2
    assert tables[0].key == tables[1].key == f"mok_jax/{tables[0].id}/{late}"


@pytest.fixture
def seats(module):
    """Two groups of three devices of this process."""
    for ordinal in range(900, 906):
        group, rank = divmod(ordinal - 900, 3)
        module.set_table(77, ordinal, group, rank, 0, [4096] * 3)
    yield module
    module.remove_table(77)


def test_devices_of_a_process_gather_before_each_call(seats):
    entered, left = [], []

    def device(ordinal):
        for call in range(20):
            time.sleep(0.001 * (ordinal - 900))
            entered.append(call)
            assert seats.gather(77, ordinal, 30.0) == ""
            left.append((call, entered.count(call)))

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(device, range(900, 903)))
    assert sorted(left) == sorted((call, 3) for call in range(20) for _ in range(3))
    # The other group waits for nobody of this one; who is late the barrier tells.
    start = time.monotonic()
    assert seats.gather(77, 903, 0.3) == "" and 0.3 <= time.monotonic() - start < 5
    assert seats.gather(78, 903, 30.0) == ""  # no such table


def test_where_one_device_refuses_a_call_the_others_of_its_process_do_too(seats):
    def device(ordinal):
        if ordinal == 901:
            time.sleep(0.1)
            seats.count_refusal(77, ordinal)
            return "refused"
        error = seats.gather(77, ordinal, 30.0)
        seats.count_refusal(77, ordinal)
        return error

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(device, range(900, 903)))
        for error in errors[::2]:
            assert re.match(r"mok_jax cuda: device 90[012] of this process has refused this call", error)
        assert [seats.refused(77, ordinal) for ordinal in range(900, 904)] == [1, 1, 1, 0]
        # And the next call is one call of all again.
        assert list(pool.map(lambda ordinal: seats.gather(77, ordinal, 30.0), range(900, 903))) == [""] * 3
    seats.set_table(77, 900, 0, 0, 0, [4096] * 3)
    assert seats.refused(77, 900) == 0


def test_the_formula_of_an_arena(module):
    row = 32 + 16  # of MXFP8, which here is larger than one of float32
    parts = [16 * row, 16 * row, 16 * 2 * 4, 16 * 2 * 4, 16 * 2 * 8 * 4, 16 * 2 * 4]
    assert distributed.arena_bytes(**SIZES, dtype="float32") == 16384 + sum(-(-part // 256) * 256 for part in parts)
    # FORMULA, where every part is a multiple of 256.
    t, h, k, s = 1024, 4096, 8, 2
    assert distributed.arena_bytes(t, h, k) == 16 * 1024 + 2 * t * h * s + 8 * t * k + t * k * (h * s + 4)


@pytest.mark.parametrize("chosen", [False, True])
def test_calls_of_a_table_can_go_onto_the_collective_stream(module, chosen):
    case = cases.make_case("f32", tokens=16, hidden=8, intermediate=8, experts=4, top_k=2, shared=8)
    config = MoKConfig(collective_stream=chosen)
    options = dict(implementation="cuda", gpu=ops.Gpu((9, 0), None))
    texts = {}
    for table in (0, 5):
        dims = cases.dims_of(case, config, table=table, **options)
        place = np.zeros(2, np.int32)
        layer = jax.grad(lambda x, d=dims, p=place: ops.moe_ffi(d, p, x, *case[1:3], case[3:6], case.shared).sum())
        if chosen and table and ops._version(jax.__version__) < (0, 11, 1):
            with pytest.raises(NotImplementedError, match=r"moe: collective_stream needs jax 0\.11\.1 or newer"):
                dims.check()
            return
        dims.check()
        texts[table] = jax.jit(layer).trace(case.x).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @(mok_\w+)\(.*", texts[5])
    assert sorted(calls) == ["mok_backward_peers", "mok_forward_peers"]
    marked = re.findall(r'custom_call @mok_\w+_peers\(.*_xla_stream_annotation = "collective"', texts[5])
    assert len(marked) == (2 if chosen else 0)
    assert "_xla_stream_annotation" not in texts[0]


# ---- what the megakernel is told of its peers ----

SOURCES = pathlib.Path(__file__).parents[1] / "ffi"


def included_by(path):
    """A source file and all of ffi that it includes."""
    found, left = set(), [path.resolve()]
    while left:
        at = left.pop()
        if at not in found:
            found.add(at)
            names = re.findall(r'#include "([^"]+)"', at.read_text())
            left += [next(p for p in ((at.parent / name).resolve(), SOURCES / name) if p.exists()) for name in names]
    return found


@pytest.mark.skipif(not SOURCES.is_dir(), reason="the sources are not here")
@pytest.mark.parametrize("name", ["megakernel_portable.cu", "megakernel_sm90a.cu", "schedule.cu", "epilogue.cu"])
def test_only_the_barrier_knows_where_flags_are(name):
    files = included_by(SOURCES / "cuda" / name)
    assert {"params.h", "megakernel.h"} <= {path.name for path in files}
    # Flags lie in an arena's Control, and a peer's are read with system scope.
    assert not {"arena.h", "exchange.h"} & {path.name for path in files}
    uses = [path.name for path in files if "LoadAcquireSystem(" in path.read_text() and path.name != "ptx.cuh"]
    assert uses == []
    # What a kernel gets of each peer is arrays, none of them the arena's beginning.
    peer = re.search(r"struct Peer \{(.*?)\n\};", (SOURCES / "params.h").read_text(), re.DOTALL)
    names = re.findall(r"void\* (\w+);", peer[1])
    assert names == ["x", "d_y", "router_weights", "returned", "returned_d_weights"] and peer[1].count(";") == 5


@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="needs CUDA's cuobjdump")
def test_no_machine_code_but_the_barrier_s_loads_with_system_scope(module):
    command = ["cuobjdump", "-sass", module.__file__]
    code = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    kernels = {}
    for part in code.split("Function : ")[1:]:
        name = re.search(r"[0-9]([A-Z][A-Za-z]+?)(?:I\S*E)*E?E?NS|$", part.split(None, 1)[0])
        loads = set(re.findall(r"\b(?:LD|LDG|ATOM|ATOMG|RED)\.\S*STRONG\.SYS", part))
        kernels.setdefault(name[1], set()).update(loads)
    assert {"HopperKernel", "PortableKernel", "Barrier", "Enter", "Place"} <= set(kernels), kernels
    assert any(load.startswith("LD") for load in kernels["Barrier"])
    # A megakernel's one access of that scope claims the place for its report, in its own memory.
    others = {name: loads for name, loads in kernels.items() if loads and name not in ("Barrier", "Enter")}
    assert others == {name: {"ATOMG.E.CAS.STRONG.SYS"} for name in ("HopperKernel", "PortableKernel")}
