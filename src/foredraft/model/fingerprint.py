"""What tells a model's weights from another's, in whatever dtype either was loaded.

Knows weights by name. Does not know what is bound to the model by it.
"""

import hashlib
import json
from typing import Any

import torch

_SAMPLED = 64
"""Numbers of each weight that are looked at."""


def fingerprint(model: Any) -> str:
    """Return a model's fingerprint: SHA-256 in hexadecimal.

    Of each weight its name, its shape and 64 numbers spread over it count, rounded to bfloat16.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().reshape(-1)
        count = min(_SAMPLED, len(flat))
        places = torch.arange(count) * max(len(flat) - 1, 0) // max(count - 1, 1)  # whole numbers round nowhere
        picked = flat[places.to(flat.device)]
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(picked.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


def architecture(config: Any) -> str:
    """Return a configuration as text, without the place that it was loaded from."""
    settings = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    return json.dumps(settings, sort_keys=True, default=str)
