"""What all ranks of a server can bring back of a prefix, and what they have brought back.

Each rank's tiers hold some heads of the same pages, and are its own: a queue for the disk is full
on one of them, a record is damaged on another, a page comes later to a third. But SGLang's tree and
its page numbers must be equal on all, so that each page which one rank lacks is lacking.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sglang_kvspec.kv.page_sources import Loaded
from sglang_kvspec.kv.prefix_store import PageLink
from sglang_kvspec.kv.prefix_tiers import PrefixTiers
from sglang_kvspec.runtime.ranks import Ranks


class AgreedPrefixes:
    """All ranks must make the same calls with the same links, in the same order."""

    def __init__(self, tiers: PrefixTiers, ranks: Ranks) -> None:
        self._tiers, self._ranks = tiers, ranks

    def num_loadable(self, wanted: Sequence[Sequence[PageLink]]) -> list[int]:
        """How many pages of each of these prefixes every rank can bring back, from the first on.
        One message, and none where there is nothing to bring back."""
        asked = [links for links in wanted if links]
        if not asked:
            return [0] * len(wanted)
        mine = [self._tiers.num_loadable(links) for links in asked]
        agreed = iter(self._ranks.least(mine, about=names_of(asked)))
        return [next(agreed) if links else 0 for links in wanted]

    def num_local(
        self, wanted: Sequence[Sequence[PageLink]], may_go_on: bool
    ) -> tuple[list[int], bool]:
        """The same without what came from another machine, and whether all ranks may_go_on: in one
        message."""
        mine = [int(may_go_on), *map(self._tiers.num_local, wanted)]
        all_may, *agreed = self._ranks.least(mine, about=names_of(wanted))
        return agreed, bool(all_may)

    def load(self, links: Sequence[PageLink], pages: Sequence[int]) -> Loaded:
        """PrefixTiers.load(), of as many pages as every rank has loaded. A page counts as from
        where the farthest of them was."""
        agree = partial(self._ranks.least, about=("load", *names_of([links[: len(pages)]])))
        return self._tiers.load(links, pages, agree)


def names_of(prefixes: Sequence[Sequence[PageLink]]) -> list[tuple[int, str]]:
    """What a message is about that ranks exchange over these prefixes."""
    return [(len(links), links[-1].key.hex() if links else "") for links in prefixes]
