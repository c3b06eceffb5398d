"""What a plan is made of: what machines give, what is left of it, and what is imagined on top."""

from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest

from omlx.cluster.choice import choose_of
from omlx.cluster.fleet import Fleet, Machine, fleet_of, this_machine
from omlx.cluster.members import Joined
from omlx.cluster.nodes import NodeId
from omlx.cluster.offer import Offer, Terms, offer_of
from omlx.cluster.placement import Demand, demand_of
from omlx.cluster.rates import LinkRate, Links, NodeRates, rates_by_chip
from omlx.cluster.what_if import imagine
from omlx.errors import BadSetting, DoesNotFit, Refused
from omlx.settings import Settings
from tests.cluster.test_planner import even, manifest_of

GB = 10**9
HERE = Machine("a" * 32, "studio", 64 * GB, 40 * GB, rates_by_chip("m4 max"), None)
FAST = LinkRate(1e-4, 3e9)


def joined(
    id: str,
    name: str,
    host: str = "10.0.0.2",
    chip: str = "Apple M4",
    speed: tuple[float, float] | None = None,
) -> Joined:
    return Joined(
        id=NodeId(id * 32),
        name=name,
        host=host,
        user="me",
        port=22,
        fingerprint="SHA256:" + id,
        chip=chip,
        memory_bytes=16 * GB,
        addresses=(host,),
        links=(),
        joined_at=datetime(2026, 11, 30, tzinfo=UTC),
        speed=speed,
    )


MINI, OTHER = joined("b", "mini", "mini.local"), joined("c", "mini")


def gives(fleet: Fleet) -> dict[str, int]:
    return {one.name: one.budget_bytes for one in fleet.machines}


def left(offer: Offer, *, with_hot: bool = True) -> dict[str, int]:
    return {node.name: node.budget.bytes for node in offer.candidates(with_hot=with_hot)}


# ------------------------------------------------------------------ what machines give


def test_a_machine_gives_what_the_settings_say_by_its_name_its_host_or_the_beginning_of_its_id() -> None:
    for word in ("mini", "mini.local", "bbbb"):
        assert gives(fleet_of(HERE, [MINI], {word: "headless"}))["mini"] == int(16 * GB * 0.9)
    assert gives(fleet_of(HERE, [MINI], {})) == {"studio": 40 * GB, "mini": int(16 * GB * 0.65)}
    assert gives(fleet_of(HERE, [MINI], {"studio": "50%"}))["studio"] == 32 * GB
    with pytest.raises(BadSetting, match="nodes"):
        fleet_of(HERE, [MINI], {"mini": "some of it"})


def test_two_machines_of_one_name_are_told_apart_and_the_gift_is_of_both() -> None:
    fleet = fleet_of(HERE, [MINI, OTHER], {"mini": "4GB"})
    assert gives(fleet) == {"studio": 40 * GB, "mini": 4 * GB, "mini-cccc": 4 * GB}
    assert gives(fleet_of(HERE, [MINI, OTHER], {"mini-cccc": "5GB", "mini": "4GB"}))["mini-cccc"] == 5 * GB


def test_this_machine_is_known_by_its_memory_and_its_chip() -> None:
    here = this_machine("a" * 32, 5 * GB, busy=True)
    assert here.name and here.memory_bytes > 0 and here.budget_bytes == 5 * GB and here.host is None


# ------------------------------------------------------------------ what is left for one model


def test_a_model_gets_what_others_and_the_hot_tier_leave_and_here_no_more_than_is_free() -> None:
    fleet = fleet_of(HERE, [MINI], {"mini": "10GB"})
    taken, free = {MINI.id: 2 * GB}, {HERE.node_id: 7 * GB}
    offer = offer_of(fleet, Terms(hot="10%"), models=2, taken=taken, free_bytes=free)
    assert left(offer) == {"studio": 7 * GB, "mini": int(7.5 * GB)}
    assert left(offer, with_hot=False) == {"studio": 7 * GB, "mini": 8 * GB}
    assert offer.hot_bytes() == {HERE.node_id: 2 * GB, MINI.id: GB // 2}


def test_a_machine_that_gets_no_layers_is_named_with_the_reason() -> None:
    fleet = fleet_of(HERE, [MINI, OTHER], {})
    full = {OTHER.id: 16 * GB}
    offer = offer_of(fleet, Terms(), taken=full, idle={MINI.id: "it does not answer"})
    assert list(left(offer)) == ["studio"]
    assert offer.idle() == [
        ("mini", "it does not answer"),
        ("mini-cccc", "other models have all that it gives"),
    ]


def test_a_model_that_fits_only_without_the_hot_tier_goes_without_it() -> None:
    model = manifest_of(even(4, GB))
    demand = Demand(100)

    def offer(size: str) -> Offer:
        return offer_of(fleet_of(HERE, [], {"studio": size}), Terms(hot="1GB"))

    assert choose_of(model, offer("10GB"), Links(), demand)[1] is True
    assert choose_of(model, offer("4500MB"), Links(), demand)[1] is False
    with pytest.raises(DoesNotFit):
        choose_of(model, offer("2GB"), Links(), demand)
    # A machine that the tier would have all of is a candidate without it.
    small = manifest_of(even(4, 1000))
    assert choose_of(small, offer("500MB"), Links(), demand)[1] is False
    with pytest.raises(Refused, match="at least one node"):
        choose_of(small, Offer((), (), Terms()), Links(), demand)


def test_an_offer_is_the_same_after_its_way_as_json() -> None:
    measured = NodeRates(200e9, 5e12)
    offer = offer_of(fleet_of(HERE, [MINI], {}), Terms(kv_bits=8), idle={MINI.id: "away"})
    first, second = offer.machines
    sent = replace(offer, machines=(replace(first, rates=measured), second), pairs=(("a", "b", FAST),))
    assert msgspec.json.decode(msgspec.json.encode(sent), type=Offer) == sent
    assert sent.links().between("b", "a") == FAST


# ------------------------------------------------------------------ what a plan is for


def test_a_plan_is_for_what_a_server_plans_for_unless_it_is_told_otherwise() -> None:
    single = Terms(step_tokens=256)
    many = replace(single, objective="throughput", places=20)
    assert demand_of(single, 4096) == Demand(4096, 1, "single", 256)
    assert demand_of(many, 4096) == Demand(512, 8, "throughput", 256)
    assert demand_of(replace(many, places=3), 4096) == Demand(1366, 3, "throughput", 256)
    assert demand_of(single, 4096, sequences=4) == Demand(1024, 4, "throughput", 256)
    assert demand_of(many, 4096, sequences=1) == Demand(4096, 1, "single", 256)
    assert demand_of(many, 4096, objective="single") == Demand(4096, 1, "single", 256)
    assert demand_of(single, 4096, context_tokens=100) == Demand(100, 1, "single", 256)
    assert demand_of(single, 4096, sequences=0).sequences == 0, "which the search refuses"


def test_the_terms_are_the_settings_and_a_model_is_planned_no_longer_than_it_is() -> None:
    settings = Settings.model_validate({"cache": False, "objective": "throughput", "context_tokens": 2000})
    terms = Terms.of(settings)
    assert (terms.hot, terms.objective, terms.places) == ("0", "throughput", 8)
    assert [terms.least_tokens(own) for own in (None, 512, 10**6)] == [2000, 512, 2000]
    assert Terms().least_tokens(None) == 4096


# ------------------------------------------------------------------ what is imagined


def offered(*, measured: bool = False) -> Offer:
    offer = offer_of(fleet_of(HERE, [MINI], {}), Terms(hot="10%"), idle={MINI.id: "it does not answer"})
    if not measured:
        return offer
    first, second = offer.machines
    half = NodeRates(first.rates.bandwidth / 2, first.rates.compute / 4)
    return replace(offer, machines=(replace(first, rates=half), second))


def test_what_a_machine_would_give_is_told_as_to_serve_and_it_is_thought_to_answer() -> None:
    for word in ("mini", "mini.local", "bbbb"):
        assert left(imagine(offered(), [f"{word}=10GB"])) == {"studio": 36 * GB, "mini": 9 * GB}
    assert left(imagine(offered(), ["mini=headless"]), with_hot=False)["mini"] == int(16 * GB * 0.9)
    assert left(imagine(offered(), ["studio=50%"]), with_hot=False) == {"studio": 32 * GB}


def test_a_new_machine_comes_to_those_that_there_are_and_keeps_nothing() -> None:
    offer = imagine(offered(), ["air=16GB@m4,headless", "old=8GB"])
    assert left(offer) == {"studio": 36 * GB, "air": int(16 * GB * 0.9), "old": 8 * GB}
    sources = {one.machine.name: one.rates.source for one in offer.machines}
    assert sources == {"studio": "table", "mini": "table", "air": "table", "old": "guess"}


def test_a_machine_that_is_replaced_keeps_its_name_and_its_link() -> None:
    offer = imagine(offered(), ["mini=48GB@546GBps"])
    assert left(offer) == {"studio": 36 * GB, "mini": 48 * GB}
    mini = offer.machines[1]
    assert mini.rates.source == "told" and mini.machine.host == "mini.local"
    kept = imagine(offered(), ["mini=32GB,headless"]).machines[1]
    assert kept.rates == MINI_RATES and kept.machine.budget_bytes == int(32 * GB * 0.9)


MINI_RATES = rates_by_chip("Apple M4", 16 * GB)


def test_an_imagined_machine_falls_as_far_behind_the_table_as_the_measured_ones() -> None:
    told = imagine(offered(), ["new=8GB@400GBps"]).machines[-1].rates
    seen = imagine(offered(measured=True), ["new=8GB@400GBps"]).machines[-1].rates
    assert (seen.bandwidth, seen.compute) == (told.bandwidth / 2, told.compute / 4)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["mini"], "name=SIZE"),
        (["mini="], "name=SIZE"),
        (["mini=lots"], "nodes"),
        (["new=headless"], "name=SIZE"),
        (["new=1GB@fast"], "@400GBps"),
        (["new=1GB", "new=2GB"], "told before"),
        (["mini=1GB", "bbbb=2GB"], "told before"),
        (["=1GB"], "name=SIZE"),
    ],
)
def test_what_cannot_be_imagined_is_one_sentence(texts: list[str], says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        imagine(offered(), texts)
