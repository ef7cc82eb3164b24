"""Draft steps of several tokens of a request, by replay of CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_kvspec.adapters.cuda_graph_drafter import CudaGraphDrafter
from sglang_kvspec.adapters.wide_graphs import WideGraphs
from sglang_kvspec.engine.batch import RoundBatch
from sglang_kvspec.engine.ports import WideLogits
from sglang_kvspec.runtime.draft_rows import DraftRow
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.wide_rows import WideRow


class CapturedWideSteps:
    """The engine's WideSteps on a GPU. Steps read the pages that were selected by begin()."""

    def __init__(self, drafter: CudaGraphDrafter, graphs: WideGraphs) -> None:
        """graphs: over the rows that `drafter` loads."""
        self._drafter, self._graphs = drafter, graphs
        self._rows: dict[int, DraftRow] = {}

    def begin(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Load the rows of steps that make lens[i] drafts, see WideSteps.begin."""
        self._rows = self._drafter.load_drafts(batch, lens)

    def most_proposed(self, state: RequestState, num_requests: int) -> int:
        """Return the most tokens of a proposal, see WideSteps.most_proposed."""
        return self._graphs.most_tokens(num_requests) - 1

    def run(self, batch: RoundBatch, proposed: Mapping[int, Sequence[int]]) -> WideLogits:
        """Run a step, see WideSteps.run. The next replay of any graph overwrites its logits."""
        rows, count = self._rows, len(self._rows)
        width = self._graphs.width(count, 1 + max(map(len, proposed.values())))
        wide = []
        for i, row in rows.items():
            state = batch.states[i]
            tokens = [state.last_token, *proposed[i]] if i in proposed else []
            wide.append(WideRow(row, state.next_position - row.position, tokens))
        self._graphs.rows.load(wide, width)
        logits = self._graphs.replay(count, width)
        top1 = self._graphs.rows.top1[0, : count * width].tolist()
        firsts = {
            i: width * (place + 1) - len(each.tokens)
            for place, (i, each) in enumerate(zip(rows, wide, strict=True))
            if i in proposed
        }
        return WideLogits(logits, top1, firsts)
