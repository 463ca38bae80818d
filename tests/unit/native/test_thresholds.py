"""Overriding the engine's thresholds: KVHVD_THRESHOLDS."""

import pytest

from kvstore_hvd import native
from kvstore_hvd.comm import shm
from kvstore_hvd.config import config, reload
from kvstore_hvd.errors import ConfigError


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("KVHVD_THRESHOLDS", raising=False)
    reload()
    yield
    monkeypatch.undo()
    reload()


def test_changes_replace_defaults_by_name(monkeypatch):
    before, after = native.thresholds(), native.thresholds(" one_shot = 4096, direct_chunk=2097152 ")
    assert all(each.least <= each.value <= each.most and each.value % each.unit == 0 for each in before.values())
    changed = {name: threshold.value for name, threshold in after.items() if threshold != before[name]}
    assert changed == {"one_shot": 4096, "direct_chunk": 2097152}
    monkeypatch.setenv("KVHVD_THRESHOLDS", "one_shot=4096")
    reload()
    assert shm._thresholds() == config().thresholds == "one_shot=4096"
    assert native.Segment.create(2, 0, shm._thresholds()).fd >= 0
    with pytest.raises(ValueError):
        native.Segment.create(2, 0, "one_shoot=1")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ("one_shoot=4096", "'one_shoot' does not exist; there are inlined, "),
        ("one_shot=many", "one_shot: 'many' is not a multiple of 64 from 0 to 131072."),
        ("direct_chunk=0", "direct_chunk: '0' is not a multiple of 4096 from 4096 "),
        ("one_shot", "'one_shot' is not NAME=BYTES."),
        ("min_part=1048576", "min_part is above max_part."),
    ],
)
def test_wrong_changes_are_refused(monkeypatch, changes, says):
    with pytest.raises(ValueError) as refused:
        native.thresholds(changes)
    assert says in str(refused.value)
    # Every worker checks what it was told, before it looks for the others.
    monkeypatch.setenv("KVHVD_THRESHOLDS", changes)
    reload()
    with pytest.raises(ConfigError) as error:
        shm._thresholds()
    assert f"KVHVD_THRESHOLDS: {refused.value}" in str(error.value)
