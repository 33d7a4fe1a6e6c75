"""The fake API server does what the real one is documented to do, where our client or Ray's autoscaler depend on it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from elastic_cluster.kube.checks.schema import crd_schema
from hypothesis import given
from hypothesis import strategies as st
from kube_fake import FakeKubernetes, Refusal, fields, schema
from kube_fake.fields import ItemKey
from kube_samples import ray_cluster, ray_job

# A list of items with names, as containers' environment is, and a list without.
SCHEMA = {
    "type": "object",
    "properties": {
        "spec": {
            "type": "object",
            "properties": {
                "a": {"type": "string"},
                "b": {"type": "string"},
                "whole": {"type": "array"},
                "env": {
                    "type": "array",
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["name"],
                    "items": {"type": "object", "properties": {"name": {}, "value": {}}},
                },
            },
        }
    },
}
Manager = dict[str, frozenset[fields.Path]]


def applied(
    live: dict[str, Any], managers: Manager, wanted: dict[str, Any], who: str
) -> tuple[dict[str, Any], Manager]:
    result = fields.apply(live, managers, {"spec": wanted}, SCHEMA, who)
    return result.object, result.managers


def test_a_field_goes_with_the_last_manager_that_wants_it() -> None:
    live, managers = applied({}, {}, {"a": "1", "b": "1"}, "x")
    live, managers = applied(live, managers, {"a": "1"}, "y")
    live, managers = applied(live, managers, {"b": "1"}, "x")
    assert live == {"spec": {"a": "1", "b": "1"}}
    live, managers = applied(live, managers, {}, "y")
    assert live == {"spec": {"b": "1"}}
    live, managers = applied(live, managers, {}, "x")
    assert "spec" not in live or live["spec"] == {}


def test_items_with_a_name_have_owners_of_their_own() -> None:
    live, managers = applied({}, {}, {"env": [{"name": "A", "value": "1"}]}, "x")
    live, managers = applied(live, managers, {"env": [{"name": "B", "value": "2"}]}, "y")
    assert live["spec"]["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    live, _ = applied(live, managers, {}, "x")
    assert live["spec"]["env"] == [{"name": "B", "value": "2"}]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"a": "2"}, [".spec.a"]),
        ({"a": "1"}, []),
        ({"b": "2"}, []),
        ({"whole": [1, 2]}, [".spec.whole"]),
        ({"env": [{"name": "A", "value": "2"}]}, ['.spec.env[name="A"].value']),
        ({"env": [{"name": "B", "value": "2"}]}, []),
    ],
)
def test_only_another_value_of_another_manager_is_a_conflict(wanted: dict[str, Any], found: list[str]) -> None:
    live, managers = applied({}, {}, {"a": "1", "whole": [1], "env": [{"name": "A", "value": "1"}]}, "x")
    conflicts = fields.conflicts(live, managers, {"spec": wanted}, SCHEMA, "y")
    assert [fields.dotted(each.path) for each in conflicts] == found
    assert fields.conflicts(live, managers, {"spec": wanted}, SCHEMA, "x") == []


def test_who_updates_a_field_owns_it_alone() -> None:
    live, managers = applied({}, {}, {"a": "1", "b": "1"}, "x")
    changed = {"spec": {"a": "2", "b": "1"}}
    owners = fields.updated(live, changed, managers, SCHEMA, "z")
    assert owners == {"x": frozenset({("spec", "b")}), "z": frozenset({("spec", "a")})}


VALUES = st.sampled_from(["1", "2"])
WANTED = st.fixed_dictionaries(
    {},
    optional={
        "a": VALUES,
        "b": VALUES,
        "whole": st.lists(st.integers(0, 1), max_size=2),
        "env": st.lists(
            st.fixed_dictionaries({"name": VALUES, "value": VALUES}), max_size=2, unique_by=lambda item: item["name"]
        ),
    },
)


@given(st.lists(st.tuples(st.sampled_from("xyz"), WANTED), max_size=8))
def test_after_a_forced_apply_the_object_has_what_was_wanted(steps: list[tuple[str, dict[str, Any]]]) -> None:
    live: dict[str, Any] = {}
    managers: Manager = {}
    for who, wanted in steps:
        before = copy.deepcopy(live)
        live, managers = applied(live, managers, wanted, who)
        found = fields.leaves(live, SCHEMA)
        new = fields.leaves({"spec": wanted}, SCHEMA) if wanted else {}
        assert {path: found.get(path) for path in new} == new
        # Once more changes nothing, and nobody else conflicts with their own fields.
        assert applied(live, managers, wanted, who) == (live, managers)
        # What goes was this manager's alone.
        # An empty object is a value as well, until something is in it.
        lost = {path for path, value in fields.leaves(before, SCHEMA).items() if value != {}} - set(found)
        assert not any(path in owned for path in lost for name, owned in managers.items() if name != who)


def test_the_schema_fills_in_defaults_and_names_unknown_fields() -> None:
    crd = crd_schema("RayCluster")
    cluster = ray_cluster()
    group = cluster["spec"]["workerGroupSpecs"][0]
    del group["replicas"]
    group["replcas"] = 3
    assert list(schema.unknown(crd, {"spec": cluster["spec"]})) == ["spec.workerGroupSpecs[0].replcas"]
    del group["replcas"]
    filled = schema.filled_in(crd, cluster)["spec"]["workerGroupSpecs"][0]
    assert (filled["replicas"], filled["numOfHosts"], filled["priority"]) == (0, 1, 0)
    assert list(schema.problems(crd, cluster)) == []


def test_every_rule_of_the_schemas_is_known() -> None:
    assert {rule for kind in ("RayJob", "RayCluster") for rule in schema.rules(crd_schema(kind))} == schema.RULES.keys()


@pytest.mark.parametrize(
    ("backend", "change", "refused"),
    [("redis", "redis", False), ("redis", "rocksdb", True)],
)
def test_what_may_not_change(backend: str, change: str, refused: bool) -> None:
    crd = crd_schema("RayCluster")
    old, new = ray_cluster(), ray_cluster()
    old["spec"]["gcsFaultToleranceOptions"] = {"backend": backend}
    new["spec"]["gcsFaultToleranceOptions"] = {"backend": change}
    told = [each.message for each in schema.problems(crd, new, old)]
    assert told == (['Invalid value: "rocksdb": gcsFaultToleranceOptions.backend is immutable'] if refused else [])


def test_an_unknown_field_is_dropped_unless_the_request_is_strict() -> None:
    kubernetes = FakeKubernetes()
    job = ray_job()
    job["spec"]["entrypiont"] = "x"
    resource = kubernetes.resource("RayJob")
    with pytest.raises(Refusal, match=r'unknown field "spec.entrypiont"'):
        kubernetes.table.create(resource, "team", job, "x", dry_run=False, strict=True)
    made = kubernetes.table.create(resource, "team", job, "x", dry_run=False, strict=False)
    assert "entrypiont" not in made["spec"]


def test_an_item_is_named_by_its_keys() -> None:
    key = ItemKey((("name", "A"),))
    assert key.matches({"name": "A", "value": "1"})
    assert not key.matches({"name": "B"})
    assert not key.matches("A")
