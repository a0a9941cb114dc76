"""Every option that users need, and every property of the rules, with an edit that makes the code ignore it.

Where a run and its reference could ignore it alike, the edit makes both do so: then no comparison of the two can tell.
"""

from __future__ import annotations

from dataclasses import dataclass

EQUIVALENCE = "tests/equivalence/"
CLIPPING = EQUIVALENCE + "test_clipping.py::"
VERIFY = EQUIVALENCE + "test_verify.py::"
RULES = EQUIVALENCE + "test_rules.py::"
SCALE = EQUIVALENCE + "test_loss_scale.py::"
PLAIN = "tests/reference/test_plain_pytorch.py::test_a_synchronous_rule_equals_plain_pytorch_bit_for_bit"

ONE_GROUP = """
{0}for group in optimizer.param_groups[1:]:
{0}    group.update({{k: v for k, v in optimizer.param_groups[0].items() if not k.startswith("param")}})"""


@dataclass(frozen=True, slots=True)
class Edit:
    """A text of a file below ``src/roundelay`` that stands there once, and what takes its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Break:
    """An option, how it comes to be ignored, and a test that then fails: pytest's arguments."""

    option: str
    edits: tuple[Edit, ...]
    test: tuple[str, ...]


def _stepped(file: str, indent: str, scheduler: str) -> Edit:
    head = f"{indent}if {scheduler} is not None:\n{indent}    "
    return Edit(file, f"{head}{scheduler}.step()\n", f"{head}pass\n")


_GRADIENTS, _REFERENCE = "runtime/gradients.py", "reference/run.py"
_RUN_STEPS = _stepped("runtime/optimizer_steps.py", "        ", "self.scheduler")
_REFERENCE_STEPS = _stepped("reference/trainer.py", "    ", "scheduler")
_RUN_GROUPS = Edit(
    "runtime/optimizer/stage_optimizer.py",
    "optimizer = make(named)",
    "optimizer = make(named)" + ONE_GROUP.format(" " * 8),
)
_REFERENCE_GROUPS = Edit(
    "reference/trainer.py",
    "optimizer = self.optimizer(named)",
    "optimizer = self.optimizer(named)" + ONE_GROUP.format(" " * 8),
)
_RATES_AHEAD = Edit(
    "runtime/optimizer/stage_optimizer.py",
    "return tuple(self.at(u)[group] for u in range(update, update + count))",
    "return (self.at(update)[group],) * count",
)

_SQUARED = """        if action.kind == schedule.last_kind:
            yield from lines[action.stage]("S", action.number)
"""
_UNHEARD_BY_HALVES = Edit(
    "runtime/handlers.py",
    "norm = _clipping_norm(context, run, header)\n",
    "norm = _clipping_norm(context, run, header)\n    norm = None if context.stage.halved else norm\n",
)
_V1 = 'CDP-v1", versions="table", fresh='

OPTIONS = (
    Break(
        "gradient accumulation: M",
        (
            Edit(
                "runtime/loading/batch_reader.py",
                "parts = replicas * micro_batches",
                "parts = replicas",
            ),
        ),
        (VERIFY + "test_batches_of_any_size_down_to_a_single_row",),
    ),
    Break(
        "moving average of the weights",
        (
            Edit(
                "runtime/optimizer/weight_averages.py",
                "average.lerp_(self._parameters[name].detach(), self._weight)",
                "pass",
            ),
            Edit(_REFERENCE, "torch.lerp(self._averages[n], weight, 1.0 - self._setting.ema)", "self._averages[n]"),
        ),
        ("tests/api/test_averages.py::test_averages_equal_torchs_own_bit_for_bit",),
    ),
    Break(
        "intra-op threads",
        (
            Edit("runtime/worker.py", "        use_threads(self.threads)\n        try:", "        try:"),
            Edit("runtime/worker.py", "        use_threads(self.threads)\n        redone", "        redone"),
        ),
        (
            "tests/runtime/test_intra_op_threads.py::test_workers_of_different_numbers_of_threads_compute_what_the_reference_does",
        ),
    ),
    Break(
        "the same bits on several threads",
        (
            Edit(
                "runtime/processes/determinism.py",
                "torch.use_deterministic_algorithms(True, warn_only=lenient)",
                "torch.use_deterministic_algorithms(wanted, warn_only=lenient)",
            ),
        ),
        ("tests/runtime/test_intra_op_threads.py::test_gradients_by_index_are_added_in_one_order",),
    ),
    Break(
        "the same bits whenever it is repeated",
        (
            Edit(
                "session/training.py",
                "exact = deterministic(self.plan.deterministic, threads=self.plan.threads)",
                "exact = deterministic(False)",
            ),
        ),
        ("tests/runtime/test_determinism.py::test_a_plan_that_asks_for_such_forms_ends_with_the_operation_s_name",),
    ),
    Break(
        "a mesh",
        (
            Edit(
                "planner/mesh_signatures.py",
                "seeds = {places[name]: signature for name, signature in given.items()}",
                "seeds = {places[name]: B for name in given}",
            ),
        ),
        (EQUIVALENCE + "test_mesh.py", "-k", "the_two_boxings_of_megatron"),
    ),
    Break(
        "a limit of memory",
        (Edit("planning/memory_limit.py", "if largest.total > most:", "if most < 0:"),),
        ("tests/cli/test_mesh.py::test_a_plan_that_needs_more_memory_than_a_limit_is_refused",),
    ),
    Break(
        "unequal workers",
        (Edit("planning/planning.py", "cluster=cluster_of(choices)", "cluster=None"),),
        ("tests/cli/test_cluster.py::test_a_plan_is_made_for_the_workers_of_a_file",),
    ),
    Break(
        "own signatures",
        (
            Edit(
                "planner/candidate.py",
                "mesh=own.mesh, parameters=own.parameters, outputs=own.outputs",
                "mesh=own.mesh, parameters=own.parameters",
            ),
        ),
        ("tests/cli/test_mesh.py::test_signatures_from_a_file_are_planned_kept_and_continued",),
    ),
    Break(
        "split states",
        (
            Edit(
                "planner/split_states.py", "            found[name] = Split(max(dims", "            _ = Split(max(dims"
            ),
        ),
        (EQUIVALENCE + "test_zero.py", "-k", "test_each_replica_writes_its_part"),
    ),
    Break(
        "a layout",
        (Edit("planner/draft_plan.py", "layout=_or(own.layout, PIPELINE),", "layout=PIPELINE,"),),
        ("tests/api/test_layout_choices.py", "-k", "test_a_run_is_continued_by_its_own_layout_and_by_another"),
    ),
    Break(
        "stages of a layout",
        (Edit("planner/given_layout.py", "stages=size if choices.stages is None else choices.stages", "stages=size"),),
        ("tests/api/test_layout_choices.py", "-k", "test_a_layout_has_as_many_stages_as_asked_for"),
    ),
    Break(
        "replicas",
        (
            Edit(_GRADIENTS, "        self._sums |= sums", "        sums = {}"),
            Edit("reference/replica.py", "if len(replicas) == 1:", "if replicas:"),
        ),
        (EQUIVALENCE + "test_replicas.py", "-k", "train_what and mlp"),
    ),
    Break(
        "clipping: stage",
        (
            Edit(_GRADIENTS, 'self._clip.by == "stage" and grads', 'self._clip.by == "stage" and not grads'),
            Edit(_REFERENCE, 'if clip.by != "stage":', "if clip.norm:"),
        ),
        (CLIPPING + "test_clipping_is_torch_s_own[1-stage:0.1-gpipe]",),
    ),
    Break(
        "clipping: previous",
        (
            Edit(_GRADIENTS, "elif norm is not None:", 'elif norm is not None and self._clip.by != "previous":'),
            Edit(_REFERENCE, '{"previous": newest, ', '{"previous": -1, '),
        ),
        (CLIPPING + "test_a_run_that_ignores_the_norm_is_found[1f1b-previous:0.05]",),
    ),
    Break(
        "clipping: global",
        (
            Edit(_GRADIENTS, "elif norm is not None:", 'elif norm is not None and self._clip.by != "global":'),
            Edit(_REFERENCE, '"global": batch}', '"global": -1}'),
        ),
        (CLIPPING + "test_clipping_is_torch_s_own[3-global:0.1-gpipe]",),
    ),
    Break(
        "clipping: previous, by halves",
        (_UNHEARD_BY_HALVES,),
        (CLIPPING + "test_a_run_that_ignores_the_norm_is_found[zb-v-previous:0.05]",),
    ),
    Break(
        "clipping: global, by halves",
        (_UNHEARD_BY_HALVES,),
        (CLIPPING + "test_clipping_is_torch_s_own[2-global:0.1-zb-v]",),
    ),
    Break(
        "clipping: global, of whole gradients",
        (
            Edit(
                "lower/emit.py",
                "        yield from lines[action.stage](action.kind, action.number)\n" + _SQUARED,
                _SQUARED
                + "        yield from lines[action.stage](action.kind, action.number)\n"
                + "        if action.kind == schedule.last_kind:\n",
            ),
        ),
        (CLIPPING + "test_clipping_is_torch_s_own[1-global:0.1-zb-h1]",),
    ),
    Break(
        "schedule stepped per update, by the run",
        (_RUN_STEPS,),
        (VERIFY + "test_a_schedule_of_rates_is_followed_and_foreseen",),
    ),
    Break("schedule stepped per update, by both", (_RUN_STEPS, _REFERENCE_STEPS), (PLAIN,)),
    Break(
        "schedule seen by the predictor, in the run",
        (_RATES_AHEAD,),
        (VERIFY + "test_a_schedule_of_rates_is_followed_and_foreseen",),
    ),
    Break(
        "schedule seen by the predictor, in both",
        (_RATES_AHEAD, Edit("reference/trainer.py", "if self._rates is None:", "if True:")),
        (VERIFY + "test_a_predictor_that_does_not_see_the_schedule_is_found_out",),
    ),
    Break("parameter groups, in the run", (_RUN_GROUPS,), (VERIFY + "test_parameter_groups_keep_their_settings",)),
    Break("parameter groups, in both", (_RUN_GROUPS, _REFERENCE_GROUPS), (PLAIN,)),
    Break(
        "precision bf16",
        (Edit("frontend/stages/precision.py", "if precision == FULL:", "if precision:"),),
        (EQUIVALENCE + "test_precision.py::test_it_is_what_plain_pytorch_computes_under_autocast[gpipe]",),
    ),
    Break(
        "precision bf16, by halves",
        (Edit("frontend/stages/make_segment.py", "call=arithmetic.lowered(halves.call)", "call=halves.call"),),
        (EQUIVALENCE + "test_precision.py::test_it_is_what_plain_pytorch_computes_under_autocast[zb-h1]",),
    ),
    Break(
        "precision fp16",
        (Edit("frontend/stages/precision.py", '"fp16": torch.float16}', '"fp16": torch.bfloat16}'),),
        (SCALE + "test_it_is_plain_pytorch_with_a_grad_scaler[1f1b]",),
    ),
    Break(
        "loss scale",
        (
            Edit("runtime/loss_scaler.py", "self._now if before is None else before", "1.0"),
            Edit("reference/gradients.py", "[0] if self._rule.on else 1.0", "[0] * 0 + 1.0"),
        ),
        (SCALE + "test_small_gradients_vanish_without_a_scale_and_last_with_one[pipedream]",),
    ),
    Break(
        "loss scale, of second halves",
        (Edit("runtime/handlers.py", "weight_half(run.g, _header(run).loss_scale)", "weight_half(run.g)"),),
        (SCALE + "test_it_is_plain_pytorch_with_a_grad_scaler[zb-v]",),
    ),
    Break(
        "loss scale: skipped updates",
        (
            Edit("runtime/handlers.py", "context.stage.gradients.drop()", "pass"),
            Edit(_REFERENCE, "if skipped or (self._flushes and any(infinite)):", "if False:"),
        ),
        (SCALE + "test_it_is_plain_pytorch_with_a_grad_scaler[zb-h1]",),
    ),
    Break(
        "BatchNorm's statistics",
        (
            Edit(
                "runtime/stage_state.py",
                "whole, self.buffers, inputs, draw",
                "whole, dict(self.buffers), inputs, draw",
            ),
            Edit(_REFERENCE, "shared.update(buffers[0])", "pass"),
        ),
        (EQUIVALENCE + "test_eager.py", "-k", "accumulation and batchnorm"),
    ),
    Break(
        "frozen parameters",
        (Edit("frontend/describe_graph.py", "r.tensor.nbytes, r.tensor.requires_grad, ", "r.tensor.nbytes, True, "),),
        (VERIFY + "test_frozen_parameters_stay_what_they_are",),
    ),
    Break(
        "recomputation",
        (
            Edit(
                "frontend/stages/stage_function.py",
                "values = dict(inputs)\n",
                'values, mode = dict(inputs), "stash" if mode == "recompute" else mode\n',
            ),
        ),
        ("tests/frontend/test_stage_function.py", "-k", "recompute_differentiates"),
    ),
    Break(
        "modules run again by the backward",
        (Edit("frontend/stage_builder.py", "if i in spec.recomputed else part", "if False else part"),),
        (EQUIVALENCE + "test_recompute.py", "-k", "bytes_that_tapes_hold"),
    ),
    Break(
        "modules run again, with the weights of mixed",
        (
            Edit(
                "frontend/stages/remat_segment.py",
                "None if mixed else cached_leaves",
                "None if False else cached_leaves",
            ),
        ),
        (EQUIVALENCE + "test_recompute.py", "-k", "by_mixed_a_segment"),
    ),
    Break(
        "--compile",
        (Edit("planning/compile_stages.py", "plan.backward if plan.compile else None", "None"),),
        ("tests/api/test_compile_stages.py", "-k", "compiled_run_equals"),
    ),
    Break(
        "--compile in a lower precision",
        (
            Edit(
                "frontend/stages/compiled_segment.py",
                "with _settings(self.saves_all), self.autocast():",
                "with _settings(self.saves_all):",
            ),
        ),
        ("tests/api/test_compile_stages.py", "-k", "precision_of_its_plan"),
    ),
    Break(
        "--compile in a lower precision, short batches",
        (
            Edit(
                "frontend/stages/compiled_segment.py",
                "self.plain(*args) if function is None",
                "self.piece.forward(*args) if function is None",
            ),
        ),
        ("tests/api/test_compile_stages.py", "-k", "precision_of_its_plan"),
    ),
    Break(
        "--compile in two precisions",
        (Edit("frontend/stage_builder.py", "device, self.precision, saves_all :=", "device, FULL, saves_all :="),),
        ("tests/api/test_compile_stages.py", "-k", "two_precisions"),
    ),
    Break(
        "metrics beside the loss",
        (Edit("runtime/handlers.py", 'data["metrics"] = ', 'data["unheard"] = '),),
        (EQUIVALENCE + "test_metrics.py::test_they_are_those_of_the_whole_batch",),
    ),
    Break(
        "DataLoader with workers",
        (
            Edit(
                "runtime/loading/loader_epoch.py",
                "            self.source = batches(epoch)\n",
                '            self.source = batches(epoch)\n            if hasattr(self.source, "num_workers"):\n'
                '                vars(self.source)["num_workers"] = 0\n',
            ),
        ),
        ("tests/runtime/test_prefetch.py::test_a_loader_s_own_processes_are_what_loads",),
    ),
    Break(
        "prefetch, in a run",
        (Edit("runtime/worker.py", "registers=self.registers", "registers=None"),),
        ("tests/runtime/test_prefetch.py::test_a_run_computes_while_its_loader_loads",),
    ),
    Break(
        "no order",
        (Edit("actor/machines.py", "FreeMachine if program.free else LoopMachine", "LoopMachine"),),
        (EQUIVALENCE + "test_free.py::test_a_run_with_delays_by_lot_is_replayed_bit_for_bit",),
    ),
    Break(
        "replaying what a run has written down",
        (Edit("reference/replay.py", "if self._digest(self._state(own)) != expected:", "if not expected:"),),
        ("tests/cli/test_trace.py::test_an_update_that_was_lost_and_weights_that_were_stale",),
    ),
    Break(
        "a window of it",
        (Edit("cli/trace_command.py", "traces, options.window, lambda", "traces, None, lambda"),),
        ("tests/cli/test_trace.py::test_a_window_has_so_many_letters_of_each_stage",),
    ),
    Break(
        "--deadline-s",
        (Edit("planner/draft_plan.py", "deadline_s=_or(own.deadline_s, DEADLINE_S)", "deadline_s=300.0"),),
        ("tests/cli/test_commands.py::test_a_deadline_is_planned_and_may_be_another_when_a_run_goes_on",),
    ),
    Break(
        "prefetch, two registers",
        (Edit("runtime/loading/prefetch.py", "Semaphore(registers.count)", "Semaphore(1)"),),
        ("tests/runtime/test_prefetch.py::test_one_is_made_while_another_is_in_use_and_no_more",),
    ),
    Break(
        "prefetch, copies to a device",
        (Edit("runtime/device.py", "self._fill(registers, data)\n                self.stream", "self.stream"),),
        ("tests/runtime/test_device.py", "-k", "copied_when_the_one_before_it_begins"),
    ),
)

PROPERTIES = (
    Break(
        "cdp-v1 is pipedream-2bw",
        (Edit("ir/rule.py", f"{_V1}_previous", f"{_V1}_as_early_as_possible"),),
        (RULES + "test_cdp_v1_and_2bw_are_one_rule",),
    ),
    Break(
        "cdp-v2: i + j >= N + 1",
        (Edit("ir/rule.py", "micro_batch + stage >= num_stages + 1", "micro_batch + stage >= num_stages + 2"),),
        (RULES + "test_the_second_rule_of_cdp_reads_what_1f1b_has",),
    ),
    Break(
        "within one batch: a flush",
        (Edit("ir/rule.py", '"partial": "crossed"', '"partial": "lag"'),),
        (RULES + "test_a_run_within_one_batch_is_a_flush",),
    ),
    Break(
        "no learning rate: all rules are one",
        (
            Edit(
                "runtime/optimizer/stage_optimizer.py", 'return float(group["lr"])', 'return float(group["lr"]) or 1e-3'
            ),
        ),
        (RULES + "test_without_a_learning_rate_all_rules_are_one",),
    ),
    Break(
        "D = 1: the plain optimizer",
        (Edit("ir/rule.py", '"improved": "crossed"', '"improved": "lag+1"'),),
        (RULES + "test_one_stage_is_the_plain_optimizer",),
    ),
    Break(
        "no update ahead: the weight itself",
        (
            Edit(
                "weight_prediction.py",
                "rates:\n        return now\n    with",
                "rates:\n        return now * 2\n    with",
            ),
        ),
        ("tests/test_weight_prediction.py::test_no_update_ahead_is_the_weight_itself",),
    ),
)

BREAKS = OPTIONS + PROPERTIES
