from typing import Any

import numpy as np

import kvstore_hvd
from kvstore_hvd.join import Join, Joinable, JoinHook


class Nothing(Joinable):
    """Takes part, and exchanges nothing of its own."""

    join_device = None

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_process_group(self) -> Any:
        return self.group

    def step(self) -> None:
        Join.notify_join_context(self)


class Counter(Nothing):
    """Sums what the workers have in each iteration."""

    def __init__(self, name: str = "counter") -> None:
        super().__init__()
        self.name, self.sums = name, list[int]()
        self.arguments: Any = None
        self.was_last: Any = None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        joinable, self.arguments = self, kwargs

        class Hook(JoinHook):
            def main_hook(self) -> None:
                joinable.sum(0)

            def post_hook(self, is_last_joiner: bool) -> None:
                joinable.was_last = is_last_joiner

        return Hook()

    def sum(self, number: int) -> None:
        self.sums.append(int(kvstore_hvd.allreduce(np.array([number]), self.name)[0]))

    def count(self, number: int) -> None:
        self.step()
        self.sum(number)
