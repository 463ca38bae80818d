"""The exceptions: their families, and the form of their texts."""

import pytest

from kvstore_hvd import errors


def test_families():
    kinds = {n: v for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.KVHvdError)}
    assert set(kinds) <= set(errors.__all__)
    lost = {name for name, kind in kinds.items() if issubclass(kind, errors.HorovodInternalError)}
    assert lost == {"HorovodInternalError", "PeerLostError", "TimeoutError", "TransportError"}
    for kind in kinds.values():
        assert issubclass(kind, RuntimeError)
        assert str(kind("a text\n  Fix: none")) == "a text\n  Fix: none"


def test_message_has_rank_subject_fact_details_and_fix():
    of = {"rank": 0, "size": 4, "operation": "allreduce", "name": "dense0_weight", "key": 3}
    details = ["(256, 784): ranks 0-2", "(128, 784): rank 3"]
    text = errors.message("ranks disagree on shape.", **of, details=details, fix="build the same on every rank.")
    assert text == (
        "[rank 0/4] allreduce 'dense0_weight' (key 3): ranks disagree on shape.\n"
        "  (256, 784): ranks 0-2\n"
        "  (128, 784): rank 3\n"
        "  Fix: build the same on every rank."
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rank": 1, "size": 2}, "[rank 1/2] fact."),
        ({"rank": 5, "size": 8, "within": "rank 1/2 in process set 3"}, "[rank 5/8, rank 1/2 in process set 3] fact."),
        ({"operation": "pushpull", "key": 0}, "pushpull (key 0): fact."),
    ],
)
def test_message_leaves_out_what_is_not_known(arguments, text):
    assert errors.message("fact.", **arguments) == text
    assert [errors.rank_list(ranks) for ranks in ([3], [7, 0, 1, 2, 5, 5])] == ["rank 3", "ranks 0-2, 5, 7"]
