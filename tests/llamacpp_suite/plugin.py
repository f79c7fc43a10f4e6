"""Pytest plugin for the suite. It leaves out the tests that can't apply here. It also keeps the
suite from starting a server with each preset first, which would only download models.
"""

import pytest

from tests.llamacpp_suite.excluded import reason_against


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import utils  # the suite's own module

    utils.ServerPreset.load_all = staticmethod(lambda: None)
    left_out = [item for item in items if reason_against(item.nodeid) is not None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
