"""Segments compiled by torch's inductor, for exactly the shapes that they were compiled for.

A segment's graph goes to ``compile_fx``, the back end of ``torch.compile``, without the front end: it is a graph
already, so nothing has to be traced, guarded or recompiled behind anybody's back. The result is called under autograd
like the piece itself, so tape, backward modes and weights as arguments stay what they are.

Every compilation happens in :meth:`CompiledSegment.learn`, before workers start. Afterwards a call whose tensors have
other shapes than those learned (a short batch at an epoch's end) is computed by the uncompiled piece. Which of the two
it is depends on the shapes alone, so a run and its reference take the same one.

The tape of ``mixed`` must hold what the forward computed: there every value that backward needs is saved. In the other
modes torch's min-cut partitioner may have backward compute cheap values again, from the same weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
import torch.fx

from roundelay.deferred_signals import hides_interrupt
from roundelay.errors import CaptureError, PlanError
from roundelay.frontend.keyed_rng import RngKey, keyed_call

Call = Callable[..., Sequence[Any]]
Key = tuple[Any, ...]


@final
class CompiledSegment:
    """One segment: compiled where its shapes have been learned, the plain piece elsewhere.

    Args:
        piece: the segment as a graph of parameters, buffers, inputs and the draw key.
        plain: what computes it uncompiled, in the precision of the plan.
        autocast: makes the context in which the compiler sees that precision's casts, and compiles them in.
        saves_all: the tape holds all that backward needs, and nothing is computed again.
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
        #: shapes of a call's tensors to the compiled function
        self.known: dict[Key, Call] = {}

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Call it; see :attr:`roundelay.frontend.segment.Segment.call`."""
        made = self.known.get(_key(args))
        results: Sequence[Any] = self.plain(*args) if made is None else made(*_tensors(args))
        return results

    def learn(self, *args: Any) -> Sequence[Any]:
        """Call it, compiled for these shapes from now on.

        Raises:
            CaptureError: it cannot be compiled.
        """
        key = _key(args)
        made = self.known.get(key) or self._compiled(args)
        try:
            results = made(*_tensors(args))
        except Exception as error:  # some operators compile, and fail when they are called
            raise self._failed(error) from error
        self.known[key] = made
        return results

    def _compiled(self, args: Sequence[Any]) -> Call:
        odd = next((node for node in self.piece.graph.nodes if node.target is keyed_call), None)
        if odd is not None:
            raise self._refused(f"the random operation {odd.args[0]}, whose numbers only the uncompiled operator draws")
        graph = _bound(self.piece, args)
        try:
            with warnings.catch_warnings(), torch.enable_grad():
                warnings.simplefilter("ignore")  # of torch's to torch: deprecations within inductor
                from torch._inductor.compile_fx import compile_fx  # imports for seconds: only who compiles waits

                with _settings(self.saves_all), self.autocast():
                    made: Any = compile_fx(graph, _tensors(args))
        except Exception as error:  # whatever torch, the compiler or an operator without a lowering says
            raise self._failed(error) from error
        called: Call = made
        return called

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
    """See that there is a C++ compiler, for which inductor writes.

    Raises:
        PlanError: there is none.
    """
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:  # torch has an error of its own for it, the system others
        raise PlanError(
            "compile = true in the plan, or --compile",
            got=f"no C++ compiler: {str(error).strip()[:300] or type(error).__name__}",
            expected="a C++ compiler that can be called, such as g++",
            remedy="Install one (Debian: apt install g++), name it in CXX, or leave --compile out.",
        ) from error


def _key(args: Sequence[Any]) -> Key:
    """What code is specialised on: layout of every tensor, value of everything else but the key of random numbers."""
    return tuple(
        (arg.shape, arg.stride(), arg.dtype, arg.device) if isinstance(arg, torch.Tensor) else arg for arg in args[:-1]
    )


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of a call; the draw key is one of them, or it would be part of the code."""
    draw: RngKey = args[-1]
    return [*(arg for arg in args[:-1] if isinstance(arg, torch.Tensor)), draw.tensor()]


def _bound(piece: torch.fx.GraphModule, args: Sequence[Any]) -> torch.fx.GraphModule:
    """A copy of the piece in which inputs that are no tensors (sizes) are constants."""
    graph = copy.deepcopy(piece.graph)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    for node, arg in zip(places[:-1], args[:-1], strict=True):
        if not isinstance(arg, torch.Tensor):
            _substitute(node, arg)
            graph.erase_node(node)
    return torch.fx.GraphModule(piece, graph)


def _substitute(node: torch.fx.Node, value: Any) -> None:
    """Put a value in the place of a node, wherever it is used."""

    def of(other: torch.fx.Node) -> Any:
        return value if other is node else other

    for user in list(node.users):
        user.args, user.kwargs = torch.fx.node.map_arg((user.args, user.kwargs), of)


@contextmanager
def _settings(saves_all: bool) -> Iterator[None]:
    """Compile in this process and thread alone, forward and backward at once, and leave no thread behind.

    Inductor's helper processes and tqdm's monitor thread would live on beside workers that are forked later.
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
    """A partitioner that has backward compute nothing again."""
    from torch._functorch.partitioners import default_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class KeepAll(CustomPartitionerFn):
        """torch's own plain one."""

        def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            kwargs.pop("compiler", None)
            return default_partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return "roundelay: default_partition"

    return KeepAll()
