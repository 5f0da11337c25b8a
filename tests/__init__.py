import pytest

pytest.register_assert_rewrite("tests.helpers")  # its asserts, too, say what they compared
