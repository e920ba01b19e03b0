"""What a draft model foresees."""

import numpy as np

from foredraft.contracts import Budget
from foredraft.model.candidates import Imitation
from foredraft.model.foresight import Foresight
from foredraft.model.growth import GrowthRules
from support.tiny_models import tiny_draft_model


def test_nothing_is_foreseen_of_ids_that_the_model_does_not_have():
    foresight = Foresight(tiny_draft_model(), GrowthRules(), Imitation(), 64)
    assert foresight.grow(np.array([1, 1000], np.int64), Budget(8, 8)) is None
    foresight.keep((1, 2))
