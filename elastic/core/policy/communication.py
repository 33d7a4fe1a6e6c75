"""How the gradients of a step may travel: which strategies there are, what each promises, what a job may ask for.

The first tier is exact: the same mean, in another order of additions. What the later ones promise is in
docs/communication.md; a job grants them by its `semantics`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.core.checkpoint.rounds import DILOCO, LOCAL_SGD, PARAMETER_SERVER, STREAMING, Rounds
from elastic.core.settings import CommunicationSettings

AUTO = "auto"
EXACT = ("all_reduce", "ring", "tree", "hierarchical")
# What is not sent is added to the next gradient.
LOSSY = ("int8", "top_k", "power_sgd")
# Islands train by themselves between outer steps.
LOCAL = (LOCAL_SGD, DILOCO, STREAMING)
ASYNC = ("bounded_staleness", PARAMETER_SERVER)
# What a job may grant -> the strategies that it permits.
TIERS: Mapping[str, tuple[str, ...]] = {
    "exact": EXACT,
    "error_feedback": ("hierarchical", *LOSSY),
    # Weights are exchanged, not gradients.
    "local": LOCAL,
    # A gradient is applied some steps after it was computed.
    "async": ASYNC,
}
# torch's communication hooks of DistributedDataParallel, by the beginning of their names
# -> what does the same here. Names are compared in small letters and without underscores.
_HOOKS = {
    "allreduce": "give the job's communication: {strategy: all_reduce}",
    "fp16compress": "give communication_data_type: fp16 in the DeepSpeed configuration, and no communication",
    "bf16compress": "give communication_data_type: bf16 in the DeepSpeed configuration, and no communication",
    "powersgd": "give the job's communication: {semantics: error_feedback, strategy: power_sgd, rank: N}",
    "batchedpowersgd": "give the job's communication: {semantics: error_feedback, strategy: power_sgd, rank: N}",
    "quantiz": "give the job's communication: {semantics: error_feedback, strategy: int8}",
    "postlocalsgd": "give the job's communication: {semantics: local, strategy: local_sgd, every_steps: N}",
    "hookwithzero": "use ZeRO stage 1, which shares out the optimizer in the same way",
    "noop": "leave it out: ranks that are never averaged are runs of their own",
}
# Keys of training in islands, and of its outer and its streaming part.
_OF_ISLANDS = ("islands",)
_OF_OUTER = ("outer_lr", "outer_momentum")
_OF_STREAMS = ("fragments", "overlap_steps", "mix")


def permitted(settings: CommunicationSettings) -> tuple[str, ...]:
    """The strategies that may be chosen from."""
    if settings.strategy == AUTO and settings.semantics == "async":
        # They train differently: the one whose losses do not depend on time.
        return ASYNC[:1]
    return TIERS[settings.semantics] if settings.strategy == AUTO else (settings.strategy,)


def refused_communication(
    settings: CommunicationSettings, engine: str = "deepspeed", tp: int = 1, ep: int = 1, pp: int = 1
) -> str | None:
    """Why gradients cannot travel as asked for, as a sentence; None where they can."""
    granted = settings.semantics
    if granted not in TIERS:
        return f"communication.semantics is {granted!r}, but must be {_listed(TIERS)}"
    if settings.strategy in LOSSY and granted != "error_feedback":
        return (
            f"communication.strategy: {settings.strategy} sends a part of each gradient and the rest later, which must "
            "be granted: add semantics: error_feedback"
        )
    if settings.strategy in LOCAL and granted != "local":
        return (
            f"communication.strategy: {settings.strategy} lets nodes train by themselves for many steps, which must be "
            "granted: add semantics: local"
        )
    if settings.strategy in ASYNC and granted != "async":
        return (
            f"communication.strategy: {settings.strategy} applies gradients some steps late, which must be granted: "
            "add semantics: async"
        )
    if granted == "local" and settings.strategy == AUTO:
        return (
            f"communication: with semantics: local name the strategy, {_listed(LOCAL)}: they train differently, and "
            "auto would choose by speed"
        )
    if settings.strategy not in (AUTO, *TIERS[granted]) and (hook := refused_hook(settings.strategy)) is not None:
        return f"communication.strategy: {hook}"
    if settings.strategy not in (AUTO, *TIERS[granted]):
        known = _listed((AUTO, *TIERS[granted]))
        return f"communication.strategy is {settings.strategy!r}, but with semantics: {granted} must be {known}"
    if engine != "deepspeed":
        return (
            f"communication is supported with engine: deepspeed, ZeRO stages 0 and 1, not {engine}, which reduces "
            "within the backward pass; leave communication out"
        )
    if tp > 1:
        return f"communication: with mesh: {{tp: {tp}}} a rank has its slices' gradient only; leave one of them out"
    if ep > 1:
        return f"communication: with mesh: {{ep: {ep}}} experts' gradients go to some ranks only; leave one of them out"
    if pp > 1:
        return f"communication: with mesh: {{pp: {pp}}} a rank has its layers' gradient only; leave one of them out"
    if settings.bucket_mb <= 0:
        return f"communication.bucket_mb must be above zero, got {settings.bucket_mb:g}"
    return _refused_rounds(settings)


def refused_in_rounds(
    settings: CommunicationSettings, sp: int, audited: bool, measured: bool, anomalies: str = "off"
) -> str | None:
    """What of the job does not go with ranks whose weights differ, or with steps that apply other gradients than their
    own, as a sentence; None where nothing does not."""
    granted = settings.semantics
    if granted not in ("local", "async"):
        return None
    found = {
        f"mesh: {{sp: {sp}}}, whose workers share sequences": sp > 1,
        "audit.every_steps, which repeats passes on other workers": audited,
        "gradient_noise.every_steps, which compares gradients of all workers": measured,
        "anomalies.policy: skip where a parameter server makes the updates (rollback, stop and off do)": (
            settings.strategy == PARAMETER_SERVER and anomalies == "skip"
        ),
    }
    why = next((why for why, so in found.items() if so), None)
    return None if why is None else f"communication.semantics: {granted} does not go with {why}; leave one of them out"


def refused_hook(name: str) -> str | None:
    """That a communication hook of torch's DistributedDataParallel is not run, and what does the same here, as a
    sentence; None where it is none of torch's. Its name is that of the function, or of `DDPCommHookType`."""
    plain = name.lower().replace("_", "")
    instead = next((instead for begins, instead in _HOOKS.items() if plain.startswith(begins)), None)
    if instead is None:
        return None
    return f"{name} is a communication hook of torch's DistributedDataParallel, which nothing here calls: {instead}"


def _refused_rounds(settings: CommunicationSettings) -> str | None:
    """Keys of training in rounds that are wrong, or would not be used."""
    of = {key: "semantics: local" for key in _OF_ISLANDS if settings.semantics != "local"}
    if settings.semantics not in ("local", "async"):
        of["every_steps"] = "semantics: local or async"
    if settings.semantics != "async":
        of["staleness"] = "semantics: async"
    if settings.strategy not in (DILOCO, STREAMING):
        of |= dict.fromkeys(_OF_OUTER, f"strategy: {DILOCO} or {STREAMING}")
    if settings.strategy != STREAMING:
        of |= dict.fromkeys(_OF_STREAMS, f"strategy: {STREAMING}")
    usual = CommunicationSettings()
    if settings.strategy == PARAMETER_SERVER:
        of["bucket_mb"] = "other strategies: a gradient goes to each shard of a parameter server as a whole"
    odd = next((key for key in of if getattr(settings, key) != getattr(usual, key)), None)
    if odd is not None:
        return f"communication.{odd} belongs to {of[odd]}; leave it out"
    if not 0 <= settings.staleness < settings.every_steps and settings.semantics == "async":
        return (
            f"communication.staleness ({settings.staleness}) must be at least 0 and below every_steps "
            f"({settings.every_steps}), after which all gradients under way are applied"
        )
    rounds = Rounds.of(settings)
    if rounds.every % rounds.fragments:
        return (
            f"communication.every_steps ({rounds.every}) must be a multiple of fragments ({rounds.fragments}), which "
            "are exchanged in turn"
        )
    if rounds.own_weights and rounds.overlap >= rounds.gap:
        return (
            f"communication.overlap_steps ({rounds.overlap}) must be below every_steps / fragments ({rounds.gap}): one "
            "fragment is under way at a time"
        )
    return None


def refused_beside(deepspeed: Mapping[str, Any], semantics: str = "exact") -> str | None:
    """Why gradients cannot travel by a strategy under this DeepSpeed configuration, as a sentence; None where they can.
    The engine says the same when it is built."""
    zero = deepspeed.get("zero_optimization") or {}
    stage = zero.get("stage") or 0
    offload = zero.get("offload_optimizer") or {}
    late = semantics == "async"
    found = {
        f"ZeRO stage {stage}, which reduces in every backward pass": stage > 1,
        "ZeRO stage 1 where islands train by themselves (semantics: local)": stage == 1 and semantics == "local",
        "ZeRO stage 1 where gradients are applied late (semantics: async)": stage == 1 and late,
        "bf16 where gradients are applied late (semantics: async)": late
        and (deepspeed.get("bf16") or {}).get("enabled"),
        "fp16, whose loss scale may change": (deepspeed.get("fp16") or {}).get("enabled"),
        "offload_optimizer": offload.get("device", "none") != "none",
        "overlap_comm, which reduces within the backward pass": stage == 1 and zero.get("overlap_comm"),
        "communication_data_type, which says the same in another way": deepspeed.get("communication_data_type"),
    }
    why = next((why for why, so in found.items() if so), None)
    return None if why is None else f"communication is not supported with {why}; leave one of them out"


def _listed(names: Sequence[str] | Mapping[str, object]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
