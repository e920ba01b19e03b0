"""Growing graphs with a draft model."""

import numpy as np

from foredraft.contracts import EMPTY_DRAFT, Budget, SequenceView, Verdict
from foredraft.model.candidates import Imitation
from foredraft.model.growth import GrowthRules, Rollout, RolloutDrafting
from support.tiny_models import tiny_draft_model


def test_no_graph_is_grown_after_ids_that_the_model_does_not_have():
    drafting = RolloutDrafting(Rollout(tiny_draft_model(), 64), GrowthRules(), Imitation())
    assert not len(drafting.propose(SequenceView(np.array([1, 1000], np.int64), 2), Budget(8, 8)))
    drafting.observe(Verdict((1, 2, 3), (), EMPTY_DRAFT, 1))
