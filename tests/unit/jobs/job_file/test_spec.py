"""job.yaml: what is wrong with it is said in one sentence with the place, before anything starts."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
from pathlib import Path

import pytest
from elastic_jobs.job_file.checks import check
from elastic_jobs.job_file.load import load_job
from elastic_jobs.job_file.spec import JobSpec

from elastic.core import actions as act
from elastic.core import events as ev
from elastic.core.data.adaptive_batch import AdaptiveBatch
from elastic.core.errors import UsageError
from elastic.core.run import machine
from elastic.core.settings import (
    GPU_FAILURES,
    AnomalySettings,
    AuditSettings,
    CommunicationSettings,
    FailureSettings,
    GradientNoiseSettings,
    RunSettings,
    SnapshotSettings,
    StragglerSettings,
)

GOOD = "entry_point: train.py:main\nmax_workers: 4\n"


def load(tmp_path: Path, text: str) -> JobSpec:
    (tmp_path / "job.yaml").write_text(text)
    return load_job(tmp_path / "job.yaml")


def test_a_small_job_has_defaults(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD)
    assert (spec.min_workers, spec.max_workers, spec.workers_per_slot) == (1, 4, 1)
    assert spec.failures == FailureSettings()
    assert spec.resources_per_worker == {"CPU": 1.0}


def test_everything_arrives_in_the_settings(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        """
entry_point: train.py:main
name: gpt
config: {lr: 1e-3, layers: [1, 2]}
min_workers: 2
max_workers: 4
workers_per_slot: 2
scaling_policy: patient
resources_per_worker: {CPU: 0.5, GPU: 1}
fork_workers: true
numa_binding: exclusive
device_faults: report
deepspeed: {zero_optimization: {stage: 2}}
global_batch: 24
micro_batch: 2
max_steps: 100
seed: 7
checkpoint: {url: ckpt, every_steps: 10, keep_last: 3, keep_every_steps: 50}
failures: {suspect_after_s: 2, crash_streak: 9, capacity_timeout_s: 60}
stragglers: {policy: evict, factor: 1.2, window_steps: 10, windows: 2, calibration_windows: 1}
anomalies: {policy: skip, max_anomalies: 2, window_steps: 50, max_overflows: 3}
gradient_noise: {every_steps: 5}
audit: {every_steps: 50, strikes: 3, rollback: agreed}
communication: {strategy: hierarchical, bucket_mb: 10}
storage_url: s3://bucket/runs
""",
    )
    settings = spec.settings("run-1", "/default")
    assert spec.config == {"lr": 0.001, "layers": [1, 2]}
    assert settings.scaling.min_slots == 1
    assert settings.scaling.max_slots == 2
    assert settings.scaling.policy == "patient"
    assert settings.fork_workers
    assert (settings.numa_binding, settings.device_faults) == ("exclusive", "report")
    assert settings.checkpoint.url == str(tmp_path / "ckpt")
    assert settings.storage_url == "s3://bucket/runs"
    assert settings.engine_config == {"zero_optimization": {"stage": 2}}
    given = {"suspect_after_s": 2, "crash_streak": 9, "capacity_timeout_s": 60}
    assert settings.failures == FailureSettings(**{**GPU_FAILURES, **given})
    assert settings.stragglers == StragglerSettings("evict", 1.2, 10, 2, 1)
    assert settings.anomalies == AnomalySettings("skip", 2, 50, 3)
    assert settings.gradient_noise == GradientNoiseSettings(5)
    assert settings.audit == AuditSettings(50, 3, "agreed")
    assert settings.communication == CommunicationSettings("exact", "hierarchical", 10.0)
    assert RunSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


def test_a_batch_that_follows_the_workers(tmp_path: Path) -> None:
    more = "anomalies: {policy: skip}\nbatch: {adaptive: sqrt, warmup_steps: 20}\n"
    settings = load(tmp_path, GOOD + more).settings("r", "/default")
    assert settings.adaptive_batch == AdaptiveBatch("sqrt", 20)
    assert RunSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


def test_storage_follows_the_checkpoints_and_both_the_default(tmp_path: Path) -> None:
    alone = load(tmp_path, GOOD).settings("r", "/default")
    assert (alone.checkpoint.url, alone.storage_url) == ("/default", "/default")
    beside = load(tmp_path, GOOD + "checkpoint: {url: s3://b/x}\n").settings("r", "/default")
    assert (beside.checkpoint.url, beside.storage_url) == ("s3://b/x", "s3://b/x")


def test_deepspeed_config_may_be_a_file_beside_the_job(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}, "optimizer": {"params": {"lr": 1e-4}}}')
    spec = load(tmp_path, GOOD + "deepspeed: ds.json\n")
    assert spec.deepspeed == {"bf16": {"enabled": True}, "optimizer": {"params": {"lr": 1e-4}}}
    with pytest.raises(UsageError, match=r"job.yaml line 3: the DeepSpeed config .*nope.json cannot be read"):
        load(tmp_path, GOOD + "deepspeed: nope.json\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_worker: 3\n", "line 3: unknown key 'max_worker'; did you mean 'max_workers'?"),
        ("num_workers: 3\n", "line 3: unknown key 'num_workers'; did you mean 'm"),
        ("keep_last: 3\n", "line 3: unknown key 'keep_last'; 'keep_last' belongs under 'checkpoint'"),
        (
            "checkpoint:\n  every_step: 3\n",
            "line 4: unknown key 'checkpoint.every_step'; did you mean 'every_steps'?",
        ),
        (
            "failures: {suspect_after: 3}\n",
            "line 3: unknown key 'failures.suspect_after'; did you mean 'suspect_after_s'?",
        ),
        (
            "gradient_noise: {every: 3}\n",
            "line 3: unknown key 'gradient_noise.every'; did you mean 'every_steps'?",
        ),
        ("gradient_noise: {every_steps: 0}\n", "'gradient_noise.every_steps' should be greater than or equal to 1"),
        (
            "gradient_noise: {every_steps: 1}\nglobal_batch: 8\nmicro_batch: 8\n",
            "needs two of them: micro_batch (8) must be below global_batch (8)",
        ),
        (
            "gradient_noise: {every_steps: 1}\nmesh: {sp: 2}\n",
            "with mesh: {sp: 2} a rank's gradient is that of its part of the sequences only",
        ),
        (
            "communication: {strategies: ring}\n",
            "line 3: unknown key 'communication.strategies'; did you mean 'strategy'?",
        ),
        ("communication: {staleness: 2}\n", "communication.staleness belongs to semantics: async; leave it out"),
        (
            "communication: {semantics: async, staleness: 30}\n",
            "staleness (30) must be at least 0 and below every_steps",
        ),
        ("batch: adaptive\n", "batch: {adaptive: linear} for SGD, {adaptive: sqrt} for Adam"),
        ("batch: {adaptive: cubic}\n", "'batch.adaptive' should be"),
        ("batch: {adaptive: sqrt, warm_up: 3}\n", "line 3: unknown key 'batch.warm_up'; did you mean 'warmup_steps'?"),
        (
            "batch: {adaptive: sqrt}\nanomalies: {policy: skip}\nscaling_policy: measured\n",
            "batch.adaptive does not go with scaling_policy: measured",
        ),
        ("batch: {adaptive: sqrt}\n", "batch.adaptive does not go with anomalies.policy: rollback"),
        (
            "batch: {adaptive: sqrt}\nanomalies: {policy: skip}\ncommunication: {semantics: async}\n",
            "batch.adaptive does not go with communication.semantics: local or async",
        ),
        ("communication: {strategy: star}\n", "communication.strategy is 'star', but with semantics: exact must be"),
        ("communication: {bucket_mb: 0}\n", "communication.bucket_mb must be above zero, got 0"),
        ("communication: {}\nengine: fsdp2\n", "communication is supported with engine: deepspeed"),
        ("communication: {}\nmesh: {tp: 2}\n", "communication: with mesh: {tp: 2} a rank has its slices' gradient"),
        ("audit: {every: 3}\n", "line 3: unknown key 'audit.every'; did you mean 'every_steps'?"),
        ("audit: {every_steps: 0}\n", "'audit.every_steps' should be greater than or equal to 1"),
        (
            "audit: {every_steps: 1}\nmesh: {sp: 2}\n",
            "with mesh: {sp: 2} a rank computes its part of a sequence only, which no other can repeat",
        ),
        ("failures: {seed: 3}\n", "unknown key 'failures.seed'; 'seed' belongs at the top level"),
        ("min_workers: 5\n", "min_workers (5) is above max_workers (4)"),
        ("min_workers: 0\n", "line 3: 'min_workers' should be greater than or equal to 1, but is 0"),
        ("global_batch: 0\n", "'global_batch' should be greater than or equal to 1, but is 0"),
        ("global_batch: 2\nmicro_batch: 4\n", "micro_batch (4) is above global_batch (2)"),
        ("max_steps: 1\nepochs: 1\n", "max_steps and epochs are both given; a run has one end"),
        ("workers_per_slot: 3\n", "must be multiples of workers_per_slot (3)"),
        ("resources_per_worker: {GPU: 0.5}\n", "GPU is 0.5, but must be 0 or 1: two ranks would share one device"),
        ("resources_per_worker: {GPU: 2}\n", "GPU is 2, but must be 0 or 1: a rank uses one device"),
        ("seed: yes\n", "line 3: 'seed' should be a valid integer, but is True"),
        ("max_steps: many\n", "line 3: 'max_steps' should be a valid integer, but is 'many'"),
        ("failures: {heartbeat_s: 0}\n", "'failures.heartbeat_s' should be greater than 0, but is 0"),
        ("failures: {heartbeat_s: 9}\n", "heartbeat_s (9.0) must be below suspect_after_s (1.0)"),
        ("failures: {capacity_timeout_s: -1}\n", "'failures.capacity_timeout_s' should be greater than 0, but is -1"),
        ("seed: 1\nseed: 2\n", "line 4: the key 'seed' was given before, in line 3"),
        ("deepspeed: 3\n", "line 3: 'deepspeed' should be"),
        (
            "anomalies: {policy: ignore}\n",
            "'anomalies.policy' should be 'stop', 'skip', 'rollback' or 'off', but is 'ignore'",
        ),
        (
            "scaling_policy: hasty\n",
            "line 3: 'scaling_policy' should be 'eager', 'measured' or 'patient', but is 'hasty'",
        ),
        ("price_per_node_hour: -1\n", "line 3: 'price_per_node_hour'"),
        ("config: [\n", "not valid YAML"),
        ("mesh: {tp: 2, pp: 2}\n", "tp and pp are supported together with engine: fsdp2; give one of them"),
        ("audit: {every_steps: 1}\nmesh: {pp: 2}\n", "with mesh: {pp: 2} a rank computes its layers only"),
        ("communication: {strategy: ring}\nmesh: {pp: 2}\n", "mesh: {pp: 2} a rank has its layers' gradient only"),
        ("gradient_noise: {every_steps: 1}\nmesh: {pp: 2}\n", "mesh: {pp: 2} a rank's gradient is that of its layers"),
        ("mesh: {pp: [4, 2]}\n", "pp: the sizes, each once, the smallest first, not [4, 2]"),
        ("mesh: {pp: [2, 4]}\n", "mesh.pp may change: give the job's global_batch and micro_batch"),
        ("mesh: {pp: 8}\n", "min_workers (1) to max_workers (4) has no multiple of 8 (mesh: {pp: 8})"),
        ("mesh: {sp: 2, pp: 2}\n", "sp and pp are supported together with engine: fsdp2; give one of them"),
        ("mesh: {cp: 2, tp: 2}\n", "line 3: cp (context parallelism, ring attention) is not supported: torch"),
        (
            "mesh: {sp: 2, ep: 2, tp: 2}\n",
            "min_workers (1) to max_workers (4) has no multiple of 8 (mesh: {sp: 2, tp: 2",
        ),
        ("mesh: {sp: 2, ep: 4}\n", "min_workers (1) to max_workers (4) has no multiple of 8 (mesh: {sp: 2, ep: 4})"),
        ("mesh: {ep: 2, pp: 2}\n", "ep and pp are supported together with engine: fsdp2; give one of them"),
        ("engine: fsdp2\nmesh: {ep: 2, pp: 4}\n", "has no multiple of 8 (mesh: {ep: 2, pp: 4})"),
        (
            "engine: fsdp2\nmesh: {ep: [1, 2], pp: [1, 2]}\n",
            "mesh.pp may change: give the job's global_batch and micro_batch",
        ),
        (
            "gradient_noise: {every_steps: 1}\nmesh: {tp: 2}\n",
            "with mesh: {tp: 2} a rank's gradient is that of its slices of the layers only",
        ),
        (
            "gradient_noise: {every_steps: 1}\nmesh: {ep: 2}\n",
            "a rank's experts have gradients of other ranks' samples",
        ),
        ("audit: {every_steps: 1}\nmesh: {ep: 2}\n", "with mesh: {ep: 2} a rank has some experts only"),
        ("communication: {strategy: ring}\nmesh: {ep: 2}\n", "mesh: {ep: 2} experts' gradients go to some ranks only"),
        ("mesh: {ep: 8}\n", "min_workers (1) to max_workers (4) has no multiple of 8 (mesh: {ep: 8})"),
        ("mesh: {tp: 8}\n", "min_workers (1) to max_workers (4) has no multiple of 8 (mesh: {tp: 8})"),
        ("mesh: {dp: 2}\n", "dp follows from the number of workers, which changes; leave it out"),
        ("mesh: {sp: 0}\n", "'mesh.sp' should be greater than or equal to 1, but is 0"),
        ("mesh: {sp: 8}\n", "min_workers (1) to max_workers (4) has no multiple of 8 (mesh: {sp: 8})"),
        (
            "workers_per_slot: 2\nmin_workers: 2\nmesh: {sp: 3}\n",
            "min_workers (3) and max_workers (3), in whole cells of 3, must be multiples of workers_per_slot (2) too",
        ),
    ],
)
def test_one_sentence_names_the_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, GOOD + text)
    assert said in caught.value.message
    assert "\n" not in caught.value.message
    assert "job.yaml" in caught.value.message


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the key 'max_workers' is missing"):
        load(tmp_path, "entry_point: a:b\n")


def test_a_mistyped_required_key_is_told_as_mistyped(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'max_workers'"):
        load(tmp_path, "entry_point: a:b\nmaxworkers: 3\n")


@pytest.mark.parametrize("text", ["", "- 1\n", "hello\n"])
def test_a_job_is_a_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="mapping of keys"):
        load(tmp_path, text)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nope.yaml cannot be read: No such file"):
        load_job(tmp_path / "nope.yaml")


def test_every_timeout_has_its_unit_in_its_name() -> None:
    for field in dataclasses.fields(FailureSettings):
        if "float" in str(field.type):
            assert field.name.endswith(("_s", "_factor")), field.name


def test_settings_of_a_newer_version_are_refused_by_name() -> None:
    data = {**RunSettings("r").to_json(), "teleport": True}
    with pytest.raises(UsageError, match="teleport"):
        RunSettings.from_json(data)


def test_the_example_is_a_good_job_and_agrees_with_its_script() -> None:
    examples = Path(__file__).parents[4] / "examples"
    spec = load_job(examples / "gpt.yaml")
    assert check(spec.job(examples / "gpt.yaml", "r")) == []
    tree = ast.parse((examples / "gpt.py").read_text())
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert ast.literal_eval(assigned["CONFIG"]) == spec.config


def test_the_elastic_example_differs_from_plain_deepspeed_by_five_lines_or_fewer() -> None:
    examples = Path(__file__).parents[4] / "examples"
    plain, ours = ((examples / name).read_text().splitlines() for name in ("plain_deepspeed.py", "gpt.py"))
    code = [line for line in difflib.ndiff(plain, ours) if line[0] in "+-" and line[2:].strip()]
    # The docstring says what each file is.
    added = [line for line in code if line[0] == "+" and "elastic run" not in line and "Compare with" not in line]
    assert len(added) == 2, added


def test_the_old_name_of_a_section_is_read_with_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = load(tmp_path, f"{GOOD}memory: {{every_steps: 3}}\n")
    assert spec.settings("run-1", "/default").snapshots.every_steps == 3
    assert capfd.readouterr().err == (
        f"{tmp_path}/job.yaml line 3: 'memory' is now called 'snapshots'; the old name will be refused in the next "
        "release\n"
    )
    assert load(tmp_path, f"{GOOD}snapshots: {{every_steps: 3}}\n") == spec
    assert capfd.readouterr().err == ""
    with pytest.raises(UsageError, match=r"line 5: unknown key 'snapshots.replica'; did you mean 'replicas'\?"):
        load(tmp_path, f"{GOOD}memory:\n  required: true\n  replica: 1\n")
    with pytest.raises(UsageError, match="line 3: 'memory' is the old name of 'snapshots', and both are given"):
        load(tmp_path, f"{GOOD}memory: {{}}\nsnapshots: {{}}\n")


def test_the_settings_of_an_old_run_are_read() -> None:
    settings = RunSettings("run-1", snapshots=SnapshotSettings(required=True))
    old = settings.to_json()
    old["memory"] = old.pop("snapshots")
    assert RunSettings.from_json(old) == settings


BOMB = "\n".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" if n else "  a0: &a0 [x, x]" for n in range(12))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (f"config:\n{BOMB}\n", "more than 100000 values; aliases count each time"),
        ("config: &c\n  own: *c\n", "line 3: an alias refers to a value that contains it"),
        (f"config: {'[' * 200}{']' * 200}\n", "nested more than 100 levels deep"),
        (f"config: {'[' * 20000}{']' * 20000}\n", "nested more than 100 levels deep"),
        ("config: {day: 2026-01-02}\n", "line 3: 'config.day' is read as a date, which a job cannot hold; put it into"),
        ("config: {at: [2026-01-02 03:04:05]}\n", "line 3: 'config.at.0' is read as a datetime"),
        ("config: {data: !!binary aGVsbG8=}\n", "line 3: 'config.data' is read as a bytes"),
        ("config: {names: !!set {a, b}}\n", "line 3: 'config.names' is read as a set"),
        ("config: {1: one}\n", "line 3: the key 1 is not text; put it into quotes"),
    ],
)
def test_hostile_and_surprising_yaml_is_one_sentence(tmp_path: Path, config: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, GOOD + config)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_aliases_and_merges_work(tmp_path: Path) -> None:
    spec = load(tmp_path, f"{GOOD}config:\n  base: &b {{lr: 1e-3}}\n  more: {{<<: *b, width: 8}}\n  same: [*b, *b]\n")
    assert spec.config["more"] == {"lr": 0.001, "width": 8}
    assert spec.config["same"] == [{"lr": 0.001}] * 2


def test_limits_have_other_defaults_where_workers_have_a_gpu(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).failures == FailureSettings()
    assert load(tmp_path, f"{GOOD}resources_per_worker: {{GPU: 0}}\n").failures == FailureSettings()
    given = {"abort_timeout_s": 3.0, "heartbeat_s": 0.1}
    on_gpus = load(tmp_path, f"{GOOD}resources_per_worker: {{GPU: 1}}\nfailures: {json.dumps(given)}\n").failures
    assert on_gpus == FailureSettings(**{**GPU_FAILURES, **given}), "what is given is kept"


@pytest.mark.parametrize("gpu", ["", "resources_per_worker: {GPU: 1}\n"])
def test_a_slip_in_failures_is_named_with_and_without_a_gpu(gpu: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="abort_timeout_s"):
        load(tmp_path, f"{GOOD}{gpu}failures: {{abort_timeout: 3.0}}\n")


def test_workers_are_rounded_to_cells_of_two_axes(tmp_path: Path) -> None:
    text = GOOD.replace("max_workers: 4", "max_workers: 11") + "min_workers: 3\nglobal_batch: 8\nmicro_batch: 2\n"
    found = {}
    meshes = ("{sp: 2, tp: 2}", "{sp: 2, tp: [1, 2]}", "{tp: 2, ep: [1, 2]}", "{sp: 2, tp: 2, pp: 2}")
    for mesh in (*meshes, "{ep: [1, 2], pp: [2, 3]}"):
        engine = "engine: fsdp2\n" if "pp" in mesh else ""
        settings = load(tmp_path, f"{text}{engine}mesh: {mesh}\n").settings("r", "./runs")
        found[mesh] = settings.scaling.min_workers, settings.scaling.max_workers, settings.mesh.cells
    assert found == {
        "{sp: 2, tp: 2}": (4, 8, (4,)),
        "{sp: 2, tp: [1, 2]}": (4, 10, (2, 4)),
        "{tp: 2, ep: [1, 2]}": (4, 10, (2, 4)),
        "{sp: 2, tp: 2, pp: 2}": (8, 8, (8,)),
        "{ep: [1, 2], pp: [2, 3]}": (3, 10, (2, 3, 4, 6)),
    }


def test_experts_may_be_shared_by_other_numbers_of_workers_in_other_generations(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD.replace("max_workers: 4", "max_workers: 7") + "min_workers: 1\nmesh: {ep: [2, 3]}\n")
    settings = spec.settings("r", "./runs")
    assert (settings.scaling.min_workers, settings.scaling.max_workers) == (2, 6)
    assert settings.mesh.choices == {"ep": (2, 3)}
    assert settings.mesh.ep == 3
    assert RunSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    state = machine.initial(settings, 0.0)
    _, actions = machine.step(state, ev.RunStarted(), 0.0)
    assert "in cells of 2 or 3 (mesh: {ep: [2, 3]})" in " ".join(a.sentence for a in actions if isinstance(a, act.Note))


@pytest.mark.parametrize(
    ("most", "sp", "sizes"), [(4, 1, (1, 2, 3, 4)), (64, 1, tuple(range(1, 9))), (7, 2, (1, 2, 3))]
)
def test_any_number_of_workers_may_share_each_layer(tmp_path: Path, most: int, sp: int, sizes: tuple[int, ...]) -> None:
    text = GOOD.replace("max_workers: 4", f"max_workers: {most}") + "min_workers: 1\nglobal_batch: 8\nmicro_batch: 2\n"
    settings = load(tmp_path, f"{text}engine: fsdp2\nmesh: {{sp: {sp}, tp: any}}\n").settings("r", "./runs")
    assert settings.mesh.choices == {"tp": sizes}
    assert settings.mesh.any_tp
    assert str(settings.mesh) == ("mesh: {tp: any}" if sp == 1 else "mesh: {sp: 2, tp: any}")
    assert RunSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


@pytest.mark.parametrize(
    ("mesh", "said"),
    [("ep: any", "each must divide the number of experts"), ("ep: [4, 2]", "the smallest first, not \\[4, 2\\]"),
     ("ep: []", "the sizes"), ("sp: [1, 2]", "sp is one number"),
     ("tp: any", "mesh.tp may change: give the job's global"),
     ("tp: some", "mesh.tp"),
     ("tp: [2, 1]", "the smallest first, not \\[2, 1\\]"), ("tp: [1, 2]", "mesh.tp may change: give the job's global"),
     ("tp: [1, 2], ep: 2", "mesh.tp may change: give the job's"), ("tp: [1, 2], pp: 2", "together with engine: fsdp2"),
     ("tp: 2, ep: [1, 2], sp: 2", "together with engine: fsdp2")],
)  # fmt: skip
def test_sizes_that_cannot_change_are_refused(tmp_path: Path, mesh: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(tmp_path, f"{GOOD}mesh: {{{mesh}}}\n")


def test_another_number_of_workers_that_share_each_layer_is_told_at_the_start(tmp_path: Path) -> None:
    """Once, and by a run that may have it alone."""
    more = "min_workers: 1\nglobal_batch: 8\nmicro_batch: 2\nmesh: {tp: SIZES}\n"
    said = []
    for sizes in ("[1, 2, 4]", "[2]", "2"):
        settings = load(tmp_path, GOOD + more.replace("SIZES", sizes)).settings("run", "/default")
        _, actions = machine.step(machine.initial(settings, 0.0), ev.RunStarted(), 0.0)
        said.append([action.sentence for action in actions if isinstance(action, act.Note) and action.kind == "start"])
    assert said[0] == [
        "the run starts from the beginning with 1 to 4 workers, in cells of 1 or 2 or 4 (mesh: {tp: [1, 2, 4]}); "
        "mesh.tp may change within the run: dropout inside layers that are cut is drawn anew then"
    ]
    assert "dropout" not in str(said[1:])


def test_workers_that_share_layers_may_begin_with_weights(tmp_path: Path) -> None:
    settings = load(tmp_path, GOOD + "weights: {source: there}\nmesh: {tp: 2}\n").settings("run", "runs")
    assert settings.weights is not None
    assert settings.mesh.tp == 2


def test_stages_whose_layers_are_shared_are_cells_of_torchs_engine(tmp_path: Path) -> None:
    more = "engine: fsdp2\nmin_workers: 2\nglobal_batch: 8\nmicro_batch: 2\nmesh: {pp: [1, 2], tp: 2}\n"
    settings = load(tmp_path, GOOD.replace("max_workers: 4", "max_workers: 7") + more).settings("run", "/default")
    assert settings.mesh.choices == {"pp": (1, 2)}
    assert (settings.mesh.tp, settings.mesh.cells) == (2, (2, 4))


def test_steps_are_predicted_with_the_stages_that_ranks_have(tmp_path: Path) -> None:
    more = GOOD + "engine: fsdp2\nmesh: {pp: 2}\n"
    looped = more + "fsdp2: {pipeline_schedule: LoopedBFS, pipeline_stages_per_rank: 3}\n"
    refused = more + "fsdp2: {pipeline_stages_per_rank: 3}\n"
    found = [load(tmp_path, text).settings("run", "/default").mesh for text in (more, looped, refused)]
    assert [mesh.stages_per_rank for mesh in found] == [1, 3, 1]


@pytest.mark.parametrize("axis", ["sp", "tp", "ep"])
def test_worker_counts_are_rounded_to_whole_cells_and_the_run_says_so(tmp_path: Path, axis: str) -> None:
    spec = load(tmp_path, GOOD.replace("max_workers: 4", "max_workers: 7") + f"min_workers: 3\nmesh: {{{axis}: 2}}\n")
    settings = spec.settings("r", "./runs")
    assert (settings.scaling.min_workers, settings.scaling.max_workers) == (4, 6)
    state = machine.initial(settings, 0.0)
    _, actions = machine.step(state, ev.RunStarted(), 0.0)
    (said,) = [action.sentence for action in actions if isinstance(action, act.Note) and action.kind == "start"]
    assert said == (
        f"the run starts from the beginning with 4 to 6 workers, in cells of 2 (mesh: {{{axis}: 2}}); "
        "min_workers 3 was rounded to 4, max_workers 7 was rounded to 6"
    )
