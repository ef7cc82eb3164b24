"""Lists of past pages by layer and KV head, on the device that reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_kvspec.kv.transfers import sent_together


@dataclass(frozen=True, slots=True)
class _Listed:
    """Lists of a request, and what they were made of: its first pages, and `seen`."""

    pages: torch.Tensor
    seen: torch.Tensor
    lists: torch.Tensor


class HeadLists:
    """Lists of the pages that drafts of running requests read, by layer and KV head.

    All rounds within a page read the same lists, and lists of half a thousand pages take the CPU
    milliseconds a request. So each is made once, and on the device.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, device: torch.device) -> None:
        self.shape = (num_layers, num_kv_heads)
        self._device = device
        # By slot. The next request in a slot replaces those of the one before.
        self._newest: dict[int, _Listed] = {}

    def of(self, slot: int, pages: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return the lists of a request [longest list, num_layers, num_kv_heads] int32, in the
        order of `seen`. Shorter ones end in -1.

        slot: as RequestState.slot. pages: ids [num_past] of the pages before the tail, on the CPU.
        seen: as Row.seen, by layer and KV head; a tensor that is given again must not have changed.
        Pages that are not among `pages` are left out: all of them must be at the ends of the lists.
        """
        known = self._newest.get(slot)
        if known is None or known.seen is not seen or not torch.equal(known.pages, pages):
            known = _Listed(pages.clone(), seen, self._listed(pages, seen))
            self._newest[slot] = known
        return known.lists

    def joined(self, pasts: list[torch.Tensor]) -> torch.Tensor:
        """Return the lists of several requests behind one another, as those of one. pasts: lists,
        or pages [num_past] on the CPU that all layers and KV heads read."""
        same = iter(sent_together(self._device, [past.int() for past in pasts if past.ndim == 1]))
        each = [
            past if past.ndim == 3 else next(same)[:, None, None].expand(-1, *self.shape)
            for past in pasts
        ]
        return torch.cat([self._empty(), *each])

    def _listed(self, pages: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        count = int((seen < len(pages)).sum(-1).max())
        if not count:
            return self._empty()
        ids, order = sent_together(self._device, [pages.int(), seen[..., :count].int()])
        is_past = order < len(pages)
        lists = torch.where(is_past, ids[torch.where(is_past, order, 0).long()], -1)
        return lists.permute(2, 0, 1).contiguous()

    def _empty(self) -> torch.Tensor:
        return torch.empty((0, *self.shape), dtype=torch.int32, device=self._device)
