"""What several test files share; one noun a module."""

import pytest

pytest.register_assert_rewrite("support.drafts", "support.families", "support.tables")  # so that they say what differed
