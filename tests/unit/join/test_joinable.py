"""The parts that programs derive from to take part in `Join`, by themselves."""

from __future__ import annotations

import pytest

from kvstore_hvd.join import Joinable, JoinHook


class Whole(Joinable):
    """Has everything that a joinable must have."""

    def join_hook(self, **kwargs: object) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> None:
        return None

    @property
    def join_process_group(self) -> None:
        return None


def test_a_hook_does_nothing_by_default() -> None:
    hook = JoinHook()
    hook.main_hook()
    hook.post_hook(is_last_joiner=True)


@pytest.mark.parametrize("missing", ["join_hook", "join_device", "join_process_group"])
def test_a_joinable_has_three_parts(missing: str) -> None:
    parts = {name: value for name, value in vars(Whole).items() if name.startswith("join_") and name != missing}
    with pytest.raises(TypeError, match=missing):
        type("Part", (Joinable,), parts)()


def test_a_joinable_begins_in_no_context() -> None:
    config = Whole()._join_config
    assert (config.enable, config.throw_on_early_termination, config.is_first_joinable) == (False, False, False)
