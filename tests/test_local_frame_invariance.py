"""A row's frame has the same bits in every batch, graph, workspace and configuration, and beside other work."""

import dataclasses

import pytest
import torch

from moss_kernels.local_frame_decode import LocalFrameDecoder, LocalFrameWeights
from moss_kernels.sample_codebook import SamplingState
from moss_kernels.testing.compare import require_equal
from moss_kernels.testing.local_frame import LocalFrameOutputs, clone_state, frame_state
from moss_kernels.testing.weights import LOCAL_FRAME_SIZES, local_frame_weights

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROWS = 128
BATCHES = (1, 2, 3, 7, 16, 33, 64, 128)


@dataclasses.dataclass
class World:
    """128 requests with mixed parameters, and the frame that they get when decoded together."""

    weights: LocalFrameWeights
    decoder: LocalFrameDecoder
    hidden: torch.Tensor
    state: SamplingState
    together: LocalFrameOutputs
    after: SamplingState

    def request_map(self) -> tuple[torch.Tensor, torch.Tensor]:
        """row_map and active of all requests in order."""
        return (
            torch.arange(ROWS, dtype=torch.int32, device=DEVICE),
            torch.ones(ROWS, dtype=torch.bool, device=DEVICE),
        )

    def check_frame(self, decoder: LocalFrameDecoder, label: str, rows: int = ROWS) -> None:
        """A decoder gives the first requests the frame that they got together."""
        outputs, state = LocalFrameOutputs.allocate(self.weights, rows), clone_state(self.state)
        row_map, active = self.request_map()
        decoder.decode(self.hidden[:rows], state, row_map[:rows], active[:rows], **outputs.arguments())
        first = slice(rows)
        require_same(outputs, self.together, label, expected_rows=first)
        require_same(state, self.after, label, first, first)


def require_same(got, expected, label: str, got_rows=slice(None), expected_rows=slice(None)) -> None:
    """Rows of two outputs or states are bitwise equal."""
    for field in dataclasses.fields(expected):
        actual, wanted = getattr(got, field.name)[got_rows], getattr(expected, field.name)[expected_rows]
        require_equal(f"{label}: {field.name}", actual, wanted)


@pytest.fixture(scope="module", params=["full", "tiny"])
def world(request) -> World:
    sizes = LOCAL_FRAME_SIZES[request.param]
    weights = local_frame_weights(11, device=DEVICE, dtype=torch.bfloat16, **sizes, never_stop=True)
    decoder = LocalFrameDecoder(weights, max_batch=ROWS)
    hidden = torch.randn(ROWS, sizes["hidden"]).to(DEVICE, torch.bfloat16)
    state = frame_state(weights, ROWS)
    world = World(weights, decoder, hidden, state, LocalFrameOutputs.allocate(weights, ROWS), clone_state(state))
    decoder.decode(hidden, world.after, *world.request_map(), **world.together.arguments())
    assert world.together.continues.all()
    assert (world.together.codes >= 0).all() and (world.together.codes < sizes["vocab"]).all()
    return world


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("batch", BATCHES)
def test_rows_do_not_depend_on_the_batch(world, batch, padding):
    for _ in range(4):
        requests = torch.randperm(ROWS)[: min(batch, ROWS - padding)]
        size = len(requests) + padding
        places = torch.randperm(size)[: len(requests)]
        row_map = torch.full((size,), ROWS, dtype=torch.int32)
        row_map[places] = requests.int()
        active = row_map < ROWS
        hidden = torch.full((size, world.hidden.shape[1]), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        hidden[places.to(DEVICE)] = world.hidden[requests.to(DEVICE)]
        outputs, state = LocalFrameOutputs.allocate(world.weights, size), clone_state(world.state)
        world.decoder.decode(hidden, state, row_map.to(DEVICE), active.to(DEVICE), **outputs.arguments())

        label = f"{len(requests)} rows of {size}"
        require_same(outputs, world.together, label, places.to(DEVICE), requests.to(DEVICE))
        require_same(state, world.after, label, requests.to(DEVICE), requests.to(DEVICE))
        others = torch.ones(ROWS + 1, dtype=torch.bool)
        others[requests] = False
        require_same(state, world.state, f"{label}, state of others", others.to(DEVICE), others.to(DEVICE))
        padded = ~active.to(DEVICE)
        assert (outputs.codes[padded] == world.weights.audio_pad_token_id).all()
        assert not outputs.continues[padded].any() and not outputs.status[padded].any()
        pad_row = world.weights.embed_tokens[world.weights.pad_token_id].expand(padding, -1)
        require_equal(f"{label}: feedback of padding", outputs.feedback[padded], pad_row)


@pytest.mark.parametrize("qkv_table", [True, False])
@pytest.mark.parametrize("multiprocessors", [None, 16, 33, 64, "all"])
def test_rows_do_not_depend_on_the_configuration(world, qkv_table, multiprocessors):
    if multiprocessors == "all":
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    options = {"qkv_table": qkv_table, "multiprocessors": multiprocessors}
    decoder = LocalFrameDecoder(world.weights, max_batch=ROWS, **options)
    for rows in (10, 20, ROWS):
        world.check_frame(decoder, f"{rows} rows, {options}", rows)


def test_too_few_multiprocessors_for_the_batch_are_refused(world):
    decoder = LocalFrameDecoder(world.weights, max_batch=ROWS, qkv_table=False, multiprocessors=1)
    row_map, active = world.request_map()
    outputs = LocalFrameOutputs.allocate(world.weights, ROWS)
    with pytest.raises(ValueError, match="`multiprocessors` must be at least"):
        decoder.decode(world.hidden, clone_state(world.state), row_map, active, **outputs.arguments())


def test_nothing_unwritten_is_read(world):
    for _ in range(2):
        world.decoder.initialise_workspace()
        world.check_frame(world.decoder, "workspace of NaN")


def test_one_workspace_serves_all_batches_in_any_order(world):
    """Partial sums of batches of other sizes lie elsewhere in it, and their readers wait in other ways."""
    for size in (3, 60, 3, 20, ROWS, 20, 12, 60, 12, ROWS, 3):
        world.check_frame(world.decoder, f"{size} rows", size)


def test_inactive_requests_keep_every_bit(world):
    row_map, active = world.request_map()
    active[::3] = False
    outputs, state = LocalFrameOutputs.allocate(world.weights, ROWS), clone_state(world.state)
    world.decoder.decode(world.hidden, state, row_map, active, **outputs.arguments())
    require_same(outputs, world.together, "active", active, active)
    paused = torch.cat((~active, active.new_ones(1)))
    require_same(state, world.state, "paused", paused, paused)
    require_same(state, world.after, "active", ~paused, ~paused)


def test_pausing_changes_nothing(world):
    """Requests that sit out some frames produce what they produce without a pause."""
    frames, batch = 6, 7
    hidden = torch.randn(frames, batch, world.hidden.shape[1]).to(DEVICE, torch.bfloat16)
    row_map = torch.arange(batch, dtype=torch.int32, device=DEVICE)

    def codes(pauses: torch.Tensor) -> torch.Tensor:
        """[frames, batch, 12]: the frames of each request, of steps in which it is not paused."""
        state, done = clone_state(world.state), torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        produced = torch.full((frames, batch, 12), -1, device=DEVICE)
        for paused in pauses:
            rows = (~paused & (done < frames)).nonzero()[:, 0]
            active = torch.zeros(batch, dtype=torch.bool, device=DEVICE)
            active[rows] = True
            step_hidden = hidden[done.clamp(max=frames - 1), row_map.long()]
            outputs = LocalFrameOutputs.allocate(world.weights, batch)
            world.decoder.decode(step_hidden, state, row_map, active, **outputs.arguments())
            produced[done[rows], rows] = outputs.codes[rows]
            done[rows] += 1
        assert (done == frames).all()
        return produced

    uninterrupted = codes(torch.zeros(frames, batch, dtype=torch.bool, device=DEVICE))
    pauses = torch.rand(5 * frames, batch, device=DEVICE) < 0.5
    pauses[4 * frames :] = False
    require_equal("codes", codes(pauses), uninterrupted)


def test_graph_replays_are_the_eager_frame(world):
    outputs, state = LocalFrameOutputs.allocate(world.weights, ROWS), clone_state(world.state)
    arguments = (world.hidden, state, *world.request_map())
    world.decoder.decode(*arguments, **outputs.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.decoder.decode(*arguments, **outputs.arguments())

    def rewind() -> None:
        for field in dataclasses.fields(state):
            getattr(state, field.name).copy_(getattr(world.state, field.name))

    for replay in range(2):
        rewind()
        for tensor in outputs.arguments().values():
            tensor.zero_()
        graph.replay()
        require_same(outputs, world.together, f"replay {replay}")
        require_same(state, world.after, f"replay {replay}")
    differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(200):
        rewind()
        graph.replay()
        for name in ("codes", "audio_logits", "hidden_out", "feedback"):
            differs |= (getattr(outputs, name) != getattr(world.together, name)).any()
    assert not differs.item()


def test_other_work_on_the_card_changes_nothing(world):
    other, matrix = torch.cuda.Stream(), torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    frames = [(LocalFrameOutputs.allocate(world.weights, ROWS), clone_state(world.state)) for _ in range(20)]
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(300):
            matrix @ matrix
    for outputs, state in frames:
        world.decoder.decode(world.hidden, state, *world.request_map(), **outputs.arguments())
    torch.cuda.current_stream().synchronize()
    assert not other.query(), "the other stream must be busy all the time"
    for outputs, state in frames:
        require_same(outputs, world.together, "busy card")
        require_same(state, world.after, "busy card")
