"""Segments compiled by torch's inductor, used for exactly the shapes that they were compiled for.

A segment's graph goes straight to ``compile_fx``, the back end of ``torch.compile``: as it is a graph already, nothing
has to be traced or guarded, and nothing is recompiled implicitly. The result is called under autograd like the graph
itself, so tape, backward modes and weights as arguments work unchanged.

All compilation happens in :meth:`CompiledSegment.compile`, before workers start. A later call with other shapes (a
short batch at an epoch's end) runs the uncompiled graph. The choice depends on the shapes alone, so a run and its
reference make the same one.

In ``mixed`` the tape must hold what the forward computed, so every value that the backward needs is saved. In the other
modes torch's min-cut partitioner may have the backward recompute cheap values, from the same weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
import torch.fx

from roundelay.deferred_signals import hides_interrupt
from roundelay.errors import CaptureError, PlanError
from roundelay.frontend.stages.keyed_rng import RngKey, keyed_call

Call = Callable[..., Sequence[Any]]
Key = tuple[Any, ...]


@final
class CompiledSegment:
    """A segment's function: compiled for the shapes that it was compiled for, uncompiled for all others.

    Args:
        piece: the segment as a graph of parameters, buffers, inputs and the RNG key.
        plain: computes it uncompiled, in the precision of the plan.
        autocast: creates the autocast context in which it is compiled.
        saves_all: whether the tape holds everything that the backward needs, and nothing is recomputed.
    """

    def __init__(
        self,
        piece: torch.fx.GraphModule,
        plain: Call,
        autocast: Callable[[], AbstractContextManager[Any]],
        *,
        saves_all: bool,
    ) -> None:
        self.piece, self.plain, self.autocast, self.saves_all = piece, plain, autocast, saves_all
        #: key of a call's arguments to the compiled function
        self.compiled: dict[Key, Call] = {}

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Call the segment; see :attr:`roundelay.frontend.stages.segment.Segment.call`."""
        function = self.compiled.get(_key(args))
        results: Sequence[Any] = self.plain(*args) if function is None else function(*_tensors(args))
        return results

    def compile(self, *args: Any) -> Sequence[Any]:
        """Compile the segment for the shapes of these arguments unless it is already, and call it.

        Raises:
            CaptureError: it cannot be compiled.
        """
        key = _key(args)
        function = self.compiled.get(key) or self._compile(args)
        try:
            results = function(*_tensors(args))
        except Exception as error:  # some operators compile, and fail when they are called
            raise self._failed(error) from error
        self.compiled[key] = function
        return results

    def _compile(self, args: Sequence[Any]) -> Call:
        random = next((node for node in self.piece.graph.nodes if node.target is keyed_call), None)
        if random is not None:
            raise self._refused(f"the random operation {random.args[0]}, which runs uncompiled only")
        graph = _with_constants(self.piece, args)
        try:
            with warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore")  # deprecations within inductor
                from torch._inductor.compile_fx import compile_fx  # takes seconds to import

                with _settings(self.saves_all), self.autocast():
                    compiled: Any = compile_fx(graph, _tensors(args))
        except Exception as error:  # whatever torch, the compiler or an operator without a lowering raises
            raise self._failed(error) from error
        function: Call = compiled
        return function

    def _failed(self, error: Exception) -> BaseException:
        if hides_interrupt(error):
            return KeyboardInterrupt()
        return self._refused(f"{type(error).__name__}: {str(error).strip()[:500]}")

    def _refused(self, why: str) -> CaptureError:
        names = [node.name for node in self.piece.graph.nodes if node.op == "call_function"]
        return CaptureError(
            f"compiling operations {names[0]} to {names[-1]}",
            got=why,
            expected="operations that torch.compile's inductor can compile",
            remedy="Leave --compile out (compile = false in the plan): the model trains without it.",
        )


def check_compiler() -> None:
    """Check that there is a C++ compiler, which inductor needs.

    Raises:
        PlanError: there is none.
    """
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:  # an error of torch's own, or of the system
        raise PlanError(
            "compile = true in the plan, or --compile",
            got=f"no C++ compiler: {str(error).strip()[:300] or type(error).__name__}",
            expected="a C++ compiler that can be called, such as g++",
            remedy="Install one (Debian: apt install g++), name it in CXX, or leave --compile out.",
        ) from error


def _key(args: Sequence[Any]) -> Key:
    """What compiled code is specialised on: intra-op threads, tensors' layouts and every other value but the RNG key.

    Inductor writes the number of threads into the code.
    """
    layouts = [
        (arg.shape, arg.stride(), arg.dtype, arg.device) if isinstance(arg, torch.Tensor) else arg for arg in args[:-1]
    ]
    return (torch.get_num_threads(), *layouts)


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of a call; the RNG key becomes one of them, as otherwise it would be compiled in."""
    rng_key: RngKey = args[-1]
    return [*(arg for arg in args[:-1] if isinstance(arg, torch.Tensor)), rng_key.tensor()]


def _with_constants(piece: torch.fx.GraphModule, args: Sequence[Any]) -> torch.fx.GraphModule:
    """Return a copy of the graph in which inputs that are no tensors (sizes) are constants."""
    graph, arguments = torch.fx.Graph(), iter(args)
    env: dict[torch.fx.Node, Any] = {}
    for node in piece.graph.nodes:
        arg = next(arguments) if node.op == "placeholder" else None
        constant = node.op == "placeholder" and not isinstance(arg, torch.Tensor | RngKey)
        env[node] = arg if constant else graph.node_copy(node, lambda n: env[n])
    return torch.fx.GraphModule(piece, graph)


@contextmanager
def _settings(saves_all: bool) -> Iterator[None]:
    """Compile in this process and thread only, forward and backward together, and leave no thread running.

    Inductor's helper processes and tqdm's monitor thread would otherwise outlive this and meet later forks of workers.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch.hub import tqdm  # type: ignore[attr-defined]

    partitioner = _keep_all() if saves_all else None
    interval = getattr(tqdm, "monitor_interval", None)
    if interval is not None:
        tqdm.monitor_interval = 0
    try:
        with (
            inductor.patch(compile_threads=1, custom_partitioner_fn=partitioner),
            functorch.patch(force_non_lazy_backward_lowering=True),
        ):
            yield
    finally:
        if interval is not None:
            tqdm.monitor_interval = interval


def _keep_all() -> Any:
    """Return a partitioner with which the backward recomputes nothing."""
    from torch._functorch.partitioners import default_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class KeepAll(CustomPartitionerFn):
        """torch's default partition, which saves every value that the backward needs."""

        def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            kwargs.pop("compiler", None)
            return default_partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return "roundelay: default_partition"

    return KeepAll()
