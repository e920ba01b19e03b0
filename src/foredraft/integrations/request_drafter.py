"""Drafts for a server's batches: matches rows to requests, drafts for each request, and forgets finished ones.

vLLM passes a proposer no request ids, and rows move. So a request is recognised by its content: its last known text is
a prefix of the row's. Only chains are drafted: a tree is cut to its best path. Does not depend on vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.contracts import EMPTY_DRAFT, Budget, Draft, DraftContext, Drafter, Drafting, SequenceView, Verdict
from foredraft.engine.guard import GuardedDrafter
from foredraft.graph.tree import IntArray, best_chain, chain_parents, common_length

PATIENCE = 64  # steps for which an unseen request is kept: preempted ones return, finished ones do not (chosen)
_TREE_NODES = 16  # of the tree whose best path is drafted (chosen); larger trees hardly improve that path
_SPARE = 2  # requests kept for each row of a batch, so that preempted ones are included (chosen)


@dataclass(slots=True, eq=False)
class _Request:
    drafting: Drafting
    prompt_length: int  # its tokens when first seen
    ids: npt.NDArray[np.int64]  # int64[n], its text when last seen
    chain: Draft = EMPTY_DRAFT  # the draft after that text
    seen: int = 0  # the step in which it was last seen

    def continues_in(self, ids: npt.NDArray[np.int64]) -> bool:
        length = len(self.ids)
        return length <= len(ids) and self.ids[-1] == ids[length - 1] and np.array_equal(self.ids, ids[:length])


class RequestDrafter:
    """Drafts chains for the requests of a server, recognised by content at every step.

    A draft depends on the request's tokens, on the steps in which it was drafted for, and with `auto` on how often its
    sources were right for other requests; never on process state. So ranks that see the same batches draft the same.

    `drafter` is opened for each request; if it raises, that request gets no more drafts, after a warning. At most
    `most` tokens are drafted for a request and step, for at most `rows` requests of at most `longest` tokens, whose ids
    are below `vocabulary`.
    """

    def __init__(self, drafter: Drafter, *, vocabulary: int, most: int, rows: int, longest: int) -> None:
        self._drafter = drafter
        self._context = DraftContext(vocabulary, max_nodes=max(_TREE_NODES, most))
        self._most, self._longest, self._kept = most, longest, _SPARE * rows
        self._requests: list[_Request] = []
        self._rows: dict[int, _Request] = {}  # of the last step
        self._step = 0

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: npt.NDArray[Any], token_ids: IntArray
    ) -> list[list[int]]:
        """Return a chain for each row of the batch, empty if nothing is drafted.

        `sampled` holds the tokens that each row got in the last step, none for a prompt that is not fully read;
        `lengths`, int[B or more], includes them. `token_ids` is int32[B or more, L].
        """
        wanted = [row for row, new in enumerate(sampled) if len(new) and lengths[row] < self._longest]
        texts = {row: token_ids[row, : lengths[row]].astype(np.int64) for row in wanted}
        drafts: list[list[int]] = [[] for _ in sampled]
        if not texts:
            return drafts
        self._step += 1
        self._rows = self._matched(texts)
        for request in self._rows.values():
            request.seen = self._step
        self._forget(len(texts) - len(self._rows))
        for row, ids in texts.items():
            if row in self._rows:
                request = self._rows[row]
                request.drafting.observe(_verdict(request.chain, ids, len(request.ids)))
            else:
                request = _Request(GuardedDrafter(self._drafter).open(self._context), len(ids), ids, seen=self._step)
                self._requests.append(request)
                self._rows[row] = request
            request.ids, request.chain = ids, self._chain(request, ids)
            drafts[row] = request.chain.tokens.tolist()
        return drafts

    def _matched(self, texts: dict[int, npt.NDArray[np.int64]]) -> dict[int, _Request]:
        """Return each row's request, if known: the row's last one, else the longest that fits; none is used twice."""
        found = {row: last for row, last in self._rows.items() if row in texts and last.continues_in(texts[row])}
        left = [request for request in self._requests if request not in found.values()]
        for row, ids in texts.items():
            fitting = [] if row in found else [request for request in left if request.continues_in(ids)]
            if fitting:
                found[row] = max(fitting, key=lambda request: len(request.ids))
                left.remove(found[row])
        return found

    def _forget(self, new: int) -> None:
        """Close the requests not seen for `PATIENCE` steps, and the oldest ones if `new` requests need room."""
        self._requests.sort(key=lambda request: request.seen)
        while self._requests and (
            len(self._requests) + new > self._kept or self._requests[0].seen < self._step - PATIENCE
        ):
            self._requests.pop(0).drafting.close()

    def _chain(self, request: _Request, ids: npt.NDArray[np.int64]) -> Draft:
        """Return the best path of the draft after a request's text."""
        ids.flags.writeable = False
        # the target adds one token after the draft, which must fit too
        depth = min(self._most, self._longest - len(ids) - 1)
        budget = Budget(max(_TREE_NODES, depth) if depth > 0 else 0, depth)
        draft = request.drafting.propose(SequenceView(ids, request.prompt_length), budget)
        # without scores, all nodes count the same: the deepest path
        score = np.ones(len(draft), np.float32) if draft.score is None else draft.score
        kept = best_chain(draft.parents, score, depth)
        # only the chain is observed, not the whole tree
        return Draft(draft.tokens[kept], chain_parents(len(kept)), None if draft.score is None else score[kept])


def _verdict(draft: Draft, ids: npt.NDArray[np.int64], known: int) -> Verdict:
    """Return the verdict on a chain drafted after `ids[:known]`; the last new token is the target's own."""
    new = tuple(ids[known:].tolist())
    accepted = common_length(draft.tokens, new[:-1])
    return Verdict(new, tuple(range(accepted)), draft, known - 1)
