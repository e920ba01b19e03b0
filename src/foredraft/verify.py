"""Walk a draft with the target's own choices and say which path of it was accepted.

One draw for a node, and that draw is emitted whether or not it matches a draft: the emitted tokens are those of plain
decoding, and the draft only decides how many of them one forward pass yields. Chains, trees and flattened graphs are
all the same here, and so are the ways to choose: under matched verification the policy draws without looking at the
draft, under rejection (sampling/rejection.py) it tries the row's drafted children, and the walk goes where its token
goes. Does not know how tokens are chosen (the policy does) or how the draft came about.
"""

from foredraft.contracts import Draft, Policy, Scores, Verdict
from foredraft.errors import NumericsError
from foredraft.graph.tree import ROOT, child_with


def verify(draft: Draft, scores: Scores, policy: Policy, at: int) -> Verdict:
    """Accept the path of `draft` that the target takes, and add the target's token at its end.

    Args:
        draft: N nodes.
        scores: what the target says after each of the N + 1 rows, root first.
        policy: chooses tokens and says when the text ends; the walk stops there, inside the draft if need be.
        at: absolute position of the root.

    Raises:
        NumericsError: scores from which no token can be chosen.
        ValueError: under rejection, a node that its q cannot have given.
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
            # what plain decoding would have written first comes out first; the next step meets the error at its root
            return Verdict(tuple(tokens), tuple(path), draft, at, hidden=scores.hidden)
        tokens.append(token)
        node = child_with(draft.tokens, draft.parents, node, token)
        if node >= 0:
            path.append(node)
        ended = policy.ends(tokens)  # asked for every token, as a policy may count them
        if node < 0 or ended:
            return Verdict(tuple(tokens), tuple(path), draft, at, hidden=scores.hidden)
