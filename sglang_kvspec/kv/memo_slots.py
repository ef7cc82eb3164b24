"""Slots of a memo for the entries that were read most recently."""

from __future__ import annotations

import torch


class MemoSlots:
    """Map from keys 0..num_keys-1 to slots 0..num_slots-1. Where slots run out, the entries that
    were read longest ago give theirs up."""

    def __init__(self, num_keys: int, num_slots: int) -> None:
        self.num_slots = min(num_keys, num_slots)
        self._slot_of_key = torch.full((num_keys,), -1, dtype=torch.int64)
        self._key_of_slot = torch.full((self.num_slots,), -1, dtype=torch.int64)
        # Number of the read in which a slot was last named; 0 for a free slot.
        self._last_read = torch.zeros(self.num_slots, dtype=torch.int64)
        self._num_reads = 0

    def place(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Give each of these distinct keys [N] int64 a slot. Return the slots [N], and the slots
        among them that have another key than before. Return None, and change nothing, for more
        keys than there are slots."""
        if len(keys) > self.num_slots:
            return None
        self._num_reads += 1
        slots = self._slot_of_key[keys]
        known = slots >= 0
        self._last_read[slots[known]] = self._num_reads
        if bool(known.all()):
            return slots, slots[:0]
        new_keys = keys[~known]
        # The slots of this read are the newest, so none of them is taken.
        taken = torch.topk(self._last_read, len(new_keys), largest=False).indices
        old_keys = self._key_of_slot[taken]
        self._slot_of_key[old_keys[old_keys >= 0]] = -1
        self._key_of_slot[taken] = new_keys
        self._slot_of_key[new_keys] = taken
        self._last_read[taken] = self._num_reads
        slots[~known] = taken
        return slots, taken

    def forget(self, key: int) -> None:
        """Free the slot of a key, if it has one."""
        slot = int(self._slot_of_key[key])
        if slot >= 0:
            self._slot_of_key[key] = self._key_of_slot[slot] = -1
            self._last_read[slot] = 0
