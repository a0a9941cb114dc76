"""Finds the parameters that an optimizer's step may not treat element by element, by the operations that it applies.

Where a worker has a part of a parameter, its optimizer sees that part alone. The update is the whole one's if every
element's depends on that element's own gradients and states. A step shows this by its operations: each result of what
comes from a parameter or its gradient is pointwise and has the parameter's shape. A mean, a norm, a product of
matrices, another view, a number read into Python, or another parameter may make it depend on more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from roundelay.reach.source_lines import users_line

_ALSO = {
    *("copy_", "fill_", "zero_", "abs_", "masked_fill", "masked_fill_", "detach", "alias", "_to_copy", "lift_fresh"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "view_as_real", "view_as_complex"),
    *("_conj", "resolve_conj", "_neg_view", "resolve_neg"),
}
"""Operations on elements that torch does not tag as pointwise, and those that read none."""

_SAME_SHAPE = {"view", "expand", "_unsafe_view", "_reshape_alias"}
"""Views that are the tensor itself where they have its shape."""

_FUSED = {"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"}

_FOREACH = "_foreach_"

_OVER_ALL = {"norm", "max", "mm", "powsum"}
"""What torch's operations on lists compute over all of a tensor."""


@final
class ElementwiseWatch(TorchDispatchMode):
    """Watches the steps within the block.

    Args:
        named: the parameters; their gradients are to be given by :meth:`gradient`.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: by parameter, the first operation that shows no elementwise update, and its line
        self.found: dict[str, str] = {}
        self._from: Any = WeakIdKeyDictionary()
        for name, parameter in named.items():
            self.follow(name, parameter)

    def follow(self, name: str, tensor: torch.Tensor) -> None:
        """Count a tensor as one that comes from a parameter."""
        self._from[tensor] = frozenset([name])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation unchanged."""
        result = func(*args, **(kwargs or {}))
        for given, made in _each(func, args, kwargs or {}, result):
            names = frozenset[str]().union(*(self._from.get(tensor, ()) for tensor in given))
            if not names:
                continue
            if len(names) > 1 or not _per_element(func, [t for t in given if t in self._from], made):
                for name in names:
                    self.found.setdefault(name, f"{_name(func)}{users_line()}")
            for tensor in made:
                self._from[tensor] = names | self._from.get(tensor, frozenset())
        return result


def _name(func: Any) -> str:
    return str(func.name()).removeprefix("aten::").split(".")[0]


Operands = list[torch.Tensor]


def _each(func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[tuple[Operands, Operands]]:
    """Tensors given, and those made or written; one after the other for an operation on lists of tensors."""
    written = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if not _name(func).startswith((_FOREACH, "_fused_")):
        yield _tensors((args, kwargs)), _tensors((result, written))
        return
    given = [*args, *kwargs.values()]
    lists, rest = [v for v in given if isinstance(v, (list, tuple))], [v for v in given if isinstance(v, torch.Tensor)]
    made = [v for v in (result, *written) if isinstance(v, (list, tuple))]
    for i in range(max(map(len, lists), default=0)):
        yield _tensors([_at(one, i) for one in lists]) + rest, _tensors([_at(one, i) for one in made])


def _at(values: Sequence[Any], i: int) -> Any:
    return values[i] if i < len(values) else None


def _tensors(tree: Any) -> Operands:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _per_element(func: Any, given: Operands, made: Operands) -> bool:
    """Whether every element of the results depends on the same element of what is given alone."""
    name = _name(func)
    alike = all(tensor.shape == one.shape for tensor in given for one in made)
    if name in ("view_as_real", "view_as_complex"):
        return True
    if name in _FUSED:
        return True
    if not alike or not made:
        return False
    if name.startswith(_FOREACH):
        base = name.removeprefix(_FOREACH)
        return base not in _OVER_ALL and (base in _ALSO or _is_pointwise(base))
    return name in _ALSO or name in _SAME_SHAPE or torch.Tag.pointwise in func.tags


def _is_pointwise(base: str) -> bool:
    packet: Any = getattr(torch.ops.aten, base, None) or getattr(torch.ops.aten, base.removesuffix("_"), None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
