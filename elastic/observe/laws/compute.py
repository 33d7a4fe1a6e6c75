"""The compute ledger of a run: model FLOPs, accelerator-hours by owner of the time, energy. A fold over its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastic.core.wording import plural
from elastic.observe.records import Record, steps_of
from elastic.observe.steps import final_steps
from elastic.observe.text import duration, finite
from elastic.observe.time_ledger import PRODUCTIVE

_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class ComputeLedger:
    """What a run has cost so far.

    `sample_flops`: of one sample's forward and backward pass, `estimated` where they are 6 N D. `model_flops`: of the
    samples that count; `repeated_flops`: of those whose steps were rolled back. `accelerator_s`: seconds by owner of
    the time, each as often as accelerators were held. `energy_j`: what the ranks' devices used in `measured_steps` of
    all `steps`; or, where `watts` is given, a figure per accelerator, that times the accelerator-seconds. Unknown
    figures are None, or empty.
    """

    sample_flops: float | None
    estimated: bool
    model_flops: float | None
    repeated_flops: float | None
    accelerator_s: Mapping[str, float]
    energy_j: float | None
    steps: int
    measured_steps: int
    watts: float | None = None

    @property
    def known(self) -> bool:
        return self.sample_flops is not None or bool(self.accelerator_s) or self.energy_j is not None

    @property
    def held_s(self) -> float:
        """Accelerator-seconds of all owners."""
        return sum(self.accelerator_s.values())

    def to_json(self) -> dict[str, Any]:
        """The fields by name, and the sentences."""
        return {**asdict(self), "sentences": self.sentences}

    def at(self, watts: float | None) -> ComputeLedger:
        """With an estimate of the energy from a power per accelerator, where no device has told it."""
        if watts is None or self.energy_j is not None or not self.accelerator_s:
            return self
        return replace(self, energy_j=watts * self.held_s, watts=watts)

    @property
    def sentences(self) -> list[str]:
        """One for each part that is known."""
        parts = (self._flops(), self._held(), self._energy())
        return [part for part in parts if part]

    def _flops(self) -> str:
        if self.sample_flops is None or self.model_flops is None:
            return ""
        how = "estimated as 6 N D" if self.estimated else "counted"
        text = f"{self.model_flops:.3g} model FLOPs, {self.sample_flops:.3g} per sample ({how})"
        if self.repeated_flops:
            text += f", and {self.repeated_flops:.3g} for steps that were rolled back"
        if self.held_s:
            text += f"; {self.model_flops / self.held_s:.3g} per second of each accelerator held"
        return text

    def _held(self) -> str:
        if not self.held_s:
            return ""
        productive = self.accelerator_s.get(PRODUCTIVE, 0.0)
        share = f"{productive / self.held_s:.0%} of them productive"
        return f"{self.held_s / 3600:.3g} accelerator-hours ({duration(self.held_s)}), {share}"

    def _energy(self) -> str:
        if self.energy_j is None:
            return ""
        text = f"{self.energy_j / _JOULES_PER_KWH:.3g} kWh"
        if self.watts is not None:
            return f"{text}, estimated from {self.watts:g} W per accelerator held"
        return f"{text} of the devices, measured in {self.measured_steps} of {plural(self.steps, 'step')}"


def compute_ledger(records: Iterable[Record], accelerator_s: Mapping[str, float]) -> ComputeLedger:
    """`accelerator_s` by owner: the sum over the run's attempts."""
    all_records = list(records)
    done = list(steps_of(all_records))
    flops = next((value for step in done if (value := finite(step.get("sample_flops")))), None)
    energies = [value for step in done if (value := finite(step.get("energy_j"))) is not None]
    counted, computed = _samples(final_steps(all_records)), _samples(done)
    return ComputeLedger(
        sample_flops=None if flops is None else abs(flops),
        estimated=flops is not None and flops < 0.0,
        model_flops=None if flops is None else abs(flops) * counted,
        repeated_flops=None if flops is None else abs(flops) * (computed - counted),
        accelerator_s=dict(accelerator_s),
        energy_j=sum(energies) if energies else None,
        steps=len(done),
        measured_steps=len(energies),
    )


def _samples(steps: Iterable[Record]) -> int:
    return sum(int(step.get("samples") or 0) for step in steps)
