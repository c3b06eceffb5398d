"""Names of blocks: equal for equal tokens behind equal tokens, different for all else."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.cache.block import ID_BYTES, chain, name, pack, root_of

ROOT = root_of({"weights": "a"})
IDENTITIES = st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3)


def test_tokens_are_packed_in_four_bytes_each_little_end_first() -> None:
    assert pack(iter([1, 258, 2**32 - 1])) == b"\1\0\0\0" + b"\2\1\0\0" + b"\xff" * 4
    assert pack([]) == b""


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_not_packed(token: int) -> None:
    with pytest.raises(struct.error):
        pack([token])


def test_a_root_does_not_depend_on_the_order_of_its_facts() -> None:
    assert root_of({"a": "1", "b": "2"}) == root_of({"b": "2", "a": "1"})
    assert len(root_of({})) == ID_BYTES


@given(one=IDENTITIES, other=IDENTITIES)
def test_different_facts_give_different_roots(one: dict[str, str], other: dict[str, str]) -> None:
    assert (root_of(one) == root_of(other)) == (one == other)


def test_a_key_cannot_pass_for_the_end_of_a_value() -> None:
    facts = [{"a": "b", "c": "d"}, {"a": 'b", "c": "d'}, {"a": "bcd"}, {"ab": "cd"}, {"a": "b", "cd": ""}]
    assert len({root_of(each) for each in facts}) == len(facts)


def test_a_name_covers_the_tokens_all_that_is_before_them_and_the_media() -> None:
    tokens, digest = pack([1, 2, 3]), b"x" * 32
    names = {
        name(ROOT, tokens),
        name(ROOT, pack([1, 2])),
        name(ROOT, pack([1, 2, 4])),
        name(root_of({"weights": "b"}), tokens),
        name(name(ROOT, tokens), tokens),
        name(ROOT, tokens, digest),
        name(ROOT, tokens, b"y" * 32),
        name(ROOT, digest + tokens),
        name(ROOT, tokens + digest),
    }
    assert len(names) == 9 and {len(each) for each in names} == {ID_BYTES}


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 5))
def test_a_chain_names_the_full_blocks_each_behind_the_one_before(tokens: list[int], size: int) -> None:
    expected, parent = [], ROOT
    for start in range(0, len(tokens) - size + 1, size):
        parent = name(parent, pack(tokens[start : start + size]))
        expected.append(parent)
    assert chain(ROOT, pack(tokens), size) == expected


def test_names_stay_the_same_from_release_to_release() -> None:
    """Or else a new release finds nothing of what an older one kept; then CACHE_VERSION has to grow."""
    root = root_of({"weights": "00", "kv_format": "float32"})
    assert root.hex() == "6cfbebc255ff03ac0501467b4b826fcc"
    assert [id.hex() for id in chain(root, pack(range(4)), 2)] == [
        "77ee2297ca9958844f5768ac1aeb7186",
        "755bd36de41d8efd1a1c124b6c369f1c",
    ]
