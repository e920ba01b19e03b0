"""Verifies a draft: follows the target's own choices down the tree and returns the accepted path.

The policy chooses one token per visited node, and that token is emitted whether or not a draft matches it. So under
matched verification, where the policy draws without looking at the draft, the output is that of plain decoding, and the
draft only decides how many tokens one pass yields. Under rejection (sampling/rejection.py) the policy tries the node's
drafted children first. Does not depend on how the policy chooses tokens or on how the draft was made.
"""

from foredraft.contracts import Draft, Policy, Scores, Verdict
from foredraft.errors import NumericsError
from foredraft.graph.tree import ROOT, child_with


def verify(draft: Draft, scores: Scores, policy: Policy, at: int) -> Verdict:
    """Accept the path of `draft` that the target chooses, and add the target's own token after it.

    Args:
        draft: N nodes.
        scores: the target's output after each of the N + 1 rows, root first.
        policy: chooses tokens and decides where the text ends, which may be inside the draft.
        at: absolute position of the root.

    Raises:
        NumericsError: logits from which no token can be chosen.
        ValueError: under rejection, a node that cannot have been drawn from its q.
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
            # emit the tokens before the error, as plain decoding would; the next step raises it at its root
            return Verdict(tuple(tokens), tuple(path), draft, at, hidden=scores.hidden)
        tokens.append(token)
        node = child_with(draft.tokens, draft.parents, node, token)
        if node >= 0:
            path.append(node)
        ended = policy.ends(tokens)  # called for every token, because a policy may count them
        if node < 0 or ended:
            return Verdict(tuple(tokens), tuple(path), draft, at, hidden=scores.hidden)
