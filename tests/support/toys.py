"""The toy pair that tests write with, and its trained heads: 16 and 1.9 million parameters; see toy/CARD.md."""

from pathlib import Path

_HERE = Path(__file__).parent.parent / "toy"
TOY, TOY_DRAFT = str(_HERE / "target"), str(_HERE / "draft")
TOY_HEADS = {method: str(_HERE / method) for method in ("eesd", "medusa")}
