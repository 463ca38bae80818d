import gc

import pytest

from support.launchers import launched

pytest.register_assert_rewrite("support.zero_copy")  # it asserts for the tests, and should say as much as they do


def pytest_configure(config):
    config.addinivalue_line("markers", "needs(workers): skipped where there are fewer workers")


def pytest_collection_modifyitems(items):
    size = launched().size
    for item in items:
        if any(marker.args[0] > size for marker in item.iter_markers("needs")):
            item.add_marker(pytest.mark.skip(reason="needs more workers"))


def pytest_collection_finish():
    gc.freeze()  # or each collection looks at all of MXNet, which takes half a second


@pytest.fixture
def kv(world):
    import mxnet as mx

    return mx.kv.create("horovod")


@pytest.fixture(params=["nd", "np"])
def kind(request):
    import mxnet as mx

    return getattr(mx, request.param)


@pytest.fixture
def no_static_graphs(monkeypatch):
    """Start as a program of its own would: what earlier tests have compiled is gone."""
    from kvstore_hvd.mxnet_compat import graph

    monkeypatch.setattr(graph, "_static_graphs", False)


@pytest.fixture
def dynamic(world):
    """Let this test add process sets; they are gone afterwards."""
    from kvstore_hvd.mxnet import process_sets

    process_sets.allow_dynamic()
    yield
    registry = process_sets._registry()
    for each in list(registry.sets.values()):
        process_sets.remove_process_set(each.process_set)
    registry.is_dynamic = False
