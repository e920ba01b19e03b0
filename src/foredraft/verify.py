"""Verifies a draft: follows the target's own choices down the tree and returns the accepted path.

One token is chosen per visited node, without looking at the draft (sampling/chooser.py), and is emitted whether or not
the draft has it. So the output is that of plain decoding. Does not depend on how the draft was made.
"""

from collections.abc import Callable, Sequence

from foredraft.contracts import Chooser, Draft, Verdict
from foredraft.errors import is_interrupt
from foredraft.graph.tree import ROOT, child_with


def verify(draft: Draft, choose: Chooser, ends: Callable[[Sequence[int]], bool], at: int) -> Verdict:
    """Accept the path of `draft` that the target chooses, and add the target's own token after it.

    The root is at absolute position `at`; `choose` reads the target's scores of it and of the N nodes. `ends` returns
    whether the text ends with the last of the tokens emitted so far, which may be inside the draft. NumericsError for
    logits that allow no token, and what a logits processor raises, both only before the first token.
    """
    tokens: list[int] = []
    path: list[int] = []
    node = ROOT
    while True:
        try:
            token = choose(node + 1, tokens)
        except Exception as error:  # processors are others' code, and raise what they like
            if not tokens or is_interrupt(error):
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
