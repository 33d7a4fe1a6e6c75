"""The corpus: every mutation with a configuration in which it makes a difference.

M1 to M34 happened in Megatron-LM, DeepSpeed or a stack on them; G1 and up are what any resharder can get wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verification import bugs_capture as capture
from verification import bugs_install as install
from verification import bugs_layout as layout
from verification import bugs_plain as plain
from verification import bugs_read as read
from verification.model import PLAIN, Parameter, Setup
from verification.tools import Mutation

_SUBS = {"sub_group_size": 60, "stage3_param_persistence_threshold": 10}
_TINY = (*PLAIN[:2], Parameter("one", (1,)), Parameter("two", (2,)), Parameter("seven", (7,), group=1))
_ONE_GROUP = tuple(replace(parameter, group=None if parameter.group is None else 0) for parameter in PLAIN)

Z0, Z1, Z2, Z3 = Setup(0), Setup(1), Setup(2), Setup(3, zero=_SUBS)
BF2, BF3 = Setup(2, "bf16"), Setup(3, "bf16", zero=_SUBS)
FP16 = Setup(2, "fp16")
WHOLE3 = Setup(3)
SGD, LION = Setup(2, optimizer="sgd"), Setup(3, optimizer="lion", zero=_SUBS)
TINY = Setup(3, parameters=_TINY, zero={"sub_group_size": 30})
ROUND = Setup(1, parameters=_ONE_GROUP, zero={"round_robin_gradients": True})
# Fp32 gradients make DeepSpeed take another optimizer, which lays bf16 out by itself.
ACCUMULATED = Setup(1, "bf16", extra={"data_types": {"grad_accum_dtype": "fp32"}})


def corpus() -> list[Mutation]:
    """Made when asked for: changes look up what they change, and that imports DeepSpeed."""
    return [*_mixed_up(), *_captured(), *_written(), *_installed(), *_plain()]


def _mixed_up() -> Iterator[Mutation]:
    """What is read, and for whom."""
    biases = {"layers.2.bias": "layers.10.bias", "layers.10.bias": "layers.2.bias"}
    same = layout.registration_order_everywhere()
    yield Mutation("M1", "tail of a padded tensor uninitialised", Z3, (2, 3), reading=read.tail_uninitialised)
    yield Mutation("M11", "reading fails on one rank", Z2, (2, 3), reading=read.Fails)
    yield Mutation("M12", "matched by sort order", Z1, (3, 2), restoring=layout.sorted_names())
    yield Mutation("M14", "offsets not reset per sub-group", Z3, (6, 4), restoring=layout.offsets_go_on())
    yield Mutation("M15", "rank r reads file r, a stale one exists", Z2, (4, 6), reading=read.FileByRank)
    yield Mutation("M17", "local rank used for rank", Z1, (4, 6), restoring=layout.local_ranks())
    yield Mutation("M19", "abs for max(0, ...)", TINY, (2, 3), restoring=layout.slices(layout.absolute))
    yield Mutation("M21", "floor for ceil", Z3, (7, 5), restoring=layout.slices(layout.floor))
    yield Mutation("M22", "wrong tail alignment", Z1, (12, 5), restoring=layout.tail_alignment())
    yield Mutation("M33a", "registration order", ROUND, (3, 2), restoring=layout.registration_order())
    yield Mutation("M33b", "registration order, all agree", ROUND, (3, 2), saving=same, restoring=same)
    yield Mutation("G1", "exp_avg and exp_avg_sq swapped", Z3, (4, 6), reading=read.swapped)
    yield Mutation("G2", "two of equal shape swapped", BF2, (6, 4), restoring=layout.names(biases))
    yield Mutation("G3", "a matrix turned", Z0, (2, 3), restoring=install.turned())
    yield Mutation("G4", "every range one element short", Z3, (12, 5), reading=read.truncated)
    yield Mutation("G6", "cast through bf16", Z1, (2, 1), reading=read.through_bf16)
    yield Mutation("G6s", "momentum cast through bf16", SGD, (3, 2), reading=read.through_bf16)
    yield Mutation("G7", "one piece from an older step", Z2, (2, 2), reading=read.OneStale)


def _captured() -> Iterator[Mutation]:
    """What is copied out of the live engine."""
    tied, frozen = capture.stale("master/embedding.weight"), capture.stale("param/frozen.weight")
    yield Mutation("S1", "a stale tied tensor saved", Z0, (2, 3), saving=tied)
    yield Mutation("S2", "a stale frozen tensor saved", BF2, (3, 2), saving=frozen)
    yield Mutation("S2s", "a stale frozen slice saved", WHOLE3, (1, 2), saving=frozen)
    yield Mutation("S3", "moments of one group left out", Z1, (2, 3), saving=capture.moments_left_out())
    yield Mutation("S3r", "moments of one group left out", Z0, (3, 2), saving=capture.moments_left_out())
    yield Mutation("S4", "exp_avg and exp_avg_sq saved swapped", Z3, (4, 6), saving=capture.swapped())
    yield Mutation("S5", "masters saved through bf16", BF3, (3, 2), saving=capture.through_bf16())
    yield Mutation("S6", "a scheduler one step old saved", Z2, (2, 3), saving=capture.scheduler_one_step_old())
    yield Mutation("S7", "counters of the step before saved", Z1, (3, 2), saving=capture.counters_one_step_old())
    yield Mutation("S8", "a loss scaler one step old saved", FP16, (2, 3), saving=capture.scaler_one_step_old())
    yield Mutation("S9", "learning rates one step old saved", Z2, (2, 1), saving=capture.rate_one_step_old())
    yield Mutation("S10", "step counts one step old saved", Z0, (2, 3), saving=capture.count_one_step_old())
    yield Mutation(
        "S11",
        "another rank's buffers saved",
        Z2,
        (3, 2),
        saving=capture.buffers_of_rank_1(),
        before_save=capture.drifted_buffers,
    )


def _written() -> Iterator[Mutation]:
    """What is written."""
    untied = layout.written_without("embedding.weight", 1)
    yield Mutation("M4", "shards taken for replicas", Z2, (3, 2), saving=layout.dealt_shards())
    yield Mutation("M13", "only rank 0 writes", Z3, (2, 1), saving=layout.rank_0_only())
    yield Mutation("M16", "tied tensor not in later files", Z3, (3, 2), saving=untied)
    yield Mutation("M30a", "diverged masters, one saved", Z0, (3, 2), before_save=layout.drifted("three"))
    yield Mutation("M30b", "diverged frozen, one saved", BF2, (2, 3), before_save=layout.drifted("frozen.weight"))


def _installed() -> Iterator[Mutation]:
    """What is installed."""
    yield Mutation("M5a", "weights restored, masters stale", BF2, (3, 2), restoring=install.masters_stale())
    yield Mutation("M5b", "masters restored, weights stale", BF3, (2, 3), restoring=install.weights_stale())
    yield Mutation("M8a", "one rank keeps its weights", BF2, (2, 3), restoring=install.replica_kept())
    yield Mutation("M8b", "buffers on rank 0 only", Z1, (2, 3), restoring=install.buffers_kept_off_rank_0())
    yield Mutation("M10", "frozen not carried", Z2, (2, 1), restoring=install.kept_old("param"))
    yield Mutation("M10s", "frozen slices not carried", Z3, (4, 6), restoring=install.kept_old("param"))
    yield Mutation("M23a", "tied alias counted twice", Z2, (2, 3), restoring=install.tied_twice())
    yield Mutation("M23b", "tie lost in the target", Z2, (2, 3), before_restore=layout.untie)
    yield Mutation("M27", "gather of weights skipped", BF2, (3, 2), restoring=install.gather_skipped())
    yield Mutation("M27b", "the same, BF16_Optimizer", ACCUMULATED, (3, 2), restoring=install.gather_skipped())
    yield Mutation("M27s", "weights kept whole are stale", BF3, (3, 2), restoring=install.persistent_stale())
    yield Mutation(
        "M28",
        "fresh optimizer without moments",
        Z2,
        (1, 2),
        restoring=install.state_only_where_there_is_some(),
        before_restore=install.without_moments,
    )
    yield Mutation("M32", "buffers not carried", Z3, (1, 2), restoring=install.kept_old("buffer"))
    yield Mutation("M34", "a rank of padding only raises", Z2, (7, 5), restoring=install.padding_raises())
    yield Mutation("G5", "applied twice", Z2, (7, 5), restoring=install.twice())
    yield Mutation("G5l", "applied twice", LION, (2, 3), restoring=install.twice())


def _plain() -> Iterator[Mutation]:
    """What is no tensor."""
    yield Mutation("M2", "scheduler holds other group dicts", Z1, (2, 1), restoring=plain.other_dicts())
    yield Mutation("M6", "rank 0's random streams for all", Z2, (2, 3), restoring=plain.one_stream_for_all())
    yield Mutation("M18", "group 0's hyper-parameters for all", Z2, (6, 4), restoring=plain.first_group_for_all())
    yield Mutation("M25", "step dropped for a group", Z1, (2, 3), restoring=plain.steps_dropped())
    yield Mutation("M26", "one step tensor for several", Z3, (3, 2), restoring=plain.step_shared())
    yield Mutation("G8", "scheduler advanced by replayed steps", Z1, (2, 3), restoring=plain.scheduler_replayed())
    yield Mutation("G9", "scaler reset", FP16, (2, 3), restoring=plain.scaler_reset())
    yield Mutation("G10", "another rate on one rank", Z2, (2, 3), restoring=plain.rate_on_one_rank())
    yield Mutation("G11", "the engine's counters not restored", Z2, (3, 2), restoring=plain.counters_fresh())
    yield Mutation("G12", "accumulation remainder dropped", Z2, (2, 3), restoring=plain.remainder_dropped())
    yield Mutation("G13", "position counted in passes", Z2, (2, 3), restoring=plain.position_in_passes())
    yield Mutation("G15", "counters worked out wrong", Z2, (3, 2), restoring=plain.skipped_steps_forgotten())
    yield Mutation("G16", "scalars of another tensor", Z2, (2, 3), restoring=plain.scalars_of_another())
    yield Mutation("G17", "a buffer taken for a cache", Z1, (2, 3), restoring=plain.buffer_taken_for_a_cache())
    yield Mutation("G18", "ranks 0 and 1 exchanged", WHOLE3, (2, 2), restoring=layout.ranks_exchanged())
    yield Mutation("G14", "the user's state on rank 0 only", Z2, (2, 3), restoring=plain.user_state_on_rank_0())
