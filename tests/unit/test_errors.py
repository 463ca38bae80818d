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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rank": 1, "size": 2}, "[rank 1/2] fact."),
        ({"rank": 0, "details": ["a: 1"], "fix": "do."}, "[rank 0/?] fact.\n  a: 1\n  Fix: do."),
        ({"rank": 5, "size": 8, "within": "rank 1/2 in process set 3"}, "[rank 5/8, rank 1/2 in process set 3] fact."),
        ({"operation": "pushpull", "key": 0}, "pushpull (key 0): fact."),
    ],
)
def test_message_leaves_out_what_is_not_known(arguments, text):
    assert errors.message("fact.", **arguments) == text
    named = [errors.rank_list(ranks) for ranks in ([], [3], [7, 0, 1, 2, 5, 5])]
    assert named == ["no rank", "rank 3", "ranks 0-2, 5, 7"]


def test_what_others_say_cannot_command_a_terminal():
    shown = errors.printable("a\tb\n\r\x1b[2J\x7f\x9b\udc80\ud800 é")
    assert shown == "a\tb\n\\r\\x1b[2J\\x7f\\x9b\udc80\\ud800 é"
