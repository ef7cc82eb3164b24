"""Agreement of all ranks of a server on how much of a prefix they can load, and have loaded.

Each rank's tiers hold some heads of the same pages, and fail by themselves. A queue for the disk is
full on one rank, a record is damaged on another, a page arrives later at a third. But SGLang's tree
and its page ids must be equal on all. So a page that one rank is missing counts as missing on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sglang_kvspec.kv.page_sources import Loaded
from sglang_kvspec.kv.prefix_store import PageLink
from sglang_kvspec.kv.prefix_tiers import PrefixTiers
from sglang_kvspec.runtime.ranks import Ranks


class CommonPrefixes:
    """Prefix tiers of all ranks. All ranks must make the same calls with the same links, in the
    same order."""

    def __init__(self, tiers: PrefixTiers, ranks: Ranks) -> None:
        self._tiers, self._ranks = tiers, ranks

    def num_loadable(self, wanted: Sequence[Sequence[PageLink]]) -> list[int]:
        """Return for each of these prefixes how many pages, from the first on, every rank can load.
        Sends one message, none if there are no pages to load."""
        asked = [links for links in wanted if links]
        if not asked:
            return [0] * len(wanted)
        mine = [self._tiers.num_loadable(links) for links in asked]
        common = iter(self._ranks.least(mine, about=names_of(asked)))
        return [next(common) if links else 0 for links in wanted]

    def num_local(
        self, wanted: Sequence[Sequence[PageLink]], may_go_on: bool
    ) -> tuple[list[int], bool]:
        """Return num_loadable() without pages from another machine, and whether all ranks
        may_go_on. Sends one message."""
        mine = [int(may_go_on), *map(self._tiers.num_local, wanted)]
        all_may, *common = self._ranks.least(mine, about=names_of(wanted))
        return common, bool(all_may)

    def load(self, links: Sequence[PageLink], pages: Sequence[int]) -> Loaded:
        """Load as many pages as every rank can, by PrefixTiers.load(). A page's source is the
        farthest one of all ranks."""
        agree = partial(self._ranks.least, about=("load", *names_of([links[: len(pages)]])))
        return self._tiers.load(links, pages, agree)


def names_of(prefixes: Sequence[Sequence[PageLink]]) -> list[tuple[int, str]]:
    """Return names of these prefixes, as the subject of a message between ranks."""
    return [(len(links), links[-1].key.hex() if links else "") for links in prefixes]
