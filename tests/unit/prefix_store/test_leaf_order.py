"""The order of eviction, compared with a model that looks at every page each time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_kvspec.kv.prefix_store.leaf_order import LeafOrder

# The parent of a page is its name without the last letter. There are chains, branches, and parents
# that are gone.
pages = st.text("ab", min_size=1, max_size=4).map(str.encode)


class OrderMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.order = LeafOrder()
        self.used: dict[bytes, int] = {}
        self.now = 0

    @rule(page=pages)
    def use(self, page):
        self.now += 1
        if page in self.used:
            self.order.touch(page, self.now)
        else:
            self.order.add(page, page[:-1], self.now)
        self.used[page] = self.now

    @rule(chain=pages)
    def use_together(self, chain):
        self.now += 1
        for end in range(1, len(chain) + 1):
            if chain[:end] in self.used:
                self.order.touch(chain[:end], self.now)
                self.used[chain[:end]] = self.now

    @rule(page=pages)
    def remove(self, page):
        if self.used.pop(page, None) is not None:
            self.order.remove(page)

    @rule(page=pages)
    def evict(self, page):
        oldest = self.order.oldest_leaf(protected=page[:-1])
        if oldest is not None:
            self.order.remove(oldest)
            del self.used[oldest]

    @invariant()
    def oldest_leaf_agrees(self):
        assert len(self.order) == len(self.used)
        parents = {page[:-1] for page in self.used}
        leaves = [page for page in self.used if page not in parents]
        for protected in (b"", b"a", b"ab", b"abab"):
            allowed = [page for page in leaves if page != protected]
            expected = min(allowed, key=lambda page: (self.used[page], page), default=None)
            assert self.order.oldest_leaf(protected) == expected


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=60, stateful_step_count=40)


def test_use_does_not_grow_without_bound():
    order = LeafOrder()
    order.add(b"a", b"", 0)
    for now in range(5000):
        order.touch(b"a", now)
    assert len(order._heap) <= 70
    assert order.oldest_leaf(b"") == b"a"
