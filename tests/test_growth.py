"""Growing graphs with a draft model."""

import numpy as np

from foredraft.contracts import Budget
from foredraft.model.candidates import Imitation
from foredraft.model.growth import GraphGrower, GrowthRules
from support.tiny_models import tiny_draft_model


def test_no_graph_is_grown_after_ids_that_the_model_does_not_have():
    grower = GraphGrower(tiny_draft_model(), GrowthRules(), Imitation(), 64)
    assert grower.grow(np.array([1, 1000], np.int64), Budget(8, 8)) is None
    grower.keep((1, 2))
