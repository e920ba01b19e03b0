"""Verifies a draft: follows the target's own choices down the tree and returns the accepted path.

The policy chooses one token per visited node, and that token is emitted whether or not a draft matches it. Under
matched verification it draws without looking at the draft, so the output is that of plain decoding; under rejection
(sampling/rejection.py) it tries the node's drafted children first. Does not depend on how the draft was made.
"""

from foredraft.contracts import Draft, Policy, Scores, Verdict
from foredraft.errors import NumericsError
from foredraft.graph.tree import ROOT, child_with


def verify(draft: Draft, scores: Scores, policy: Policy, at: int) -> Verdict:
    """Accept the path of `draft` that the target chooses, and add the target's own token after it.

    `scores` are the target's, for the root, at absolute position `at`, and the N nodes. The text may end in the draft.
    NumericsError for logits that allow no token; ValueError, under rejection, for a node that its q cannot have given.
    """
    choose = policy.chooser(scores, at, draft)
    tokens: list[int] = []
    path: list[int] = []
    node = ROOT
    while True:
        try:
            token = choose(node + 1, tokens)
        except NumericsError:
            if not tokens:
                raise
            break  # emit the tokens before the error, as plain decoding would; the next step raises it at its root
        tokens.append(token)
        node = child_with(draft.tokens, draft.parents, node, token)
        if node >= 0:
            path.append(node)
        ended = policy.ends(tokens)  # called for every token, because a policy may count them
        if node < 0 or ended:
            break
    return Verdict(tuple(tokens), tuple(path), draft, at, hidden=scores.hidden)
