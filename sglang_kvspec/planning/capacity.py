"""Division of a KV memory budget between anchors, recent window and residual cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from sglang_kvspec.core.errors import ConfigError

# Page 0 takes the writes of SGLang's batch padding. Anchors are stored for this page, too.
PADDING_PAGES = 1

# Names of the limits on the number of pages.
KV_MEMORY, HOST_MEMORY, MAX_TOKENS = "KV memory", "host memory", "--max-total-tokens"
# Name in place of KV_MEMORY where the recent window takes most of the KV memory.
RECENT_WINDOW = "recent window"


@dataclass(frozen=True, slots=True)
class PageBytes:
    """Bytes of one page over all layers and heads of a rank. packed: of its residual in the packed
    form, in which a host store may hold it; None: it holds residuals as they are. takes_anchors:
    the packed form has the anchors beside it."""

    plain: int
    anchor: int
    residual: int
    packed: int | None = None
    takes_anchors: bool = False

    @property
    def store_form(self) -> str:
        return "raw" if self.packed is None else "packed"

    @property
    def stored(self) -> int:
        """Bytes of the residual in a host store. The link moves no more."""
        return self.residual if self.packed is None else self.packed


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Pages of each pool. num_pages: pages that SGLang may allocate, without its padding page.

    host_pages: num_pages with a host store (write-through, one slot a page), 0 without one. Without
    a host store, cache_pages is num_pages. binding: the limit that set num_pages, one of the four
    above. kept_anchor_pages: pages whose anchors stay in KV memory after the pages were freed.
    pages_without_anchors: how many of num_pages have no place for anchors, where all are in use.
    """

    num_pages: int
    window_pages: int
    cache_pages: int
    host_pages: int
    page_bytes: PageBytes
    binding: str
    kept_anchor_pages: int = 0
    pages_without_anchors: int = 0

    @property
    def anchor_pages(self) -> int:
        """Pages that may have anchors at once."""
        return self.num_pages - self.pages_without_anchors

    @property
    def hbm_bytes(self) -> int:
        page = self.page_bytes
        return (
            (self.anchor_pages + PADDING_PAGES + self.kept_anchor_pages) * page.anchor
            + self.window_bytes
            + self.cache_pages * page.residual
        )

    @property
    def window_bytes(self) -> int:
        return self.window_pages * self.page_bytes.plain

    @property
    def host_bytes(self) -> int:
        return self.host_pages * self.page_bytes.stored

    @property
    def plain_pages(self) -> int:
        """Pages that a pool in the model's KV dtype would hold in the same memory."""
        return self.hbm_bytes // self.page_bytes.plain


@dataclass(frozen=True, slots=True)
class AnchorShare:
    """Pages that have anchors at once: a share of all, and `least` more, at most all."""

    share: float = 1.0
    least: int = 0

    def pages(self, num_pages: int) -> int:
        return min(num_pages, ceil(num_pages * self.share) + self.least)

    def most_pages(self, bytes_: int, anchor_bytes: int, beside_bytes: float = 0) -> int:
        """Return how many pages fit into bytes_, each with beside_bytes, and with anchor_bytes if
        it has anchors."""
        all_have = int(bytes_ // (anchor_bytes + beside_bytes))
        some_have = (bytes_ - self.least * anchor_bytes) // (
            self.share * anchor_bytes + beside_bytes
        )
        num_pages = max(all_have, int(some_have))
        while self.pages(num_pages) * anchor_bytes + num_pages * beside_bytes > max(bytes_, 0):
            num_pages -= 1
        return num_pages


ALL_HAVE_ANCHORS = AnchorShare()


def window_pages_for(
    max_running_requests: int, recent_pages: int, max_draft_len: int, page_size: int
) -> int:
    """Return the window pages that suffice for all running requests at once.

    Each request holds its newest full pages, the page that it fills, and pages that drafts may
    spill into. QuantSpec section 4.3 keeps two groups; drafts longer than a page need more.
    """
    spill = -(-max(max_draft_len, 1) // page_size)
    return max_running_requests * (recent_pages + 1 + spill)


def pages_of_one_request(context_len: int, max_draft_len: int, page_size: int) -> int:
    """Return the most residual pages that a forward of one request reads and writes: its context,
    and pages that verified drafts spill into."""
    return -(-context_len // page_size) + -(-(max_draft_len + 1) // page_size) + 1


def kept_anchor_pages_for(
    budget_bytes: int, page_bytes: PageBytes, window_pages: int, fraction: float
) -> int:
    """Return how many pages' anchors fit into a share, `fraction`, of the memory that the recent
    window leaves."""
    rest = max(budget_bytes - window_pages * page_bytes.plain, 0)
    return int(rest * fraction) // page_bytes.anchor


def split_shared_memory(
    budget_bytes: int,
    page_bytes: PageBytes,
    window_pages: int,
    residual_fraction: float,
    anchors: AnchorShare = ALL_HAVE_ANCHORS,
) -> tuple[int, int]:
    """Divide memory that is KV memory and host memory at once, as on a CPU.

    Returns (KV bytes, host bytes) such that both hold about the same number of pages.
    """
    fixed_bytes = window_pages * page_bytes.plain + PADDING_PAGES * page_bytes.anchor
    rest = max(budget_bytes - fixed_bytes, 0)
    # Anchors have the part of the KV memory that is not the cache's, or all residuals are cached.
    share, residual = 1 - residual_fraction, page_bytes.residual
    with_cache = anchors.most_pages(int(rest * share), page_bytes.anchor, residual * share)
    all_cached = anchors.most_pages(rest, page_bytes.anchor, 2 * residual)
    num_pages = max(with_cache, all_cached)
    anchor_bytes = anchors.pages(num_pages) * page_bytes.anchor
    kv_bytes = min(ceil(anchor_bytes / share), anchor_bytes + num_pages * residual)
    host_bytes = max(min((num_pages + 1) * residual, rest - kv_bytes), 0)
    return budget_bytes - host_bytes, host_bytes


def plan_capacity(
    budget_bytes: int,
    page_bytes: PageBytes,
    *,
    window_pages: int,
    residual_fraction: float,
    host_bytes: int | None,
    host_limit_bytes: int,
    max_pages: int | None = None,
    min_cache_pages: int = 0,
    kept_anchor_pages: int = 0,
    anchors: AnchorShare = ALL_HAVE_ANCHORS,
) -> CapacityPlan:
    """Divide budget_bytes of KV memory. The kept anchors get their part first.

    host_bytes: size of the residual store, None for as much as needed up to host_limit_bytes, 0
    for no store. max_pages: cap of num_pages (--max-total-tokens). min_cache_pages: least pages of
    the cache, whatever its share; the cache holds all num_pages where these are fewer. Raises
    ConfigError when not one page fits.
    """
    rest = budget_bytes - window_pages * page_bytes.plain
    rest -= (kept_anchor_pages + PADDING_PAGES) * page_bytes.anchor
    limits: dict[str, int] = {}
    all_cached = anchors.most_pages(rest, page_bytes.anchor, page_bytes.residual)
    if host_bytes == 0:
        limits[KV_MEMORY] = all_cached
    else:
        # A cache that exceeds all residuals would be wasted: anchors get the surplus.
        of_anchors = min(
            int(rest * (1 - residual_fraction)), rest - min_cache_pages * page_bytes.residual
        )
        beside_cache = anchors.most_pages(of_anchors, page_bytes.anchor)
        limits[KV_MEMORY] = max(beside_cache, all_cached)
        limits[HOST_MEMORY] = (
            host_limit_bytes if host_bytes is None else host_bytes
        ) // page_bytes.stored
    if max_pages is not None:
        limits[MAX_TOKENS] = max_pages
    binding = min(limits, key=lambda name: limits[name])
    num_pages = limits[binding]
    if num_pages < 1:
        kept_bytes = kept_anchor_pages * page_bytes.anchor
        raise ConfigError(_too_small(binding, budget_bytes - kept_bytes, window_pages, page_bytes))
    cache_pages = 0
    if host_bytes == 0:
        cache_pages = num_pages
    elif residual_fraction > 0 or min_cache_pages > 0:
        # The cache takes all that anchors leave: more than its share when another limit binds.
        left = rest - anchors.pages(num_pages) * page_bytes.anchor
        cache_pages = min(left // page_bytes.residual, num_pages)
    plan = CapacityPlan(
        num_pages=num_pages,
        window_pages=window_pages,
        cache_pages=cache_pages,
        host_pages=0 if host_bytes == 0 else num_pages,
        page_bytes=page_bytes,
        binding=binding,
        kept_anchor_pages=kept_anchor_pages,
        pages_without_anchors=num_pages - anchors.pages(num_pages),
    )
    if binding == KV_MEMORY and _is_mostly_window(plan):
        return replace(plan, binding=RECENT_WINDOW)
    return plan


def _is_mostly_window(plan: CapacityPlan) -> bool:
    """Return True where the window takes half of the KV memory, or all that encoding saves."""
    rest_bytes = plan.hbm_bytes - plan.window_bytes
    fits_bytes = plan.num_pages * plan.page_bytes.plain
    return plan.window_bytes >= rest_bytes or rest_bytes <= fits_bytes < plan.hbm_bytes


def _too_small(binding: str, budget_bytes: int, window_pages: int, page_bytes: PageBytes) -> str:
    if binding == MAX_TOKENS:
        return "--max-total-tokens must be at least --page-size, so that one page fits"
    if binding == HOST_MEMORY:
        return (
            f"--kvspec-host-gb leaves no room for one page of residuals ({page_bytes.stored} "
            "bytes): raise --kvspec-host-gb, or set it to 0 to keep residuals in KV memory"
        )
    return (
        f"{budget_bytes / 2**20:.0f} MiB of KV memory do not hold the recent window of "
        f"{window_pages} pages ({window_pages * page_bytes.plain / 2**20:.0f} MiB) and one page: "
        "raise --mem-fraction-static or lower --max-running-requests or --kvspec-recent-pages"
    )
