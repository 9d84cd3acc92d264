"""Frames between the stages: both transports hand on the same, and nothing that is not a code."""

import pytest
import torch

from moss_runtime.engine.transport import HostCopy, InProcess
from moss_runtime.graphs.requests import FrameDelta

ROWS, FRAMES, CODEBOOKS = 3, 9, 4


@pytest.fixture
def history():
    return torch.arange(ROWS * FRAMES * CODEBOOKS, dtype=torch.int16).view(ROWS, FRAMES, CODEBOOKS)


@pytest.fixture(params=["in_process", "host_copy"])
def transport(request, history):
    return InProcess(history) if request.param == "in_process" else HostCopy()


def send(transport, history, name, row, first, count, final=False):
    transport.send(FrameDelta(name, 1, first, count, history[row], None, final, "stop" if final else None))


def test_frames_come_out_as_they_went_in(transport, history):
    send(transport, history, "a", 2, 0, 4)
    send(transport, history, "b", 0, 0, 1)
    send(transport, history, "a", 2, 4, 5, final=True)
    codes = transport.gather([("a", 0, 3), ("b", 0, 1)], 3)
    assert (codes.shape, codes.dtype) == ((2, 3, CODEBOOKS), torch.int16)
    assert torch.equal(codes[0], history[2, :3]) and torch.equal(codes[1, :1], history[0, :1])
    codes = transport.gather([("a", 3, 6)], 6)
    assert torch.equal(codes[0], history[2, 3:])


def test_padding_holds_codes(transport, history):
    """Rows behind the history's end, and frames that nobody has written, may hold anything."""
    send(transport, history, "a", 2, 0, 9)
    transport.gather([("a", 0, 7)], 7)
    assert torch.equal(transport.gather([("a", 7, 2)], 5)[0, 2:], history[2, 8].expand(3, -1))


def test_a_request_may_begin_with_an_empty_delta(transport, history):
    send(transport, history, "a", 1, 0, 0)
    send(transport, history, "a", 1, 0, 2)
    assert torch.equal(transport.gather([("a", 0, 2)], 2)[0], history[1, :2])


def test_what_is_forgotten_is_gone(transport, history):
    transport.forget("never seen")
    send(transport, history, "a", 0, 0, 2)
    transport.forget("a")
    with pytest.raises(KeyError):
        transport.gather([("a", 0, 1)], 1)
    # The name may come again, in another row.
    send(transport, history, "a", 1, 0, 2)
    assert torch.equal(transport.gather([("a", 0, 2)], 2)[0], history[1, :2])


def test_the_copy_keeps_no_frame_twice(history):
    transport = HostCopy()
    for first in range(0, 8, 2):
        send(transport, history, "a", 0, first, 2)
    transport.gather([("a", 0, 5)], 5)
    assert [first for first, _ in transport._sent["a"]] == [4, 6]
    history.zero_()
    assert transport.gather([("a", 5, 1)], 1).any()
