"""Verifies a draft: follows the target's own choices down the tree and returns the accepted path.

One token is chosen per visited node, and it is emitted whether or not a draft matches it. Under matched verification
(sampling/chooser.py) it is drawn without looking at the draft, so the output is that of plain decoding; under rejection
(sampling/rejection.py) the node's drafted children are tried first. Does not depend on how the draft was made.
"""

from collections.abc import Callable, Sequence

from foredraft.contracts import Chooser, Draft, Verdict
from foredraft.errors import ImpossibleDraftError, is_interrupt
from foredraft.graph.tree import ROOT, child_with


def verify(draft: Draft, choose: Chooser, ends: Callable[[Sequence[int]], bool], at: int) -> Verdict:
    """Accept the path of `draft` that the target chooses, and add the target's own token after it.

    The root is at absolute position `at`; `choose` reads the target's scores of it and of the N nodes. `ends` returns
    whether the text ends with the last of the tokens emitted so far, which may be inside the draft. NumericsError for
    logits that allow no token, and what a logits processor raises, both only before the first token;
    ImpossibleDraftError, under rejection, for a node that its q cannot have given.
    """
    tokens: list[int] = []
    path: list[int] = []
    node = ROOT
    while True:
        try:
            token = choose(node + 1, tokens)
        except Exception as error:  # processors are others' code, and raise what they like
            if not tokens or isinstance(error, ImpossibleDraftError) or is_interrupt(error):
                raise
            break  # emit the tokens before the error, as plain decoding would; the next step raises it at its root
        tokens.append(token)
        node = child_with(draft.tokens, draft.parents, node, token)
        if node >= 0:
            path.append(node)
        ended = ends(tokens)  # called for every token, because it may count them
        if node < 0 or ended:
            break
    return Verdict(tuple(tokens), tuple(path), draft, at)
