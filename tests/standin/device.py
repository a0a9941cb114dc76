"""CUDA devices that are none, in a torch that was built for the CPU alone; see ``device.cpp``.

Importing this module makes them: ``python -m pytest -p tests.standin.device``, or ``python -m tests.standin``. It must
come before torch, which looks for CUDA once, while it is imported. From the environment:

- ``ROUNDELAY_STANDIN_DEVICES``: how many devices there are (2);
- ``ROUNDELAY_STANDIN_MEMORY``: bytes of each (16 GiB);
- ``ROUNDELAY_STANDIN_CACHE``: the folder of the compiled library.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.standin.build import library, torch_folder

PRELOADED = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so")
"""Of torch: what the library needs before torch itself is imported."""


def _loaded() -> ctypes.CDLL:
    """The library, loaded into this process.

    Raises:
        RuntimeError: torch was there first.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported before tests.standin.device, and has found no CUDA")
    path = library()
    for name in PRELOADED:
        found = torch_folder() / "lib" / name
        ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(path))
    for name in ("calls", "capacity", "count", "host_reads", "num_races"):
        getattr(loaded, f"standin_{name}").restype = ctypes.c_int64
    loaded.standin_race.restype, loaded.standin_race.argtypes = ctypes.c_char_p, (ctypes.c_int64,)
    loaded.standin_limit.argtypes = (ctypes.c_int, ctypes.c_int64)
    loaded.standin_sleep.argtypes = (ctypes.c_double,)
    return loaded


_LIBRARY = _loaded()

import torch  # noqa: E402
from torch import accelerator, cuda  # noqa: E402

COUNT: int = _LIBRARY.standin_count()
CAPACITY: int = _LIBRARY.standin_capacity()
NAME = "stand-in for a CUDA device"
CYCLES_PER_MS = 2e6
"""Of the clock by which ``torch.cuda._sleep`` counts."""

MOST_THREADS = 1024


def calls() -> int:
    """Operators that devices have run in this process."""
    return int(_LIBRARY.standin_calls())


def host_reads() -> dict[int, int]:
    """How often a thread (``threading.get_ident()``) has waited for a device's numbers.

    These are ``item``, copies to the host that are not to pinned memory and non-blocking, and operators such as
    ``nonzero``, whose result's size is read.
    """
    threads, counts = (ctypes.c_uint64 * MOST_THREADS)(), (ctypes.c_int64 * MOST_THREADS)()
    found = min(MOST_THREADS, _LIBRARY.standin_host_reads(threads, counts, MOST_THREADS))
    return {threads[i]: counts[i] for i in range(found)}


def races(since: int = 0) -> list[str]:
    """Uses of memory by streams that have not waited for each other, as they were found, the first so many left out."""
    return [_LIBRARY.standin_race(k).decode() for k in range(since, _LIBRARY.standin_num_races())]


def limit(num_bytes: int, device: Any = None) -> None:
    """Let a device have so many bytes; more are refused with ``torch.OutOfMemoryError``."""
    _LIBRARY.standin_limit(_index(device), num_bytes)


def fail_assertion() -> None:
    """Let every later call of a device raise ``torch.AcceleratorError``, as after a kernel's failed assertion."""
    _LIBRARY.standin_assert()


def _index(device: Any = None) -> int:
    """The number of a device, given as ``torch.cuda`` accepts it."""
    if device is None:
        return accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index: int | None = torch.device(device).index
    return accelerator.current_device_index() if index is None else index


class Stream:
    """As ``torch.cuda.Stream``: a ``torch.Stream``, as torch's own class needs torch's CUDA."""

    def __new__(cls, device: Any = None, priority: int = 0, **more: Any) -> Any:
        """A new stream on the device."""
        return torch.Stream(device=torch.device("cuda", _index(device)), priority=priority)


class Event:
    """As ``torch.cuda.Event``: a ``torch.Event``."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        """A new event."""
        return torch.Event(device="cuda", enable_timing=enable_timing)


@contextmanager
def _stream(stream: Any) -> Iterator[None]:
    """As ``torch.cuda.stream``: the stream and its device are the thread's current ones."""
    if stream is None:
        yield
        return
    device, before = accelerator.current_device_index(), accelerator.current_stream(stream.device)
    accelerator.set_stream(stream)
    try:
        yield
    finally:
        accelerator.set_stream(before)
        accelerator.set_device_index(device)


def _exchange(index: int) -> int:
    """Make a device current, unless it is -1; the one that was."""
    before: int = accelerator.current_device_index()
    if index >= 0:
        accelerator.set_device_index(index)
    return before


def _properties(device: Any = None) -> Any:
    index = _index(device)
    if not 0 <= index < COUNT:
        raise AssertionError("Invalid device id")
    more = {"multi_processor_count": 1, "is_integrated": 0, "gcnArchName": "", "warp_size": 32}
    return SimpleNamespace(name=NAME, major=8, minor=0, total_memory=CAPACITY, **more)


def _fraction(fraction: float, device: Any = None) -> None:
    limit(int(fraction * CAPACITY), device)


def _copied(storage: Any) -> Any:
    """A copy of a storage: for one of CUDA's a torch for the CPU has no constructor."""
    room = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
    return room.untyped_storage().copy_(storage)


def _resized(resize: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """``UntypedStorage.resize_``, for storages of devices too."""

    def resized(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        torch.ops.standin.resize_storage(storage, size)
        return storage

    return resized


def _sync_mode(mode: int | str) -> None:
    _LIBRARY.standin_sync_mode({"default": 0, "warn": 1, "error": 2}.get(str(mode), mode))


def _of_device(function: Callable[[int], Any]) -> Callable[..., Any]:
    """A function of torch.accelerator that takes a device as torch.cuda's do."""
    return lambda device=None: function(_index(device))


def _default_generators() -> tuple[torch.Generator, ...]:
    """Those of the devices, as ``torch.Generator`` gives them while the library lends them."""
    _LIBRARY.standin_lend_defaults(1)
    made = tuple(torch.Generator(torch.device("cuda", k)) for k in range(COUNT))
    _LIBRARY.standin_lend_defaults(0)
    return made


def _random_functions() -> dict[str, Callable[..., Any]]:
    """Those of ``torch.cuda`` that seed and keep the devices' default generators."""
    generators: tuple[Any, ...] = cuda.default_generators

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def seed_one(seed: int) -> None:
        generators[_index()].manual_seed(seed)

    def restore(state: Any, device: Any = "cuda") -> None:
        generators[_index(device)].set_state(state)

    def restore_all(states: Any) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    return {
        "manual_seed": seed_one,
        "manual_seed_all": seed_all,
        "initial_seed": lambda: generators[_index()].initial_seed(),
        "get_rng_state": lambda device="cuda": generators[_index(device)].get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state": restore,
        "set_rng_state_all": restore_all,
    }


def _memory_functions() -> dict[str, Callable[..., Any]]:
    """Those of ``torch.cuda`` that tell of memory."""
    names = ("allocated", "reserved")
    told = {
        f"{most}memory_{name}": _of_device(getattr(accelerator, f"{most}memory_{name}"))
        for most in ("", "max_")
        for name in names
    }
    return told | {
        "memory_stats": _of_device(accelerator.memory_stats),
        "reset_peak_memory_stats": _of_device(accelerator.reset_peak_memory_stats),
        "reset_accumulated_memory_stats": _of_device(accelerator.reset_accumulated_memory_stats),
        "mem_get_info": _of_device(torch._C._accelerator_getMemoryInfo),
        "empty_cache": accelerator.memory.empty_cache,
        "set_per_process_memory_fraction": _fraction,
    }


def _device_functions() -> dict[str, Any]:
    """The rest of ``torch.cuda`` that is used without a kernel."""
    return {
        "_lazy_init": lambda: None,
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "_sleep": lambda cycles: _LIBRARY.standin_sleep(cycles / CYCLES_PER_MS),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: COUNT,
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(_index(device)),
        "synchronize": lambda device=None: accelerator.synchronize(_index(device)),
        "current_stream": lambda device=None: accelerator.current_stream(_index(device)),
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=1),
        "stream": _stream,
        "Stream": Stream,
        "Event": Event,
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties(device).name,
        "get_device_capability": lambda device=None: (8, 0),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": _sync_mode,
    }


def _install() -> None:
    """Put all of it in the place of torch's own."""
    setattr(cuda, "default_generators", _default_generators())  # noqa: B010  typed otherwise
    for name, value in {**_device_functions(), **_memory_functions(), **_random_functions()}.items():
        setattr(cuda, name, value)
    others: tuple[tuple[Any, str, Any], ...] = (
        (torch.storage._StorageBase, "clone", _copied),
        (torch.UntypedStorage, "resize_", _resized(torch.UntypedStorage.resize_)),
        (torch.backends.cudnn, "is_acceptable", lambda tensor: False),  # torch's own warns that it has none
    )
    for owner, name, value in others:
        setattr(owner, name, value)
    os.register_at_fork(after_in_child=_lose)


def _lose() -> None:
    """A process that was forked from one with devices can use none of them."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: initialization error")

    for owner, name, value in (
        (cuda, "_is_in_bad_fork", lambda: True),
        (cuda, "is_initialized", lambda: False),
        (cuda, "is_current_stream_capturing", refuse),
        (accelerator, "current_stream", refuse),
    ):
        setattr(owner, name, value)
    fail_assertion()


_install()
