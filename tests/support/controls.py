"""Controls, asked about one text at a time."""

from foredraft.control import MeasuredControl


class OfOne:
    """A control of one text, without the lists of `Control`."""

    def __init__(self, control):
        self.control, self.budget = control, control.budget

    def trim(self, draft, budget):
        (kept,) = self.control.trim([draft], [budget])
        return kept

    def observe(self, verdict, forward, other, drafting=0.0):
        self.control.observe([verdict], len(verdict.draft) + 1, forward, other, drafting)


def measured(curve, *arguments, **options):
    """The control `measured` of one text, with the cost `curve`."""
    return OfOne(MeasuredControl(lambda: curve, *arguments, **options))
