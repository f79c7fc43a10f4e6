"""Pytest plugin for the suite. It keeps the suite from starting a server with each preset first,
which would only download models.
"""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems() -> None:
    import utils  # the suite's own module

    utils.ServerPreset.load_all = staticmethod(lambda: None)
