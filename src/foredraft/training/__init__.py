"""Training of draft models and heads: traces of the target's texts, tasks that learn from them, and a loop."""
