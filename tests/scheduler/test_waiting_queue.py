"""Order, bound and removal of waiting requests; slots."""

from __future__ import annotations

import pytest

from sonar.errors import CapacityError
from sonar.kvcache.request_blocks import RequestBlocks
from sonar.request import Request, RequestSpec
from sonar.sampling_params import SamplingParams
from sonar.scheduler.slots import SlotPool
from sonar.scheduler.waiting_queue import WaitingQueue


def _request(order: int, priority: int = 0) -> Request:
    spec = RequestSpec(f"r{order}", 1, 9, frozenset(), SamplingParams(seed=0), order, priority)
    return Request(spec, [1], RequestBlocks(1, b""))


def _ids(queue: WaitingQueue) -> list[str]:
    return [request.spec.request_id for request in queue]


def test_order_is_priority_then_preempted_then_arrival() -> None:
    queue = WaitingQueue(9)
    for order, priority in ((0, 0), (1, 1), (2, -1), (3, 0)):
        queue.push(_request(order, priority))
    for order, priority in ((5, 0), (4, 1)):
        back = _request(order, priority)
        back.preempt()
        queue.push_back(back)
    assert _ids(queue) == ["r2", "r5", "r0", "r3", "r4", "r1"]


def test_bound_holds_for_new_requests_only() -> None:
    queue = WaitingQueue(1)
    queue.push(_request(0))
    with pytest.raises(CapacityError, match="max_waiting=1"):
        queue.push(_request(1))
    back = _request(2)
    back.preempt()
    queue.push_back(back)
    assert len(queue) == 2


def test_remove_takes_the_very_request() -> None:
    queue = WaitingQueue(9)
    requests = [_request(order) for order in range(4)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[2])
    assert _ids(queue) == ["r0", "r1", "r3"]
    with pytest.raises(AssertionError, match="r2 is not waiting"):
        queue.remove(requests[2])


def test_slots_come_back_through_the_released_list() -> None:
    slots = SlotPool(2)
    first, second = slots.take(), slots.take()
    assert slots.num_free == 0
    slots.give_back(second)
    slots.give_back(first)
    assert slots.num_free == 2
    assert slots.take_released() == [second, first]
    assert slots.take_released() == []
    slots.check([])
    with pytest.raises(AssertionError, match="slots"):
        slots.check([first])
