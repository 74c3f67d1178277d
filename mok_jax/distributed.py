"""Peer GPUs: the arenas through which the ranks of an expert axis exchange rows, and who may reach whom.

`initialize` is called once on every process alike, before anything compiles; where one process holds all
devices of the mesh, `moe` does it itself. A call then only names its table (ffi/cuda/arena.h).

What the two barriers of a call compare is what the call is (direction, dtype, sizes, `swiglu_limit`) and how many calls
the rank has refused, not which layer it is of. So ranks that call two layers of equal sizes in another order, or of
which one skips a call or runs out of memory before it, are noticed only when unlike calls meet, or none comes; until
then the results are wrong. Where one rank alone refuses a call (an earlier fault that it learnt of sooner) the others
wait for its next one, or for `barrier_timeout`, and the group is given up.

A process that dies is also noticed by `jax.distributed` itself, which aborts the others once
`heartbeat_timeout_seconds` (of its `initialize`; 100 by default) have passed: set `barrier_timeout` below that, or that
above it, for mok_jax to name the ranks first. The survivors' exit code is then that of an abort (134), since
`jax.distributed`'s own shutdown waits `shutdown_timeout_seconds` in vain.
"""

import atexit
import collections
import contextlib
import dataclasses
import pathlib
import pickle
import sys
import threading
import time
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from mok_jax import ops
from mok_jax.config import MoKConfig
from mok_jax.placement import DEFAULT_EXPERT_AXIS

__all__ = ["WAYS", "Table", "arena_bytes", "finalize", "initialize", "probe", "tables"]

WAYS = ("pointers", "ipc", "fabric", "nccl")
"""How a rank reaches its peers' arenas: raw pointers where one process holds the whole mesh; between processes, in the
order in which they are tried, CUDA IPC handles on one machine, fabric handles in one NVLink domain, and a window of
NCCL's over the communicator that XLA lends (jaxlib 0.11.2 or newer)."""


@dataclasses.dataclass(frozen=True)
class Table:
    """One mesh's peers.

    id: the same on every process, never 0, and the same again where the arenas are made anew for the same mesh and
    axis, since compiled programs hold it. key: of this table alone, in the store. bytes: of each arena.
    """

    id: int
    key: str
    way: str
    shape: tuple[tuple[str, int], ...]
    expert_axis: str
    devices: tuple[int, ...]
    bytes: int
    processes: tuple[int, ...] = (0,)  # that hold its devices
    arenas: tuple[tuple[int, int], ...] = ()  # (ordinal, address) of those that this process made
    imported: tuple[tuple[int, int], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()  # ways tried before, and why they could not be

    @property
    def ranks(self) -> int:
        return dict(self.shape)[self.expert_axis]


_tables: list[Table] = []
_built: collections.Counter[str] = collections.Counter()  # by key: one of the store is never used twice
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

    Where the mesh has arenas that are too small, larger ones take their place, also for what is compiled: when no
    call that uses them is under way in another thread.

    Args:
      mesh: a concrete mesh of CUDA devices, at most 72 along the expert axis.
      tokens: the most tokens that one rank passes to `moe`; likewise `hidden` and `top_k`. An arena takes
        `arena_bytes` of them.
      dtype: of x, bfloat16 or float32.
      expert_axis: the axis of the mesh along which ranks exchange rows.
      way: one of WAYS, None for the first that can be.
      timeout: seconds to wait for the other processes.

    Returns:
      The table, which `moe` finds by the mesh; the one that is there already, where its arenas are large enough.

    Raises:
      TypeError, ValueError: a mesh without CUDA devices or without the axis, another dtype, sizes out of range, an
        unknown way, or another one than that of the table in force.
      RuntimeError: some process cannot reach a peer, with the reason, on every process; or another one did not come.
    """
    if not isinstance(mesh, Mesh) or mesh.empty:
        raise TypeError(f"distributed.initialize: mesh must be a concrete jax.sharding.Mesh, got {mesh!r}")
    if way is not None and not (isinstance(way, str) and way in WAYS):
        raise ValueError(f"distributed.initialize: way must be one of {WAYS} or None, got {way!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e6:
        raise ValueError(f"distributed.initialize: timeout must be seconds > 0 and below 1e6, got {timeout!r}")
    _check_sizes("distributed.initialize", tokens, hidden, top_k, dtype)
    if expert_axis not in mesh.axis_names:
        raise ValueError(
            f"distributed.initialize: expert_axis must name an axis of the mesh {mesh.axis_names}, got {expert_axis!r}"
        )
    platforms = sorted({device.platform for device in mesh.devices.flat})
    if platforms not in (["gpu"], ["cuda"]):
        raise ValueError(
            f"distributed.initialize: mesh must have CUDA devices, these are {', '.join(platforms)}, which need no "
            "arenas; leave the call out"
        )
    groups = groups_of(mesh, expert_axis)
    module = ops.cuda()
    if groups.shape[1] > module.MAX_RANKS:
        raise ValueError(
            f"distributed.initialize: the expert axis {expert_axis!r} must have at most {module.MAX_RANKS} devices, as "
            f"one NVLink domain has, got {groups.shape[1]}; put a data axis across domains"
        )
    size = arena_bytes(tokens, hidden, top_k, dtype)
    with _lock:
        table = _build(module, mesh, groups, expert_axis, size, way, timeout)
        if table not in _tables:
            _tables.append(table)
    _watch()
    return table


FORMULA = "16 KiB + 2 T H s + 8 T K + T K (H s + 4) bytes, s bytes an element of x, each part rounded up to 256"


def arena_bytes(tokens: int, hidden: int, top_k: int, dtype: Any = jnp.bfloat16) -> int:
    """Bytes of one rank's arena: x, dy, router weights and ids staged, and the window into which peers push rows.

    It does not depend on the number of ranks, the experts, or their width; `FORMULA` says it in words.

    Raises:
      TypeError: a dtype other than bfloat16 and float32.
      ValueError: sizes that are no integers of at least 1, or tokens * top_k of 2**31 and more.
    """
    _check_sizes("distributed.arena_bytes", tokens, hidden, top_k, dtype)
    dims = ops.Dims(
        tokens=tokens,
        hidden=hidden,
        intermediate=16,
        shared_intermediate=0,
        local_experts=1,
        ranks=1,
        top_k=top_k,
        dtype=jnp.dtype(dtype),
        config=MoKConfig(),
    )
    return dims.arena_bytes()


def _check_sizes(who: str, tokens, hidden, top_k, dtype) -> None:
    for name, value in dict(tokens=tokens, hidden=hidden, top_k=top_k).items():
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ValueError(f"{who}: {name} must be an integer >= 1 and below 2**31, got {value!r}")
    if tokens * top_k >= 2**31 or tokens * top_k * hidden >= 2**58:
        raise ValueError(
            f"{who}: tokens * top_k must be below 2**31, and times hidden below 2**58, "
            f"got {tokens}, {top_k} and {hidden}"
        )
    try:
        known = jnp.dtype(dtype).name in ("bfloat16", "float32")
    except TypeError:
        known = False
    if not known:
        raise TypeError(f"{who}: dtype must be bfloat16 or float32, that of x, got {dtype!r}")


def finalize() -> None:
    """Gives every arena back. On every process of their meshes alike, when no call that uses them is under way.

    Raises:
      RuntimeError: another process did not come.
    """
    with _lock:
        while _tables:
            _give_back(ops.cuda(), _tables[0])


def _give_back(module, table: Table, timeout: float = 120.0) -> None:
    for ordinal, _ in (*table.arenas, *table.imported):
        module.synchronize(ordinal)
    _meet(f"{table.key}/quiet", table.processes, timeout)  # nobody writes into what is freed next
    module.remove_table(table.id)
    _tables.remove(table)
    for ordinal, address in table.imported:
        module.arena_close(table.way, ordinal, address)
    _meet(f"{table.key}/closed", table.processes, timeout)  # else arenas stay: peers may still have them mapped
    for ordinal, address in table.arenas:
        module.arena_free(table.way, ordinal, address)


def tables() -> tuple[Table, ...]:
    """Those in force, the oldest first."""
    return tuple(_tables)


def find(mesh: Mesh | AbstractMesh, expert_axis: str | None, wanted: int) -> Table | None:
    """The table for calls over this mesh whose arenas hold `wanted` bytes, or None.

    Raises:
      ValueError: there is one for the same devices in another order, or an abstract mesh may be any of several.
    """
    if mesh is None or mesh.empty:
        return None
    axis = expert_axis or DEFAULT_EXPERT_AXIS
    alike = [table for table in _tables if table.shape == mesh.shape_tuple and table.expert_axis == axis]
    if isinstance(mesh, AbstractMesh) and len({table.devices for table in alike}) > 1:
        raise ValueError(
            f"moe: the mesh must be concrete (mesh=) where several of its shape have arenas, those of devices "
            f"{' and '.join(str(list(table.devices)) for table in alike)}; got an abstract one"
        )
    for table in alike:
        if table.bytes < wanted:
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
    axis = mesh.axis_names.index(expert_axis)
    return np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.devices.shape[axis])


# ---- building ----


def _build(module, mesh: Mesh, groups: np.ndarray, expert_axis: str, size: int, way: str | None, timeout: float):
    devices = tuple(device.id for device in mesh.devices.flat)
    # Alike on every process of the mesh, whatever others have built besides. Without the way: a compiled call holds
    # this number, and it may be reached by another way after `finalize`.
    number = zlib.crc32(repr((mesh.shape_tuple, expert_axis, devices)).encode()) or 1
    there = next((table for table in _tables if table.id == number), None)
    if there is not None:
        if way not in (None, there.way):
            raise ValueError(
                f"distributed.initialize: way must be {there.way!r} or None while these arenas are there, got {way!r}; "
                "call mok_jax.distributed.finalize first"
            )
        if there.bytes >= size:
            return there
        _give_back(module, there, timeout)
        way = there.way
    processes = tuple(sorted({device.process_index for device in groups.flat}))
    refused: list[tuple[str, str]] = []
    with _numbered(f"mok_jax/{number}", processes, timeout) as key:
        for candidate in (way,) if way else WAYS[1:] if len(processes) > 1 else WAYS[:1]:
            attempt = _Attempt(module, candidate, groups, size, f"{key}/{candidate}", processes, timeout)
            complaint = attempt.run(mesh, number)
            if complaint is None:
                return Table(
                    number,
                    key,
                    candidate,
                    mesh.shape_tuple,
                    expert_axis,
                    devices,
                    size,
                    processes,
                    tuple(attempt.arenas),
                    tuple(attempt.imported),
                    tuple(refused),
                )
            refused.append((candidate, complaint))
    reasons = "; ".join(f"{name}: {complaint}" for name, complaint in refused)
    raise RuntimeError(f'distributed.initialize: {reasons}; use implementation="xla" over these devices')


@dataclasses.dataclass
class _Attempt:
    """One way tried on every process: its steps end alike everywhere, with None or what went wrong first."""

    module: Any
    way: str
    groups: np.ndarray
    size: int
    key: str
    processes: tuple[int, ...]
    timeout: float
    arenas: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    imported: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    windows: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # by device: of each rank of NCCL's

    def run(self, mesh: Mesh, number: int) -> str | None:
        ended = False  # not where a process did not come
        imported_from = False  # whether others may have opened what is made here
        try:
            complaint, sizes = self._step("open", self._open)
            if len({*sizes}) > 1:
                complaint = (
                    f"the processes ask for arenas of {sizes} bytes; every process of the mesh must call it alike"
                )
            if complaint is None:
                complaint, published = self._step("made", lambda: self._make(mesh))
            if complaint is None:
                everyone = {key: value for part in published for key, value in part.items()}
                imported_from = True
                complaint, _ = self._step("reached", lambda: self._reach_all(number, everyone))
            ended = True
        finally:
            if not ended or complaint is not None:
                self._undo(number, imported_from)
        return complaint

    def _undo(self, number: int, imported_from: bool) -> None:
        self.module.remove_table(number)
        for ordinal, address in self.imported:
            self.module.arena_close(self.way, ordinal, address)
        try:
            if imported_from:
                _meet(f"{self.key}/closed", self.processes, self.timeout)
        except Exception as error:  # jaxlib raises several types
            print(
                f"mok_jax: arenas stay until the process ends, since peers may still use them: {error}",
                file=sys.stderr,
            )
            return
        for ordinal, address in self.arenas:
            self.module.arena_free(self.way, ordinal, address)

    def _step(self, name: str, act) -> tuple[str | None, list[Any]]:
        """The first complaint of any process, and what `act` returned on each."""
        mine: tuple[str | None, Any]
        try:
            mine = None, act()
        except Exception as error:  # of whatever kind: the other processes wait for what comes of this step
            mine = str(error) if isinstance(error, RuntimeError) else repr(error), None
        known = _exchange(f"{self.key}/{name}", mine, self.processes, self.timeout)
        for process, (complaint, _) in sorted(known.items()):
            if complaint is not None:
                return f"process {process}: {complaint}", []
        return None, [value for _, value in known.values()]

    @property
    def _mine(self) -> list[Any]:
        return [device for device in self.groups.flat if device.process_index == jax.process_index()]

    def _open(self) -> int:
        if self.way == "pointers" and len(self.processes) > 1:
            raise RuntimeError("raw pointers reach only devices of one process")
        ordinals = [device.local_hardware_id for device in self._mine]
        reason = _unreachable(self.module, ordinals)
        if reason is not None:
            raise RuntimeError(reason)
        for ordinal in ordinals:
            # Every kernel is loaded now: a device must not load one while another waits for it at a barrier.
            self.module.open_device(ordinal)
        return self.size

    def _make(self, mesh: Mesh) -> dict[int, Any]:
        """(process, machine, address, handle) of each device here; of NCCL's windows the handle is its rank."""
        published = {}
        if self.way == "nccl":
            _make_windows(self.module, mesh, self.groups, self.size)
        for device in self._mine:
            ordinal = device.local_hardware_id
            if self.way == "nccl":
                address, handle, self.windows[device.id] = self.module.window(ordinal)
            else:
                address = self.module.arena_allocate(self.way, ordinal, self.size)
            self.arenas.append((ordinal, address))
            if self.way != "nccl":
                handle = self.module.arena_export(self.way, ordinal, address)
            published[device.id] = (jax.process_index(), _machine(), address, handle)
        return published

    def _reach_all(self, number: int, everyone: dict[int, Any]) -> None:
        for group, row in enumerate(self.groups):
            for rank, device in enumerate(row):
                if device.process_index == jax.process_index():
                    pointers = [self._reach(device, peer, everyone[peer.id]) for peer in row]
                    self.module.set_table(number, device.local_hardware_id, group, rank, self.size, pointers)

    def _reach(self, device, peer, entry) -> int:
        """The address of a peer's arena for one device of this process."""
        process, machine, address, handle = entry
        if self.way == "nccl":
            return self.windows[device.id][handle]
        if process == jax.process_index():  # CUDA refuses to import what the same process exports
            return address
        if self.way == "ipc" and machine != _machine():
            raise RuntimeError(
                f"device {peer.id} is on another machine than device {device.id}, which CUDA IPC cannot cross"
            )
        opened = self.module.arena_import(self.way, device.local_hardware_id, handle, self.size)
        self.imported.append((device.local_hardware_id, opened))
        return opened


def _make_windows(module, mesh: Mesh, groups: np.ndarray, size: int) -> None:
    """Arenas of NCCL's, registered over communicators that XLA lends: by a program of all processes."""
    if "mok_window" not in module.targets():
        raise RuntimeError(
            f"mok_jax was built with the headers of jaxlib {module.JAXLIB_VERSION}, by which XLA lends no communicator"
        )
    position = {device.id: number for number, device in enumerate(mesh.devices.flat)}
    ids = np.asarray([position[device.id] for device in groups.flat], np.int64)
    call = jax.ffi.ffi_call("mok_window", jax.ShapeDtypeStruct((1,), jnp.int32), has_side_effect=True)
    attributes = dict(groups=ids, ranks=np.int64(groups.shape[1]), bytes=np.int64(size))
    run = jax.shard_map(
        lambda: call(**attributes), mesh=mesh, in_specs=(), out_specs=P(mesh.axis_names), check_vma=False
    )
    jax.block_until_ready(jax.jit(run)())


def probe(ways: tuple[str, ...] = WAYS) -> dict[str, str | None]:
    """Why each of these ways is not open to the CUDA devices of this process, or None where it is.

    Raises:
      ImportError: the package was built without CUDA.
      RuntimeError: there is no CUDA device.
    """
    module = ops.cuda()
    devices = jax.local_devices(backend="cuda")
    ordinals = [device.local_hardware_id for device in devices]
    mesh = Mesh(np.array(devices), (DEFAULT_EXPERT_AXIS,))

    def attempt(way: str) -> str | None:
        try:
            if way == "pointers":
                return _unreachable(module, ordinals)
            if way == "nccl":
                _make_windows(module, mesh, groups_of(mesh, DEFAULT_EXPERT_AXIS), 1)
                for ordinal in ordinals:
                    module.arena_free(way, ordinal, module.window(ordinal)[0])
                return None
            address = module.arena_allocate(way, ordinals[0], 1)
            try:
                module.arena_export(way, ordinals[0], address)
            finally:
                module.arena_free(way, ordinals[0], address)
        except RuntimeError as error:
            return str(error)
        return None

    return {way: attempt(way) for way in ways}


def _unreachable(module, ordinals: list[int]) -> str | None:
    try:
        reasons = [module.reach(a, b) for a in ordinals for b in ordinals if a != b]
    except RuntimeError as error:
        return str(error)
    return next((reason for reason in reasons if reason), None)


def _machine() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# ---- between processes; jax has no public key-value store ----


def _client():
    from jax._src import distributed  # private, but as it is since jax 0.4

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("distributed.initialize: several processes need jax.distributed.initialize first")
    return client


@contextlib.contextmanager
def _numbered(key: str, processes: tuple[int, ...], timeout: float):
    """The key of one build: with a number that the first process gives, since another one may have missed some."""
    first, now = processes[0], f"{key}/now"
    number = _built[key]
    if jax.process_index() == first:
        if len(processes) > 1:
            _client().key_value_set(now, str(number))
    else:
        deadline = time.monotonic() + timeout
        known = -1
        while known < number:  # that of the last build may still be there
            left = max(0, int(1000 * (deadline - time.monotonic())))
            try:
                known = int(_client().blocking_key_value_get(now, left))
            except Exception as error:  # jaxlib raises several types
                raise _missing(first, timeout) from error
            if known < number:
                time.sleep(0.02)
                if time.monotonic() > deadline:
                    raise _missing(first, timeout)
        number = known
    _built[key] = number + 1
    try:
        yield f"{key}/{number}"
    finally:
        if jax.process_index() == first and len(processes) > 1:
            _client().key_value_delete(now)


def _missing(process: int, timeout: float) -> RuntimeError:
    return RuntimeError(
        f"distributed.initialize: process {process} did not come within {timeout:g} s; "
        "every process of the mesh must call it alike"
    )


def _exchange(key: str, value: Any, processes: tuple[int, ...], timeout: float) -> dict[int, Any]:
    """The value of each of these processes, by process."""
    me = jax.process_index()
    if len(processes) == 1:
        return {me: value}
    client, milliseconds = _client(), int(timeout * 1000)
    client.key_value_set_bytes(f"{key}/{me}", pickle.dumps(value))
    found = {}
    for process in processes:
        try:
            found[process] = pickle.loads(client.blocking_key_value_get_bytes(f"{key}/{process}", milliseconds))
        except Exception as error:  # jaxlib raises several types
            raise _missing(process, timeout) from error
    return found


def _meet(key: str, processes: tuple[int, ...], timeout: float) -> None:
    if len(processes) == 1:
        return
    client = _client()
    try:
        client.wait_at_barrier(key, int(timeout * 1000), list(processes))
    except Exception as error:  # jaxlib raises several types
        raise RuntimeError(
            f"mok_jax.distributed: the processes {list(processes)} did not all come to give arenas back; every one "
            f"must call initialize, with the same sizes, and finalize alike: {str(error).partition(chr(10))[0]}"
        ) from error


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
