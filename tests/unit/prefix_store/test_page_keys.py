"""Keys of prefix pages: equal if, and only if, all tokens up to the page are equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.kv.prefix_store.page_keys import KEY_BYTES, chain_links

token_lists = st.lists(st.integers(0, 2), max_size=12)
names = st.sampled_from([b"", b"a", b"b"])


@given(first=token_lists, second=token_lists, spaces=st.tuples(names, names))
def test_keys_agree_exactly_as_far_as_the_prefixes_do(first, second, spaces):
    one = list(chain_links(first, 3, spaces[0]))
    two = list(chain_links(second, 3, spaces[1]))
    for position in range(min(len(one), len(two))):
        end = 3 * (position + 1)
        same = spaces[0] == spaces[1] and first[:end] == second[:end]
        assert (one[position].key == two[position].key) == same
        assert (one[position] == two[position]) == same


@given(tokens=token_lists)
def test_links_hold_what_they_were_made_of(tokens):
    links = list(chain_links(tokens, 3))
    assert len(links) == len(tokens) // 3
    for position, link in enumerate(links):
        assert link.position == position
        assert len(link.key) == len(link.parent) == KEY_BYTES
        own = np.frombuffer(link.tokens, dtype="<i8").tolist()
        assert own == tokens[3 * position : 3 * position + 3]
        if position:
            assert link.parent == links[position - 1].key


def test_pages_are_not_confused_with_namespaces_or_across_boundaries():
    keys = {link.key for tokens in ([1, 2, 3, 4], [2, 1, 3, 4]) for link in chain_links(tokens, 2)}
    assert len(keys) == 4
    (root_child,) = chain_links([7, 8], 2)
    (other,) = chain_links([7, 8], 2, namespace=root_child.parent)
    assert root_child.key != other.key


@pytest.mark.parametrize("wrap", [list, tuple, np.array, lambda ids: np.array(ids, np.int32)])
def test_any_sequence_of_ids_will_do(wrap):
    ids = [0, 151_935, 2**31 - 1, 2**40]
    if isinstance(wrap(ids[:1]), np.ndarray) and wrap(ids[:1]).dtype == np.int32:
        ids = ids[:2]
    assert list(chain_links(wrap(ids), 2)) == list(chain_links(ids, 2))


def test_the_keys_of_a_store_on_disk_do_not_change_between_runs():
    (link,) = chain_links([1, 2], 2, b"lora")
    assert link.key.hex() == "ffc7f1dd668ef2e815d4f32d8217e065166d6d80090fb28521ca2d8a6f96d267"
