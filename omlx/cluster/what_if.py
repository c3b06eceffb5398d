"""Machines that a plan is to imagine, beside those that there are or in their place. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from omlx.cluster.candidate import parse_candidate
from omlx.cluster.fleet import Machine, given
from omlx.cluster.measure import lent, presumed
from omlx.cluster.offer import Offer, Offered
from omlx.errors import BadSetting


def imagine(offer: Offer, texts: Iterable[str]) -> Offer:
    """`texts`: NAME=WHAT with what a machine of the offer gives, as `omlx serve --node` takes it; or a node
    as `parse_candidate` reads it, of a new name or in the place of one that there is.

    An imagined machine is thought to fall behind the table as far as the measured ones do. Raises BadSetting.
    """
    machines, told = list(offer.machines), set[int]()
    for text in texts:
        name, _, what = (part.strip() for part in text.partition("="))
        place = next((i for i, one in enumerate(machines) if one.machine.is_called(name)), len(machines))
        if place in told:
            raise BadSetting(f"--node {text!r}: that machine was told before; give each a name of its own")
        told.add(place)
        known = machines[place] if place < len(machines) else None
        if known is not None and what and not {"@", ","} & set(what):
            budget = given(what, known.machine.memory_bytes)
            machines[place] = replace(
                known, machine=replace(known.machine, budget_bytes=budget), why_not=None
            )
        else:
            machines[place : place + 1] = [_imagined(text, known, offer.machines)]
    return replace(offer, machines=tuple(machines))


def _imagined(text: str, known: Offered | None, there: Sequence[Offered]) -> Offered:
    thought = parse_candidate(text)
    size, rates = thought.budget.bytes, thought.rates
    machine = Machine("", thought.name, size, size, rates, None)
    if known is not None:
        rates = rates if "@" in text else known.machine.rates
        machine = replace(known.machine, memory_bytes=size, budget_bytes=size, rates=rates)
        if "@" not in text:
            return Offered(machine, known.rates, imagined=True)
    measured = [one for one in there if one.rates.source == "measured"]
    pairs = [(one.machine.rates, one.rates) for one in measured]
    lenders = [one.rates for one in measured if one.rates.kinds]
    return Offered(machine, lent(presumed(rates, pairs), lenders), imagined=True)
