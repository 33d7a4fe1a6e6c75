"""The parameter server in one process: what it computes, what it survives and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import parameter_servers as ps
import pytest
import torch
from torch import nn

from elastic.comm.server import cuts
from elastic.comm.server.frozen import freeze, notes_of, read_shard
from elastic.comm.server.requests import Advance, Close, Push
from elastic.comm.server.shard import fresh, initial
from elastic.comm.server.shard_client import ShardClient
from elastic.comm.server.shard_server import ShardServer
from elastic.comm.server.worker import FlatModel
from elastic.core.errors import CollectiveFailed, Fenced, IntegrityError, UsageError
from elastic.core.server.continuing import Whole, scales_of, wholes
from elastic.core.server.global_batches import begin, rank_part
from elastic.core.server.placement import generation_view, next_view
from elastic.store.open import open_objects


def assert_equal(nets: Sequence[nn.Module], want: nn.Module) -> None:
    expected = want.state_dict()
    for net in nets:
        got = net.state_dict()
        assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("servers", "optimizer_of"), [(2, ps.adamw), (3, ps.momentum)])
def test_with_staleness_0_every_worker_ends_with_the_weights_of_plain_torch(
    servers: int, optimizer_of: ps.OptimizerOf
) -> None:
    nets = ps.run(servers, optimizer_of, ["a", "b"], staleness=0, micros=3, steps=6)
    assert_equal(nets, ps.plain(optimizer_of, micros=3, steps=6))


def test_rates_multiply_the_learning_rate_of_their_update() -> None:
    with ps.cluster(2) as made:
        made.begin(ps.momentum, begin(1, 0, 2), ["a"], rates=[1.0, 0.0])
        assert_equal(made.train(ps.momentum, ["a"]), ps.plain(ps.momentum, micros=1, steps=1))


@pytest.mark.parametrize("lost", ["s0", "s1"])
def test_a_server_lost_in_mid_run_leaves_no_trace_in_the_weights(lost: str) -> None:
    """s0 is the primary of the shard that keeps the rules' state, s1 its replica."""
    once = threading.Lock()
    with ps.cluster(3) as made:

        def lose(worker: str, micro: int) -> None:
            if micro == 7 and once.acquire(blocking=False):
                made.lose(lost, joins="s3")
                # The second loss is of a copy that was sent when the first one was replaced.
                made.lose("s2")

        made.begin(ps.adamw, begin(3, 0, 6), ["a", "b"])
        nets = made.train(ps.adamw, ["a", "b"], lose)
        assert made.view.number == 3
    assert_equal(nets, ps.plain(ps.adamw, micros=3, steps=6))


def test_a_worker_that_was_declared_lost_is_refused_and_its_samples_are_computed_by_others() -> None:
    with ps.cluster(2) as made:
        made.begin(ps.momentum, begin(3, 0, 4), ["old", "a"])
        net, old = made.worker("old", ps.momentum)
        ps.loss(net, next(old.micros())).backward()
        made.client.members(["a"])
        with pytest.raises(Fenced, match="does not hold lease"):
            old.push()
        old.close()
        assert_equal(made.train(ps.momentum, ["a"]), ps.plain(ps.momentum, micros=3, steps=4))


def test_a_gradient_that_is_too_old_is_computed_again() -> None:
    """With staleness 1 that of b is two updates old when it arrives."""
    seen: list[int] = []
    with ps.cluster(2) as made:
        made.begin(ps.momentum, begin(1, 1, 4), ["a", "b"])
        workers = {name: made.worker(name, ps.momentum) for name in "ab"}
        micros = {name: worker.micros() for name, (_, worker) in workers.items()}

        def compute(name: str) -> int:
            micro = next(micros[name])
            ps.loss(workers[name][0], micro).backward()
            return micro

        compute("a")
        seen.append(compute("b"))
        workers["a"][1].push()
        compute("a")
        workers["a"][1].push()
        workers["b"][1].push()
        seen.append(compute("b"))
        workers["b"][1].push()
        assert made.client.batches().version == 3
        for _, worker in workers.values():
            worker.close()
    assert seen == [1, 1]


def test_a_run_continues_from_a_cut_on_another_number_of_servers(tmp_path: Path) -> None:
    objects = open_objects(str(tmp_path))
    with ps.cluster(2) as made:
        made.begin(ps.adamw, begin(2, 0, 6, cut_every=2), ["a"])
        net, worker = made.worker("a", ps.adamw)
        assert cuts.save(made.client, made.specs, objects, "cuts") is None
        for micro in worker.micros():
            if micro == 9:  # update 4 has been made, and the next one half
                break
            ps.loss(net, micro).backward()
            worker.push()
        worker.close()
        cut = cuts.save(made.client, made.specs, objects, "cuts")
        assert cut is not None
        assert (cut.version, cut.next_micro, cut.missing) == (4, 8, ())
    saved = cuts.load(objects, "cuts")
    assert saved is not None
    with ps.cluster(3) as made:
        made.begin(ps.adamw, saved.begun(), ["b"], shards=saved.shards(3))
        assert_equal(made.train(ps.adamw, ["b"]), ps.plain(ps.adamw, micros=2, steps=6))
    damaged = tmp_path / "cuts" / "v00000004" / "shard-1"
    damaged.write_bytes(bytes(8) + damaged.read_bytes()[8:])
    with pytest.raises(IntegrityError, match="shard-1 is not as it was saved"):
        cuts.load(objects, "cuts")


def refused(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    with pytest.raises(UsageError) as error:
        FlatModel(net, optimizer).require_fresh()
    return error.value.message


def test_what_a_server_cannot_compute_is_refused_by_name() -> None:
    net = ps.model()
    assert "Adagrad is none of SGD, Adam, AdamW" in refused(net, torch.optim.Adagrad(net.parameters()))
    with_norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert "module 1 keeps running statistics" in refused(with_norm, ps.momentum(with_norm))
    half = ps.model().half()
    assert "parameter 0.weight is torch.float16 on cpu" in refused(half, ps.momentum(half))
    used = ps.momentum(net)
    ps.loss(net, 0).backward()
    used.step()
    assert "the optimizer has made a step already" in refused(net, used)


def test_a_gradient_that_is_missing_or_not_finite_does_not_travel() -> None:
    with ps.cluster(2) as made:
        made.begin(ps.momentum, begin(1, 0, 2), ["a"])
        net, worker = made.worker("a", ps.momentum)
        (ps.loss(net, next(worker.micros())) * float("inf")).backward()
        with pytest.raises(IntegrityError, match="micro-batch 0 is not finite"):
            worker.push()
        next(worker.micros())
        with pytest.raises(UsageError, match=r"parameter 0.weight has no gradient"):
            worker.push()
        worker.close()


def test_a_shard_whose_copies_are_both_lost_is_never_continued_from_something_else() -> None:
    """The new replica had not been sent the state when the primary was lost."""
    with ps.cluster(2) as made:
        made.begin(ps.momentum, begin(1, 0, 2), ["a"])
        made.servers.pop("s1").close()
        made.servers["s2"] = ShardServer("s2", ps.TOKEN, "127.0.0.1")
        view = next_view(made.view, ["s1"], {"s2": made.servers["s2"].address})
        made.servers.pop("s0").close()
        client = ShardClient([made.servers["s2"].address], ps.TOKEN, limit_s=0.2)
        client.announce(next_view(view, ["s0"]))
        with pytest.raises(IntegrityError, match="both copies were lost"):
            client.batches()
        client.close()


def test_nobody_without_the_token_is_served() -> None:
    with ps.cluster(2) as made:
        client = ShardClient([made.view.addresses["s0"]], bytes(31) + b"x", limit_s=0.2)
        with pytest.raises(CollectiveFailed, match="no parameter server knows"):
            client.batches()
        client.close()


class _Ranks:
    """A run of two ranks with a micro-batch each in every step; the test sends what each of them would."""

    def __init__(self, made: ps.Cluster, clip: float = 0.0) -> None:
        net, self.clip = ps.model(), clip
        flat = FlatModel(net, ps.adamw(net))
        self.client, self.view = made.client, generation_view(5, made.view.addresses)
        self.client.announce(self.view)
        self.specs = flat.specs(2, micros=2, keeps_last=True, clips=clip > 0.0)
        for number, shard in enumerate(flat.shards(self.specs)):
            self.client.load_shard(number, shard)
        self.net, self.flat = net, flat

    def push(self, rank: int, step: int) -> None:
        """Its gradient, always at the first parameters."""
        self.net.zero_grad()
        ps.loss(self.net, step * 2 + rank).backward()
        gradient, options = self.flat.gradient(), tuple(group.options for group in self.flat.groups())
        for shard, spec in enumerate(self.specs):
            part = gradient[spec.begin : spec.end]
            push = Push(shard, 5, "primary", rank_part(step, rank, 2), (("gradient", part.numel()),), options)
            self.client.ask(shard, lambda _, push=push: push, (part,))

    def pull(self, rank: int, steps: int, version: int) -> tuple[list[int], torch.Tensor] | None:
        """The updates that are in the parameters of each shard, and these; None: there are not so many."""
        told = [
            self.client.ask(shard, lambda _, shard=shard: Advance(shard, 5, rank, steps, version, -1, 0.0))
            for shard in (0, 1)
        ]
        if any(message.get("waits") for message, _ in told):
            return None
        return [message["version"] for message, _ in told], torch.cat([each["parameters"] for _, each in told])

    def expected(self, updates: int) -> torch.Tensor:
        net = ps.model()
        optimizer = ps.adamw(net)
        gradients = []
        for step in range(updates):
            net.zero_grad()
            for rank in (0, 1):
                (ps.loss(net, step * 2 + rank) / 2).backward()
            gradients.append([each.grad.clone() for each in net.parameters() if each.grad is not None])
        for gradient in gradients:
            for parameter, own in zip(net.parameters(), gradient, strict=True):
                parameter.grad = own
            if self.clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), self.clip)
            optimizer.step()
        return FlatModel(net, optimizer).parameters()


def test_a_step_counts_when_all_ranks_have_sent_it_to_all_shards_and_the_newest_is_taken() -> None:
    with ps.cluster(2) as made:
        ranks = _Ranks(made)
        for step in (0, 1, 2):
            ranks.push(0, step)
        ranks.push(1, 0)
        # All gradients of step 0 are there, but rank 1 has not said so: one may be missing on the other shard.
        assert ranks.pull(0, steps=3, version=1) is None
        found = ranks.pull(1, steps=1, version=0)
        assert found is not None
        assert found[0] == [1, 1]
        assert torch.allclose(found[1], ranks.expected(1), rtol=1e-6)
        assert ranks.pull(1, steps=1, version=2) is None
        ranks.push(1, 1)
        ranks.push(1, 1)  # an answer was lost
        ranks.push(1, 0)  # it is in an update already
        found = ranks.pull(1, steps=2, version=0)
        assert found is not None
        assert found[0] == [2, 2], "the newest, not the least that would do"
        assert torch.allclose(found[1], ranks.expected(2), rtol=1e-6)


def test_a_newer_generation_shuts_out_the_one_before() -> None:
    with ps.cluster(2) as made:
        ranks = _Ranks(made)
        other = ShardClient(ranks.view.addresses.values(), ps.TOKEN, limit_s=0.2)
        other.announce(generation_view(6, ranks.view.addresses))
        with pytest.raises(CollectiveFailed, match="epoch"):
            ShardClient.ask(other, 0, lambda _: Advance(0, 5, 0, 1, 0, -1, 0.0))
        other.close()


def _taken(made: ps.Cluster, whole: Whole, clip: float = 0.0) -> torch.Tensor:
    scales = scales_of(whole.squares, clip)
    parts = [
        read_shard(made.view.addresses[name], ps.TOKEN, whole, shard, 0, scales)
        for shard, name in enumerate(whole.holders)
    ]
    return torch.cat([tensors[name] for _, tensors in parts for name in tensors if name.endswith("/parameter")])


def test_a_generation_that_is_over_leaves_its_state_until_the_next_one_has_begun() -> None:
    """Two updates; of the third one gradient is on both shards, and the other nowhere."""
    with ps.cluster(2) as made:
        ranks = _Ranks(made)
        for step in (0, 1):
            for rank in (0, 1):
                ranks.push(rank, step)
                ranks.pull(rank, steps=step + 1, version=0)
            for rank in (0, 1):
                note = Close(0, 5, "primary", rank, step + 1, f"{rank} in {step + 1}", 1)
                ranks.client.ask(0, lambda _, note=note: note)
        ranks.push(0, 2)
        made.servers.pop("s0").close()
        found = freeze(ranks.view.addresses, ps.TOKEN, 6)
        assert {name: len(copies) for name, copies in found.items()} == {"s1": 2}, "a replica and a primary"
        whole = next(wholes(found), None)
        assert whole == Whole(5, 2, 2, ("s1", "s1"), ({}, {}))
        assert torch.equal(_taken(made, whole), ranks.expected(2))
        notes = notes_of(read_shard(made.view.addresses["s1"], ps.TOKEN, whole, 0, 1, {})[0])
        assert notes == {2: {0: "0 in 2", 1: "1 in 2"}}, "of the steps that are asked for"
        # The update before was made, too, and can be had again.
        assert torch.equal(_taken(made, replace(whole, version=1)), ranks.expected(1))
        with pytest.raises(Fenced, match="generation 5 is over"):
            made.servers["s1"]._handle(Push(1, 5, "primary", rank_part(2, 1, 2), ()), {"gradient": torch.zeros(1)})

        begins = generation_view(6, {"s1": made.view.addresses["s1"]})
        client = ShardClient(begins.addresses.values(), ps.TOKEN)
        client.announce(begins)
        assert next(wholes(freeze(begins.addresses, ps.TOKEN, 7)), None) == whole, "nothing is loaded yet"
        (spec,) = ranks.flat.specs(1, micros=1, keeps_last=True)
        client.announce(generation_view(8, begins.addresses))
        client.load_shard(0, fresh(spec, 2, 2, (), initial(spec, ranks.flat.parameters())))
        part = torch.zeros(ranks.flat.numbers)
        push = Push(0, 8, "primary", rank_part(2, 0, 1), (("gradient", part.numel()),))
        client.ask(0, lambda _: push, (part,))
        client.close()
        (held,) = freeze(begins.addresses, ps.TOKEN, 9)["s1"]
        assert (held.epoch, held.shards, held.first, held.last) == (8, 1, 2, 3)


def test_a_shard_that_was_behind_is_clipped_as_the_other_one_was() -> None:
    """Only one shard has made the update when its primary is lost: its replica knows by what the other one is to."""
    with ps.cluster(2) as made:
        ranks = _Ranks(made, clip=0.05)
        for rank in (0, 1):
            ranks.push(rank, 0)
        squares = []
        for shard in (0, 1):
            for rank in (0, 1):
                look = Advance(shard, 5, rank, 1, 0, 0, 0.0, measures=True)
                told, _ = ranks.client.ask(shard, lambda _, look=look: look)
            squares.append({int(at): square for at, square in told["squares"]})
        with pytest.raises(IntegrityError, match="nobody has said by how much it is clipped"):
            ranks.pull(0, steps=1, version=1)
        make = Advance(0, 5, 0, 1, 1, 0, 0.0, until=1, scales=scales_of(squares, 0.05))
        assert 0.0 < make.scales[0] < 1.0
        ranks.client.ask(0, lambda _: make)
        for rank in (0, 1):
            note = Close(0, 5, "primary", rank, 1, "", 1)
            ranks.client.ask(0, lambda _, note=note: note)
        made.servers.pop("s0").close()
        held = freeze(ranks.view.addresses, ps.TOKEN, 6)
        assert {(copy.shard, copy.first, copy.last) for copy in held["s1"]} == {(0, 0, 1), (1, 0, 1)}
        whole = next(wholes(held), None)
        assert whole is not None
        assert torch.allclose(_taken(made, whole, 0.05), ranks.expected(1), rtol=1e-6)


def test_what_did_not_arrive_as_it_was_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with ps.cluster(2) as made:
        ranks = _Ranks(made)
        freeze(ranks.view.addresses, ps.TOKEN, 6)
        monkeypatch.setattr("elastic.comm.server.frozen.hash_of", lambda tensors: "another")
        with pytest.raises(IntegrityError, match="did not arrive as it was sent"):
            read_shard(made.view.addresses["s0"], ps.TOKEN, Whole(5, 0, 2, ()), 0, 0, {})
