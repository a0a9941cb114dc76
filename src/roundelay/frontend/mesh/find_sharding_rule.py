"""The form of an operation: which dimensions of its tensors go together, so that they may be split together.

A form labels factors of dimensions. In ``linear``, x (..., k), w (n, k) and the result (..., n), every dimension has a
label: whoever has it is split when it is split, the others stay whole; a label that is in no result is summed over, and
the result is then partial. A factor without a label cannot be split: a softmax runs over it, for example. So OneFlow's
Table 1 follows from the form of a matrix product, and the signatures of all operations from their forms.

An operation whose form is not known here has no labels: each worker computes all of it.

Each family of operators has its rules in a module of its own, ``sharding_rules_*``; here the rule of a node is found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from roundelay.frontend.mesh.sharding_rules_base import (
    NodeForm,
    Rule,
    decided,
    result_shapes,
    rounds,
    shape_of,
    tensors_of,
    unlabelled,
    whole_args,
)
from roundelay.frontend.mesh.sharding_rules_indexing import INDEXING
from roundelay.frontend.mesh.sharding_rules_pointwise import POINTWISE, pointwise
from roundelay.frontend.mesh.sharding_rules_products import PRODUCTS
from roundelay.frontend.mesh.sharding_rules_reductions import REDUCTIONS
from roundelay.frontend.mesh.sharding_rules_views import VIEWS
from roundelay.ir.op_form import OpForm

_RULES: dict[Any, Rule] = {**POINTWISE, **PRODUCTS, **VIEWS, **INDEXING, **REDUCTIONS}


def op_form(node: Node) -> OpForm:
    """The form of a node of the exported graph; its ``meta`` has the shapes."""
    rule = _rule(node.target)
    has_dims = any(shape_of(arg) for arg in tensors_of(node))
    fits = bool(tensors_of(node)) and (has_dims or rule is pointwise)  # the others look for a dimension
    made = rule(node) if rule is not None and fits else None
    form = decided(made) if made is not None else _unknown(node)
    named = {arg.name: dims for arg, dims in form.args.items()}
    groups = tuple(
        [frozenset([arg.name for arg in group]) for group in form.linear if not any(rounds(node, x) for x in group)]
    )
    over = None if form.over is None else (form.over[0].name, form.over[1])
    return OpForm(named, form.results, groups, tuple(form.sizes), form.reduction, over, known=made is not None)


def _rule(target: Any) -> Rule | None:
    """What makes the form of an operator; none for one that writes into a tensor, which must be all of it."""
    if not isinstance(target, torch._ops.OpOverload):
        return _RULES.get(target)
    if target._schema.is_mutable:
        return None
    usual = pointwise if torch.Tag.pointwise in target.tags else None
    return _RULES.get(target) or _RULES.get(str(target), usual)  # by name, one that a library registers


def _unknown(node: Node) -> NodeForm:
    """A form without labels, also for what has several results."""
    return NodeForm(whole_args(node), tuple(map(unlabelled, result_shapes(node))))
