"""Peer GPUs: the arenas through which the ranks of an expert axis exchange rows, and who may reach whom.

`initialize` is called once on every process alike, before anything compiles; where one process holds all
devices of the mesh, `moe` does it itself. A call then only names its table (ffi/cuda/arena.h).
"""

import atexit
import dataclasses
import itertools
import pathlib
import pickle
import sys
import threading
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from mok_jax import ops
from mok_jax.config import MoKConfig
from mok_jax.placement import DEFAULT_EXPERT_AXIS

WAYS = ("pointers", "ipc")
"""How a rank reaches its peers' arenas, in the order in which they are tried: raw pointers where one process holds
the whole group, CUDA IPC handles between processes of one machine."""


@dataclasses.dataclass(frozen=True)
class Table:
    """One mesh's peers.

    id: the same on every process, never 0, and the same again after `finalize` and a like `initialize`, since
    compiled programs hold it. key: of this table alone, in the store. bytes: of each arena.
    """

    id: int
    key: str
    way: str
    shape: tuple[tuple[str, int], ...]
    expert_axis: str
    devices: tuple[int, ...]
    bytes: int
    arenas: tuple[tuple[int, int], ...] = ()  # (ordinal, address) of those that this process made
    imported: tuple[tuple[int, int], ...] = ()

    @property
    def ranks(self) -> int:
        return dict(self.shape).get(self.expert_axis, 1)


_tables: list[Table] = []
_serial = itertools.count()  # a key of the store is never used twice
_lock = threading.Lock()


def initialize(
    mesh: Mesh,
    *,
    tokens: int,
    hidden: int,
    top_k: int,
    dtype: Any = jnp.bfloat16,
    expert_axis: str = DEFAULT_EXPERT_AXIS,
    way: str | None = None,
    timeout: float = 120.0,
) -> Table:
    """Makes the arenas of a mesh and maps those of its peers. On every process of the mesh, in the same order.

    Args:
      mesh: a concrete mesh of CUDA devices, at most 72 along the expert axis.
      tokens: the most tokens that one rank passes to `moe`; likewise `hidden` and `top_k`. An arena takes
        16 KiB + 2 T H s + 8 T K + T K (H s + 4) bytes, s being the size of `dtype`, each part rounded up to 256.
      dtype: of x.
      expert_axis: the axis along which ranks exchange rows; a mesh without it has groups of one.
      way: one of WAYS, None for the first that can be.
      timeout: seconds to wait for the other processes.

    Returns:
      The table, which `moe` finds by the mesh; the one that is there already, for the same arguments.

    Raises:
      TypeError, ValueError: a mesh without CUDA devices, sizes out of range, an unknown way.
      RuntimeError: some process cannot reach a peer, or did not come; with the reason, on every process.
    """
    if not isinstance(mesh, Mesh) or mesh.empty:
        raise TypeError(f"distributed.initialize: mesh must be a concrete jax.sharding.Mesh, got {mesh!r}")
    if way is not None and way not in WAYS:
        raise ValueError(f"distributed.initialize: way must be one of {WAYS} or None, got {way!r}")
    for name, value in dict(tokens=tokens, hidden=hidden, top_k=top_k).items():
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            raise ValueError(f"distributed.initialize: {name} must be an integer >= 1, got {value!r}")
    platforms = sorted({device.platform for device in mesh.devices.flat})
    if platforms not in (["gpu"], ["cuda"]):
        raise ValueError(f"distributed.initialize: mesh must have CUDA devices, these are {', '.join(platforms)}")
    groups = groups_of(mesh, expert_axis)
    module = ops.cuda()
    if groups.shape[1] > module.MAX_RANKS:
        raise ValueError(
            f"distributed.initialize: the expert axis {expert_axis!r} must have at most {module.MAX_RANKS} devices, as "
            f"one NVLink domain has, got {groups.shape[1]}; put a data axis across domains"
        )
    sizes = dict(tokens=tokens, hidden=hidden, top_k=top_k, intermediate=16, shared_intermediate=0)
    dims = ops.Dims(
        **sizes,
        local_experts=1,
        ranks=groups.shape[1],
        dtype=jnp.dtype(dtype),
        config=MoKConfig(),
        implementation="cuda",
        gpu=ops.Gpu((9, 0), None),
        table=1,
    )
    with _lock:
        table = _build(module, mesh, groups, expert_axis, dims.arena_bytes(), way, timeout)
        if table not in _tables:
            _tables.append(table)
    _watch()
    return table


def finalize() -> None:
    """Gives every arena back. On every process alike, when no call that uses them is under way."""
    module = ops.cuda()
    with _lock:
        for table in _tables:
            for ordinal, _ in (*table.arenas, *table.imported):
                module.synchronize(ordinal)
            _meet(f"{table.key}/quiet", 120.0)  # nobody writes into what is freed next
            module.remove_table(table.id)
            for ordinal, address in table.imported:
                module.arena_close(ordinal, address)
            _meet(f"{table.key}/closed", 120.0)
            for ordinal, address in table.arenas:
                module.arena_free(ordinal, address)
        _tables.clear()


def tables() -> tuple[Table, ...]:
    """Those in force, the oldest first."""
    return tuple(_tables)


def find(mesh: Mesh | AbstractMesh, expert_axis: str | None, wanted: int) -> Table | None:
    """The table for calls over this mesh whose arenas hold `wanted` bytes, or None.

    Raises:
      ValueError: there is one for the same devices in another order.
    """
    if mesh is None or mesh.empty:
        return None
    axis = expert_axis or DEFAULT_EXPERT_AXIS
    for table in reversed(_tables):
        if table.shape != mesh.shape_tuple or table.bytes < wanted or table.expert_axis != axis:
            continue
        if isinstance(mesh, AbstractMesh):
            return table
        devices = tuple(device.id for device in mesh.devices.flat)
        if devices == table.devices:
            return table
        if sorted(devices) == sorted(table.devices):
            raise ValueError(
                f"moe: the mesh must have its devices in the order {list(table.devices)} that "
                f"mok_jax.distributed.initialize got, got {list(devices)}; initialize with this mesh"
            )
    return None


def why_not(mesh: Mesh | AbstractMesh | None, ranks: int) -> str | None:
    """Why the ranks of this mesh cannot exchange rows, or None where they can."""
    if mesh is not None and any(table.shape == mesh.shape_tuple and table.ranks == ranks for table in _tables):
        return None
    ask = "call mok_jax.distributed.initialize(mesh, ...) on every process first"
    if not isinstance(mesh, Mesh):
        return f"its {ranks} ranks have no peer buffers, and the mesh is abstract here; {ask}"
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        return f"its {ranks} ranks in several processes have no peer buffers; {ask}"
    return _unreachable(ops.cuda(), [device.local_hardware_id for device in mesh.devices.flat])


def groups_of(mesh: Mesh, expert_axis: str) -> np.ndarray:
    """Devices [groups, ranks]: a group for each place on the other axes, numbered as `Placement.index` does."""
    if expert_axis not in mesh.axis_names:
        return mesh.devices.reshape(-1, 1)
    axis = mesh.axis_names.index(expert_axis)
    return np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.devices.shape[axis])


# ---- building ----


def _build(module, mesh: Mesh, groups: np.ndarray, expert_axis: str, size: int, way: str | None, timeout: float):
    devices = tuple(device.id for device in mesh.devices.flat)
    number = zlib.crc32(repr((mesh.shape_tuple, expert_axis, devices, size, way)).encode()) or 1
    there = next((table for table in _tables if table.id == number), None)
    if there is not None:
        return there
    key = f"mok_jax/{next(_serial)}/{number}"
    me = jax.process_index()
    several = len({device.process_index for device in groups.flat}) > 1
    mine = [device for device in groups.flat if device.process_index == me]
    chosen = way or ("ipc" if several else "pointers")
    arenas: list[tuple[int, int]] = []
    imported: list[tuple[int, int]] = []
    published: dict[int, Any] = {}
    complaint = None
    try:
        if chosen == "pointers" and several:
            raise RuntimeError("raw pointers reach only devices of one process")
        reason = _unreachable(module, [device.local_hardware_id for device in mine])
        if reason is not None:
            raise RuntimeError(reason)
        for device in mine:
            # Every kernel is loaded now: a device must not load one while another waits for it at a barrier.
            module.open_device(device.local_hardware_id)
            address = module.arena_allocate(device.local_hardware_id, size)
            arenas.append((device.local_hardware_id, address))
            handle = module.arena_export(device.local_hardware_id, address) if chosen == "ipc" else b""
            published[device.id] = (me, _machine(), address, handle)
    except RuntimeError as error:
        complaint = str(error)
    known = _exchange(f"{key}/arenas", (complaint, published), several, timeout)
    complaint = _first_complaint(known)
    everyone = {key: value for _, part in known.values() for key, value in part.items()}
    if complaint is None:
        try:
            for group, row in enumerate(groups):
                for rank, device in enumerate(row):
                    if device.process_index == me:
                        pointers = [_reach(module, device, peer, everyone[peer.id], me, imported) for peer in row]
                        module.set_table(number, device.local_hardware_id, group, rank, size, pointers)
        except RuntimeError as error:
            complaint = str(error)
        complaint = _first_complaint(_exchange(f"{key}/reached", (complaint, {}), several, timeout))
    if complaint is not None:
        module.remove_table(number)
        for ordinal, address in imported:
            module.arena_close(ordinal, address)
        for ordinal, address in arenas:
            module.arena_free(ordinal, address)
        raise RuntimeError(f'distributed.initialize: {complaint}; use implementation="xla" over these devices')
    return Table(number, key, chosen, mesh.shape_tuple, expert_axis, devices, size, tuple(arenas), tuple(imported))


def _reach(module, device, peer, entry, me: int, imported: list[tuple[int, int]]) -> int:
    """The address of a peer's arena for one device of this process."""
    process, machine, address, handle = entry
    if process == me:  # CUDA refuses to import what the same process exports
        return address
    if machine != _machine():
        raise RuntimeError(
            f"device {peer.id} is on another machine than device {device.id}, which CUDA IPC cannot cross"
        )
    opened = module.arena_import(device.local_hardware_id, handle)
    imported.append((device.local_hardware_id, opened))
    return opened


def _unreachable(module, ordinals: list[int]) -> str | None:
    try:
        reasons = [module.reach(a, b) for a in ordinals for b in ordinals if a != b]
    except RuntimeError as error:
        return str(error)
    return next((reason for reason in reasons if reason), None)


def _machine() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _first_complaint(known: dict[int, tuple[str | None, Any]]) -> str | None:
    found = [(process, complaint) for process, (complaint, _) in sorted(known.items()) if complaint is not None]
    return f"process {found[0][0]}: {found[0][1]}" if found else None


# ---- between processes; jax has no public key-value store ----


def _client():
    from jax._src import distributed  # private, but as it is since jax 0.4

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("distributed.initialize: several processes need jax.distributed.initialize first")
    return client


def _exchange(key: str, value: Any, several: bool, timeout: float) -> dict[int, Any]:
    """Every process's value, by process."""
    me = jax.process_index()
    if not several:
        return {me: value}
    client, milliseconds = _client(), int(timeout * 1000)
    client.key_value_set_bytes(f"{key}/{me}", pickle.dumps(value))
    found = {}
    for process in range(jax.process_count()):
        try:
            found[process] = pickle.loads(client.blocking_key_value_get_bytes(f"{key}/{process}", milliseconds))
        except Exception as error:  # jaxlib raises several types
            raise RuntimeError(
                f"distributed.initialize: process {process} did not come within {timeout:g} s; every process must call "
                "it alike"
            ) from error
    return found


def _meet(key: str, timeout: float) -> None:
    if jax.process_count() > 1:
        _client().wait_at_barrier(key, int(timeout * 1000))


# ---- what a rank has to say while nobody calls ----

_stop = threading.Event()
_watcher: threading.Thread | None = None


def _watch() -> None:
    """Prints faults between ranks soon after they happen: the next call, which raises them, may never come."""
    global _watcher
    if _watcher is None:
        _watcher = threading.Thread(target=_print_reports, name="mok_jax reports", daemon=True)
        _watcher.start()
        atexit.register(_stop_watching, _watcher)


def _stop_watching(watcher: threading.Thread) -> None:
    _stop.set()
    watcher.join(5.0)


def _print_reports() -> None:
    module = ops.cuda()
    stopped = False
    while not stopped:
        stopped = _stop.wait(0.2)  # and once more after that
        for text in module.new_reports():
            print(text, flush=True, file=sys.stderr)
